"""The error of a result relative to the exact one."""

import math

import torch


def sqnr(exact: torch.Tensor, actual: torch.Tensor) -> float:
    """Signal to quantization noise ratio, 20 log10(|exact| / |exact - actual|), in dB.

    Computed in fp64; inf if the two are equal.
    """
    exact, actual = exact.detach().double(), actual.detach().double()
    noise = (exact - actual).norm()
    return math.inf if noise == 0 else (20 * torch.log10(exact.norm() / noise)).item()
