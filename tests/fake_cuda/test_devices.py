"""GEMMs that are called on devices of several compute capabilities: those of the table."""

import warnings
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_cuda.device import capability
from fake_cuda.experts import ExpertsShape, count_experts
from fake_cuda.layer import LayerShape, count_layer
from fake_cuda.process import FakeCudaProcess

from fp8_dist import gemm_table, text
from fp8_dist.gemm_table import TABLE, GemmKind, block_of_gemm, has_gemm
from fp8_dist.kernels import gemm as gemms

DEVICES = ((8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
LAYER, EXPERTS = LayerShape(1024, 512, 768), ExpertsShape(4, 512, 512, 768)
DENSE = "tensorwise", "rowwise", "rowwise_folded", "delayed"
BLOCKS = {"blockwise": 128, "mxfp8": 32}
KINDS: tuple[GemmKind, ...] = tuple(dict.fromkeys(row.gemm for row in TABLE))
# MX on a 12.0, from torch 2.14 on.
NEW = {"blocks of 32"} if torch.__version__ >= "2.14" else set()


def known(device: tuple[int, int]) -> tuple[set[GemmKind], int | None]:
    """What the table says of a device."""
    cuda = torch.device("cuda", 0)
    with capability(*device):
        return {gemm for gemm in KINDS if has_gemm(gemm, cuda)}, block_of_gemm(cuda)


def test_the_table(fake_cuda: FakeCudaProcess) -> None:
    found = {device: fake_cuda.run(known, device) for device in DEVICES}
    assert found == {
        (8, 9): ({"scaled", "by rows"}, None),
        (9, 0): ({"scaled", "by rows", "blocks of 128", "groups", "groups in bf16"}, 128),
        (10, 0): ({"scaled", "by rows", "blocks of 32", "groups in bf16"}, 32),
        (10, 3): ({"scaled", "by rows", "blocks of 32", "groups in bf16"}, 32),
        # (MX from torch 2.14 on.)
        (12, 0): ({"scaled", "by rows"} | NEW, 32 if NEW else None),
        (12, 1): ({"scaled", "by rows"} | NEW, 32 if NEW else None),
    }


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_layers(device: tuple[int, int], fake_cuda: FakeCudaProcess) -> None:
    _, block = fake_cuda.run(known, device)
    for recipe in (*DENSE, *BLOCKS):
        counts = fake_cuda.run(count_layer, recipe, LAYER, device)
        gemm = "_scaled_mm"
        if recipe in BLOCKS:
            gemm = "_scaled_mm_v2" if BLOCKS[recipe] == block else "mm"
        assert [kernel.name for kernel in counts.by_kind("gemm")] == [gemm] * 3
        assert counts.problems == counts.syncs == []


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_experts(device: tuple[int, int], fake_cuda: FakeCudaProcess) -> None:
    """Where the grouped GEMM in float8 is missing, that in bf16 serves; else one per expert."""
    gemms, block = fake_cuda.run(known, device)
    for recipe in ("rowwise_folded", "tensorwise", *BLOCKS):
        counts = fake_cuda.run(count_experts, recipe, EXPERTS, torch.bfloat16, device)
        expected = {"_grouped_mm": 3}
        if "groups" in gemms and recipe not in BLOCKS:
            expected = {"_scaled_grouped_mm": 3}
        elif "groups in bf16" not in gemms:
            alone = "_scaled_mm"
            if recipe in BLOCKS:
                alone = "_scaled_mm_v2" if BLOCKS[recipe] == block else "mm"
            expected = {alone: 3 * EXPERTS.experts}
        assert Counter(kernel.name for kernel in counts.by_kind("gemm")) == expected
        assert counts.problems == counts.syncs == []


def warned(recipe: str, device: tuple[int, int]) -> list[str]:
    """What experts warn of."""
    with patch.object(text, "_warned", set()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count_experts(recipe, EXPERTS, torch.bfloat16, device)
    return [str(each.message) for each in caught]


def rowwise_layer(cuda: tuple[int, int]) -> tuple[list[int], list[str]]:
    """The numbers of scales of the GEMMs of a layer on a Hopper, and what it warns of."""
    sizes, multiply = [], gemms.native_scaled_mm

    def noted(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, **how: Any) -> torch.Tensor:
        sizes.append(sum(scale.numel() for scale in scales))
        return multiply(a, b, *scales, **how)

    with (
        patch.object(gemm_table, "cuda_release", lambda: cuda),
        patch.object(gemms, "native_scaled_mm", noted),
        patch.object(text, "_warned", set()),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        count_layer("rowwise", LAYER, (9, 0))
    return sizes, [str(each.message) for each in caught]


def test_a_gemm_that_refuses_shapes_is_not_called(fake_cuda: FakeCudaProcess) -> None:
    """cuBLASLt of CUDA 12.9 multiplies with one scale per tensor, and products are scaled then."""
    sizes, told = fake_cuda.run(rowwise_layer, (13, 0))
    assert min(sizes) > 1000
    assert told == []
    sizes, (warning,) = fake_cuda.run(rowwise_layer, (12, 9))
    assert {*sizes} == {2}
    assert "products are scaled in passes of their own" in warning


def test_what_is_lost_is_said_once(fake_cuda: FakeCudaProcess) -> None:
    assert fake_cuda.run(warned, "rowwise_folded", (9, 0)) == []
    (told,) = fake_cuda.run(warned, "rowwise_folded", (10, 0))
    assert "has no grouped GEMM in float8 in this release of torch" in told
    assert "multiplied in bf16: slower than without float8" in told
    (told,) = fake_cuda.run(warned, "mxfp8", (10, 0))
    assert told.startswith("scales of blocks have no grouped GEMM in float8")
    (told,) = fake_cuda.run(warned, "tensorwise", (12, 0))
    assert "experts are multiplied one after the other" in told
