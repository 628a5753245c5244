"""Tensors for property tests, described by plain data: kind of values, shape, dtype and seed."""

import math
from collections.abc import Sequence

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VALUES = (
    *("normal", "zeros", "equal", "negative zero", "denormals", "tiny", "outlier", "magnitudes"),
    *("nan", "inf", "-inf"),
)


def values(kind: str, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of a kind in `VALUES`; special values occur at one place."""
    generator = torch.Generator("cpu").manual_seed(seed)
    limits = torch.finfo(dtype)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    if kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "equal":
        x = torch.full_like(x, 0.7)
    elif kind == "denormals":
        x *= limits.smallest_normal / 8
    elif kind == "tiny":
        x *= max(1e-30, limits.smallest_normal * 16)
    elif kind == "magnitudes" and x.ndim:
        x *= torch.exp(2 * torch.randn((*x.shape[:-1], 1), generator=generator, dtype=x.dtype))
    x = x.clamp(-limits.max, limits.max).to(dtype)
    special = {"negative zero": -0.0, "outlier": min(1e30, limits.max / 2)}
    special |= {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    if kind in special and x.numel():
        x.view(-1)[seed * 7 % x.numel()] = special[kind]
    return x
