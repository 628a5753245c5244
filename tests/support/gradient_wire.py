"""Independent reference of gradients on the wire: encoding in fp64, and the sum of pieces."""

import math
from collections.abc import Sequence

import torch
from reference import float8_grid

BLOCK = 128


def on_the_wire(x: torch.Tensor, transport: str) -> torch.Tensor:
    """What arrives of finite numbers ``[n]``: fp32, computed in fp64."""
    if transport == "bf16":
        return x.to(torch.bfloat16).float()
    return torch.cat([_float8_block(block) for block in x.float().split(BLOCK)])


def _float8_block(block: torch.Tensor) -> torch.Tensor:
    grid = torch.tensor(float8_grid(torch.float8_e4m3fn), dtype=torch.float64)
    values = block.double()
    amax = values.abs().max().item()
    exponent = max(math.ceil(math.log2(amax / 448)) if amax else -126, -126)
    while amax > 448 * 2.0**exponent:  # (the logarithm may be off by a rounding)
        exponent += 1
    scaled = values.abs() / 2.0**exponent
    above = torch.searchsorted(grid, scaled).clamp(max=len(grid) - 1)
    below = (above - 1).clamp(min=0)
    up, down = grid[above] - scaled, scaled - grid[below]
    # To nearest; of two the one with the even code, which is its place in the grid.
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (grid[code] * 2.0**exponent).copysign(values).float()


def shard_of_mean(
    gradients: Sequence[torch.Tensor], owner: int, transport: str | None
) -> torch.Tensor:
    """The mean of the ranks' gradients of a parameter, as the owner of a shard has it: fp32.

    gradients: of all ranks, whole. transport: None if the parameter travels as it is.
    """
    ranks = len(gradients)
    pieces = []
    for rank, gradient in enumerate(gradients):
        rows = -(-len(gradient) // ranks)
        piece = gradient[owner * rows : (owner + 1) * rows]
        padded = torch.zeros(rows, *gradient.shape[1:])
        padded[: len(piece)] = piece
        flat = padded.flatten()
        if transport is not None and rank != owner:
            flat = on_the_wire(flat, transport)
        pieces.append(flat.view(padded.shape)[: len(piece)])
    total = pieces[0].clone()
    for piece in pieces[1:]:
        total += piece
    return total / ranks
