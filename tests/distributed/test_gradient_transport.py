"""Gradients of FSDP2 on the wire: what arrives, what it takes, and what else FSDP2 does with them."""

import copy
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from expecttest import assert_expected_inline
from gradient_wire import shard_of_mean
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, sqnr
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_dist
from fp8_dist import Float8State
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import clip_grad_norm_, set_gradient_transport
from fp8_dist.kernels.encoding import encode_float8
from fp8_dist.mesh import local_tensor
from fp8_dist.torch_internals import fsdp_groups_of_module, fsdp_reduction

Gradients = dict[str, torch.Tensor]


class Uneven(nn.Module):
    """Dims that few numbers of ranks divide, fewer rows than ranks, a bias, a norm, a spare part."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.wide = nn.Linear(96, 37)
            self.norm = nn.LayerNorm(37)
            self.flat = nn.Linear(37, 3, bias=False)
            self.last = nn.Linear(3, 130, bias=False)
            self.spare = nn.Linear(96, 130, bias=False)

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        y = self.last(F.gelu(self.flat(self.norm(F.gelu(self.wide(x))))))
        return y + self.spare(x) if spare else y


def sharded(mesh: DeviceMesh, **arguments: Any) -> Uneven:
    """Under FSDP2: one group for the first layer, one for the rest."""
    net = Uneven()
    fully_shard(net.wide, mesh=mesh, **arguments)
    return fully_shard(net, mesh=mesh, **arguments)


def data(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 96, generator=generator) * (1 + rank)


def backward(net: nn.Module, rank: int, step: int = 0, **arguments: Any) -> None:
    net(data(rank, step), **arguments).pow(3).mean().backward()


def gradients_of(net: nn.Module) -> Gradients:
    """Whole gradients."""
    return {
        name: p.grad.full_tensor()  # type: ignore[union-attr]
        for name, p in net.named_parameters()
        if p.grad is not None
    }


def of_single_rank(rank: int, frozen: bool = False, **arguments: Any) -> Gradients:
    net = Uneven()
    net.flat.requires_grad_(not frozen)
    backward(net, rank, **arguments)
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def _with_spare(net: Uneven, rank: int) -> None:
    backward(net, rank, spare=True)


def wrong_bits(transport: Any, spare: bool) -> list[str]:
    """Parameters whose shard is not, in each of two runs, the mean that was computed apart.

    Without `spare` a parameter between others is frozen, too.
    """
    mesh, own = device_mesh(dp=dist.get_world_size()), dist.get_rank()
    each = [of_single_rank(rank, not spare, spare=spare) for rank in range(mesh.size())]
    wrong = []
    for _ in range(2):
        net = sharded(mesh)
        net.flat.requires_grad_(spare)
        set_gradient_transport(net, transport)
        backward(net, own, spare=spare)
        for name, p in net.named_parameters():
            if p.grad is None or name not in each[0]:
                wrong += [name] * ((p.grad is None) != (name not in each[0]))
                continue
            how = transport if p.ndim > 1 else None
            expected = shard_of_mean([gradients[name] for gradients in each], own, how)
            wrong += [name] * (not torch.equal(local_tensor(p.grad), expected))
    return wrong


@pytest.mark.parametrize("transport", ["bf16", "float8"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shards_are_the_sums_of_what_arrived(
    ranks: RankPools, world_size: int, transport: str
) -> None:
    for spare in (False, True):
        assert ranks(world_size).run(wrong_bits, transport, spare) == [[]] * world_size


def sqnrs(
    mesh: DeviceMesh | None = None,
    run: Callable[[Uneven, int], object] = _with_spare,
    how: dict[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, float]:
    """SQNR of each gradient after `run` against FSDP2's own reduction, in dB."""
    found = []
    for each in ({"transport": None}, arguments):
        net = sharded(mesh or device_mesh(dp=dist.get_world_size()), **(how or {}))
        set_gradient_transport(net, **each)  # type: ignore[arg-type]
        run(net, dist.get_rank())
        found.append(gradients_of(net))
    return {name: sqnr(grad, found[1][name]) for name, grad in found[0].items()}


@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 4))]
)
def test_accuracy(ranks: RankPools, world_size: int) -> None:
    def found(**arguments: Any) -> dict[str, float]:
        return ranks(world_size).run_same(sqnrs, **arguments)

    for transport, least in (("bf16", 55), ("float8", 30)):
        each = found(transport=transport)
        assert min(each.values()) > least, each
        for name in ("wide.bias", "norm.weight", "norm.bias"):
            assert each[name] > 130  # fp32; the order of the sum may differ
    assert min(found(transport="float8", stochastic_rounding=1).values()) > 26
    kept = found(transport="float8", high_precision=_is_spare)
    assert kept["spare.weight"] > 130
    assert kept["wide.weight"] < 60


def _is_spare(name: str, parameter: nn.Parameter) -> bool:
    assert isinstance(parameter, nn.Parameter)
    return name.startswith("spare")


_flat: dict[tuple[int, int], DeviceMesh] = {}


def flat_mesh(nodes: int, local: int) -> DeviceMesh:
    """All axes of a mesh as one; made once."""
    if (nodes, local) not in _flat:
        _flat[nodes, local] = device_mesh(nodes=nodes, local=local)._flatten(f"dp{nodes}x{local}")
    return _flat[nodes, local]


def wire(
    transport: Any,
    axes: dict[str, int],
    nodes: int = 0,
    reduce_dtype: torch.dtype | None = None,
    **arguments: Any,
) -> str:
    """The collectives of a backward's reductions: 131,072 elements of a matrix, 512 of a bias."""
    root = mesh = device_mesh(**axes)
    if nodes:
        arguments["hierarchy"], mesh = root, flat_mesh(*axes.values())
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    net = fully_shard(nn.Linear(256, 512), mesh=mesh, mp_policy=policy)
    set_gradient_transport(net, transport, **arguments)
    output = net(torch.randn(4, 256)).sum()
    with comm_audit(root) as audit:
        output.backward()
    gathers = ("all_gather",) if "replicas" not in axes else ()
    found = [row for row in audit.rows if row.op not in gathers]
    return "".join(f"{r.op} {r.dtype} over {r.axis}: {r.count}, {r.bytes:,} B\n" for r in found)


def test_bytes(ranks: RankPools) -> None:
    hybrid = {"replicas": 2, "dp": 2}
    found = ""
    for transport in (None, "bf16", "float8"):
        found += f"{transport}\n{ranks(4).run_same(wire, transport, hybrid)}"
    found += "float8 on 2 nodes of 4\n"
    found += ranks(8).run_same(wire, "float8", {"nodes": 2, "local": 4}, 2)
    # What is not encoded travels in reduce_dtype.
    arguments = {"transport": "float8", "axes": {"dp": 2}, "reduce_dtype": torch.bfloat16}
    with_feedback = ranks(2).run_same(wire, **arguments, error_feedback=True)
    assert ranks(2).run_same(wire, **arguments) == with_feedback
    found += f"float8, bf16 else\n{with_feedback}"
    assert_expected_inline(
        found,
        """\
None
reduce_scatter torch.float32 over dp: 1, 526,336 B
all_reduce torch.float32 over replicas: 1, 263,168 B
bf16
all_to_all torch.bfloat16 over dp: 1, 262,144 B
all_to_all torch.float32 over dp: 0, 2,048 B
all_to_all torch.bfloat16 over replicas: 1, 131,072 B
all_to_all torch.float32 over replicas: 0, 1,024 B
all_gather torch.float32 over replicas: 1, 263,168 B
float8
all_to_all torch.float8_e4m3fn over dp: 1, 131,072 B
all_to_all torch.uint8 over dp: 0, 1,024 B
all_to_all torch.float32 over dp: 0, 2,048 B
all_to_all torch.float8_e4m3fn over replicas: 1, 65,536 B
all_to_all torch.uint8 over replicas: 0, 512 B
all_to_all torch.float32 over replicas: 0, 1,024 B
all_gather torch.bfloat16 over replicas: 1, 131,072 B
all_gather torch.float32 over replicas: 0, 1,024 B
float8 on 2 nodes of 4
all_to_all torch.float8_e4m3fn over local: 1, 131,072 B
all_to_all torch.uint8 over local: 0, 1,024 B
all_to_all torch.float32 over local: 0, 2,048 B
all_to_all torch.float8_e4m3fn over nodes: 1, 32,768 B
all_to_all torch.uint8 over nodes: 0, 256 B
all_to_all torch.float32 over nodes: 0, 512 B
float8, bf16 else
all_to_all torch.float8_e4m3fn over dp: 1, 131,072 B
all_to_all torch.uint8 over dp: 0, 1,024 B
all_to_all torch.bfloat16 over dp: 0, 1,024 B
""",
    )


def special_values(transport: Any) -> None:
    """NaN, infinity and zeros of single ranks in the gradient of a matrix."""
    mesh, rank = device_mesh(dp=dist.get_world_size()), dist.get_rank()
    found = []
    for special in (False, True):
        net = fully_shard(nn.Linear(160, 9, bias=False), mesh=mesh)
        set_gradient_transport(net, transport)
        x = data(rank)[:1, :96].repeat(1, 2)[:, :160].clone()
        if rank == 1:
            x.zero_()
        if special and rank == 0:
            x[0, 3], x[0, 5], x[0, 130] = math.nan, math.inf, -math.inf
        net(x).sum().backward()
        found.append(gradients_of(net)["weight"])
    clean, spoiled = found
    assert spoiled[:, 3].isnan().all()
    assert (spoiled[:, 5] == math.inf).all()
    assert (spoiled[:, 130] == -math.inf).all()
    others = [i for i in range(160) if i not in (3, 5, 130)]
    # Their blocks have the scales of before, unless what was replaced was the largest value.
    assert spoiled[:, others].isfinite().all()
    assert sqnr(clean[:, others], spoiled[:, others]) >= 30
    net.zero_grad()
    net(torch.zeros(2, 160)).sum().backward()
    assert not gradients_of(net)["weight"].count_nonzero()


def test_special_values_arrive(ranks: RankPools) -> None:
    for world_size, transport in ((2, "bf16"), (2, "float8"), (3, "float8")):
        ranks(world_size).run(special_values, transport)


@on_ranks(2)
def test_none_gives_back_the_reduction_of_fsdp2() -> None:
    mesh, rank = device_mesh(dp=dist.get_world_size()), dist.get_rank()
    expected, net = sharded(mesh), sharded(mesh)
    set_gradient_transport(net, "float8", error_feedback=True)
    backward(net, rank)
    net.zero_grad()
    set_gradient_transport(net, None)
    for each in (expected, net):
        backward(each, rank)
    assert all(map(torch.equal, gradients_of(expected).values(), gradients_of(net).values()))
    assert not Float8State(net).state_dict()


def _micro_batches(net: Uneven, rank: int) -> None:
    for step in range(3):
        net.set_requires_gradient_sync(step == 2)  # type: ignore[operator]
        backward(net, rank, step, spare=step == 0)


def _reduced_each(net: Uneven, rank: int) -> None:
    for step in range(2):
        backward(net, rank, step, spare=step == 0)


def _scaled(net: Uneven, rank: int) -> None:
    (net(data(rank)).pow(3).mean() * 2.0**20).backward()


def _clipped(net: Uneven, rank: int) -> None:
    backward(net, rank)
    clip_grad_norm_(net.parameters(), 1e-3)


def _compiled(net: Uneven, rank: int) -> None:
    torch.compile(net, backend="aot_eager")(data(rank)).pow(3).mean().backward()


def _divided(net: Uneven, rank: int) -> None:
    for module in (net.wide, net):
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        module.set_gradient_divide_factor(16.0)  # type: ignore[operator]
    backward(net, rank)


@on_ranks(3)
def test_with_what_else_is_done() -> None:
    bf16 = torch.bfloat16
    ways: list[tuple[Callable[[Uneven, int], None], dict[str, Any]]] = [
        *((run, {}) for run in (_micro_batches, _reduced_each, _scaled, _clipped, _compiled)),
        (_divided, {}),
        (_reduced_each, {"mp_policy": MixedPrecisionPolicy(param_dtype=bf16)}),
        (_reduced_each, {"mp_policy": MixedPrecisionPolicy(bf16, torch.float32)}),
        (_reduced_each, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}),
        (_reduced_each, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        (_reduced_each, {"reshard_after_forward": False}),
    ]
    for run, how in ways:
        found = sqnrs(None, run, how, transport="float8")
        # (Some parameters are so small that their SQNR hangs on a few values.)
        assert min(found.values()) > 28, (run, how, found)


def replicas(transport: Any, partial: bool, error_feedback: bool) -> tuple[float, bool]:
    """HSDP on 2 x 2: the lowest SQNR, and whether replicas have the same bits."""

    def run(net: Uneven, rank: int) -> None:
        for step in range(3 if partial else 1):
            if partial:
                net.set_requires_all_reduce(step == 2)  # type: ignore[operator]
            backward(net, rank, step, spare=True)
        nets.append(net)

    nets: list[Uneven] = []
    mesh = device_mesh(replicas=2, dp=2)
    found = sqnrs(mesh, run, transport=transport, error_feedback=error_feedback)
    bits = torch.cat([grad.flatten() for grad in gradients_of(nets[1]).values()])
    everywhere = [torch.empty_like(bits) for _ in range(4)]
    dist.all_gather(everywhere, bits)
    return min(found.values()), all(torch.equal(bits, each) for each in everywhere)


# (Sums are rounded a second time. The smallest parameter has 111 elements.)
@pytest.mark.parametrize(("transport", "least"), [("bf16", 54), ("float8", 29)])
@pytest.mark.parametrize("partial", [False, True])
def test_replicas(ranks: RankPools, transport: str, least: int, partial: bool) -> None:
    feedback = partial == (transport == "bf16")
    lowest, same = ranks(4).run_same(replicas, transport, partial, feedback)
    assert lowest > least
    assert same


def in_hierarchy(nodes: int, local: int, **arguments: Any) -> dict[str, float]:
    """SQNR of sums inside of nodes, then between them."""
    root = device_mesh(nodes=nodes, local=local)
    return sqnrs(flat_mesh(nodes, local), _with_spare, hierarchy=root, **arguments)


@pytest.mark.parametrize(
    ("nodes", "local"), [(2, 2), (2, 4), pytest.param(4, 2, marks=pytest.mark.full)]
)
def test_hierarchies(ranks: RankPools, nodes: int, local: int) -> None:
    pool = ranks(nodes * local)
    for transport, least in (("bf16", 50), ("float8", 28)):
        found = pool.run_same(in_hierarchy, nodes, local, transport=transport)
        assert min(found.values()) > least
        assert found["norm.weight"] > 130
    pool.run_same(in_hierarchy, nodes, local, transport="float8", error_feedback=True)


@on_ranks(4, returns=["all_reduce", "reduce_scatter"])
def test_a_reduce_scatter_that_a_user_sets_afterwards_stays() -> list[str]:
    """Of replicas, by FSDP2's own all-reduce."""
    mesh = device_mesh(replicas=2, dp=2)
    net = fully_shard(nn.Linear(64, 64), mesh=mesh)
    set_gradient_transport(net, "float8")
    own = type("Own", (DefaultReduceScatter,), {})()
    net.set_custom_reduce_scatter(own)
    set_gradient_transport(net, None)
    assert fsdp_reduction(fsdp_groups_of_module(net)[0]) is own
    with comm_audit(mesh) as audit:
        net(data(dist.get_rank())[:, :64]).sum().backward()
    return sorted(row.op for row in audit.rows if row.op != "all_gather")


class Gated(nn.Module):
    """With a gate that tensor parallelism replicates."""

    def __init__(self, mesh: DeviceMesh, hidden: int = 256) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.up = nn.Linear(64, hidden, bias=False)
            self.down = nn.Linear(hidden, 64, bias=False)
            self.gate = nn.Linear(64, 64, bias=False)
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(self, mesh["tp"], plan)
        fully_shard(self, mesh=mesh["dp"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x))) * self.gate(x)


@on_ranks(4)
def test_replicated_parameters_round_alike_on_tensor_parallel_ranks() -> None:
    mesh = device_mesh(dp=2, tp=2)
    # What comes before is sharded evenly, or not.
    for transport, hidden in (("bf16", 251), ("float8", 256), ("float8", 251), ("float8", 3)):
        net = Gated(mesh, hidden)
        set_gradient_transport(net, transport, stochastic_rounding=True)  # type: ignore[arg-type]
        net(data(mesh.get_local_rank("dp"))[:, :64]).pow(2).mean().backward()
        own = local_tensor(net.gate.weight.grad).contiguous()
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, own, group=mesh.get_group("tp"))
        assert torch.equal(*both), (transport, hidden)


class Seeds(TorchDispatchMode):
    """The seeds by which values are encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is encode_float8.overload:
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


def seeds_of_a_step(in_nodes: bool) -> list[int]:
    """This rank's seeds in a step of HSDP, or of nodes and between them."""
    mesh, hierarchy = device_mesh(replicas=2, dp=2), None
    if in_nodes:
        mesh, hierarchy = flat_mesh(2, 2), device_mesh(nodes=2, local=2)
    net = Uneven()
    for part in (net.wide, net.flat, net):
        fully_shard(part, mesh=mesh)
    set_gradient_transport(net, "float8", stochastic_rounding=True, hierarchy=hierarchy)
    with Seeds() as seeds:
        backward(net, dist.get_rank(), spare=True)
    return seeds.found


@pytest.mark.parametrize("in_nodes", [False, True])
def test_every_rounding_has_a_seed_of_its_own(ranks: RankPools, in_nodes: bool) -> None:
    found = [seed for seeds in ranks(4).run(seeds_of_a_step, in_nodes) for seed in seeds]
    assert len(set(found)) == len(found) == 4 * 2 * 4  # ranks, exchanges, matrices


@on_ranks(4)
def test_tensor_parallel_ranks_that_differ() -> None:
    mesh = device_mesh(dp=2, tp=2)
    how: Any = "float8" if mesh.get_local_rank("tp") else "bf16"
    message = raised(ValueError, lambda: set_gradient_transport(Gated(mesh), how))
    assert "the transport of the gradient of up.weight: bf16 on rank" in message, message


def feedback(error_feedback: bool) -> float:
    """SQNR of the mean over steps with one gradient; the lower one of two parameters."""
    mesh, rank = device_mesh(dp=dist.get_world_size()), dist.get_rank()
    net, exact = sharded(mesh), sharded(mesh)
    set_gradient_transport(net, "float8", error_feedback=error_feedback)
    backward(exact, rank)
    for _ in range(16):  # gradients accumulate
        backward(net, rank)
    expected, found = gradients_of(exact), gradients_of(net)
    return min(sqnr(expected[name], found[name] / 16) for name in ("wide.weight", "last.weight"))


def test_error_feedback_makes_up_for_what_was_left_out(ranks: RankPools) -> None:
    without = ranks(3).run_same(feedback, False)
    assert ranks(3).run_same(feedback, True) > without + 20


@on_ranks(2, returns=True)
def test_nan_is_no_error_to_make_up_for() -> bool:
    net, rank = sharded(device_mesh(dp=dist.get_world_size())), dist.get_rank()
    set_gradient_transport(net, "float8", error_feedback=True)
    (net(data(rank)).mean() * math.nan).backward()
    net.zero_grad()
    backward(net, rank)
    return all(grad.isfinite().all() for grad in gradients_of(net).values())


def errors_of(net: nn.Module) -> Gradients:
    return Float8State(net).state_dict()["gradient_errors"]


def errors_that_do_not_fit() -> list[str]:
    """What is said of them, in the order of the test."""
    net = sharded(device_mesh(dp=dist.get_world_size()))
    state, found = Float8State(net), []
    set_gradient_transport(net, "float8", error_feedback=True)
    backward(net, dist.get_rank())
    saved = copy.deepcopy(state.state_dict()["gradient_errors"])
    key = next(key for key in saved if ".codes." in key)
    for damaged in (saved | {key: saved[key][:1]}, saved | {key: [1.0]}, [1.0]):
        with pytest.raises(ValueError, match=r"gradient errors .* are damaged") as error:
            state.load_state_dict({"gradient_errors": damaged})
        found.append(str(error.value).replace(f".rank{dist.get_rank()}.shard{dist.get_rank()}", ""))
    assert all(torch.equal(saved[name], tensor) for name, tensor in errors_of(net).items())
    fp8_dist.text._warned.clear()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        state.load_state_dict({"gradient_errors": saved})
        state.load_state_dict({})
        assert not any(t.any() for name, t in errors_of(net).items() if ".codes." in name)
        set_gradient_transport(net, None)
        state.load_state_dict({"gradient_errors": saved})
    return found + [str(each.message) for each in given]


def test_errors_that_do_not_fit_are_told(ranks: RankPools) -> None:
    assert_expected_inline(
        "\n".join(ranks(2).run_same(errors_that_do_not_fit)),
        """\
Float8State: the saved gradient errors flat.weight.0.codes.2x1x74 are damaged: expected a tensor [2, 1, 74] of torch.uint8, found [1, 1, 74] of torch.uint8; load an undamaged checkpoint, or leave them out
Float8State: the saved gradient errors flat.weight.0.codes.2x1x74 are damaged: expected a tensor [2, 1, 74] of torch.uint8, found a list; load an undamaged checkpoint, or leave them out
Float8State: the saved gradient errors flat.weight.0.codes.2x1x74 are damaged: expected a tensor [2, 1, 74] of torch.uint8, found a list; load an undamaged checkpoint, or leave them out
Float8State: 8 of this rank's 8 errors of gradients are not in the state, which is of another rank or mesh, or of a run without error feedback: they start at zero
Float8State: the state has errors of gradients, and the model keeps none; call set_gradient_transport(..., error_feedback=True) before the state is loaded, or register float8_ddp_hook with error feedback and pass the DDP model""",
    )


def saved_and_loaded(folder: str) -> None:
    """Errors that DCP saved and loaded give the gradients of an uninterrupted run."""
    mesh, rank = device_mesh(dp=dist.get_world_size()), dist.get_rank()
    old, new = sharded(mesh), sharded(mesh)
    for net in (old, new):
        set_gradient_transport(net, "float8", error_feedback=True)
    backward(old, rank)
    dcp.save({"float8": Float8State(old), "model": old}, checkpoint_id=folder)
    dcp.load({"float8": Float8State(new), "model": new}, checkpoint_id=folder)
    for net in (old, new):
        net.zero_grad()
        backward(net, rank, 1)
    assert all(map(torch.equal, gradients_of(new).values(), gradients_of(old).values()))


def loaded_elsewhere(folder: str, partial: bool) -> None:
    net = sharded(device_mesh(dp=dist.get_world_size()))
    set_gradient_transport(net, "float8", error_feedback=True)
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    dcp.load({"float8": Float8State(net)}, checkpoint_id=folder, planner=planner)
    assert not any(t.any() for k, t in errors_of(net).items() if ".codes." in k)


def test_checkpoints_have_errors(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(saved_and_loaded, str(tmp_path))
    ranks(3).run(loaded_elsewhere, str(tmp_path), True)
    with pytest.raises(RuntimeError, match="Missing key"):
        ranks(3).run(loaded_elsewhere, str(tmp_path), False)


def names_of_errors() -> dict[str, list[str]]:
    """The parameters that keep errors, by what was passed."""
    mesh, found = device_mesh(dp=dist.get_world_size()), {}
    for case in ("apart", "wrapped", "frozen", "unfrozen", "frozen later", "together", "forgotten"):
        net = Uneven()
        net.wide.weight.requires_grad_(case not in ("frozen", "unfrozen"))
        for part in [[net.wide, net.flat]] if case == "together" else [net.wide, net.flat]:
            fully_shard(part, mesh=mesh)
        fully_shard(net, mesh=mesh)
        passed = {"apart": [net.wide, net.flat], "wrapped": [torch.compile(net)]}.get(case, [net])
        for module in passed:
            assert isinstance(module, nn.Module)
            set_gradient_transport(module, "float8", error_feedback=True)
        if case == "unfrozen":
            net.wide.weight.requires_grad_(True)
        if case in ("frozen later", "forgotten"):
            backward(net, dist.get_rank())
            net.wide.weight.requires_grad_(False)
        if case != "forgotten":
            found[case] = sorted({key.partition(".0.")[0] for key in errors_of(net)})
        else:  # its errors alone are zero
            net.zero_grad()
            backward(net, dist.get_rank())
            net.wide.weight.requires_grad_(True)
            found[case] = [
                key.partition(".0.")[0]
                for key, t in errors_of(net).items()
                if ".codes." in key and "spare" not in key and not t.any()
            ]
    return found


def test_errors_have_the_names_of_trained_parameters(ranks: RankPools) -> None:
    every = ["flat.weight", "last.weight", "spare.weight", "wide.weight"]
    assert ranks(2).run_same(names_of_errors) == {
        "apart": ["flat.weight", "wide.weight"],
        "wrapped": every,
        "frozen": every[:3],
        "unfrozen": every,
        "frozen later": every[:3],
        "together": every,
        "forgotten": ["wide.weight"],
    }


def keys_are_alike() -> bool:
    """Those of errors on a mesh of 2 x 2, and on one with its axes swapped."""
    found = []
    for axes in ({"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}):
        net = Gated(device_mesh(**axes))
        set_gradient_transport(net, "float8", error_feedback=True)
        found.append(set(errors_of(net)))
    return found[0] == found[1]


def test_errors_of_another_mesh_have_other_keys(ranks: RankPools) -> None:
    # On the diagonal a rank has the same part of both.
    assert ranks(4).run(keys_are_alike) == [True, False, False, True]


def sent_and_kept(nodes: int, local: int) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
    """All-to-alls of a backward, gradients, errors; without a hierarchy if ``nodes`` is 0."""
    flat, hierarchy = device_mesh(dp=dist.get_world_size()), None
    if nodes:
        flat, hierarchy = flat_mesh(nodes, local), device_mesh(nodes=nodes, local=local)
    net = sharded(flat)
    set_gradient_transport(net, "float8", error_feedback=True, hierarchy=hierarchy)
    with comm_audit(flat) as audit:
        backward(net, dist.get_rank())
    kept = Float8State(net).state_dict().get("gradient_errors", {})
    sent = sum(row.count for row in audit.rows if row.op == "all_to_all")
    return sent, [*gradients_of(net).values()], [*kept.values()]


def test_a_rank_sends_nothing_to_itself(ranks: RankPools) -> None:
    exact = Uneven()
    backward(exact, 0)
    for nodes in (0, 1):
        ((sent, gradients, errors),) = ranks(1).run(sent_and_kept, nodes, 1)
        assert (sent, errors) == (0, [])
        expected = [p.grad for p in exact.parameters() if p.grad is not None]
        assert all(map(torch.equal, gradients, expected))
    flat = ranks(2).run(sent_and_kept, 0, 0)
    for shape in ((1, 2), (2, 1)):
        for one, other in zip(flat, ranks(2).run(sent_and_kept, *shape), strict=True):
            assert one[0] == other[0] == 2  # a group of parameters each
            for these, those in zip(one[1:], other[1:], strict=True):
                assert len(these) == len(those) > 0
                pairs = zip(these, those, strict=True)
                assert all(torch.equal(a.flatten(), b.flatten()) for a, b in pairs)


@on_ranks(
    4,
    returns={
        "torch.float8_e4m3fn over local",
        "torch.uint8 over local",
        "torch.float32 over local",
        "torch.bfloat16 over local",
        "torch.bfloat16 over nodes",
        "torch.float32 over nodes",
    },
)
def test_modules_that_are_sharded_over_other_ranks() -> set[str]:
    """The dtypes and axes of exchanges of modules that were set one by one."""
    hierarchy, flat = device_mesh(nodes=2, local=2), flat_mesh(2, 2)
    net = Uneven()
    fully_shard(net.wide, mesh=hierarchy["local"])
    fully_shard(net, mesh=flat)
    call: Any = set_gradient_transport
    message = raised(ValueError, lambda: call(net, "bf16", hierarchy=hierarchy))
    assert "wide is sharded over the ranks" in message
    set_gradient_transport(net.wide, "float8")
    set_gradient_transport(net, "bf16", hierarchy=hierarchy, recurse=False)
    with comm_audit(hierarchy) as audit:
        net(data(dist.get_rank())).sum().backward()
    set_gradient_transport(net, None, recurse=False)
    left = [fsdp_reduction(group) for m in (net, net.wide) for group in fsdp_groups_of_module(m)]
    assert [found is None for found in left] == [True, False]
    return {f"{row.dtype} over {row.axis}" for row in audit.rows if row.op == "all_to_all"}


@on_ranks(2)
def test_a_tool_that_puts_back_what_it_found() -> None:
    mesh, rank = device_mesh(dp=dist.get_world_size()), dist.get_rank()
    net, set_again = sharded(mesh), sharded(mesh)
    for each in (net, set_again):
        with FSDPMemTracker(each):
            set_gradient_transport(each, "float8")
            backward(each, rank)
    set_gradient_transport(set_again, "float8")
    backward(set_again, rank, spare=True)
    message = raised(RuntimeError, lambda: backward(net, rank, spare=True))
    assert "has put back the post_backward of its parameter group (FSDPMemTracker does)" in message


class OwnReduceScatter:
    """What a user may have given to FSDP2."""


def refusals() -> dict[str, str]:
    mesh = device_mesh(dp=dist.get_world_size())
    net, own, copied = sharded(mesh), sharded(mesh), replicate(Uneven(), mesh=mesh)
    of_two_groups = sharded(mesh)
    state = of_two_groups._get_fsdp_state()  # type: ignore[operator]
    # (Before torch 2.13 there are none of these.)
    state._fsdp_param_groups = [*fsdp_groups_of_module(of_two_groups)] * 2
    together = Uneven()
    fully_shard([together.wide, together.flat], mesh=mesh)
    for without_sums in (copied, of_two_groups):
        set_gradient_transport(nn.Sequential(sharded(mesh), without_sums), None)
    of_fp64 = fully_shard(nn.Linear(8, 8).double(), mesh=mesh)
    replicas = device_mesh(replicas=2, dp=1)
    copies_of_fp64 = fully_shard(nn.Linear(8, 8).double(), mesh=replicas)
    for each in (of_fp64, copies_of_fp64):
        set_gradient_transport(each, "bf16")
    flat, axes = flat_mesh(1, 2), (device_mesh(nodes=1, local=2), device_mesh(nodes=2, local=1))
    own.wide.set_custom_reduce_scatter(OwnReduceScatter())  # type: ignore[operator]
    call: Any = set_gradient_transport
    calls: dict[str, Callable[[], None]] = {
        "transport": lambda: call(net, "fp8"),
        "not sharded": lambda: call(nn.Linear(2, 2), "bf16"),
        "feedback of nothing": lambda: call(net, None, error_feedback=True),
        "filter of nothing": lambda: call(net, None, high_precision=_is_spare),
        "seed": lambda: call(net, "bf16", stochastic_rounding=-1),
        "custom": lambda: call(own, "bf16"),
        "replicated": lambda: call(copied, "bf16"),
        "two groups": lambda: call(of_two_groups, "bf16"),
        "hierarchy": lambda: call(net, "bf16", hierarchy=mesh),
        "ranks differ": lambda: call(net, "bf16" if dist.get_rank() else "float8"),
        "hierarchies differ": lambda: call(sharded(flat), "bf16", hierarchy=axes[dist.get_rank()]),
        "shared group": lambda: call(together.flat, "bf16"),
        "filter of all": lambda: call(net, "bf16", high_precision=lambda name, p: True),
    }
    found = {name: raised(ValueError, each) for name, each in calls.items()}
    for case, module in {"fp64": of_fp64, "fp64, replicas": copies_of_fp64}.items():
        sum_of_fp64 = module(torch.ones(2, 8).double()).sum()
        found[case] = raised(NotImplementedError, sum_of_fp64.backward)
    types: dict[str, Callable[[], None]] = {
        "filter": lambda: call(net, "bf16", high_precision="norm"),
        "model": lambda: call([net], "bf16"),
        "flag": lambda: call(net, "bf16", error_feedback="yes"),
        "tuple": lambda: call(net, "bf16", hierarchy=(1, 2)),
    }
    return found | {name: raised(TypeError, each) for name, each in types.items()}


def test_refusals(ranks: RankPools) -> None:
    found = {
        name: re.sub(r", stride=(\(1,\)|1)", "", message)  # torch's releases differ in it
        for name, message in ranks(2).run_same(refusals).items()
    }
    assert_expected_inline(
        "\n".join(f"{k}: {v}" for k, v in found.items()),
        """\
transport: set_gradient_transport: transport is 'fp8'; it must be one of ('float8', 'bf16', None)
not sharded: set_gradient_transport: the Linear has no module that fully_shard was called on; call it after fully_shard
feedback of nothing: set_gradient_transport: the other arguments are about how gradients are encoded, and transport=None encodes none; drop them
filter of nothing: set_gradient_transport: the other arguments are about how gradients are encoded, and transport=None encodes none; drop them
seed: set_gradient_transport: stochastic_rounding is -1; it must be a bool, or a seed: an int that is not negative
custom: set_gradient_transport: wide has a reduce-scatter of its own (OwnReduceScatter, of set_custom_reduce_scatter or of memory from the process group), which would be replaced
replicated: set_gradient_transport: the root module is replicated (replicate, not fully_shard): its gradients are all-reduced, and there is no reduce-scatter
two groups: set_gradient_transport: the root module has 2 parameter groups (a shard_placement_fn that gives parameters meshes of their own); torch takes no custom reduce-scatter for such a module. Shard its parts apart, with one mesh each
hierarchy: set_gradient_transport: hierarchy is a mesh of shape (2,) of the ranks [0, 1], but the root module is sharded over the ranks [0, 1]; it must be a 2-D mesh, (nodes, ranks of a node), of the same ranks in the same order: flatten it for fully_shard
ranks differ: set_gradient_transport: the ranks of DeviceMesh((dp=2), 'cpu') have set up the model in different ways: the transport of the gradient of flat.weight: float8 on rank 0; bf16 on rank 1. Give it the same arguments on all ranks
hierarchies differ: set_gradient_transport: the ranks of DeviceMesh((dp1x2=2), 'cpu') have set up the model in different ways: options: error_feedback=False, stochastic_rounding=False, a hierarchy of shape (1, 2) on rank 0; error_feedback=False, stochastic_rounding=False, a hierarchy of shape (2, 1) on rank 1. Give it the same arguments on all ranks
shared group: set_gradient_transport: a parameter group of FSDP2 (fully_shard of a list) has parameters outside of the module that was passed; pass one that holds all of them
filter of all: set_gradient_transport: transport='bf16' would encode no gradient: all parameters have fewer than 2 dims, or high_precision is true for them
fp64: set_gradient_transport: the root module has gradients of torch.float64; sums are taken in fp32. Set reduce_dtype, or give this module transport=None
fp64, replicas: set_gradient_transport: the root module has gradients of torch.float64; sums are taken in fp32. Set reduce_dtype, or give this module transport=None
filter: set_gradient_transport: high_precision is 'norm'; it must be a function of a parameter's name and the parameter, such as lambda name, p: 'embed' in name
model: set_gradient_transport needs a module that fully_shard was called on, got a list
flag: set_gradient_transport: error_feedback is 'yes'; it must be a bool
tuple: set_gradient_transport: hierarchy is (1, 2); it must be a 2-D DeviceMesh, such as mesh['node', 'local']""",
    )


def biases(**axes: int) -> float:
    """The largest relative bias of stochastic rounding, over gradients of one value each."""
    values = 1 + torch.rand(16, 1, generator=torch.Generator().manual_seed(0)).expand(16, 1024)
    layer = fully_shard(nn.Linear(1024, 16, bias=False), mesh=device_mesh(**axes))
    total = torch.zeros(16, 1024)
    for seed in range(16):
        set_gradient_transport(layer, "float8", stochastic_rounding=seed)
        layer.zero_grad()
        layer(torch.eye(1024)).mul(values.t()).sum().backward()
        total += layer.weight.grad.full_tensor()
    return (total / 16 / values - 1).mean(1).abs().max().item()


def test_stochastic_rounding_has_no_bias(ranks: RankPools) -> None:
    """The sums of replicas are rounded stochastically too."""
    for axes in ({"dp": 4}, {"replicas": 2, "dp": 2}):
        assert ranks(4).run_same(biases, **axes) < 0.0006, axes
