"""One training step on one rank: what it communicates, and what memory it holds.

The model is the reference Llama with SP over "tp", FSDP2 over the other axes, and AdamW. The same
code runs on real ranks and in a fake world (scripts/plan/world.py).

A *phase* is a part of a step: what is called for the scales after the previous optimizer step
("precompute", which is the sync for delayed scales), "forward", "backward", and clipping with the
optimizer's step ("optimizer").
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fp8_dist import float8_layers
from fp8_dist.debug import comm_audit
from fp8_dist.debug.table import CommRow, CommTable
from fp8_dist.fsdp import clip_grad_norm_
from scripts.common.llama import Llama, LlamaConfig
from scripts.common.models import after_step, build
from scripts.plan.links import Collectives
from scripts.plan.meter import MemoryMeter, bytes_of
from scripts.plan.world import fake

PEER = "torchao tensorwise"
PHASES = ("precompute", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Plan:
    """A run to be planned."""

    model: LlamaConfig
    axes: dict[str, int]  # sizes of the mesh's axes
    variant: str  # "bf16", the name of a recipe, or `PEER`
    batch_size: int  # sequences per data-parallel rank
    seq_len: int

    @property
    def ranks(self) -> int:
        """The size of the world."""
        return math.prod(self.axes.values())


@dataclass
class Step:
    """What one rank sees of a step."""

    collectives: list[Collectives] = field(default_factory=list)  # in the order of the phases
    memory: dict[str, int] = field(default_factory=dict)  # bytes by kind
    weights: int = 0  # that a recipe converts
    parameters: int = 0  # elements of the whole model


def make_mesh(plan: Plan) -> DeviceMesh:
    """The mesh of a plan over the default group."""
    axes = plan.axes
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def run_step(plan: Plan, mesh: DeviceMesh, fake_tensors: bool) -> Step:
    """Builds the model and runs one step, as it is from the second one on, on the plan's mesh.

    fake_tensors: the default group is a fake one.
    """
    model = build(plan.variant, plan.model, mesh, "meta", shard=True)
    for layer in float8_layers(model).values():
        for history in layer.histories.values():  # delayed scales have one from the second step on
            history.load(torch.ones(1))
    with fake() if fake_tensors else nullcontext():
        model.to_empty(device="cpu")
        if not fake_tensors:
            model.init_weights()
        step = _step(plan, model, mesh)
    step.parameters = sum(parameter.numel() for parameter in model.parameters())
    step.weights = sum(isinstance(module, nn.Linear) for module in model.modules()) - 1  # the head
    return step


def _step(plan: Plan, model: Llama, mesh: DeviceMesh) -> Step:
    tokens = torch.zeros(plan.batch_size, plan.seq_len, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    meter = MemoryMeter(model, model.layers)
    step = Step()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with comm_audit(mesh) as audit:
            yield
        step.collectives += _collectives(name, audit.rows)

    with phase("precompute"):
        after_step(plan.variant, sharded=True)(model)
    with phase("forward"), meter, meter.saving():
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    del logits
    kept = [layer.float8_weight.cache.float8 or () for layer in float8_layers(model).values()]
    shards = bytes_of(part for casts in kept for cast in casts for part in (cast.qdata, cast.scale))
    del kept
    with phase("backward"), meter:
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with phase("optimizer"):
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    step.memory = {
        "parameters": bytes_of(model.parameters()),
        "gradients": bytes_of(gradients),
        "optimizer state": bytes_of(states),
        "float8 shards kept": shards,
        "gathered parameters, peak": meter.gathered,
        **{f"saved for backward: {kind}": size for kind, size in meter.saved.items()},
    }
    return step


def _collectives(phase: str, rows: Iterable[CommRow]) -> list[Collectives]:
    """The rows of an audit, summed over modules, sorted."""
    summed = CommTable(rows).without_modules().rows
    found = [
        Collectives(phase, r.op, r.axis, str(r.dtype).removeprefix("torch."), r.count, r.bytes)
        for r in summed
    ]
    return sorted(found, key=lambda r: (r.axis, r.op, r.dtype, -r.count))
