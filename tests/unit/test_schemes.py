"""Scaling schemes: their levels, keys and plans, and schemes that tests add."""

import copy
import pickle
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from delayed_steps import quantized
from gemm_records import record_gemms
from recipe_algebra import step
from reference import raised, reference_cast, same_bits, same_values, sqnr
from schemes import (
    COLUMN_PAIRS,
    CONFIG,
    GATHERED_CONFIG,
    ROW_PAIRS,
    ROW_QUADS,
    SINGLE_ROWS,
    Pairs,
    Quads,
    config_of,
)
from torch.distributed.tensor import Placement, Shard
from torch.nn.functional import pad
from two_level import TwoLevel

from fp8_dist import CastConfig, Float8Linear, Float8LinearConfig, cast_to_float8
from fp8_dist.mesh import Layout
from fp8_dist.operand.moves import reason_to_move_high
from fp8_dist.recipe import GEMM_OPERANDS, Operand
from fp8_dist.scaling import (
    Blocks,
    CastPlan,
    Dense,
    Quantized,
    Scheme,
    Unscaled,
    covering,
    reduction,
    scheme_named,
)
from fp8_dist.scaling.operators import cast, cast_operator, dequantize, dequantize_operator
from fp8_dist.scaling.reduction import as_integers, from_integers

E4M3 = torch.float8_e4m3fn
TENSOR, ROW, COLUMN = (Dense(E4M3, per) for per in ("tensor", "row", "column"))
MATRIX, SLICE = Dense(E4M3, "matrix"), covering((1,), TENSOR, 3)
ALL = [TENSOR, MATRIX, ROW, COLUMN, SLICE, Blocks(E4M3, 1, 4), Blocks(E4M3, 4, 4)]
ALL += [ROW_PAIRS, COLUMN_PAIRS, ROW_QUADS]


@dataclass(frozen=True)
class Mesh:
    """The sizes of a mesh, and the place of a rank on it."""

    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    def size(self, axis: int) -> int:
        return self.sizes[axis]

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate


def layout(
    shape: tuple[int, ...], *placements: Placement, coordinate: tuple[int, ...] = ()
) -> Layout:
    """The layout of one of two ranks per axis, by default the last."""
    mesh: Any = Mesh((2,) * len(placements), coordinate or (1,) * len(placements))
    return Layout(mesh, placements, torch.Size(shape))


@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.covers)
def test_parts_are_cast_as_the_whole(scheme: Scheme) -> None:
    """Reduce the statistics of all parts in one message; parts cut blocks along both dims."""
    x = torch.randn(6, 10) * torch.logspace(-2, 2, 60).view(6, 10)
    known, scales, (qdata,) = scheme.cast(x, None, (0, 0), [False])
    places, parts = [], []
    for coordinate in product(range(2), repeat=2):
        at = layout((6, 10), Shard(0), Shard(1), coordinate=coordinate)
        row, column = at.offset()
        part, start = (slice(row, row + 3), slice(column, column + 5)), scheme.start(at)
        (local,) = scheme.measure(x[part], start)
        places.append(reduction.Placed.of(local, scheme.levels[0], at, (0, 1)))
        parts.append((at, part, start))
    dtype = reduction.message_dtype([place.local for place in places])
    reduced = torch.stack([place.flat(dtype) for place in places]).amax(0)
    assert len(reduced) == places[0].size
    for place, (at, part, start) in zip(places, parts, strict=True):
        whole = place.whole(reduced)
        assert same_bits(whole, known[0])
        own = place.part(whole)
        assert same_bits(own, scheme.local_part(known, at)[0])
        _, found, (data, transposed) = scheme.cast(x[part], (own,), start, [False, True])
        assert same_bits(data, qdata[part])
        assert same_bits(
            transposed, pad(data.t().contiguous().view(torch.uint8), (0, 13)).view(E4M3)
        )
        assert same_bits(found[0], scheme.local_part(scales, at)[0])
        values = scheme.dequantize(data, found, start)
        assert same_bits(values, scheme.dequantize(qdata, scales)[part])


def test_a_message_of_amaxes_and_exponents() -> None:
    amaxes = torch.tensor([0.0, 1e-40, 1.5, 448.0, torch.inf, torch.nan])
    exponents = torch.tensor([0, 1, 127, 255], dtype=torch.uint8)
    assert reduction.message_dtype([amaxes, exponents]) is torch.int32
    assert reduction.message_dtype([exponents]) is torch.uint8
    for statistics in (amaxes, exponents):
        integers = as_integers(statistics, torch.int32)
        assert (integers.diff() > 0).all()
        assert same_bits(from_integers(integers, statistics.dtype), statistics)


def test_what_fsdp_gathers_beside_the_data() -> None:
    even, uneven, columns = (
        layout((8, 8), Shard(0)),
        layout((9, 8), Shard(0)),
        layout((8, 8), Shard(1)),
    )
    # The levels whose scales differ between shards; whether the gather carries the scales.
    found = {
        scheme.covers: [
            (scheme.moving_levels(each, None), scheme.scales_fit_gather(each, None))
            for each in (even, uneven, columns)
        ]
        for scheme in (TENSOR, ROW, Blocks(E4M3, 1, 4), Blocks(E4M3, 4, 4), Blocks(E4M3, 8, 8))
    }
    assert found == {
        "tensor": [((), True), ((), False), ((), False)],
        "row": [((0,), True), ((0,), False), ((), False)],
        "block of 1 x 4": [((0,), True), ((0,), False), ((0,), False)],
        "block of 4 x 4": [((0,), True), ((0,), False), ((0,), False)],
        "block of 8 x 8": [((0,), False), ((0,), False), ((0,), False)],
    }
    assert TENSOR.moving_levels(None, None) == ()
    # Nothing is gathered of a weight that is whole on every rank, or that only other axes shard.
    assert [ROW.moving_levels(each, each) for each in (even, uneven, columns)] == [()] * 3


def test_keys() -> None:
    floor = Blocks(torch.float8_e5m2, 1, 32, "floor")
    for scheme in (*ALL, floor, Dense(E4M3, "row", power_of_2=True)):
        for other in (
            scheme_named(scheme.key),
            copy.deepcopy(scheme),
            pickle.loads(pickle.dumps(scheme)),
            replace(scheme),
        ):
            assert other == scheme
            assert hash(other) == hash(scheme)
            assert other.key == scheme.key
    assert len({*ALL, *ALL}) == len(ALL)
    assert ROW != COLUMN
    assert Dense(E4M3, "row", power_of_2=True) not in ALL
    # As another process made it.
    key = "dense(dtype='torch.float8_e5m2', per='row', power_of_2=True, dims=())"
    assert scheme_named(key) == Dense(torch.float8_e5m2, "row", True)
    for unknown in ("thirds()", "thirds", "dense", "quads.of()"):
        text = raised(ValueError, partial(scheme_named, unknown))
        assert text.startswith(f"the scaling scheme {unknown} is not defined here; import")


def test_schemes_that_do_not_fit() -> None:
    @dataclass(frozen=True, eq=False)
    class Unturned(TwoLevel):
        family = "unturned"

        def transposed(self) -> Any:
            return None

    levels = CastConfig(scaling_granularity=Unturned())
    x = torch.randn(32, 16)
    for wanted, call in {
        "input has one scale per unturned": partial(config_of, Unturned()),
        "define Unturned.transposed": partial(config_of, Unturned()),
        "input has one scale per column, but its first GEMM sums": partial(config_of, COLUMN),
        "input has one scale per matrix, but blocks of tokens": partial(config_of, MATRIX),
        "weight has one scale per slice of dims 1, a scheme": partial(config_of, SLICE, TENSOR),
        "Dense.per='rows': use one of ['tensor', 'matrix',": partial(Dense, per="rows"),
        "needs a tensor of 2 dims or more, got 1": partial(
            cast_to_float8, x[0], CastConfig(scaling_granularity=TwoLevel(rows=16))
        ),
    }.items():
        assert wanted in raised(ValueError, call)
    rows, column = (CastConfig(scaling_granularity=each) for each in (ROW, COLUMN))
    Float8LinearConfig(cast_config_input=rows, cast_config_input_for_grad_weight=column)
    assert "no such scales" in raised(NotImplementedError, cast_to_float8(x, levels).t)
    text = reason_to_move_high(COLUMN_PAIRS, (Shard(0),), 2)
    assert text.endswith(
        "can't be moved from [Shard(dim=0)]; use a recipe with one scale per tensor"
    )
    assert "shard the sequence" in reason_to_move_high(ROW_QUADS, (Shard(-1),), 2)


def test_what_a_new_scheme_must_say() -> None:
    def again() -> None:
        class Others(Scheme):
            family = "quads"

    assert "two scaling schemes have the family 'quads'; rename one" in raised(ValueError, again)

    class Nameless(Quads):
        pass

    def misnamed() -> None:
        class Others(Scheme):
            family = "a family"

    assert "Nameless has no family; give the class" in raised(TypeError, Nameless)
    assert "the family 'a family' of Others must be an identifier" in raised(ValueError, misnamed)

    @dataclass(frozen=True, eq=False)
    class Still(Quads):
        """One copy serves both GEMMs, but is not gathered."""

        family = "still"
        can_gather = False

    still = CastConfig(scaling_granularity=Still())
    same = {f"cast_config_{operand}": still for operand in ("input", "weight", "grad_output")}
    assert Float8LinearConfig(**same).recipe.gather_scheme["weight"] is None
    two = {name: getattr(CONFIG, name) for name in same}
    for casts, text in (
        (
            same,
            "take it with one scale per 4 values of a row and with one scale per 4 values of a row",
        ),
        (two, "take it with one scale per pair of rows and with one scale per pair of columns"),
    ):
        gathered = partial(Float8LinearConfig, **casts, enable_fsdp_float8_all_gather=True)
        assert text in raised(ValueError, gathered)
    assert "round_scales_to_power_of_2=True has no effect on a scaling scheme" in raised(
        ValueError, lambda: config_of(ROW_QUADS, round_scales_to_power_of_2=True)
    )
    cast = CastConfig(scaling_granularity=Pairs())
    assert "one scale per pair of rows, but blocks of tokens must be one row" in raised(
        ValueError, lambda: Float8LinearConfig(cast_config_input=cast)
    )
    e5m2 = CastConfig(scaling_granularity=ROW_QUADS, target_dtype=torch.float8_e5m2)
    assert e5m2.scheme("input", False) == Quads(torch.float8_e5m2)


def expected_operand(x: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """The data and the scale of each value of a matrix, block by block."""
    rows, columns = x.shape
    blocks = {
        ROW_PAIRS: (2, columns),
        SINGLE_ROWS: (1, columns),
        COLUMN_PAIRS: (rows, 2),
        ROW_QUADS: (1, 4),
    }
    block = blocks[scheme]
    data, scales = torch.empty(x.shape, dtype=scheme.dtype), torch.empty(x.shape)
    for i, j in product(range(0, rows, block[0]), range(0, columns, block[1])):
        part = slice(i, i + block[0]), slice(j, j + block[1])
        scale = torch.tensor(reference_cast(x[part], scheme.dtype)[1])
        data[part], scales[part] = quantized(x[part], 1 / scale, scheme.dtype), scale
    return data, scales


@pytest.mark.parametrize("config", [CONFIG, GATHERED_CONFIG], ids=["pairs", "quads"])
@pytest.mark.parametrize("ndim", [2, 3])
def test_a_new_scheme_on_one_device(ndim: int, config: Float8LinearConfig) -> None:
    layer = Float8Linear(16, 12, bias=False, config=config)
    x = torch.randn(8, 16) * torch.logspace(-3, 3, 8)[:, None]
    grad = torch.randn(8, 12) * torch.logspace(2, -2, 8)[:, None]
    shape = (8,) if ndim == 2 else (2, 4)
    with record_gemms() as records:
        results = step(layer, x.view(*shape, 16), grad.view(*shape, 12))
    w = layer.weight.detach()
    matrices: dict[Operand, torch.Tensor] = {"input": x, "weight": w, "grad_output": grad}
    assert [record.gemm for record in records] == list(GEMM_OPERANDS)
    for record in records:
        for operand, found in zip(GEMM_OPERANDS[record.gemm], (record.a, record.b), strict=True):
            used = config.recipe.uses[operand][record.gemm]
            assert used is not None
            data, scales = expected_operand(matrices[operand], used)
            if found.shape != data.shape:
                data, scales = data.t(), scales.t()
            assert same_bits(found.qdata, data), (record.gemm, operand)
            elements = found.scheme.element_scales(found.scales, found.shape, found.start)
            assert same_bits(elements.expand(scales.shape).contiguous(), scales.contiguous())
    exact = {"output": x @ w.t(), "grad_input": grad @ w, "grad_weight": grad.t() @ x}
    for gemm, expected in exact.items():
        assert sqnr(expected, results[gemm].view(expected.shape)) > 20


def test_rows_and_their_parts_have_one_scheme() -> None:
    rows = Pairs(size=1)
    whole: Any = cast_to_float8(torch.randn(4, 2, 8), CastConfig(scaling_granularity=rows))
    parts = [*whole.split([1, 3]), whole[1:], whole.transpose(0, 1), whole.view(8, 8), whole[0]]
    assert all(part.scheme == rows for part in parts)


def test_dequantizing_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch then reports compiling in all threads, and the operator must not call itself."""
    x = cast_to_float8(torch.randn(4, 32), CastConfig())
    expected = x.dequantize()
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    args = x.qdata, [x.scale], x.key, (0, 0), torch.float32
    assert same_bits(dequantize_operator.overload(*args), expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_dequantized_to_bf16(dtype: torch.dtype) -> None:
    """Every code with every exponent, in whole blocks and parts, has the values of fp32, rounded."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(dtype)
    exponents = torch.arange(256, dtype=torch.uint8).view(256, 1)
    rows, columns = Blocks(dtype, 1, 256), Blocks(dtype, 256, 1)
    cases = [Quantized(codes, (exponents,), rows)]
    cases.append(Quantized(codes.mT, (exponents.mT,), columns))
    cases.append(Quantized(codes.mT.contiguous(), (exponents.mT,), columns))
    part = codes[:, :100], (exponents,), rows, (0, 156)
    cases.append(Quantized(*part))
    part = codes[:, :100].mT.contiguous(), (exponents.mT,), columns, (156, 0)
    cases.append(Quantized(*part))
    cases += [
        case._replace(
            qdata=torch.stack([case.qdata] * 2), scales=(torch.stack([*case.scales] * 2),)
        )
        for case in cases
    ]
    for case in cases:
        expected = case.scheme.dequantize(*case[:2], case.start).bfloat16()
        assert same_values(dequantize(case, torch.bfloat16), expected)


def test_a_cast_to_high_precision_copies_in_its_operator_alone() -> None:
    x, plan = torch.randn(4, 32).bfloat16(), CastPlan((Unscaled(),))
    (same,) = cast(x, plan, None)[1]
    assert same is x
    (copy,) = cast_operator.overload(
        x, [], [Unscaled().key], (0, 0), [0], [False], True, False, None
    )
    assert same_bits(copy, x)
    assert copy.data_ptr() != x.data_ptr()
