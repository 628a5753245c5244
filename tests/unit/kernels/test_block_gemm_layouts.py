"""Operands of GPUs' GEMMs with block scales, checked by torch itself on the meta device."""

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from reference import same_values
from torch.nn.functional import scaled_mm
from torch.utils._pytree import tree_map_only

from fp8_dist import text
from fp8_dist.kernels.blocks import exponents_shape
from fp8_dist.kernels.cuda import gemm as block_gemm

# Sizes M, K, N, and where K begins in its first block.
SIZES = {
    "whole blocks": (256, 512, 384, 0),
    "one block": (128, 128, 128, 0),
    "a part of blocks": (48, 208, 80, 0),
    "tokens that are no multiple of 16": (63, 256, 80, 0),
    "blocks that shards cut": (64, 320, 256, 64),
}


def operands(block: int, gemm: str, sizes: tuple[int, int, int, int]) -> tuple[Any, ...]:
    """Operands of one of the three GEMMs, as a layer passes them."""
    m, k, n, first = sizes
    first %= block
    blocks_a = (1, block, 0, first)
    blocks_b = (block, 1 if gemm == "grad_weight" else block, first, 0)
    shapes = {  # of a as it lies in memory, and of b
        "output": ((m, k), (n, k)),
        "grad_input": ((m, k), (k, n)),
        "grad_weight": ((k, m), (k, n)),
    }[gemm]
    a, b = (torch.empty(s, dtype=torch.float8_e4m3fn, device="meta") for s in shapes)
    a, b = (a.t() if gemm == "grad_weight" else a), (b.t() if gemm == "output" else b)
    exponents = [
        torch.empty(exponents_shape(s, blocks), dtype=torch.uint8, device="meta")
        for s, blocks in (((m, k), blocks_a), ((k, n), blocks_b))
    ]
    return a, b, *exponents, blocks_a, blocks_b


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", [128, 32])
def test_torch_takes_the_operands(kind: int, sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs)
        return scaled_mm(*args, **kwargs)

    monkeypatch.setattr(block_gemm, "scaled_mm_of_torch", counted)
    monkeypatch.setattr(block_gemm, "block_of_gemm", lambda device: kind)
    m, _, n, _ = SIZES[sizes]
    for gemm, dtype in product(
        ("output", "grad_input", "grad_weight"), (torch.bfloat16, torch.float32)
    ):
        calls.clear()
        given = operands(kind, gemm, SIZES[sizes])
        found = block_gemm._block_scaled_mm(*given, dtype, False)
        assert (found.shape, found.dtype, len(calls)) == ((m, n), dtype, 1)


def test_scales_that_hopper_reads() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(64, 4)
    for exponents in (every, every.t(), every[:33, 1:]):
        expected = (2.0 ** (exponents.double() - 127)).float()
        expected.masked_fill_(exponents == 255, torch.nan)
        for numbers in (exponents, expected):
            scales = block_gemm._column_major(numbers, 64)
            assert (len(scales), scales.t().is_contiguous()) == (64, True)
            assert same_values(scales[: len(expected)], expected)


@pytest.mark.parametrize("kind", [128, 32])
def test_what_the_devices_do_not_multiply(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_gemm, "block_of_gemm", lambda device: kind)
    a, b, exponents, _, blocks_a, blocks_b = operands(kind, "output", (64, 320, 64, 0))
    for left, right, blocks, dtype in (
        (a, b[:, :9], blocks_a, torch.bfloat16),
        (a[:0], b, blocks_a, torch.bfloat16),
        (a, b, (*blocks_a[:3], 16), torch.bfloat16),
        (a, b, (1, 64, 0, 0), torch.bfloat16),
        (a, b, blocks_a, torch.float16),
        (a.view(torch.float8_e5m2), b, blocks_a, torch.bfloat16),
    ):
        assert block_gemm._obstacle(left, right, exponents, blocks, blocks_b, dtype) is not None


def zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=torch.uint8).view(like.dtype)


def test_a_gemm_in_high_precision_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warn once for each reason."""
    monkeypatch.setattr(text, "_warned", set())
    monkeypatch.setattr(block_gemm, "has_gemm", lambda *_: True)
    multiply = block_gemm.block_scaled_mm.implementations["cuda"]
    told = []
    for kind, of, columns in (
        (None, 128, 64),
        (128, 32, 64),
        (32, 128, 64),
        (128, 128, 63),
        (128, 128, 61),
    ):
        monkeypatch.setattr(block_gemm, "block_of_gemm", lambda device, kind=kind: kind)
        given = tree_map_only(torch.Tensor, zeros, operands(of, "output", (63, 256, columns, 0)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert multiply(*given, torch.bfloat16, False).shape == (63, columns)
            multiply(*given, torch.bfloat16, True)  # asked for, so it says nothing
        told += [str(each.message) for each in caught]
    assert_expected_inline(
        "\n".join(told),
        """\
float8 GEMM of (63, 256) by (256, 64) with one scale per block of 128 values: it runs in high precision, no faster than without float8; this device, or this build of torch, has no such GEMM; use rowwise_folded
float8 GEMM of (63, 256) by (256, 64) with one scale per block of 32 values: it runs in high precision, no faster than without float8; this device multiplies blocks of 128 values; use blockwise
float8 GEMM of (63, 256) by (256, 64) with one scale per block of 128 values: it runs in high precision, no faster than without float8; this device multiplies blocks of 32 values; use mxfp8
float8 GEMM of (63, 256) by (256, 63) with one scale per block of 128 values: it runs in high precision, no faster than without float8; the layer's features must be multiples of 16""",
    )
