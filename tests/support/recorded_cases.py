"""Random recordings on a mesh, clean or with one planted fault, and what a replay must find.

Faults change tensors in place where observers see them, so that training continues with the wrong
values, as after an error in a kernel or message.
"""

import math
import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from nets import Net, net_plan
from property_verdicts import documented
from ranks import RankPools, device_mesh
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from two_level import config_named

from fp8_dist import convert_to_float8_training, update_float8_scales
from fp8_dist.debug import record
from fp8_dist.debug.replay.findings import Finding, Replay
from fp8_dist.linear import autograd, rowwise_folded
from fp8_dist.mesh import local_tensor
from fp8_dist.moe import (
    Float8ExpertsConfig,
    convert_experts_to_float8_training,
    dispatch,
    functions,
)
from fp8_dist.operand import observers
from fp8_dist.recipe import GEMM_OPERANDS
from fp8_dist.tensor_parallel import (
    Float8ExpertParallel,
    Float8ExpertTensorParallel,
    apply_tp_plan,
)
from fp8_dist.torch_internals import in_backward

# Mesh sizes: ranks that replicate, that shard (FSDP2), that are tensor- or expert-parallel.
MESHES = {
    "FSDP2 x2": (1, 2, 1),
    "FSDP2 x3": (1, 3, 1),
    "FSDP2 x4": (1, 4, 1),
    "HSDP 2 x 2": (2, 2, 1),
    "TP x2": (1, 1, 2),
    "TP x3": (1, 1, 3),
    "TP x4": (1, 1, 4),
    "TP + SP x3": (1, 1, 3),
    "TP + SP x4": (1, 1, 4),
    "FSDP2 2 x TP 2": (1, 2, 2),
    "FSDP2 2 x TP + SP 2": (1, 2, 2),
    "EP x3": (1, 1, 3),
    "EP x4": (1, 1, 4),
    "FSDP2 2 x EP 2": (1, 2, 2),
    "parted experts x4": (1, 1, 4),
    "FSDP2 2 x parted experts 2": (1, 2, 2),
}
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "rowwise_folded", "blockwise", "mxfp8")
RECIPES += ("delayed", "two levels", "half octaves", "fp32 blocks")
OF_EXPERTS = ("tensorwise", "rowwise_folded", "blockwise", "mxfp8")
LAYERS = [f"layers.{i}.{name}" for i in (0, 1) for name in ("w1", "w2", "w3")]
GEMMS = ("output", "grad_input", "grad_weight")
EXPERTS = 12  # over all ranks
UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


@dataclass(frozen=True)
class RecordedCase:
    """A recorded training.

    Attributes:
        fault: the fault of one rank in the last step; ``""`` for none.
        target: the layer and the operand or GEMM of the fault.
        named: whether to record all layers by name, or to write the last step's casts at its end.
        experts: the number of experts that get tokens.
    """

    mesh: str = "FSDP2 x4"
    recipe: str = "tensorwise"
    gather: bool = True
    dim: int = 64
    hidden: int = 96
    batch: int = 2
    sequence: int = 12
    steps: int = 2
    accumulation: int = 1
    checkpointing: bool = False
    compiled: bool = False
    named: bool = True
    experts: int = 12
    fault: str = ""
    faulty: int = 0
    target: tuple[str, str] = ("", "")
    seed: int = 0

    @property
    def has_experts(self) -> bool:
        return "EP" in self.mesh or self.has_parts

    @property
    def has_parts(self) -> bool:
        return "parted" in self.mesh

    @property
    def ranks(self) -> int:
        replicate, shard, parallel = MESHES[self.mesh]
        return replicate * shard * parallel

    @property
    def sequence_parallel(self) -> bool:
        return "SP" in self.mesh.partition("TP")[2]


def drawn(number: int, seed: int, has_fault: bool) -> RecordedCase:
    """The case with a number, drawn from the seed."""
    of = random.Random(f"{seed} {number}")
    mesh = of.choice([mesh for mesh in MESHES if not has_fault or RecordedCase(mesh).ranks == 4])
    case = RecordedCase(mesh)
    recipe = of.choice(OF_EXPERTS if case.has_experts else RECIPES)
    case = replace(
        case,
        recipe=recipe,
        gather=of.random() < 0.7,
        dim=of.choice([50, 64, 90]),
        hidden=of.choice([50, 90, 96, 130]),
        batch=of.choice([1, 2, 3]),
        sequence=12 if case.sequence_parallel else of.choice([5, 12]),
        steps=of.choice([1, 2, 3]),
        accumulation=of.choice([1, 1, 2]),
        checkpointing=of.random() < 0.3,
        compiled=of.random() < 0.2,
        named=of.random() < 0.8,
        experts=of.choice([2, 5, EXPERTS]),
        seed=number,
    )
    return _with_fault(case, of) if has_fault else case


def _with_fault(case: RecordedCase, of: random.Random) -> RecordedCase:
    fqn, gemm = of.choice(LAYERS), of.choice(GEMMS)
    operand = of.choice(["input", "weight", "grad_output"])
    side = of.choice(GEMM_OPERANDS[gemm])
    targets = {
        "byte": (fqn, operand),
        "scale": (fqn, operand),
        "nan": ("layers.0.w1", "input"),
        "operand byte": (fqn, f"{gemm} {side}"),
        "operand scale": (fqn, f"{gemm} {side}"),
        "result": (fqn, gemm),
    }
    if case.mesh.startswith("HSDP"):
        targets["replica"] = fqn, "weight"
    if "TP" in case.mesh and not case.sequence_parallel:
        targets |= {"input": ("layers.0.w1", "input"), "gradient": ("layers.1.w2", "grad_output")}
    if case.has_experts:
        fqn = of.choice([UP, DOWN])
        targets = {name: (fqn, targets[name][1]) for name in ("byte", "scale", "result")}
        targets["nan"] = UP, "input"
        if (case.has_parts, case.recipe, gemm) == (True, "rowwise_folded", "grad_input"):
            del targets["result"]  # its check would need parts of other ranks
        if case.has_parts:
            targets |= {"input": (UP, "input"), "gradient": (DOWN, "grad_output")}
        else:
            targets["routing"] = UP, "input"
            for name in ("rows swapped", "row twice"):
                targets[name] = of.choice([(UP, "input"), (DOWN, "grad_output")])
    fault = of.choice([*targets])
    named = case.named or fault not in ("byte", "scale", "nan", "input", "gradient")
    named |= targets[fault][1] == "weight"  # FSDP2 may have freed it when the recorder writes
    return replace(
        case, fault=fault, target=targets[fault], faulty=of.randrange(case.ranks), named=named
    )


class Experts(nn.Module):
    def __init__(self, dim: int, hidden: int, used: int) -> None:
        super().__init__()
        self.used = used
        sizes = {"hidden_size": dim, "moe_intermediate_size": hidden, "num_experts": EXPERTS}
        self.experts = Qwen3MoeExperts(Qwen3MoeConfig(**sizes))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.experts.parameters():
            size = parameter.shape[2] ** 0.5
            parameter.data = torch.randn(parameter.shape, generator=generator) / size

    def forward(self, x: Tensor) -> Tensor:
        """Route each token to experts that depend on its values."""
        first = x.detach().argmax(1)
        ids = torch.stack([first, first + 1], 1) % self.used
        return self.experts(x, ids, torch.full(ids.shape, 0.5))


def built(case: RecordedCase) -> nn.Module:
    replicate, shard, parallel = MESHES[case.mesh]
    mesh = device_mesh(replicate=replicate, shard=shard, parallel=parallel)
    data = mesh["replicate", "shard"] if replicate > 1 else mesh["shard"]
    net: nn.Module
    if case.has_experts:
        net = Experts(case.dim, case.hidden, case.experts)
        convert_experts_to_float8_training(net, config=Float8ExpertsConfig(case.recipe))  # type: ignore[arg-type]
        style = Float8ExpertTensorParallel() if case.has_parts else Float8ExpertParallel()
        parallelize_module(net.experts, mesh["parallel"], style)
        parts = [net]
    else:
        net = Net(case.dim, case.hidden)
        config = config_named(case.recipe)
        if case.gather and data.size() > 1:
            config = replace(config, enable_fsdp_float8_all_gather="auto")
        convert_to_float8_training(net, config=config)
        if parallel > 1:
            plan = net_plan(net, case.sequence_parallel)  # type: ignore[arg-type]
            apply_tp_plan(net, mesh["parallel"], plan)
        parts = [*net.layers, net]  # type: ignore[misc]
    for module in parts if data.size() > 1 else ():
        fully_shard(module, mesh=data)
    return net


class Fault:
    """A fault on this rank, which happens once.

    Attributes:
        is_armed: whether it may happen now.
        has_happened: whether it has happened.
    """

    def __init__(self, case: RecordedCase) -> None:
        self.case, self.kind, self.is_armed, self.has_happened = case, case.fault, False, False

    def happens(self, *target: str) -> bool:
        """Whether the fault happens now, at this target; if so, note that."""
        found = self.is_armed and not self.has_happened and target == self.case.target
        self.has_happened |= found
        return found

    def name(self, owner: Any) -> str:
        return f"{owner.fqn}.{owner.name}" if self.case.has_experts else owner.fqn

    def observe(self, real: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``notify_cast`` to plant a wrong byte or scale in a cast."""

        def observe(use: Any, high: Tensor, layout: Any, made: Any, *a: Any) -> None:
            is_cast = self.kind in ("byte", "scale") and made and high.numel()
            if is_cast and self.happens(self.name(use.owners[0]), use.operand):
                if self.kind == "byte":
                    change_byte(made[0].qdata, high.shape, self.case.seed, 8)
                else:
                    change_scale(made[0].scales)
            real(use, high, layout, made, *a)

        return observe

    def gemm(self, left: Any, right: Any, gemm: str, spec: Any, *a: Any, **k: Any) -> Any:
        """Run a GEMM, with a wrong operand if the fault is there."""
        pair = [left, right]
        for i, operand in enumerate(GEMM_OPERANDS[gemm]):  # type: ignore[index]
            is_taken = self.kind.startswith("operand") and not isinstance(pair[i], Tensor)
            if is_taken and pair[i].qdata.numel() and self.happens(spec.fqn, f"{gemm} {operand}"):
                qdata, scales = pair[i].qdata.clone(), [s.clone() for s in pair[i].scales]
                if self.kind == "operand byte":
                    change_byte(qdata, (1, qdata.shape[-1]), self.case.seed, 0x40)
                else:
                    change_scale(scales)
                pair[i] = pair[i]._replace(qdata=qdata, scales=tuple(scales))
        return REAL_GEMM(*pair, gemm, spec, *a, **k)

    def observe_multiply(self, real: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``notify_multiply`` to plant a wrong result of a GEMM."""

        def observe_multiply(owner: Any, product: Any) -> None:
            is_result = self.kind == "result" and product.result.numel()
            if is_result and self.happens(self.name(owner), product.gemm):
                at = (0,) * product.result.ndim
                product.result[at] += 1 + 2 * product.result[at].abs()
            real(owner, product)

        return observe_multiply

    def send_rows(self, rows: Any, places: Tensor, routing: Any) -> Any:
        """Send float8 rows; the fault swaps two of them, or sends one twice."""
        out, is_again = REAL_SEND(rows, places, routing), in_backward()
        target = (DOWN, "grad_output") if places is routing.slots else (UP, "input")
        if (is_again and target[0] == UP) or not self.kind.startswith("row"):
            return out  # activation checkpointing repeats it
        count, data = len(out.qdata), out.qdata.view(torch.uint8)
        if count < 2 or torch.equal(data[0], data[-1]) or not self.happens(*target):
            return out
        order = torch.arange(count)
        order[[0, -1]] = order[[-1, 0]] if self.kind == "rows swapped" else order[[0, 0]]
        return dispatch._moved(out, lambda x: x.index_select(0, order))

    def arrivals(self, *a: Any) -> Tensor:
        """The order of arrived rows; the fault swaps two of them."""
        found = REAL_ARRIVALS(*a)
        if self.kind == "routing" and len(found) > 1 and self.happens(*self.case.target):
            found[[0, -1]] = found[[-1, 0]]
        return found

    def input(self, x: Tensor) -> Tensor:
        if self.kind in ("nan", "input") and x.numel() and self.happens(*self.case.target):
            x.view(-1)[self.case.seed % x.numel()] = math.nan if self.kind == "nan" else 5
        return x

    def gradient(self, grad: Tensor) -> Tensor:
        if self.kind == "gradient" and self.happens(*self.case.target):
            grad = grad.clone()
            grad[..., 1, 2] += 1
        return grad

    def weight(self, net: nn.Module) -> None:
        if self.kind == "replica":
            fqn, _ = self.case.target
            local: Any = local_tensor(net.get_submodule(fqn).weight)  # type: ignore[arg-type]
            if local.numel() and self.happens(*self.case.target):
                with torch.no_grad():
                    getattr(local, "plain", local)[0, 0] += 0.5


def change_byte(qdata: Tensor, shape: Sequence[int], seed: int, bits: int) -> None:
    """Change a byte of float8 data, outside of the padding that transposed copies may have."""
    row = seed % math.prod(shape[:-1])
    at = torch.unravel_index(torch.tensor(row), qdata.shape[:-1])
    qdata.data.view(torch.uint8)[(*at, seed % shape[-1])] ^= bits


def change_scale(scales: Sequence[Tensor]) -> None:
    last = scales[-1].data  # .data, because autograd may have saved it already
    at = (0,) * last.ndim
    if last.dtype is torch.float32:
        last[at] *= 2
    else:
        last.view(torch.uint8)[at] += 1


REAL_GEMM, REAL_SEND, REAL_ARRIVALS = autograd._gemm, functions.send_rows, dispatch._arrivals


def planted(fault: Fault) -> ExitStack:
    """A context with the patches of a fault."""
    patches: list[tuple[Any, str, Any]] = [(autograd, "_gemm", fault.gemm)]
    patches += [(functions, "send_rows", fault.send_rows), (dispatch, "_arrivals", fault.arrivals)]
    wrong_cast = fault.observe(observers.notify_cast)
    patches += [(module, "notify_cast", wrong_cast) for module in (observers, rowwise_folded)]
    wrong_product = fault.observe_multiply(observers.notify_multiply)
    patches.append((observers, "notify_multiply", wrong_product))
    stack = ExitStack()
    for place in patches:
        stack.enter_context(patch.object(*place))
    return stack


def recorded(case: RecordedCase, folder: Path) -> tuple[str, bool]:
    """Record a case; return the recording's name, and whether a fault of this rank has happened."""
    warnings.simplefilter("ignore")
    rank, fault = dist.get_rank(), Fault(case)
    net = built(case)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    if case.compiled:
        net.compile()
    layers = "*" if case.named else ()
    with planted(fault) if rank == case.faulty else ExitStack():
        with record(net, folder, case.steps, layers) as recorder:
            for step in range(case.steps):
                fault.is_armed = step == case.steps - 1 and rank == case.faulty
                if fault.is_armed:
                    fault.weight(net)
                update_float8_scales(net)
                for number in range(case.accumulation):
                    x = fault.input(batch(case, step * case.accumulation + number))
                    output = (
                        checkpoint(net, x, use_reentrant=False) if case.checkpointing else net(x)
                    )
                    if fault.is_armed:
                        output.register_hook(fault.gradient)
                    output.square().mean().backward()
                if step == case.steps - 1 and not case.named:
                    written = recorder.write()
                optimizer.step()
                optimizer.zero_grad()
        if case.named:
            written = recorder.write()
    dist.barrier()
    return written.name, fault.has_happened


def batch(case: RecordedCase, number: int) -> Tensor:
    """This rank's part of a batch. Data-parallel ranks have different numbers of rows."""
    parallel, rank = MESHES[case.mesh][2], dist.get_rank()
    replica = rank if case.has_experts and not case.has_parts else rank // parallel
    generator = torch.Generator().manual_seed(1000 * case.seed + 10 * number + replica)
    size = case.batch + replica % 2, case.sequence, case.dim
    x = torch.randn(size, generator=generator)
    if case.sequence_parallel:
        x = x.chunk(parallel, dim=1)[rank % parallel].contiguous()
    return x.view(-1, case.dim) if case.has_experts else x


def refused_or_recorded(case: RecordedCase, folder: Path) -> tuple[str, bool] | str:
    try:
        return recorded(case, folder)
    except Exception as error:
        if documented(error) or isinstance(error, NotImplementedError):
            return str(error)
        raise


def verdict(case: RecordedCase, pools: RankPools, folder: Path) -> str:
    """Record and replay a case: ``right``, ``refused``, ``no fault``, or a wrong finding."""
    found = pools(case.ranks).run(refused_or_recorded, case, folder)
    if isinstance(found[0], str):
        return "refused"
    if case.fault and not any(happened for _, happened in found):
        return "no fault"
    findings = Replay(folder / found[0][0]).findings
    if not case.fault:
        return f"found {shown(findings[0])}" if findings else "right"
    if not findings:
        return "found nothing"
    return "right" if is_named(case, findings[0]) else f"found {shown(findings[0])}"


def is_named(case: RecordedCase, first: Finding) -> bool:
    """Whether a finding names the step, the layer, the operand or GEMM, and the rank of a fault.

    Replicas that differ can't be told apart, so for these it may name all their ranks.
    """
    fqn, what = case.target
    *gemm, operand = what.split(" ")
    if case.fault == "result":
        gemm, operand = [what], "result"
    where = first.is_wrong, first.step, first.fqn, first.operand
    is_place = where == (True, case.steps - 1, fqn, operand) and {*gemm} <= {*first.gemms}
    candidates = 1
    if case.fault == "nan" and first.gemms == ["output"]:  # TP ranks share it
        candidates = MESHES[case.mesh][2]
    elif case.fault == "replica":
        candidates = 2 if case.gather and len(first.gemms) == 2 else 4
    elif case.fault in ("input", "gradient") or (case.fault, case.recipe) == ("scale", "delayed"):
        candidates = 1 if MESHES[case.mesh][2] == 4 else 2
    return is_place and case.faulty in first.ranks and len(first.ranks) <= candidates


def shown(first: Finding) -> str:
    where = first.step, first.fqn, first.operand, [*first.gemms], first.element, first.ranks
    return f"{where}: {first.text}"
