"""Grouped GEMMs on the fake CUDA device: one kernel each, in layouts that torch's checks accept."""

import pytest
import torch
from fake_cuda.counter import Counts, KernelCounter
from fake_cuda.device import fake_tensors
from fake_cuda.experts import ExpertsShape, count_experts, count_routed
from fake_cuda.process import FakeCudaProcess

from fp8_dist.kernels.grouped import Groups
from fp8_dist.moe import Float8ExpertsConfig
from fp8_dist.moe.functions import cast_weight, grouped_product
from scripts.common.recipes import BF16


@pytest.mark.parametrize(
    ("name", "kernels", "gigabytes"),
    [
        (BF16, 3, 0.00),
        ("rowwise_folded", 14, 3.40),
        ("tensorwise", 18, 4.11),
        ("blockwise", 21, 6.70),
        ("mxfp8", 21, 6.75),
    ],
)
def test_a_step(name: str, kernels: int, gigabytes: float, fake_cuda: FakeCudaProcess) -> None:
    counts = fake_cuda.run(count_experts, name, ExpertsShape(), torch.bfloat16)
    is_float8 = name in ("rowwise_folded", "tensorwise")
    gemm = "_scaled_grouped_mm" if is_float8 else "_grouped_mm"
    assert [kernel.name for kernel in counts.by_kind("gemm")] == [gemm] * 3
    assert counts.launches == kernels
    assert counts.bytes_besides_gemms / 1e9 == pytest.approx(gigabytes, abs=0.0051)
    assert counts.syncs == counts.problems == []


@pytest.mark.parametrize(
    ("name", "kernels", "gigabytes"),
    [
        ("rowwise_folded", 68, 8.74),
        ("tensorwise", 80, 11.07),
        ("blockwise", 89, 14.81),
        ("mxfp8", 89, 14.84),
    ],
)
def test_routed_experts(
    name: str, kernels: int, gigabytes: float, fake_cuda: FakeCudaProcess
) -> None:
    """The host waits once, for the numbers of rows."""
    counts = fake_cuda.run(count_routed, name)
    assert len(counts.by_kind("gemm")) == 9
    assert counts.launches == kernels
    assert counts.bytes_besides_gemms / 1e9 == pytest.approx(gigabytes, abs=0.0051)
    assert (counts.syncs, counts.problems) == (["_to_copy from cuda to cpu"], [])


def products(
    counts: list[int],
    sizes: tuple[int, int],
    dtype: torch.dtype,
    pads: bool,
    recipe: str,
) -> tuple[Counts, list[tuple[int, ...]]]:
    """Counts of a forward and backward of groups with these numbers of rows; shapes of results."""
    config = Float8ExpertsConfig(recipe, pad_token_groups_for_grouped_mm=pads)  # type: ignore[arg-type]
    (n, k), on_host = sizes, torch.tensor(counts)
    with fake_tensors(), torch.device("cuda"):
        groups = Groups.of(torch.empty(len(counts), dtype=torch.int64), on_host, sum(counts))
        x = torch.empty(sum(counts), k, dtype=torch.bfloat16, requires_grad=True)
        w = torch.empty(len(counts), n, k, dtype=dtype, requires_grad=True)
        with KernelCounter() as counter:
            (output,) = grouped_product(x, [cast_weight(w, config)], groups, config)
            found = [output, *torch.autograd.grad(output, (x, w), torch.empty_like(output))]
    return counter.counts, [tuple(each.shape) for each in found]


@pytest.mark.parametrize("recipe", ["rowwise_folded", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize(
    ("counts", "sizes", "dtype", "pads", "at_once", "alone"),
    [
        ([125, 3, 0, 256], (96, 160), torch.bfloat16, True, 3, 0),
        ([48, 16, 0, 256], (96, 160), torch.bfloat16, False, 3, 0),
        ([125, 3, 0, 256], (96, 160), torch.bfloat16, False, 2, 3),
        ([125, 3, 0, 256], (96, 160), torch.float32, True, 2, 3),  # torch only writes bf16
        ([125, 3, 0, 256], (96, 37), torch.bfloat16, True, 0, 9),  # rows must be 16-byte aligned
        ([0, 0], (96, 160), torch.bfloat16, True, 0, 0),
    ],
)
def test_any_groups(
    recipe: str,
    counts: list[int],
    sizes: tuple[int, int],
    dtype: torch.dtype,
    pads: bool,
    at_once: int,
    alone: int,
    fake_cuda: FakeCudaProcess,
) -> None:
    if recipe in ("blockwise", "mxfp8") and (at_once, alone) == (2, 3) and not pads:
        at_once, alone = 3, 0  # blocks are padded in any case
    found, shapes = fake_cuda.run(products, counts, sizes, dtype, pads, recipe)
    assert shapes == [(sum(counts), sizes[0]), (sum(counts), sizes[1]), (len(counts), *sizes)]
    names = [kernel.name for kernel in found.by_kind("gemm")]
    together = [name for name in names if "grouped" in name]
    assert (len(together), len(names) - len(together)) == (at_once, alone)
    assert found.syncs == found.problems == []
