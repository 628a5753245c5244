"""Gradient transport under FSDP2: sums, bytes, other features of FSDP2, and refusals."""

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from expecttest import assert_expected_inline
from gradient_wire import Uneven, backward, data, nodes_of, shard_of_mean
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, sqnr
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fp8_dist import text
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import clip_grad_norm_, set_gradient_transport
from fp8_dist.mesh import local_tensor

Gradients = dict[str, torch.Tensor]


def sharded(mesh: DeviceMesh, **arguments: Any) -> Uneven:
    """Under FSDP2: one group for the first layer, one for the rest."""
    net = Uneven()
    fully_shard(net.wide, mesh=mesh, **arguments)
    return fully_shard(net, mesh=mesh, **arguments)


def gradients_of(net: nn.Module) -> Gradients:
    """Whole gradients."""
    return {
        name: p.grad.full_tensor()  # type: ignore[union-attr]
        for name, p in net.named_parameters()
        if p.grad is not None
    }


def single_rank_gradients(rank: int, frozen: bool = False, **arguments: Any) -> Gradients:
    net = Uneven()
    net.flat.requires_grad_(not frozen)
    backward(net, rank, **arguments)
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def _with_spare(net: Uneven, rank: int) -> None:
    backward(net, rank, spare=True)


def wrong_bits(transport: Any, spare: bool, per_node: int = 1, within: Any = None) -> list[str]:
    """Parameters whose gradient shard differs, in either of two runs, from a locally computed mean.

    Without `spare`, a parameter between two others is frozen as well.

    per_node: the ranks on each node; 1: there is one hop.
    """
    mesh, own = device_mesh(dp=dist.get_world_size()), dist.get_rank()
    nodes = None if per_node == 1 else nodes_of(per_node)
    each = [single_rank_gradients(rank, not spare, spare=spare) for rank in range(mesh.size())]
    wrong = []
    for _ in range(2):
        net = sharded(mesh)
        net.flat.requires_grad_(spare)
        set_gradient_transport(net, transport, nodes=nodes, within_nodes=within)
        backward(net, own, spare=spare)
        for name, p in net.named_parameters():
            if p.grad is None or name not in each[0]:
                wrong += [name] * ((p.grad is None) != (name not in each[0]))
                continue
            how = transport if p.ndim > 1 and transport != "fp32" else None
            first = how and (within or how)
            whole = [gradients[name] for gradients in each]
            expected = shard_of_mean(whole, own, how, per_node, first)
            wrong += [name] * (not torch.equal(local_tensor(p.grad), expected))
    return wrong


@pytest.mark.parametrize(("world_size", "transport"), [(2, "bf16"), (3, "float8"), (4, "float8")])
def test_shards_are_the_sums_of_what_arrived(
    ranks: RankPools, world_size: int, transport: str
) -> None:
    for spare in (False, True):
        assert ranks(world_size).run(wrong_bits, transport, spare) == [[]] * world_size


@pytest.mark.parametrize(
    ("world_size", "per_node", "transport", "within"),
    [
        (4, 2, "float8", None),
        (4, 4, "float8", "bf16"),
        (8, 4, "bf16", "float8"),
        (8, 2, "fp32", None),
    ],
)
def test_shards_are_sums_over_nodes(
    ranks: RankPools, world_size: int, per_node: int, transport: str, within: str | None
) -> None:
    for spare in (False, True):
        found = ranks(world_size).run(wrong_bits, transport, spare, per_node, within)
        assert found == [[]] * world_size


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


def test_gradients_that_stay_in_high_precision(ranks: RankPools) -> None:
    found = ranks(3).run_same(sqnrs, transport="float8", high_precision=_is_spare)
    for name in ("spare.weight", "wide.bias", "norm.weight", "norm.bias"):
        assert found[name] > 130  # fp32; the order of the sum may differ
    assert 30 < found["wide.weight"] < 60


@on_ranks(4)
def test_sqnr_of_two_hops() -> None:
    """bf16 within nodes makes up for the second rounding."""
    for within, least, most in ((None, 27, 31), ("bf16", 29.5, 35)):
        found = sqnrs(transport="float8", nodes=nodes_of(2), within_nodes=within)
        encoded = [ratio for ratio in found.values() if ratio < 100]
        assert len(encoded) == 4
        assert least < min(encoded) <= max(encoded) < most, (within, found)


def _is_spare(name: str, parameter: nn.Parameter) -> bool:
    assert isinstance(parameter, nn.Parameter)
    return name.startswith("spare")


def wire(
    transport: Any,
    axes: dict[str, int],
    reduce_dtype: torch.dtype | None = None,
    per_node: int | None = None,
) -> str:
    """The collectives of a backward's reductions: 131,072 elements of a matrix, 512 of a bias."""
    mesh = device_mesh(**axes)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    net = fully_shard(nn.Linear(256, 512), mesh=mesh, mp_policy=policy)
    set_gradient_transport(net, transport, nodes=per_node and nodes_of(per_node))
    output = net(torch.randn(4, 256)).sum()
    with comm_audit(mesh) as audit:
        output.backward()
    gathers = ("all_gather",) if "replicas" not in axes else ()
    found = [row for row in audit.rows if row.op not in gathers]
    return "".join(f"{r.op} {r.dtype} over {r.axis}: {r.count}, {r.bytes:,} B\n" for r in found)


def test_bytes(ranks: RankPools) -> None:
    hybrid = {"replicas": 2, "dp": 2}
    found = ""
    for transport in (None, "fp32", "bf16", "float8"):
        found += f"{transport}\n{ranks(4).run_same(wire, transport, hybrid)}"
    # What is not encoded travels in reduce_dtype.
    with_bf16 = ranks(2).run_same(wire, "float8", {"dp": 2}, torch.bfloat16)
    found += f"float8, bf16 else\n{with_bf16}"
    for transport in ("fp32", "bf16", "float8"):
        found += f"{transport} on two nodes of 2\n"
        found += ranks(4).run_same(wire, transport, {"dp": 4}, None, 2)
    assert_expected_inline(
        found,
        """\
None
reduce_scatter torch.float32 over dp: 1, 526,336 B
all_reduce torch.float32 over replicas: 1, 263,168 B
fp32
all_to_all torch.float32 over dp: 1, 526,360 B
all_to_all torch.float32 over replicas: 1, 263,184 B
all_gather torch.float32 over replicas: 1, 263,184 B
bf16
all_to_all torch.bfloat16 over dp: 1, 262,144 B
all_to_all torch.float32 over dp: 0, 2,072 B
all_to_all torch.bfloat16 over replicas: 1, 131,072 B
all_to_all torch.float32 over replicas: 0, 1,040 B
all_gather torch.float32 over replicas: 1, 263,184 B
float8
all_to_all torch.float8_e4m3fn over dp: 1, 131,072 B
all_to_all torch.uint8 over dp: 0, 1,024 B
all_to_all torch.float32 over dp: 0, 2,072 B
all_to_all torch.float8_e4m3fn over replicas: 1, 65,536 B
all_to_all torch.uint8 over replicas: 0, 512 B
all_to_all torch.float32 over replicas: 0, 1,040 B
all_gather torch.bfloat16 over replicas: 1, 131,072 B
all_gather torch.float32 over replicas: 0, 1,040 B
float8, bf16 else
all_to_all torch.float8_e4m3fn over dp: 1, 131,072 B
all_to_all torch.uint8 over dp: 0, 1,024 B
all_to_all torch.bfloat16 over dp: 0, 1,036 B
fp32 on two nodes of 2
all_to_all torch.float32 over dp: 2, 789,576 B
bf16 on two nodes of 2
all_to_all torch.bfloat16 over dp: 2, 393,216 B
all_to_all torch.float32 over dp: 0, 3,144 B
float8 on two nodes of 2
all_to_all torch.float8_e4m3fn over dp: 2, 196,608 B
all_to_all torch.uint8 over dp: 0, 1,536 B
all_to_all torch.float32 over dp: 0, 3,144 B
""",
    )


def sent(transport: Any, per_node: int) -> list[tuple[int, int]]:
    """Bytes within and between nodes of a backward's gradients, without and with the transport."""
    mesh, found = device_mesh(dp=dist.get_world_size()), []
    for how, nodes in ((None, None), (transport, nodes_of(per_node))):
        net = fully_shard(nn.Linear(256, 512, bias=False), mesh=mesh)
        set_gradient_transport(net, how, nodes=nodes)
        output = net(torch.randn(4, 256)).sum()
        with comm_audit(mesh, gpus_per_node=per_node) as audit:
            output.backward()
        rows = [row for row in audit.rows if row.op != "all_gather"]
        found.append((sum(r.bytes_within for r in rows), sum(r.bytes_between for r in rows)))
    return found


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (8, 4), (8, 2)])
def test_bytes_between_nodes(ranks: RankPools, size: int, per_node: int) -> None:
    gradients, flags = 256 * 512, 2  # used or not, and the module's number
    ring = 4 * gradients * (size - 1) // size  # of the ring's links, one in per_node leaves a node
    for transport, width in (("float8", 1 + 1 / 128), ("bf16", 2), ("fp32", 4)):
        own, (within, between) = ranks(size).run_same(sent, transport, per_node)
        assert own == (ring - ring // per_node, ring // per_node)
        others, nodes = per_node - 1, size // per_node - 1
        piece = width * gradients / size + 4 * flags  # of one rank
        assert within == others * (nodes + 1) * piece
        assert between == nodes * piece
        assert between < width * gradients / per_node


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


@pytest.mark.parametrize(("size", "per_node"), [(3, None), (4, 2)])
@on_ranks("size")
def test_with_what_else_is_done(size: int, per_node: int | None) -> None:
    bf16, nodes = torch.bfloat16, per_node and nodes_of(per_node)
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
        found = sqnrs(None, run, how, transport="float8", nodes=nodes)
        # (Some parameters are so small that their SQNR hangs on a few values.)
        assert min(found.values()) > (28 if nodes is None else 26), (run, how, found)


# (Sums are rounded a second time. The smallest parameter has 111 elements.)
@pytest.mark.parametrize(
    ("transport", "partial", "least"), [("bf16", False, 53), ("float8", True, 28)]
)
@on_ranks(4)
def test_replicas(transport: str, partial: bool, least: int) -> None:
    """HSDP on 2 x 2, whose replicas have the same bits."""

    def run(net: Uneven, rank: int) -> None:
        for step in range(3 if partial else 1):
            if partial:
                net.set_requires_all_reduce(step == 2)  # type: ignore[operator]
            backward(net, rank, step, spare=True)
        nets.append(net)

    nets: list[Uneven] = []
    mesh = device_mesh(replicas=2, dp=2)
    found = sqnrs(mesh, run, transport=transport)
    bits = torch.cat([grad.flatten() for grad in gradients_of(nets[1]).values()])
    everywhere = [torch.empty_like(bits) for _ in range(4)]
    dist.all_gather(everywhere, bits)
    assert min(found.values()) > least
    assert all(torch.equal(bits, other) for other in everywhere)


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


def launched(local: Sequence[str | None], run: Callable[[], object], host: str = "") -> int:
    """Run a function as if launched with each rank's LOCAL_WORLD_SIZE; return if it warned."""
    value = local[dist.get_rank() % len(local)]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if value is not None:
            patch.setenv("LOCAL_WORLD_SIZE", value)
        patch.setattr("platform.node", lambda: host)
        text._warned.clear()
        run()
    return sum("one hop" in str(each.message) for each in caught)


def hops_of(axes: dict[str, int], local: list[str | None], hosts: str = "a") -> list[int]:
    """The number of all-to-alls in a backward, the elements of those in float8, and the warnings.

    Args:
        local: LOCAL_WORLD_SIZE of each rank.
        hosts: the name of each rank's host, a letter. Ranks beyond take these in turns.
    """
    mesh, rank = device_mesh(**axes), dist.get_rank()
    net = Gated(mesh) if "tp" in axes else fully_shard(nn.Linear(64, 64, bias=False), mesh=mesh)
    host = hosts[rank % len(hosts)]
    warned = launched(local, lambda: set_gradient_transport(net, "float8"), host)
    output = net(torch.randn(4, 64, generator=torch.Generator().manual_seed(rank)))
    with comm_audit(mesh) as audit:
        output.float().sum().backward()
    found = [r.elements for r in audit.rows if r.op == "all_to_all" and not r.in_mixed_gather]
    return [audit.count("all_to_all"), *found, *[1] * warned]


def test_where_there_are_two_hops(ranks: RankPools) -> None:
    """Of 4,096 gradients, or 20,480 of a tensor-parallel rank."""
    one, two = [1, 4096], [2, 4096 + 2048]
    for axes, local, expected in (
        ({"dp": 4}, ["2"], two),
        ({"dp": 4}, ["1"], one),
        ({"dp": 4}, ["4"], one),
        ({"dp": 4}, [None], one),
        ({"dp": 4}, ["3", "3", "3", "1"], [*one, 1]),
        ({"dp": 4}, ["3"], [*one, 1]),
        ({"dp": 2, "tp": 2}, ["2"], [1, 20480]),  # tensor parallelism fills the node
        ({"tp": 2, "dp": 2}, ["2"], [1, 20480]),
    ):
        assert ranks(4).run_same(hops_of, axes, local) == expected, (axes, local)
    assert ranks(4).run_same(hops_of, {"dp": 4}, [None], hosts="ab") == [*one, 1]
    # Consecutive ranks share a host; or the launcher places them in turns.
    assert ranks(4).run_same(hops_of, {"dp": 4}, ["2"], hosts="aabb") == two
    assert ranks(4).run_same(hops_of, {"dp": 4}, ["2"], hosts="abab") == [*one, 1]
    assert ranks(8).run_same(hops_of, {"dp": 4, "tp": 2}, ["4"]) == [2, 20480 + 10240]
    # The shards of one replica share a node, those of another do not.
    found = ranks(6).run(hops_of, {"replicas": 3, "dp": 2}, ["3"])
    assert [each[0] for each in found] == [2] * 6


def gradients_under_tp(transport: Any) -> dict[str, torch.Tensor]:
    net = Gated(device_mesh(dp=4, tp=2))
    set_gradient_transport(net, transport, nodes=transport and nodes_of(4))
    rank = dist.get_rank() // 2
    net(torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))).float().sum().backward()
    return {name: p.grad.full_tensor() for name, p in net.named_parameters()}  # type: ignore[union-attr]


@on_ranks(8)
def test_two_hops_under_tensor_parallelism() -> None:
    exact, summed, encoded = (gradients_under_tp(how) for how in (None, "fp32", "float8"))
    for name in exact:
        assert sqnr(exact[name], summed[name]) > 120
        assert 25 < sqnr(exact[name], encoded[name]) < 40


@on_ranks(4)
def test_tensor_parallel_ranks_that_differ() -> None:
    mesh = device_mesh(dp=2, tp=2)
    how: Any = "float8" if mesh.get_local_rank("tp") else "bf16"
    message = raised(ValueError, lambda: set_gradient_transport(Gated(mesh), how))
    assert "the transport of the gradient of up.weight: bf16 on rank" in message, message


@on_ranks(1)
def test_one_rank_rounds_as_others_do_and_sends_nothing() -> None:
    exact, mesh = single_rank_gradients(0), device_mesh(dp=1)
    net, handed = sharded(mesh), list[int]()
    net.set_all_reduce_hook(lambda reduced: handed.append(reduced.numel()))  # type: ignore[operator]
    set_gradient_transport(net, "float8")
    with comm_audit(mesh) as audit:
        backward(net, 0)
    assert not audit.count("all_to_all")
    assert len(handed) == 1
    for name, grad in gradients_of(net).items():
        how = "float8" if grad.ndim > 1 else None
        assert torch.equal(grad, shard_of_mean([exact[name]], 0, how)), name


@on_ranks(2)
def test_modules_that_are_set_apart() -> None:
    """A group of several modules in a compiled model; part of a model; and None, to undo it."""
    mesh, rank = device_mesh(dp=2), dist.get_rank()
    net = Uneven()
    fully_shard([net.wide, net.flat], mesh=mesh)
    fully_shard(net, mesh=mesh)
    set_gradient_transport(torch.compile(net), "float8")  # type: ignore[arg-type]
    with comm_audit(mesh) as audit:
        backward(net, rank)
    assert audit.count("all_to_all") == 2
    apart = sharded(mesh)
    set_gradient_transport(apart.wide, "float8")
    with comm_audit(mesh) as audit:
        backward(apart, rank)
    assert (audit.count("all_to_all"), audit.count("reduce_scatter")) == (1, 1)
    set_gradient_transport(apart, "float8", nodes=nodes_of(2), within_nodes="bf16")
    set_gradient_transport(apart, None)
    with comm_audit(mesh) as audit:
        backward(apart, rank)
    assert (audit.count("all_to_all"), audit.count("reduce_scatter")) == (0, 2)
    set_gradient_transport(apart, "float8", within_nodes="bf16")  # of the only hop
    with comm_audit(mesh) as audit:
        backward(apart, rank)
    assert audit.count("all_to_all") == 2
    assert audit.count("all_to_all", dtype=torch.float8_e4m3fn) == 0


class OwnReduceScatter:
    """What a user may have given to FSDP2."""


@on_ranks(2)
def test_modules_that_are_sharded_later_are_named() -> None:
    mesh, x = device_mesh(dp=2), torch.ones(2, 8)

    def stack() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))

    net = stack()
    fully_shard(net[0], mesh=mesh)
    set_gradient_transport(net, "float8")
    fully_shard(net, mesh=mesh)
    net(x)  # reduces nothing
    text = raised(ValueError, lambda: net(x).sum().backward())
    assert_expected_inline(
        text,
        """\
set_gradient_transport: fully_shard was called on the root module after it, so the gradient of 1.0.weight (one of 4) would have no transport. Call set_gradient_transport after the last fully_shard""",
    )
    net = stack()
    fully_shard(net[0], mesh=mesh)
    set_gradient_transport(net, "float8")
    for part in (net[1], net):
        fully_shard(part, mesh=mesh)
    assert "called on 1 after it" in raised(ValueError, lambda: net(x).sum().backward())
    set_gradient_transport(net, "float8")
    net(x).sum().backward()
    # A part that was given a transport, and the module around it that shards the rest of the part.
    net = stack()
    fully_shard(net[1][0], mesh=mesh)
    set_gradient_transport(net[1], "bf16")
    fully_shard(net, mesh=mesh)
    text = raised(ValueError, lambda: net(x).sum().backward())
    assert "called on the root module after it, so the gradient of 1.weight (one of 2)" in text


@on_ranks(2)
def test_modules_without_a_transport_on_purpose() -> None:
    mesh, x = device_mesh(dp=2), torch.ones(2, 8)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for part in net:
        fully_shard(part, mesh=mesh)
    set_gradient_transport(net, "float8")
    set_gradient_transport(net[0], None)
    net(x).sum().backward()
    # Parts that were named, and frozen parameters.
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(net[0], mesh=mesh)
    set_gradient_transport(net[0], "float8")
    fully_shard(net, mesh=mesh)
    net(x).sum().backward()
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False))
    fully_shard(net[0], mesh=mesh)
    set_gradient_transport(net, "float8")
    fully_shard(net, mesh=mesh)
    net(x).sum().backward()


def refusals() -> dict[str, str]:
    mesh = device_mesh(dp=dist.get_world_size())
    net, own, copied = sharded(mesh), sharded(mesh), replicate(Uneven(), mesh=mesh)
    together = Uneven()
    fully_shard([together.wide, together.flat], mesh=mesh)
    set_gradient_transport(nn.Sequential(sharded(mesh), copied), None)
    layer_in_fp64 = fully_shard(nn.Linear(8, 8).double(), mesh=mesh)
    set_gradient_transport(layer_in_fp64, "bf16")
    own.wide.set_custom_reduce_scatter(OwnReduceScatter())  # type: ignore[operator]
    call: Any = set_gradient_transport
    calls: dict[str, Callable[[], None]] = {
        "transport": lambda: call(net, "fp8"),
        "not sharded": lambda: call(nn.Linear(2, 2), "bf16"),
        "filter of nothing": lambda: call(net, None, high_precision=_is_spare),
        "custom": lambda: call(own, "bf16"),
        "replicated": lambda: call(copied, "bf16"),
        "ranks differ": lambda: call(net, "bf16" if dist.get_rank() else "float8"),
        "shared group": lambda: call(together.flat, "bf16"),
        "filter of all": lambda: call(net, "bf16", high_precision=lambda name, p: True),
        "within": lambda: call(net, "bf16", within_nodes="fp32"),
        "nodes of nothing": lambda: call(net, None, nodes=nodes_of(2)),
        "within of nothing": lambda: call(net, "fp32", within_nodes="bf16"),
        "nodes differ": lambda: call(net, "bf16", nodes=None if dist.get_rank() else nodes_of(2)),
        "within differs": lambda: call(net, "bf16", within_nodes=("bf16", None)[dist.get_rank()]),
        "none differs": lambda: call(net, None if dist.get_rank() else "bf16"),
        "launched": lambda: launched(["2.0"], lambda: call(net, "bf16")),
        "other nodes": lambda: call(net, "float8", nodes=DeviceMesh("cpu", [[0]])),
    }
    found = {name: raised(ValueError, each) for name, each in calls.items()}
    sum_of_fp64 = layer_in_fp64(torch.ones(2, 8).double()).sum()
    found["fp64"] = raised(NotImplementedError, sum_of_fp64.backward)
    types: dict[str, Callable[[], None]] = {
        "filter": lambda: call(net, "bf16", high_precision="norm"),
        "model": lambda: call([net], "bf16"),
        "nodes": lambda: call(net, "bf16", nodes=mesh),
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
transport: set_gradient_transport: transport is 'fp8'; it must be one of ('float8', 'bf16', 'fp32', None)
not sharded: set_gradient_transport: the Linear has no module that fully_shard was called on; call it after fully_shard
filter of nothing: set_gradient_transport: high_precision and within_nodes are about how gradients are encoded, and transport=None encodes none; drop them
custom: set_gradient_transport: wide has a reduce-scatter of its own (OwnReduceScatter, of set_custom_reduce_scatter or of memory from the process group), which would be replaced
replicated: set_gradient_transport: the root module is replicated (replicate, not fully_shard): its gradients are all-reduced, and there is no reduce-scatter
ranks differ: set_gradient_transport: the ranks of DeviceMesh((dp=2), 'cpu') have set up the model in different ways: the transport of the gradient of flat.weight: float8 on rank 0; bf16 on rank 1. Give it the same arguments on all ranks
shared group: set_gradient_transport: a parameter group of FSDP2 (fully_shard of a list) has parameters outside of the module that was passed; pass one that holds all of them
filter of all: set_gradient_transport: transport='bf16' would encode no gradient: all parameters have fewer than 2 dims, or high_precision is true for them
within: set_gradient_transport: within_nodes is 'fp32'; it must be one of ('float8', 'bf16', None)
nodes of nothing: set_gradient_transport: nodes is for a transport, and transport is None; drop it
within of nothing: set_gradient_transport: high_precision and within_nodes are about how gradients are encoded, and transport='fp32' encodes none; drop them
nodes differ: set_gradient_transport: the ranks of DeviceMesh((dp=2), 'cpu') have set up the model in different ways: nodes: [[0, 1]] on rank 0; None on rank 1. Give it the same arguments on all ranks
within differs: set_gradient_transport: the ranks of DeviceMesh((dp=2), 'cpu') have set up the model in different ways: within_nodes: bf16 on rank 0; None on rank 1. Give it the same arguments on all ranks
none differs: set_gradient_transport: the ranks of DeviceMesh((dp=2), 'cpu') have set up the model in different ways: the transport of the gradient of flat.weight: bf16 on rank 0; None on rank 1. Give it the same arguments on all ranks
launched: set_gradient_transport: LOCAL_WORLD_SIZE='2.0' is no number of ranks; unset it
other nodes: set_gradient_transport: each row of nodes must have the same number of the ranks that share gradients, one after the other (2 from rank 0 on)
fp64: set_gradient_transport: the root module has gradients of torch.float64; sums are taken in fp32. Set reduce_dtype, or give this module transport=None
filter: set_gradient_transport: high_precision is 'norm'; it must be a function of a parameter's name and the parameter, such as lambda name, p: 'embed' in name
model: expected a model (an nn.Module), got a list
nodes: set_gradient_transport: nodes is DeviceMesh((dp=2), 'cpu'); it must be a 2-D DeviceMesh, with a row for each node""",
    )
