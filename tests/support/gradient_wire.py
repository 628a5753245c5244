"""Independent reference of gradients on the wire: encoding in fp64, and the sum of pieces."""

import math
from collections.abc import Sequence

import torch
from reference import nearest

BLOCK = 128


def on_the_wire(x: torch.Tensor, transport: str) -> torch.Tensor:
    """What arrives of finite numbers ``[n]``: fp32, computed in fp64."""
    if transport == "bf16":
        return x.to(torch.bfloat16).float()
    return torch.cat([_float8_block(block) for block in x.float().split(BLOCK)])


def _float8_block(block: torch.Tensor) -> torch.Tensor:
    values = block.double()
    fraction, exponent = math.frexp(values.abs().max().item() / 448)
    scale = 2.0 ** (max(exponent - (fraction == 0.5), -126) if fraction else -126)
    return (nearest(values / scale, torch.float8_e4m3fn) * scale).float()


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
