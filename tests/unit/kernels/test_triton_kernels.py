"""The kernels for GPUs against the portable implementations.

In Triton's interpreter on CPUs, compiled where there is a GPU; every bit is compared.
"""

import math
from collections.abc import Iterator
from itertools import cycle, product

import pytest
import torch
from implementations import DEVICE, check_operator, implementation, matrix, note_launches
from reference import same_bits
from torch.nn.functional import pad

from fp8_dist.device import FLOAT8_DTYPES
from fp8_dist.kernels import scale
from fp8_dist.kernels.cuda.triton.launch import DTYPES
from fp8_dist.kernels.folding import fold_gradient, fold_groups
from fp8_dist.kernels.grouped import Groups, places_of_groups, rows_of_groups
from fp8_dist.kernels.quantization import (
    cast_and_measure,
    cast_copies,
    cast_fresh,
    cast_tensors,
    quantize,
    transposed_copy,
)
from fp8_dist.kernels.scale import amax, amax_of_tensors, scaling_from_amax

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROW, COLUMN, TENSOR = "row", "column", "tensor"
SHAPES = [(1, 1), (77, 130), (3, 1025), (0, 5), (5, 0), (0, 0)]
# What each scale covers; for each copy, the index of its scale, and whether it is transposed.
COPIES = [
    ([ROW, COLUMN], [0, 1], [False, True]),
    ([ROW], [0, 0], [False, True]),
    ([COLUMN], [0, 0], [False, True]),
    ([TENSOR], [0, 0], [True, False]),
]
# Also copies of which the first is transposed, or with scales of a tensor and of rows.
MIXED = [
    ([ROW, COLUMN], [0, 1], [False, True]),
    ([ROW, TENSOR], [0, 1], [False, True]),
    ([COLUMN, ROW], [1, 0, 0], [True, False, True]),
]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy: x / 0, NaN


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that are launched."""
    return note_launches(monkeypatch)


def views(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The matrix, its transpose, and the matrix in other strides."""
    yield x
    yield x.t()
    rows, columns = x.shape
    yield x.new_zeros(rows, 2 * columns + 1)[:, 1::2].copy_(x)
    yield x.new_zeros(rows, columns + 3)[:, 2:-1].copy_(x)


def check_casts(used: set[str], x: torch.Tensor, dtype: torch.dtype, power_of_2: bool) -> None:
    """All operators that find amaxes or cast, on one matrix."""
    used.clear()
    for dims in (None, (1,), (0,)):
        check_operator(amax, x, dims)
        assert (implementation(amax)(x, dims).view(torch.int32) >= 0).all()
    for covers, of, transposed in COPIES:
        check_operator(scale.amaxes, x, covers)
        values = scale.amaxes.portable(x, covers)
        check_operator(cast_copies, x, values, dtype, power_of_2, of, transposed)
        for each in values:
            multiplier, _ = scaling_from_amax.portable(each, dtype, power_of_2)
            check_operator(quantize, x, multiplier, dtype, saturate=False)
    for transposed in ([False], [False, True]):
        for by_row in (False, True):
            check_operator(cast_fresh, x, dtype, power_of_2, transposed, by_row)
    assert used >= {"_rows", "_tiles", "_cast", "_cast_rows_and_columns"}
    assert ("_cast_rows" in used) is (x.stride(1) == 1)


@pytest.mark.full
def test_casts_of_any_shape_dtype_and_strides(used: set[str]) -> None:
    for shape, format_ in zip(SHAPES, cycle([(E4M3, True), (E5M2, False)])):
        check_casts(used, matrix(shape, torch.bfloat16), *format_)
    for of, dtype in zip(DTYPES, cycle((E5M2, E4M3))):
        check_casts(used, matrix((70, 65), of), dtype, False)
    for view in views(matrix((70, 65), torch.bfloat16)):
        check_casts(used, view, E4M3, True)


def test_rows_that_registers_do_not_hold_are_read_twice(used: set[str]) -> None:
    for columns, names in ((16384, {"_cast_rows"}), (16385, {"_rows", "_cast"})):
        used.clear()
        x = matrix((2, columns), torch.bfloat16)
        check_operator(cast_fresh, x, E4M3, True, [False], True)
        assert used == names


@pytest.mark.parametrize(
    ("of", "power_of_2"),
    [(torch.bfloat16, True), (torch.float16, False), (torch.float32, True)],
)
def test_casts_of_special_values(used: set[str], power_of_2: bool, of: torch.dtype) -> None:
    info = torch.finfo(of)
    # A row of each alone, and columns of all of them.
    special = [math.nan, -math.nan, math.inf, -math.inf, -0.0, info.max, info.smallest_normal]
    x = matrix((len(special) + 2, 9), of)
    for row, value in enumerate(special):
        x[row, row] = value
    x[4] = -0.0
    x[6] = info.smallest_normal / torch.arange(4, 13, device=DEVICE)  # subnormal
    for dtype in FLOAT8_DTYPES:
        for part in (x, x[4:7], x[6:7]) if dtype is E4M3 else (x,):  # the last two are finite
            check_casts(used, part, dtype, power_of_2)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_values_that_do_not_fit_saturate(used: set[str], dtype: torch.dtype) -> None:
    x = matrix((33, 70), torch.bfloat16)
    x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    rows = torch.logspace(-6, 20, 33, device=DEVICE).view(33, 1)
    for given in (rows, torch.tensor(1e3, device=DEVICE), rows[:, :1].expand(33, 2)[:, 1:]):
        check_operator(quantize, x, given, dtype)
        for transposed in ([False], [True], [False, True]):
            of = [0] * len(transposed)
            check_operator(cast_copies, x, [1 / given], dtype, True, of, transposed, saturate=True)
    assert used == {"_cast"}


def test_an_amax_begins_at_zero(used: set[str]) -> None:
    """What is allocated holds other numbers."""
    torch.use_deterministic_algorithms(True)
    try:
        for shape in [(40, 700), (0, 5), (70, 65)]:
            x = matrix(shape, torch.bfloat16)
            check_operator(amax, x)
            check_operator(amax, x, [0])
            check_operator(cast_and_measure, x, amax(x), E4M3, False, [True])
    finally:
        torch.use_deterministic_algorithms(False)
    assert used == {"_tiles", "_cast"}


MANY = [(16, 32), (0, 32), (5, 7), (3, 0), (1, 1), (40, 1030), (11,)]


@pytest.mark.parametrize("of", DTYPES)
def test_one_tensor_and_many(used: set[str], of: torch.dtype) -> None:
    for shape in ((), (0,), (5,), (2, 3, 4), (2, 0, 4), (40, 700)):
        x = matrix(shape, of)
        for view in (x, x.transpose(0, -1)) if x.ndim else (x,):
            check_operator(amax, view)
    tensors = [matrix(shape, of) for shape in MANY]
    tensors[2][1, :4] = torch.tensor([-math.nan, math.nan, math.inf, -math.inf])
    tensors[0][3], tensors[4][0] = -0.0, -math.nan
    parts = (slice(None), slice(1), slice(1, 2), slice(0, None, 2))
    for by_row, part in product((False, True), parts):
        first, *others = tensors[part]
        check_operator(amax_of_tensors, first, others, by_row)
        values = implementation(amax_of_tensors)(first, others, by_row)
        assert (values.view(torch.int32) >= 0).all()
    assert used == {"_tiles", "_many"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_tensors_are_cast_as_each_of_them(dtype: torch.dtype, used: set[str]) -> None:
    """To parts of one buffer, which may be larger than the tensors; values above scales saturate."""
    torch.manual_seed(0)
    shapes = [(77, 130), (3, 1025), (16, 64), (0, 5), (2, 5, 48)]
    first, *others = (torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes)
    others[0][1, 2] = torch.inf
    for by_row, power_of_2, padding in product((False, True), (False, True), (0, 24)):
        amaxes = amax_of_tensors.portable(first, others, by_row) * 0.75
        sizes = [x.numel() + padding for x in (first, *others)]
        how = amaxes, sizes, E4M3, power_of_2, by_row
        found, scales = implementation(cast_tensors)(first, others, *how)
        expected, expected_scales = cast_tensors.portable(first, others, *how)
        assert same_bits(scales, expected_scales)
        parts = zip((first, *others), found.split(sizes), expected.split(sizes), strict=True)
        begin = 0
        for x, mine, theirs in parts:
            assert torch.equal(mine[: x.numel()], theirs[: x.numel()])
            amax_of_x = amaxes[
                begin : (begin := begin + (math.prod(x.shape[:-1]) if by_row else 1))
            ]
            shape = (*x.shape[:-1], 1) if by_row else ()
            alone = amax_of_x.view(shape), E4M3, power_of_2, [0], [False]
            one = cast_copies.portable(x, [alone[0]], *alone[1:], saturate=True)[1]
            assert torch.equal(theirs[: x.numel()], one.view(torch.uint8).view(-1))
    assert used == {"_cast_many"}


def test_transposes(used: set[str]) -> None:
    for shape in SHAPES:
        for view in views(torch.randint(256, shape, dtype=torch.uint8, device=DEVICE)):
            for data in (view, view.view(E4M3)):
                for multiple in (16, 256):
                    found = implementation(transposed_copy)(data, multiple)
                    assert found.dtype == data.dtype
                    assert found.is_contiguous()
                    rows = len(data) + -len(data) % multiple
                    expected = pad(view.t(), (0, rows - len(data)))
                    assert torch.equal(found.view(torch.uint8), expected)
                    check_operator(transposed_copy, data, multiple)
    assert used == {"_transpose"}


def test_long_rows_are_left_to_the_portable_code(used: set[str]) -> None:
    """A tensor of one dim can have more tiles than a grid's second axis allows."""
    x = torch.zeros(1, dtype=torch.bfloat16, device=DEVICE).expand(2**25)
    assert implementation(amax)(x) == 0
    assert not used


def row_scales(rows: int) -> torch.Tensor:
    x = matrix((rows, 8), torch.float32) * 8.0 ** torch.randn(rows, 1, device=DEVICE)
    return scaling_from_amax.portable(amax.portable(x, (1,)), E4M3, True)[1].view(-1)


def test_folded_casts(used: set[str]) -> None:
    dtypes = [(torch.bfloat16, E5M2), (torch.float16, E4M3), (torch.float32, E5M2)]
    shapes = [(34, 130)] * 3 + [(1, 1), (0, 5)]
    for (rows, columns), (of, dtype) in zip(shapes, cycle(dtypes)):
        grad = matrix((rows, columns), of)
        for s, t in product((row_scales(columns), None), (row_scales(rows), None)):
            check_operator(fold_gradient, grad, dtype, s, t, True)
    s, t = row_scales(20), row_scales(10)
    for value in (math.nan, math.inf, 0.0, 1e-30, 1e30):
        grad = matrix((20, 10), torch.float32).t()
        grad[3, 5] = value
        grad[7] = value
        check_operator(fold_gradient, grad, E5M2, s, t, True)
    # The first fold saturates: g0 is 1.25, 9 % more than g, whose product with this scale is just
    # within the range.
    grad = torch.full((4, 20), 1.140625, device=DEVICE)
    s, t = torch.full((20,), 1.526, device=DEVICE), row_scales(4)
    check_operator(fold_gradient, grad, E5M2, s, t, True)
    found = implementation(fold_gradient)(grad, E5M2, s, t, True)[0]
    assert (found.float() == torch.finfo(E5M2).max).all()
    assert used == {"_multipliers", "_fold_rows", "_fold_columns"}


@pytest.mark.parametrize("counts", [[5, 0, 33, 1], [16, 32], [0, 70, 0]])
def test_groups(used: set[str], counts: list[int]) -> None:
    groups = Groups.of(torch.tensor(counts, device=DEVICE), torch.tensor(counts), sum(counts))
    (rows, columns), experts = (sum(counts), 130), len(counts)
    grad = matrix((rows, columns), torch.bfloat16)
    _, scale, qdata = cast_fresh.portable(grad, E4M3, True, [False], True)
    for source in (groups.padded(16).source, groups.padded(16).source.flip(0)):
        for transposed in (False, True):
            check_operator(rows_of_groups, qdata, source, transposed)
    s, t = (row_scales(n) for n in (experts * columns, rows))
    s, row_groups = s.view(experts, columns), groups.group_of_row
    for place, value in ((None, 0.0), ((2, 0), math.nan), ((1, 0), math.inf), ((3, 0), 0.0)):
        if place is not None:
            scale[place] = value
        check_operator(
            fold_groups, qdata, scale, s, t, row_groups, experts, groups.padded(16).source
        )
        check_operator(
            fold_groups, qdata, scale, None, t, row_groups, experts, groups.padded(16).source
        )
        check_operator(fold_groups, qdata, scale, s, None, row_groups, experts)
    matrices = qdata.view(torch.uint8)[: rows // 2 * 2].view(2, -1, columns).view(E4M3)
    check_operator(transposed_copy, matrices)
    assert used == {
        "_fold_columns_of_groups",
        "_fold_rows_of_groups",
        "_scaling",
        "_transpose",
    }


@pytest.mark.parametrize("multiple", [1, 16, 32])
@pytest.mark.parametrize(
    "counts", [[5, 0, 33, 1], [0, 0, 70], [0], [0, 0], [1100, 3, 1024], [1] * 9]
)
def test_places_of_groups(used: set[str], counts: list[int], multiple: int) -> None:
    groups: list[int] = []
    rows: list[int] = []
    ends = []
    for group, count in enumerate(counts):
        padding = -count % multiple
        first = sum(counts[:group])
        groups += [group] * (count + padding)
        rows += [*range(first, first + count), *[-1] * padding]
        ends.append(len(rows))
    sizes = torch.tensor(counts, device=DEVICE)
    check_operator(places_of_groups, sizes, len(rows), multiple)
    found = places_of_groups.portable(sizes, len(rows), multiple)
    assert [each.tolist() for each in found] == [groups, rows, ends]
    assert used == {"_places"}


def test_matrices(used: set[str]) -> None:
    """One scale per matrix; matrices may be transposed or empty."""
    shapes = [(3, 5, 7), (2, 70, 130), (1, 4, 9), (2, 1, 5), (2, 2, 3, 65), (5, 7)]
    for shape in [*shapes, (2, 0, 3), (0, 3, 4), (2, 3, 0)]:
        of_matrix = [len(shape) - 2, len(shape) - 1]
        x = matrix(shape, torch.bfloat16)
        for view in (x, x.mT.contiguous().mT):
            used.clear()
            check_operator(amax, view, of_matrix)
            known = [amax.portable(view, of_matrix)]
            for of, transposed in (([0], [False]), ([0, 0], [False, True])):
                check_operator(cast_copies, view, known, E4M3, True, of, transposed)
            assert ("_cast" in used) is (x.numel() > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(6, 32), (2, 3, 32), (0, 32), (16,)], ids=str)
def test_amaxes_casts_and_copies(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).mul_(100).to(DEVICE, dtype)
    for dims in (None, (x.ndim - 1,), tuple(range(x.ndim - 1)), (0,)):
        check_operator(amax, x, dims)
        check_operator(scaling_from_amax, amax(x, dims), E4M3, True)
        m, _ = scaling_from_amax(amax(x, dims), E4M3, True)
        for saturate in (True, False):
            check_operator(quantize, x, m, E4M3, saturate=saturate)
    known = torch.tensor(3.0, device=DEVICE)
    for covers, of, transposed in MIXED:
        check_operator(scale.amaxes, x, covers)
        amaxes = scale.amaxes(x, covers)
        check_operator(cast_copies, x, amaxes, E4M3, True, of, transposed)
        check_operator(cast_copies, x * 2, amaxes, E4M3, False, of, transposed, saturate=True)
        layouts = list(dict.fromkeys(transposed))
        for by_row in (False, True):
            check_operator(cast_fresh, x, E4M3, True, layouts, by_row)
        check_operator(cast_and_measure, x, known, E4M3, False, layouts)
    check_operator(cast_and_measure, x, known, E4M3, True, [True])


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_value_that_is_not_finite_poisons_a_scale_that_was_known(value: float) -> None:
    x = torch.ones(4, 32, dtype=torch.bfloat16, device=DEVICE)
    x[1, 2] = value
    one = torch.ones((), device=DEVICE)
    for run in (cast_and_measure.portable, implementation(cast_and_measure)):
        current, scale, qdata = run(x, one, E4M3, False, [False])
        assert same_bits(current.cpu(), torch.tensor(abs(value)))
        assert scale.isnan()
        assert (qdata.float() * scale).isnan().all()


@pytest.mark.parametrize("rows", [4, 33])
def test_results_that_graphs_get_are_aligned(rows: int) -> None:
    x = torch.randn(rows, 32, device=DEVICE)
    for values in implementation(scale.amaxes)(x, [ROW, COLUMN]):
        assert values.storage_offset() * values.itemsize % 16 == 0


def test_another_default_dtype() -> None:
    x, one = torch.randn(8, 32, device=DEVICE), torch.ones((), device=DEVICE)
    scales = torch.rand(32, device=DEVICE) + 1, torch.rand(8, device=DEVICE) + 1
    torch.set_default_dtype(torch.bfloat16)
    try:
        for covers, of, transposed in MIXED:
            check_operator(cast_copies, x, scale.amaxes(x, covers), E4M3, True, of, transposed)
        check_operator(scale.amaxes, x, [ROW, TENSOR])
        check_operator(cast_and_measure, x, one, E4M3, False, [False, True])
        check_operator(cast_fresh, x, E4M3, True, [False], True)
        check_operator(fold_gradient, x, E4M3, *scales, True)
    finally:
        torch.set_default_dtype(torch.float32)
