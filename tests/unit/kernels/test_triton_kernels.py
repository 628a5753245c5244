"""The kernels for GPUs, fused and by torch's operators, against the portable implementations.

In Triton's interpreter on CPUs, compiled where there is a GPU; every bit is compared.
"""

import math
import warnings
from collections.abc import Iterator
from itertools import product
from types import ModuleType

import pytest
import torch
from reference import same_values

from fp8_dist import Float8Linear, warn
from fp8_dist.cast import quantize_over
from fp8_dist.config import CastSpec
from fp8_dist.dtypes import FLOAT8_DTYPES
from fp8_dist.granularity import ROW
from fp8_dist.kernels import amax, amax_of_each, quantize, quantize_each, scaling_from_amax
from fp8_dist.kernels.cuda import DTYPES, HAS_TRITON, Cast, operators, triton
from fp8_dist.linear.rowwise_folded import folded_gradients
from fp8_dist.tensor import Quantized

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(1, 1), (77, 130), (3, 1025), (0, 5), (5, 0), (0, 0)]
# The dims that one scale covers: all of them, a row, a column.
COVERED = (None, [1], [0])

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy: x / 0, NaN


@pytest.fixture(params=[triton, operators], ids=["triton", "operators"])
def route(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def matrix(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values over the whole range of a format beside its largest."""
    return (torch.randn(shape) * 4.0 ** (3 * torch.randn(shape)).clamp(-8, 5)).to(DEVICE, dtype)


def views(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The matrix, its transpose, and the matrix in other strides."""
    yield x
    yield x.t()
    rows, columns = x.shape
    yield x.new_zeros(rows, 2 * columns + 1)[:, 1::2].copy_(x)
    yield x.new_zeros(rows, columns + 3)[:, 2:-1].copy_(x)


def assert_cast(found: Cast, expected: torch.Tensor, scaling: tuple[torch.Tensor, ...]) -> None:
    assert_layouts(found.qdata, found.qdata_t, expected)
    assert same_values(found.multiplier, scaling[0])
    assert same_values(found.scale, scaling[1])


def assert_layouts(
    qdata: torch.Tensor | None, qdata_t: torch.Tensor | None, expected: torch.Tensor
) -> None:
    assert qdata is not None or qdata_t is not None
    for layout, values in ((qdata, expected), (qdata_t, expected.t())):
        if layout is not None:
            assert layout.is_contiguous()
            assert same_values(layout, values)


def check_casts(
    route: ModuleType, x: torch.Tensor, dtype: torch.dtype, power_of_2: bool, column_major: bool
) -> None:
    """All functions that find amaxes or cast, on one matrix."""
    both = {"column_major": column_major}
    amaxes, casts = {}, {}
    for dims in COVERED:
        found = route.amax(x, dims)
        value = amax.portable(x, dims)
        assert same_values(found, value)
        assert (found.view(torch.int32) >= 0).all()
        scaling = scaling_from_amax.portable(value, dtype, power_of_2)
        qdata = quantize.portable(x, scaling[0], dtype, fits=True)
        assert_cast(route.cast(x, value, dtype, power_of_2, **both), qdata, scaling)
        assert_layouts(*route.quantize(x, scaling[0], dtype, fits=True, **both), qdata)
        key = str(dims)
        amaxes[key], casts[key] = value, (qdata, scaling)
    assert_cast(route.cast_rows(x, dtype, power_of_2, **both), *casts["[1]"])
    found = route.amax_of_rows_and_columns(x)
    for mine, key in zip(found, ("[1]", "[0]"), strict=True):
        assert same_values(mine, amaxes[key])
    rows, columns = route.cast_rows_and_columns(x, *found, dtype, power_of_2)
    assert rows.qdata_t is None
    assert columns.qdata is None
    assert_cast(rows, *casts["[1]"])
    assert_cast(columns, *casts["[0]"])


def test_casts_of_any_shape_dtype_and_strides(route: ModuleType) -> None:
    for shape in SHAPES:
        check_casts(route, matrix(shape, torch.bfloat16), E4M3, True, True)
        check_casts(route, matrix(shape, torch.bfloat16), E5M2, False, False)
    for of, dtype in product(DTYPES, (E4M3, E5M2)):
        check_casts(route, matrix((70, 65), of), dtype, False, True)
    for shape in ((77, 130), (3, 1)):
        for view in views(matrix(shape, torch.bfloat16)):
            check_casts(route, view, E4M3, True, True)


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("of", DTYPES)
def test_casts_of_special_values(route: ModuleType, power_of_2: bool, of: torch.dtype) -> None:
    info = torch.finfo(of)
    # A row of each alone, and columns of all of them.
    special = [math.nan, -math.nan, math.inf, -math.inf, -0.0, info.max, info.smallest_normal]
    x = matrix((len(special) + 2, 9), of)
    for row, value in enumerate(special):
        x[row, row] = value
    x[4] = -0.0
    x[6] = info.smallest_normal / torch.arange(4, 13, device=DEVICE)  # subnormal
    for dtype in FLOAT8_DTYPES:
        for part in (x, x[4:7], x[6:7]):  # the last two are finite
            check_casts(route, part, dtype, power_of_2, True)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_a_multiplier_that_does_not_fit_saturates(route: ModuleType, dtype: torch.dtype) -> None:
    x = matrix((33, 70), torch.bfloat16)
    x[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    rows = torch.logspace(-6, 20, 33, device=DEVICE).view(33, 1)
    for multiplier in (rows, torch.tensor(1e3, device=DEVICE), rows[:, :1].expand(33, 2)[:, 1:]):
        expected = quantize.portable(x, multiplier, dtype)
        for layouts in ((True, False), (False, True), (True, True)):
            wanted = dict(zip(("row_major", "column_major"), layouts, strict=True))
            found = route.quantize(x, multiplier, dtype, **wanted)
            assert tuple(each is not None for each in found) == layouts
            assert_layouts(*found, expected)


MANY = [(16, 32), (0, 32), (5, 7), (3, 0), (1, 1), (40, 1030), (11,)]


@pytest.mark.parametrize("of", DTYPES)
def test_amaxes_of_one_tensor_and_of_many(route: ModuleType, of: torch.dtype) -> None:
    for shape in ((), (0,), (5,), (2, 3, 4), (2, 0, 4), (40, 700)):
        x = matrix(shape, of)
        for view in (x, x.transpose(0, -1)) if x.ndim else (x,):
            assert same_values(route.amax(view), amax.portable(view))
    vectors = [matrix((n,), of) for n in (16, 5, 0, 20_000, 1)]
    vectors[4][0] = -math.nan
    tensors = [matrix(shape, of) for shape in MANY]
    tensors[2][1, 2], tensors[2][3] = -math.nan, -math.inf
    for part in (slice(None), slice(1), slice(1, 2), slice(0, None, 2)):
        found = route.amaxes(vectors[part])
        assert same_values(found, torch.stack([amax.portable(each) for each in vectors[part]]))
        of_rows = route.row_amaxes(tensors[part])
        expected = [amax.portable(each, (each.ndim - 1,)).reshape(-1) for each in tensors[part]]
        assert same_values(of_rows, torch.cat(expected))
        assert (torch.cat([found, of_rows]).view(torch.int32) >= 0).all()


@pytest.mark.parametrize("of_rows", [False, True])
@pytest.mark.parametrize(
    ("of", "dtype"), [*product(DTYPES, (E4M3,)), *product(DTYPES[:1], FLOAT8_DTYPES[1:])]
)
def test_casts_of_many_tensors(
    route: ModuleType, of: torch.dtype, dtype: torch.dtype, of_rows: bool
) -> None:
    tensors = [matrix(shape, of) for shape in MANY]
    tensors[2][1, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    tensors[0][3] = -0.0
    for chosen in (tensors, tensors[:1], tensors[1:2], tensors[::2]):
        values = amax_of_each.portable(chosen[0], chosen[1:], of_rows)
        multipliers, _ = scaling_from_amax.portable(values, dtype)
        multipliers[::3] *= 3  # what does not fit saturates
        found = route.quantize_many(chosen, multipliers, dtype, of_rows)
        expected = quantize_each.portable(chosen[0], chosen[1:], multipliers, dtype, of_rows)
        assert same_values(found, expected)


def test_transposes(route: ModuleType) -> None:
    for shape in SHAPES:
        for view in views(torch.randint(256, shape, dtype=torch.uint8, device=DEVICE)):
            for data in (view, view.view(E4M3)):
                found = route.transpose(data)
                assert found.dtype == data.dtype
                assert found.is_contiguous()
                assert torch.equal(found.view(torch.uint8), view.t())
    shapes = [(64, 128), (0, 5), (1, 1), (77, 130), (5, 0), (16, 1), *[(3, 70)] * 13, (0, 0)]
    matrices = [torch.randint(256, shape, dtype=torch.uint8, device=DEVICE) for shape in shapes]
    for chosen in (matrices, matrices[:1], matrices[1:3], matrices[1:2], matrices[::5]):
        found = route.transpose_many([x.view(E4M3) for x in chosen])
        for mine, x in zip(found, chosen, strict=True):
            assert mine.dtype is E4M3
            assert mine.is_contiguous()
            assert torch.equal(mine.view(torch.uint8), x.t())


def test_offsets_of_more_than_32_bits(route: ModuleType) -> None:
    stride = 2**30 + 16
    memory = torch.empty(2 * stride + 8, dtype=torch.uint8, device=DEVICE)  # mostly not touched
    data = memory.as_strided((3, 5), (stride, 1))
    data.copy_(torch.arange(15).view(3, 5))
    assert torch.equal(route.transpose(data).t(), data)
    assert torch.equal(route.transpose(data.t()), data)


def check_folds(
    route: ModuleType, grad: torch.Tensor, w: Quantized, x: Quantized, dtype: torch.dtype
) -> None:
    s, t = w.scale.view(-1), x.scale.view(-1)
    cast, owner = CastSpec(dtype, ROW), Float8Linear(1, 1).float8_weight
    operands = folded_gradients(grad, cast, None, w, x, None, False, owner)
    g1, g2 = operands["grad_input"][0], operands["grad_weight"][0]
    rows = route.fold_rows(grad, s, t, dtype)
    assert same_values(rows.qdata, g1.qdata)
    assert same_values(rows.scale, g1.scale)
    data, scale = route.fold_columns(grad, rows.multiplier, t, rows.column_amax, dtype)
    assert data.is_contiguous()
    assert same_values(data, g2.qdata.t())
    assert same_values(scale, g2.scale)


def cast_of_rows(rows: int) -> Quantized:
    x = matrix((rows, 8), torch.float32) * 8.0 ** torch.randn(rows, 1, device=DEVICE)
    return quantize_over(x, CastSpec(E4M3, ROW), True)


def test_folded_casts(route: ModuleType) -> None:
    dtypes = [(torch.bfloat16, E5M2), (torch.float16, E4M3), (torch.float32, E5M2)]
    for (rows, columns), (of, dtype) in product(((1, 1), (34, 130), (0, 5)), dtypes):
        weight, input = cast_of_rows(columns), cast_of_rows(rows)
        check_folds(route, matrix((rows, columns), of), weight, input, dtype)
    weight, input = cast_of_rows(20), cast_of_rows(10)
    for value in (math.nan, math.inf, 0.0, 1e-30, 1e30):
        grad = matrix((20, 10), torch.float32).t()
        grad[3, 5] = value
        grad[7] = value
        check_folds(route, grad, weight, input, E5M2)


def test_the_first_fold_saturates(route: ModuleType) -> None:
    # g0 is 1.25, 9 % more than g, whose product with this scale is just within the range.
    grad = torch.full((4, 20), 1.140625, device=DEVICE)
    weight = cast_of_rows(20)._replace(scale=torch.full((20, 1), 1.526, device=DEVICE))
    check_folds(route, grad, weight, cast_of_rows(4), E5M2)
    rows = route.fold_rows(grad, weight.scale.view(-1), None, E5M2)
    assert (rows.qdata.float() == torch.finfo(E5M2).max).all()


@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32])
def test_one_of_the_two_folds(route: ModuleType, of: torch.dtype) -> None:
    s, t = cast_of_rows(20).scale.view(-1), cast_of_rows(10).scale.view(-1)
    grad = matrix((10, 20), of)
    both = route.fold_rows(grad, s, t, E5M2)
    first = route.fold_rows(grad, s, None, E5M2)
    assert first.column_amax is None
    assert same_values(first.qdata, both.qdata)
    second = route.fold_rows(grad, None, t, E5M2)
    assert second.qdata is second.scale is None
    assert same_values(second.multiplier, both.multiplier)
    assert same_values(second.column_amax, both.column_amax)


def test_there_is_one_warning_where_there_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HAS_TRITON

    class OnGPU:
        is_cuda = True

    monkeypatch.setattr(warn, "_warned", set())
    with pytest.warns(UserWarning, match="no Triton") as found:
        operators.note_no_triton(OnGPU())
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operators.note_no_triton(OnGPU())
        operators.amax(torch.ones(3))
