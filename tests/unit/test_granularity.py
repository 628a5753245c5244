"""What a scale covers, how an operand gets to its GEMMs, and a granularity that tests add."""

import copy
import pickle
from functools import partial
from itertools import product

import pytest
import torch
from expecttest import assert_expected_inline
from granularities import COLUMN_PAIRS, CONFIG, ROW_PAIRS, ROW_QUADS, config_of
from reference import raised, reference_cast, same_bits, sqnr
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from fp8_dist import CastConfig, Float8Linear, Float8LinearConfig, cast_to_float8
from fp8_dist.cast import quantize_over
from fp8_dist.config import GEMM_OPERANDS, CastSpec, Operand
from fp8_dist.granularity import COLUMN, ROW, TENSOR, Granularity, covering
from fp8_dist.linear.observing import record_gemms
from fp8_dist.linear.operands import plan_operand

E4M3 = torch.float8_e4m3fn
ALL = [TENSOR, ROW, COLUMN, covering((1,), 3), ROW_PAIRS, COLUMN_PAIRS, ROW_QUADS]


def test_granularities_as_a_table() -> None:
    shape, placements = (4, 6, 8), (Shard(0), Shard(1), Shard(-1), Replicate())
    lines = [
        f"{g.name:22} scales {g.scale_shape(shape)!s:14} offset {g.offset((2, 4, 4))!s:13} "
        f"amax over {g.amax_axes(placements, 3)!s:9} "
        f"moves from {[d for d in range(3) if g.can_move([d], 3)]}"
        for g in ALL
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
tensor                 scales []             offset []            amax over (0, 1, 2) moves from [0, 1, 2]
row                    scales [4, 6, 1]      offset [2, 4, 0]     amax over (2,)      moves from [0, 1]
column                 scales [1, 1, 8]      offset [0, 0, 4]     amax over (0, 1)    moves from []
slice of dims 1        scales [4, 1, 8]      offset [2, 0, 4]     amax over (1,)      moves from []
pair of rows           scales [4, 3, 1, 1]   offset [2, 2, 0, 0]  amax over (2,)      moves from []
pair of columns        scales [1, 1, 4, 1]   offset [0, 0, 2, 0]  amax over (0, 1)    moves from []
4 values of a row      scales [4, 6, 2, 1]   offset [2, 4, 1, 0]  amax over ()        moves from [0, 1]""",
    )


def test_the_axes_of_an_amax() -> None:
    placements = [Replicate(), Shard(0), Partial(), Shard(1)]
    assert TENSOR.amax_axes(placements, 2) == (1, 3)
    assert TENSOR.amax_axes((Partial(), Shard(0)), 2) == (1,)  # a sum is no shard
    assert ROW.amax_axes(placements, 2) == (3,)  # the axes that cut rows
    assert COLUMN.amax_axes(placements, 2) == (1,)
    assert ROW.amax_axes([Shard(-1)], 3) == (0,)


def test_there_is_one_instance_of_each() -> None:
    for granularity in ALL:
        assert copy.deepcopy(granularity) is granularity
        assert pickle.loads(pickle.dumps(granularity)) is granularity
    assert "called 'pair of rows' already" in raised(ValueError, type(ROW_PAIRS))


class Thirds(Granularity):
    name = "third of a row"

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (3, -1))

    def covered_dims(self, ndim: int) -> tuple[int, ...]:
        return (ndim - 1,)


def test_what_a_new_granularity_must_say() -> None:
    thirds = Thirds()
    for call in (lambda: thirds.offset((0, 0)), lambda: thirds.amax_axes((Shard(0),), 2)):
        assert "must override offset and amax_axes" in raised(NotImplementedError, call)
    config = CastConfig(scaling_granularity=thirds)
    assert "is for layers" in raised(
        ValueError, lambda: cast_to_float8(torch.ones(3, 3), config, dim=0)
    )
    # One copy serves both GEMMs, but no Float8Tensor carries its scales.
    same = {f"cast_config_{o}": config for o in ("input", "weight", "grad_output")}
    assert Float8LinearConfig(**same).gather_cast("weight") is None
    two = {n: getattr(CONFIG, n) for n in same}
    for casts, text in (
        (same, "it can't be gathered, with one scale per third of a row"),
        (two, "one scale per pair of rows and one per pair of columns"),
    ):
        gathered = partial(Float8LinearConfig, **casts, enable_fsdp_float8_all_gather=True)
        assert text in raised(ValueError, gathered)


PLANS = """\
plain           tensor  global  cast per tensor                    amaxes over all
plain           tensor  rank    cast per tensor                    amaxes over ()
plain           rowwise global  cast row, column                   amaxes over all
plain           rowwise rank    cast row, column                   amaxes over ()
Shard(1) -> R   tensor  global  cast per tensor, then move float8  amaxes over all
Shard(1) -> R   tensor  rank    cast per tensor, then move float8  amaxes over (0,)
Shard(1) -> R   folded  global  cast per row, then move float8     amaxes over all
Shard(1) -> R   rowwise global  move high, then cast row, column   amaxes over all
Shard(1) -> R   rowwise rank    move high, then cast row, column   amaxes over ()
Shard(1) -> R   gw_hp   global  move high, then cast row, high     amaxes over all
Shard(-1) -> R  tensor  global  cast per tensor, then move float8  amaxes over all
Shard(-1) -> R  folded  global  move high, then cast row, row      amaxes over all
stays           tensor  rank    cast per tensor                    amaxes over ()
stays           rowwise global  cast row, column                   amaxes over all
2-D, one axis   tensor  rank    cast per tensor, then move float8  amaxes over (1,)
2-D, one axis   folded  global  cast per row, then move float8     amaxes over all
2-D, one axis   rowwise rank    move high, then cast row, column   amaxes over ()
"""


def test_plans_as_a_table() -> None:
    row, column = CastSpec(E4M3, ROW), CastSpec(E4M3, COLUMN)
    kinds: dict[str, tuple[CastSpec | None, ...]] = {
        "tensor": (CastSpec(E4M3), CastSpec(E4M3)),
        "folded": (row, row),
        "rowwise": (row, column),
        "gw_hp": (row, None),
    }
    moves: dict[str, tuple[tuple[Placement, ...] | None, tuple[Placement, ...] | None]] = {
        "plain": (None, None),
        "stays": ((Shard(2),), (Shard(2),)),
        "Shard(1) -> R": ((Shard(1),), (Replicate(),)),
        "Shard(-1) -> R": ((Shard(-1),), (Replicate(),)),
        "2-D, one axis": ((Shard(0), Shard(1)), (Shard(0), Replicate())),
    }
    for line in PLANS.splitlines():
        move, kind, scope = line[:16].strip(), *line[16:32].split()
        plan = plan_operand(kinds[kind], *moves[move], 3, scope)
        names = ["high" if cast is None else cast.granularity.name for cast in kinds[kind]]
        steps = f"cast {', '.join(names)}"
        if plan.first_cast is not None:
            steps = f"cast per {plan.first_cast.granularity.name}"
            steps += ", then move float8" if plan.moves else ""
        elif plan.moves:
            steps = f"move high, then {steps}"
        axes = "all" if plan.amax_axes is None else plan.amax_axes
        assert line[32:].split("  ")[0] == steps, line
        assert line.endswith(f" amaxes over {axes}"), line


def expected_operand(x: torch.Tensor, cast: CastSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales ``[M, K]`` of a matrix, group by group, in fp64."""
    rows, columns = x.shape
    group = {ROW_PAIRS: (2, columns), COLUMN_PAIRS: (rows, 2), ROW_QUADS: (1, 4)}[cast.granularity]
    values, scales = torch.empty(x.shape, dtype=torch.float64), torch.empty(x.shape)
    for i, j in product(range(0, rows, group[0]), range(0, columns, group[1])):
        part = slice(i, i + group[0]), slice(j, j + group[1])
        values[part], scales[part] = reference_cast(x[part], cast.dtype)
    return values, scales


@pytest.mark.parametrize("granularity", [ROW_PAIRS, ROW_QUADS], ids=lambda g: g.name)
@pytest.mark.parametrize("ndim", [2, 3])
def test_a_new_granularity_on_one_device(ndim: int, granularity: Granularity) -> None:
    config = config_of(granularity)
    layer = Float8Linear(16, 12, bias=False, config=config)
    x = torch.randn(8, 16) * torch.logspace(-3, 3, 8)[:, None]
    grad = torch.randn(8, 12) * torch.logspace(2, -2, 8)[:, None]
    shape = (8,) if ndim == 2 else (2, 4)
    leaf = x.view(*shape, 16).clone().requires_grad_()
    with record_gemms() as records:
        output = layer(leaf)
        output.backward(grad.view(*shape, 12))
    matrices: dict[Operand, torch.Tensor] = {
        "input": x,
        "weight": layer.weight.detach(),
        "grad_output": grad,
    }
    assert [record.gemm for record in records] == list(GEMM_OPERANDS)
    for record in records:
        for operand, found in zip(GEMM_OPERANDS[record.gemm], (record.a, record.b), strict=True):
            cast = config.cast(operand, record.gemm)
            assert cast is not None
            values, scales = expected_operand(matrices[operand], cast)
            if found.shape != values.shape:
                values, scales = values.t(), scales.t()
            assert torch.equal(found.qdata.double(), values), (record.gemm, operand)
            assert same_bits(found.scale.expand(values.shape).contiguous(), scales.contiguous())
    assert leaf.grad is not None
    assert layer.weight.grad is not None
    exact = {"output": x @ layer.weight.t(), "grad_input": grad @ layer.weight}
    results = {"output": output.view(8, 12), "grad_input": leaf.grad.view(8, 16)}
    for gemm, reference in exact.items():
        assert sqnr(reference, results[gemm]) > 20
    assert sqnr(grad.t() @ x, layer.weight.grad) > 20


def test_scales_of_a_part_of_a_row_move_with_their_rows() -> None:
    x = torch.randn(6, 8) * torch.logspace(-3, 3, 6)[:, None]
    whole = quantize_over(x, CastSpec(E4M3, ROW_QUADS), False).as_tensor(x.dtype)
    values = whole.dequantize()
    assert sqnr(x, values) > 25
    assert same_bits(torch.cat(whole.split([2, 4])).dequantize(), values)
    assert same_bits(whole[1:4].dequantize(), values[1:4])
    assert same_bits(whole.view(2, 3, 8).dequantize(), values.view(2, 3, 8))
    padded = torch.nn.functional.pad(whole, (0, 0, 0, 2)).dequantize()
    assert same_bits(padded[:6], values)
    assert same_bits(whole.clone().dequantize(), values)
    for cut in (lambda: whole.t(), lambda: whole[:, :4], lambda: whole.split(4, dim=1)):
        assert "no such scales" in raised(NotImplementedError, cut)
