"""One training step of a planned run, on one rank: what it communicates and what memory it holds.

The model is the one of scripts/llama.py, parallelized and trained as in scripts/train.py. The same
code runs on real ranks and in a *fake world* (scripts/plan_world.py).

Vocabulary: a *phase* is a part of a step: what is called for the scales between two steps
(precompute, or the sync of delayed ones), forward, backward, and clipping with the optimizer's
step. A *variant* is bf16, one of the library's recipes, or torchao.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from llama import Llama, LlamaConfig
from measure_communication import TORCHAO, torchao, torchao_plan
from plan_memory import MemoryMeter, bytes_of, kept_float8_shards
from plan_world import fake_tensors
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train import MAX_GRAD_NORM, calls_after_step, float8_config

from fp8_dist import convert_to_float8_training
from fp8_dist.debug import comm_audit
from fp8_dist.debug.table import CommTable
from fp8_dist.fsdp import clip_grad_norm_
from fp8_dist.linear import float8_layers
from fp8_dist.tensor_parallel import apply_tp_plan, llama_tp_plan

PEER = TORCHAO.library
PHASES = ("precompute", "forward", "backward", "optimizer")
TP = "tp"


@dataclass(frozen=True)
class Plan:
    """A run to be planned.

    Attributes:
        model: sizes of the Llama.
        axes: sizes of the mesh's axes: "dp", or "replicate" and "shard"; then "tp".
        variant: "bf16", the name of a recipe, or "torchao" (tensorwise, its styles, precompute).
        batch_size: sequences per data-parallel rank.
        seq_len: tokens of each.
    """

    model: LlamaConfig
    axes: dict[str, int]
    variant: str
    batch_size: int
    seq_len: int

    @property
    def ranks(self) -> int:
        """The size of the world."""
        return math.prod(self.axes.values())

    @property
    def shards(self) -> int:
        """How many ranks FSDP2 shards over."""
        return self.axes.get("dp", self.axes.get("shard", 1))


@dataclass(frozen=True)
class Collectives:
    """The collectives of one phase that agree in op, axis and dtype, as `comm_audit` counts them.

    `count` is 0 for bytes that travel in the collectives of another dtype (FSDP2's mixed gathers).
    """

    phase: str
    op: str
    axis: str
    dtype: str
    count: int
    bytes: int


@dataclass
class Measured:
    """What one rank sees of a step.

    Attributes:
        collectives: in the order of the phases, sorted within each.
        memory: bytes by kind.
        weights: converted weights.
        parameters: elements of the whole model.
        seconds: CPU seconds of this process, by part of the work.
    """

    collectives: list[Collectives] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    weights: int = 0
    parameters: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def is_head(name: str) -> bool:
    """The layer that stays in high precision."""
    return name == "output"


def make_mesh(plan: Plan) -> DeviceMesh:
    """The mesh of a plan over the default group; its slices exist afterwards."""
    axes = plan.axes
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes of a plan's mesh that FSDP2 shards, and replicates, over."""
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[tuple(name for name in names if name != TP)]


def converted(plan: Plan) -> Llama:
    """The model on the meta device, converted for the plan's variant."""
    with torch.device("meta"):
        model = Llama(plan.model)
    options: dict[str, Any] = {"module_filter_fn": lambda _, name: not is_head(name)}
    config = None if plan.variant == PEER else float8_config(plan.variant)
    if config is not None:
        convert_to_float8_training(model, config=config, **options)
    elif plan.variant == PEER:
        peer = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=plan.shards > 1)
        torchao.convert_to_float8_training(model, config=peer, **options)
    return model


def parallelized(plan: Plan, mesh: DeviceMesh) -> Llama:
    """The converted model on the meta device: SP over "tp", FSDP2 over the other axes."""
    model = converted(plan)
    if plan.axes[TP] > 1:
        styles = llama_tp_plan(model)
        if plan.variant == PEER:
            # The layers of a Llama are alike.
            styles |= {
                path.replace("layers.0.", f"layers.{layer}.", 1): style
                for path, style in torchao_plan(TORCHAO).items()
                for layer in range(plan.model.n_layers)
                if path.startswith("layers.0.")
            }
        apply_tp_plan(model, mesh[TP], styles)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*model.layers, model):
        fully_shard(module, mesh=data_parallel_mesh(mesh), mp_policy=policy)
    return model


def calls_between_steps(plan: Plan) -> list[Callable[[nn.Module], None]]:
    """What a training loop calls with the model after each step of the optimizer."""
    if plan.variant != PEER:
        return calls_after_step(float8_config(plan.variant), precompute=True)
    # It covers weights that FSDP2 shards.
    return [torchao.precompute_float8_dynamic_scale_for_fsdp] if plan.shards > 1 else []


def start_histories(model: nn.Module) -> None:
    """Gives delayed scales a history, as they have it from the second step on."""
    for layer in float8_layers(model).values():
        for history in layer.histories.values():
            history.load(torch.ones(1))


def measured_step(
    plan: Plan, mesh: DeviceMesh, fake: bool, progress: Callable[[str], None] = lambda part: None
) -> Measured:
    """Builds the model and runs one step as it is from the second one on.

    Args:
        plan: what to run; `mesh` is its mesh.
        fake: with fake tensors: the default group is a fake one.
        progress: called with the name of each part of the work as it begins.
    """
    result = Measured()
    stopwatch = _Stopwatch(result.seconds, progress)
    stopwatch.begin("build")
    model = parallelized(plan, mesh)
    result.parameters = sum(parameter.numel() for parameter in model.parameters())
    result.weights = sum(
        isinstance(module, nn.Linear) and not is_head(name)
        for name, module in model.named_modules()
    )
    start_histories(model)
    with fake_tensors() if fake else nullcontext():
        model.to_empty(device="cpu")
        if not fake:
            model.init_weights()
        _run(plan, model, mesh, result, stopwatch)
    stopwatch.end()
    return result


def _run(
    plan: Plan, model: Llama, mesh: DeviceMesh, result: Measured, stopwatch: "_Stopwatch"
) -> None:
    tokens = torch.zeros(plan.batch_size, plan.seq_len, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    meter = MemoryMeter(model, model.layers)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        stopwatch.begin(name)
        with comm_audit(mesh) as audit:
            yield
        result.collectives += _rows(name, audit.rows)

    with phase("precompute"):
        for call in calls_between_steps(plan):
            call(model)
    with phase("forward"), meter, meter.saving():
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    del logits
    shards = kept_float8_shards(model)
    with phase("backward"), meter:
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with phase("optimizer"):
        clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
    states = [s for state in optimizer.state.values() for s in state.values()]
    result.memory = {
        "parameters": bytes_of(model.parameters()),
        "gradients": bytes_of(gradients),
        "optimizer state": bytes_of(states),
        "float8 shards kept": shards,
        "gathered parameters, peak": meter.gathered,
        **{f"saved for backward: {kind}": size for kind, size in meter.saved.items()},
    }


def _rows(phase: str, rows: Any) -> list[Collectives]:
    """Summed over modules, and sorted."""
    table = CommTable(rows).without_modules()
    return sorted(
        (
            Collectives(phase, r.op, r.axis, str(r.dtype).removeprefix("torch."), r.count, r.bytes)
            for r in table.rows
        ),
        key=lambda r: (r.axis, r.op, r.dtype, -r.count),
    )


class _Stopwatch:
    """CPU seconds of consecutive parts of the work."""

    def __init__(self, seconds: dict[str, float], progress: Callable[[str], None]) -> None:
        self._seconds, self._progress = seconds, progress
        self._running: tuple[str, float] | None = None

    def begin(self, part: str) -> None:
        self.end()
        self._progress(part)
        self._running = part, time.process_time()

    def end(self) -> None:
        if self._running is not None:
            part, start = self._running
            self._seconds[part] = time.process_time() - start
        self._running = None
