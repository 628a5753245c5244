"""Experts on several ranks: the bits of one device, what is sent, and errors on one rank."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import SELECTIVE
from expecttest import assert_expected_inline
from graphs import Ops
from moe_layers import RECIPES, SPREADS, Layer, results
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import kinds, raised, same_values
from torch.utils.checkpoint import checkpoint

from fp8_dist.debug import CommRow, comm_audit
from fp8_dist.debug.audit import CommTable
from fp8_dist.moe import Float8ExpertsConfig, dispatch_linear, linear_combine, route

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COMBINES = ("high_precision", "float8")
# Each recipe with half of the spreads, some of which run on two ranks and the others on four.
PAIRS = [
    ((2, 4)[j // 3], RECIPES[i], DTYPES[(i + j) % 3], COMBINES[(i // 2 + j) % 2], SPREADS[j])
    for i, j in product(range(len(RECIPES)), range(len(SPREADS)))
    if (i + j) % 2 == 0
]


def different(layer: Layer, frozen: tuple[str, ...] = ()) -> list[str]:
    """Names of results that are not this rank's part of one device's results."""
    rank, group = dist.get_rank(), dist.group.WORLD
    whole = layer.trained(frozen=frozen)
    parts = layer.part(rank).trained(group, frozen)
    return [
        n for n, part in parts.items() if not same_values(layer.part_of(n, whole[n], rank), part)
    ]


@pytest.mark.parametrize(("size", "recipe", "dtype", "combine", "spread"), PAIRS)
@on_ranks("size", returns=[])
def test_bits_of_one_device(
    size: int, recipe: Any, dtype: torch.dtype, combine: Any, spread: str
) -> list[str]:
    return different(Layer.of(Float8ExpertsConfig(recipe, combine), size, spread, dtype))


@pytest.mark.parametrize(("recipe", "combine"), zip(RECIPES, COMBINES * 2, strict=True))
@on_ranks(3, returns=[])
def test_odd_sizes(recipe: Any, combine: Any) -> list[str]:
    layer = Layer.of(Float8ExpertsConfig(recipe, combine), 3, "uneven", sizes=(6, 37, 19, 1))
    return different(layer)


@pytest.mark.parametrize("frozen", [("x",), ("x", "gate", "up", "gate_bias"), ("down", "up")])
@on_ranks(2, returns=[])
def test_frozen(frozen: tuple[str, ...]) -> list[str]:
    return different(Layer.of(Float8ExpertsConfig(), 2), frozen)


class _NoGradient(torch.autograd.Function):
    """Identity whose backward returns no gradient on rank 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor | None:  # type: ignore[override]
        return grad if dist.get_rank() else None


@pytest.mark.parametrize(
    ("between", "rank_0_gradients"), [(False, ["gate", "up", "down"]), (True, ["x", "down"])]
)
@on_ranks(2, timeout=20)
def test_a_rank_without_gradients(between: bool, rank_0_gradients: list[str]) -> None:
    """Tensors with gradients other than 0, if rank 0 has none after (or before) the combination.

    Rank 0 sends zeros, because the others wait for its rows.
    """
    group, layer = dist.group.WORLD, Layer.of(Float8ExpertsConfig(), 2).part(dist.get_rank())
    t = {n: layer.tensors[n].clone().requires_grad_() for n in ("x", "gate", "up", "down")}
    routing = route(layer.ids, 8, group)
    gate, up = dispatch_linear(t["x"], [t["gate"], t["up"]], routing)
    hidden = gate * up
    slots = linear_combine(_NoGradient.apply(hidden) if between else hidden, t["down"], routing)
    output = slots.sum(1)
    (output if between else _NoGradient.apply(output)).backward(layer.grad)
    found = [n for n, each in t.items() if each.grad is not None and each.grad.any()]
    assert found == (rank_0_gradients if dist.get_rank() == 0 else ["x", "gate", "up", "down"])


CHECKPOINTS: dict[str, dict[str, Any]] = {"none": {}, "full": {}, "selective": SELECTIVE}


def checkpointed() -> list[str]:
    """A line for each mode: what a step runs. The results are the same."""
    layer, lines = Layer.of(Float8ExpertsConfig(), 2).part(dist.get_rank()), []
    expected = layer.trained(dist.group.WORLD)
    for mode, arguments in CHECKPOINTS.items():
        tensors = {n: t.clone().requires_grad_() for n, t in layer.tensors.items()}
        with Ops(lambda func: func._schema.name.partition("::")[2]) as ops:
            if mode == "none":
                output = layer.output(tensors, dist.group.WORLD)
            else:
                output = checkpoint(
                    layer.output, tensors, dist.group.WORLD, use_reentrant=False, **arguments
                )
            found = results(output, tensors, layer.grad)
        assert [n for n in expected if not same_values(expected[n], found[n])] == []
        names = ("all_to_all_single", "slots_by_expert", "numbers_of_rows", "scaled_mm")
        lines.append(" ".join([mode, *(f"{name} {ops.counts[name]}" for name in names)]))
    return lines


def test_checkpointing(ranks: RankPools) -> None:
    # In full: counts, dispatch and combination, which the routing weights follow.
    assert_expected_inline(
        "\n".join(ranks(2).run_same(checkpointed)),
        """\
none all_to_all_single 5 slots_by_expert 1 numbers_of_rows 1 scaled_mm 36
full all_to_all_single 8 slots_by_expert 2 numbers_of_rows 2 scaled_mm 48
selective all_to_all_single 5 slots_by_expert 1 numbers_of_rows 1 scaled_mm 36""",
    )


def audited(config: Float8ExpertsConfig) -> dict[str, list[CommRow]]:
    """What a rank sends: 48 rows of 256 and of 128 features."""
    mesh = device_mesh(ep=2)
    layer = Layer.of(config, 2, dtype=torch.bfloat16, sizes=(8, 256, 128, 2)).part(dist.get_rank())
    layer.ids = torch.arange(48).view(24, 2) % 8  # as many rows for each expert
    audits = {phase: comm_audit(mesh) for phase in ("forward", "backward")}
    with audits["forward"]:
        output, _ = layer.forward(mesh.get_group())
    with audits["backward"]:
        output.backward(layer.grad)
    return {phase: audit.without_modules().rows for phase, audit in audits.items()}


@pytest.mark.parametrize(
    ("recipe", "scales"),
    [("rowwise_folded", 4), ("tensorwise", 4), ("blockwise", 256 // 128), ("mxfp8", 256 // 32)],
)
@on_ranks(2)
def test_bytes_of_rows(recipe: Any, scales: int) -> None:
    for phase, rows in audited(Float8ExpertsConfig(recipe)).items():
        others = (torch.int64, torch.bfloat16)
        found = sum(row.bytes for row in rows if row.dtype not in others)
        assert found == 48 * (256 + scales), phase


def test_what_is_sent(ranks: RankPools) -> None:
    tables = []
    for combine in COMBINES:
        phases = ranks(2).run_same(audited, Float8ExpertsConfig(combine=combine))
        tables += [f"{p}, {combine}\n{kinds(CommTable(phases[p]).table())}" for p in phases]
    assert_expected_inline(
        "\n".join(tables),
        """\
forward, high_precision
op          axis  dtype          count  elements   bytes
all_to_all  ep    int64              1         8      64
all_to_all  ep    float8_e4m3fn      1    12,288  12,288
all_to_all  ep    float32            +        48     192
all_to_all  ep    bfloat16           1    12,288  24,576
backward, high_precision
op          axis  dtype          count  elements   bytes
all_to_all  ep    float8_e4m3fn      1    12,288  12,288
all_to_all  ep    float32            +        48     192
all_to_all  ep    bfloat16           1    12,288  24,576
forward, float8
op          axis  dtype          count  elements   bytes
all_to_all  ep    int64              1         8      64
all_to_all  ep    float8_e4m3fn      2    24,576  24,576
all_to_all  ep    float32            +        96     384
backward, float8
op          axis  dtype          count  elements   bytes
all_to_all  ep    float8_e4m3fn      2    24,576  24,576
all_to_all  ep    float32            +        96     384""",
    )


def refused() -> list[str]:
    rank, group = dist.get_rank(), dist.group.WORLD
    ids = torch.tensor([[0, 3], [1, 2]])
    texts = [
        raised(ValueError, lambda: route(ids + 2 * rank, 4, group)),  # 5 on rank 1
        raised(ValueError, lambda: route(ids + rank - 1, 4, group)),  # -1 on rank 0
        raised(ValueError, lambda: route(ids, 5, group)),
        raised(ValueError, lambda: route(ids.int(), 4, group)),
        raised(ValueError, lambda: route(ids.flatten(), 4, group)),
    ]
    routing = route(ids, 4, group)  # the ranks still agree
    x, w = torch.ones(2, 32), torch.ones(4, 32, 32)
    rows = torch.ones(sum(routing.groups.counts), 32)
    return [
        *texts,
        raised(ValueError, lambda: dispatch_linear(x, w, routing)),
        raised(ValueError, lambda: linear_combine(rows, w[:1], routing)),
        raised(ValueError, lambda: linear_combine(rows, w[0], routing)),
    ]


def test_what_is_refused(ranks: RankPools) -> None:
    first, second = ranks(2).run(refused)
    text = "\n".join(
        a if a == b else f"{a}\n  rank 1: {b}" for a, b in zip(first, second, strict=True)
    )
    assert_expected_inline(
        text,
        """\
route: expert ids must be from 0 to 4; rank 1 of 2 has others
  rank 1: route: expert ids must be from 0 to 4; rank 1 of 2 has others, such as [5]
route: expert ids must be from 0 to 4; rank 0 of 2 has others, such as [-1]
  rank 1: route: expert ids must be from 0 to 4; rank 0 of 2 has others
route: 5 experts can't be divided equally between 2 ranks of expert parallelism; choose a number of ranks that divides it
route: expert_ids must be int64 [tokens, top_k], got torch.int32 (2, 2)
route: expert_ids must be int64 [tokens, top_k], got torch.int64 (4,)
dispatch_linear: the routing has 2 rows and 2 experts of this rank, got 2 rows and weights of 4 experts; pass what was routed
linear_combine: the routing has 4 rows and 2 experts of this rank, got 4 rows and weights of 1 experts; pass what was routed
linear_combine: rows of shape [R, K] need weights of shape [E, N, K], got (4, 32) and (32, 32)""",
    )
