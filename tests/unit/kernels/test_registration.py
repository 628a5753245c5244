"""The operators' implementations for GPUs, in Triton's interpreter, against the portable ones."""

from collections.abc import Sequence

import pytest
import torch
from implementations import check_operator, implementation
from reference import same_bits

from fp8_dist import kernels
from fp8_dist.kernels import cast_and_measure, cast_copies, cast_rows
from fp8_dist.kernels.folding import fold_gradient

E4M3 = torch.float8_e4m3fn
SHAPES = [(6, 32), (2, 3, 32), (0, 32), (16,)]
ROW, COLUMN, TENSOR = "row", "column", "tensor"

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy: x / 0, NaN


COPIES: list[tuple[Sequence[str], list[int], list[bool]]] = [
    ([ROW, COLUMN], [0, 1], [False, True]),
    ([ROW, TENSOR], [0, 1], [False, True]),
    ([TENSOR], [0, 0], [False, True]),
    ([COLUMN, ROW], [1, 0, 0], [True, False, True]),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_amaxes_casts_and_copies(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).mul_(100).to(dtype)
    for dims in (None, (x.ndim - 1,), tuple(range(x.ndim - 1)), (0,)):
        check_operator(kernels.amax, x, dims)
        check_operator(kernels.scaling_from_amax, kernels.amax(x, dims), E4M3, True)
        m, _ = kernels.scaling_from_amax(kernels.amax(x, dims), E4M3, True)
        for saturate in (True, False):
            check_operator(kernels.quantize, x, m, E4M3, saturate=saturate)
    known = torch.tensor(3.0)
    for covers, of, transposed in COPIES:
        check_operator(kernels.amaxes, x, covers)
        amaxes = kernels.amaxes(x, covers)
        check_operator(cast_copies, x, amaxes, E4M3, True, of, transposed)
        check_operator(cast_copies, x * 2, amaxes, E4M3, False, of, transposed, saturate=True)
        layouts = list(dict.fromkeys(transposed))
        check_operator(cast_rows, x, E4M3, True, layouts)
        check_operator(cast_and_measure, x, known, E4M3, False, layouts)
    check_operator(cast_and_measure, x, known, E4M3, True, [True])


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_value_that_is_not_finite_poisons_a_scale_that_was_known(value: float) -> None:
    x = torch.ones(4, 32, dtype=torch.bfloat16)
    x[1, 2] = value
    one = torch.ones(())
    for run in (cast_and_measure.portable, implementation(cast_and_measure)):
        amax, known, scale, qdata = run(x, one, E4M3, False, [False])
        assert same_bits(amax, torch.tensor(abs(value)))
        assert known.isnan()
        assert scale.isnan()
        assert (qdata.float() * scale).isnan().all()


def test_amaxes_of_many_tensors_are_those_of_each() -> None:
    first, *others = [torch.randn(shape).bfloat16() for shape in SHAPES]
    for of_rows in (False, True):
        check_operator(kernels.amax_of_each, first.t(), [], of_rows)
        for x in (first, first.float(), torch.randn(32, 6).bfloat16().t()):
            check_operator(kernels.amax_of_each, x, others, of_rows)
            rows = [
                row
                for each in (x, *others)
                for row in (each.reshape(-1, each.shape[-1]) if of_rows else each.reshape(1, -1))
            ]
            found = kernels.amax_of_each.portable(x, others, of_rows)
            assert same_bits(found, torch.stack([kernels.amax(row) for row in rows]))


@pytest.mark.parametrize("rows", [4, 33])
def test_results_that_graphs_get_are_aligned(rows: int) -> None:
    for amax in implementation(kernels.amaxes)(torch.randn(rows, 32), [ROW, COLUMN]):
        assert amax.storage_offset() * amax.itemsize % 16 == 0


def test_another_default_dtype() -> None:
    x, one = torch.randn(8, 32), torch.ones(())
    scales = torch.rand(32) + 1, torch.rand(8) + 1
    torch.set_default_dtype(torch.bfloat16)
    try:
        for covers, of, transposed in COPIES:
            check_operator(cast_copies, x, kernels.amaxes(x, covers), E4M3, True, of, transposed)
        check_operator(kernels.amaxes, x, [ROW, TENSOR])
        check_operator(cast_and_measure, x, one, E4M3, False, [False, True])
        check_operator(cast_rows, x, E4M3, True, [False])
        check_operator(fold_gradient, x, E4M3, *scales, True)
    finally:
        torch.set_default_dtype(torch.float32)
