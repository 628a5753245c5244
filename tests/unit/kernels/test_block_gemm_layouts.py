"""What GPUs' GEMMs with scales of blocks are given, by torch's own checks of operands without data."""

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_mm

from fp8_dist.kernels.blocks import exponents_shape
from fp8_dist.kernels.cuda import gemm as block_gemm

# Sizes M, K, N, and where K begins in its first block.
SIZES = {
    "whole blocks": (256, 512, 384, 0),
    "one block": (128, 128, 128, 0),
    "a part of blocks": (48, 208, 80, 0),
    "blocks that shards cut": (64, 320, 256, 64),
}


def operands(kind: str, gemm: str, sizes: tuple[int, int, int, int]) -> tuple[Any, ...]:
    """As a layer gives them: the output, grad_input and grad_weight."""
    m, k, n, first = sizes
    block = 128 if kind == "hopper" else 32
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
@pytest.mark.parametrize("kind", ["hopper", "blackwell"])
def test_torch_takes_the_operands(kind: str, sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs)
        return scaled_mm(*args, **kwargs)

    monkeypatch.setattr(block_gemm, "scaled_mm_of_torch", counted)
    monkeypatch.setattr(block_gemm, "device_kind", lambda device: kind)
    m, _, n, _ = SIZES[sizes]
    for gemm, dtype in product(
        ("output", "grad_input", "grad_weight"), (torch.bfloat16, torch.float32)
    ):
        calls.clear()
        given = operands(kind, gemm, SIZES[sizes])
        found = block_gemm.block_mm(*given, dtype)
        assert found is not None
        assert (found.shape, found.dtype, len(calls)) == ((m, n), dtype, 1)


@pytest.mark.parametrize("kind", ["hopper", "blackwell"])
def test_what_the_devices_do_not_multiply(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_gemm, "device_kind", lambda device: kind)
    a, b, of_a, of_b, blocks_a, blocks_b = operands(kind, "output", (64, 320, 64, 0))
    for left, right, blocks, dtype in (
        (a[:7], b, blocks_a, torch.bfloat16),
        (a, b[:, :9], blocks_a, torch.bfloat16),
        (a[:0], b, blocks_a, torch.bfloat16),
        (a, b, (*blocks_a[:3], 16), torch.bfloat16),
        (a, b, (1, 64, 0, 0), torch.bfloat16),
        (a, b, blocks_a, torch.float16),
        (a.view(torch.float8_e5m2), b, blocks_a, torch.bfloat16),
    ):
        assert block_gemm.block_mm(left, right, of_a, of_b, blocks, blocks_b, dtype) is None
