"""Distance of a result to the exact one."""

import math

import torch


def sqnr(exact: torch.Tensor, actual: torch.Tensor) -> float:
    """Signal to quantization noise ratio, 20 log10(|exact| / |exact - found|), in dB.

    Computed in fp64; inf where the two are equal.
    """
    exact, actual = exact.detach().double(), actual.detach().double()
    noise = (exact - actual).norm()
    return math.inf if noise == 0 else (20 * torch.log10(exact.norm() / noise)).item()
