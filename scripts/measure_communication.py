"""What one training step of a tiny Llama communicates, measured on the ranks that run this file.

    torchrun --nproc-per-node 4 scripts/measure_communication.py rows.json

scripts/communication.py starts it and shows the rows. The recorded step is the second one: forward,
backward, optimizer and precompute.

Vocabulary: a *mesh* is one way to distribute the model; a *variant* is a library with its
settings; a *row* is what one rank counts for a variant on a mesh (all ranks count alike). An
*amax all-reduce* reduces one number, or one per row, in forward or backward; what precompute or the
sync of delayed scales reduces is counted apart. It is *blocking* if its result is waited for before
any other op but a view is issued: nothing hides it.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llama import Llama, LlamaConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.debug import CommAudit, comm_audit
from fp8_dist.debug.collectives import IGNORED_OPS, read_collective
from fp8_dist.dtypes import is_float8
from fp8_dist.tensor_parallel import apply_tp_plan, llama_tp_plan

try:
    from torchao import float8 as torchao
    from torchao.float8 import float8_tensor_parallel as torchao_styles
except ImportError:
    torchao = torchao_styles = None

LAYERS = 4
SEQUENCE = 32
BATCH = 2  # sequences per data-parallel rank

# (dp, tp) by the name of the mesh.
FSDP, TP, BOTH = "FSDP2 x2", "TP x2 + SP", "FSDP2 2 x TP 2 + SP"
MESHES = {FSDP: (2, 1), TP: (1, 2), BOTH: (2, 2)}


@dataclasses.dataclass(frozen=True)
class Variant:
    """What multiplies and communicates: `library` is "bf16", "fp8_dist" or "torchao".

    `precompute` stands for what is called after the optimizer's step: precompute, or the sync of
    delayed scales.
    """

    library: str
    precompute: bool = False
    amax_scope: str = "global"
    recipe: str = "tensorwise"

    @property
    def name(self) -> str:
        scope = "" if self.amax_scope == "global" else f', amax_scope="{self.amax_scope}"'
        recipe = "" if self.recipe == "tensorwise" else f" {self.recipe}"
        call = " + sync" if self.recipe == "delayed" else " + precompute"
        return f"{self.library}{recipe}{call if self.precompute else ''}{scope}"


BF16 = Variant("bf16")
OURS, OURS_PRECOMPUTED = Variant("fp8_dist"), Variant("fp8_dist", True)
OURS_RANK = Variant("fp8_dist", True, "rank")
FOLDED = Variant("fp8_dist", True, recipe="rowwise_folded")
FOLDED_RANK = dataclasses.replace(FOLDED, amax_scope="rank")
DELAYED = Variant("fp8_dist", True, recipe="delayed")
ROWWISE = Variant("fp8_dist", recipe="rowwise")
TORCHAO, TORCHAO_PRECOMPUTED = Variant("torchao"), Variant("torchao", True)
OPS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclasses.dataclass(frozen=True)
class Row:
    """What one rank counts in one step.

    Attributes:
        mesh: a key of `MESHES`.
        variant: name of a `Variant`.
        counts: collectives of the step, precompute's included, by op.
        sizes: bytes of their buffers, by op; as in `comm_audit`.
        float8_gathered: those of `sizes["all_gather"]` that are float8.
        precompute: collectives of precompute alone.
        amax: amax all-reduces of forward and backward.
        blocking: the blocking ones among them.
    """

    mesh: str
    variant: str
    counts: dict[str, int]
    sizes: dict[str, int]
    float8_gathered: int
    precompute: int
    amax: int
    blocking: int


class Float8AsBytes(TorchDispatchMode):
    """Lets gloo, which refuses float8, gather it for torchao: as uint8, which is as large.

    Modes that are entered after this one see the float8 gather.
    """

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_rewritten(types):
            return NotImplemented
        gather = torch.ops._c10d_functional.all_gather_into_tensor.default
        if func is gather and is_float8(args[0].dtype):
            return gather(args[0].view(torch.uint8), *args[1:], **kwargs).view(args[0].dtype)
        return func(*args, **kwargs)


class AmaxReductions(TorchDispatchMode):
    """Counts all-reduces of amaxes, and those waited for before another op is issued."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.blocking = 0
        self._issued = 0
        # By the address of the result's storage: the result, and the ops issued until then.
        self._in_flight: dict[int, tuple[torch.Tensor, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_rewritten(types):
            return NotImplemented
        if func is torch.ops._c10d_functional.wait_tensor.default:
            _, issued = self._in_flight.pop(args[0].untyped_storage()._cdata, (None, -1))
            self.blocking += issued == self._issued
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        # Neither views, nor bookkeeping of collectives, nor what DTensor asks fake tensors.
        idle = func.is_view or func._schema.name in IGNORED_OPS or isinstance(result, FakeTensor)
        self._issued += not idle
        call = read_collective(func, args, kwargs)
        # Ours reduce the bits of amaxes; torchao's are those of one number.
        if call and call.op == "all_reduce" and _are_amaxes(call.tensors):
            assert isinstance(result, torch.Tensor), f"{func} is not waited for by an op"
            self.count += 1
            self._in_flight[result.untyped_storage()._cdata] = (result, self._issued)
        return result


def _are_amaxes(tensors: Sequence[torch.Tensor]) -> bool:
    return sum(t.numel() for t in tensors) == 1 or all(t.dtype is torch.int32 for t in tensors)


def _is_rewritten(types: tuple[type, ...]) -> bool:
    """Whether a tensor subclass makes other ops of this one, which a mode sees then."""
    return any(
        kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        # DTensor asks fake tensors what an op would return.
        and not issubclass(kind, FakeTensor)
        for kind in types
    )


def variants(mesh: str) -> Iterator[Variant]:
    """The variants that mean something on a mesh."""
    yield from (BF16, OURS, OURS_PRECOMPUTED)
    if mesh != FSDP:
        yield OURS_RANK  # the only operands that FSDP2 reduces are weights, and these are gathered
    yield FOLDED
    if mesh != FSDP:
        yield FOLDED_RANK
    yield from (DELAYED, ROWWISE)
    if torchao is not None:
        yield TORCHAO
        if mesh != TP:
            yield TORCHAO_PRECOMPUTED  # it covers weights that FSDP2 shards alone


def distributed_model(variant: Variant, mesh: DeviceMesh) -> Llama:
    """A Llama on axes "dp" and "tp", parallelized as in README; each one may have a single rank."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(64, LAYERS, 4, 4, 128, vocab_size=256, max_seq_len=SEQUENCE))
    sharded = mesh["dp"].size() > 1
    converted: dict[str, Any] = {"module_filter_fn": lambda _, name: name != "output"}
    if variant.library == "fp8_dist":
        config = Float8LinearConfig.from_recipe_name(variant.recipe)
        gather = sharded and config.gather_cast("weight") is not None
        config = dataclasses.replace(
            config, enable_fsdp_float8_all_gather=gather, amax_scope=variant.amax_scope
        )
        convert_to_float8_training(model, config=config, **converted)
    elif variant.library == "torchao":
        config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=sharded)
        torchao.convert_to_float8_training(model, config=config, **converted)
    if mesh["tp"].size() > 1:
        plan = llama_tp_plan(model)
        apply_tp_plan(model, mesh["tp"], plan | torchao_plan(variant))
    if not sharded:
        return model.bfloat16()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=False
    )
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=True)
    return model


def torchao_plan(variant: Variant) -> dict[str, ParallelStyle]:
    """torchao's styles for its own converted layers; empty for any other library."""
    if variant.library != "torchao":
        return {}
    plan: dict[str, ParallelStyle] = {}
    for layer in range(LAYERS):
        for block, readers, writer in (
            ("attention", ("wq", "wk", "wv"), "wo"),
            ("feed_forward", ("w1", "w3"), "w2"),
        ):
            path = f"layers.{layer}.{block}"
            plan[path] = torchao_styles.PrepareFloat8ModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
            for name in readers:
                plan[f"{path}.{name}"] = torchao_styles.Float8ColwiseParallel()
            plan[f"{path}.{writer}"] = torchao_styles.Float8RowwiseParallel(output_layouts=Shard(1))
    return plan


def precompute_of(variant: Variant) -> Callable[[nn.Module], None]:
    """What a training loop calls after the optimizer's step."""
    if not variant.precompute:
        return lambda model: None
    if variant.library == "torchao":
        return torchao.precompute_float8_dynamic_scale_for_fsdp
    if variant.recipe == "delayed":
        return sync_float8_amax_and_scale_history
    return precompute_float8_dynamic_scale


def measure(mesh_name: str, variant: Variant, mesh: DeviceMesh) -> Row:
    """Runs two steps and returns what the second one communicates; called on every rank."""
    model, precompute = distributed_model(variant, mesh), precompute_of(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (BATCH, SEQUENCE))
    for _ in range(2):
        step, after, amax = comm_audit(mesh), comm_audit(mesh), AmaxReductions()
        with Float8AsBytes(), step:
            with amax:
                model(tokens).logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with after:
            precompute(model)
    return Row(
        mesh_name,
        variant.name,
        counts={op: step.count(op) + after.count(op) for op in OPS},
        sizes={op: _bytes(op, step) + _bytes(op, after) for op in OPS},
        float8_gathered=sum(row.float8_bytes for row in step.rows if row.op == "all_gather"),
        precompute=after.count(),
        amax=amax.count,
        blocking=amax.blocking,
    )


def _bytes(op: str, audit: CommAudit) -> int:
    return sum(row.bytes for row in audit.rows if row.op == op)


def main(path: Path) -> None:
    """The life of one rank: rows of every mesh of this world size; rank 0 writes them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for name, (dp, tp) in MESHES.items():
        if dp * tp != dist.get_world_size():
            continue
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        rows += [measure(name, variant, mesh) for variant in variants(name)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rows)
    assert all(theirs == rows for theirs in everyone), "ranks count differently"
    if dist.get_rank() == 0:
        path.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
