"""A model and data for tests of encoded gradients, and references for codes and sums in fp64."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import device_mesh
from reference import nearest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

BLOCK = 128


class Uneven(nn.Module):
    """A model with uneven dims, fewer rows than ranks, a bias, a norm, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.wide = nn.Linear(96, 37)
            self.norm = nn.LayerNorm(37)
            self.flat = nn.Linear(37, 3, bias=False)
            self.last = nn.Linear(3, 130, bias=False)
            self.spare = nn.Linear(96, 130, bias=False)

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        y = self.last(F.gelu(self.flat(self.norm(F.gelu(self.wide(x))))))
        return y + self.spare(x) if spare else y


def data(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 96, generator=generator) * (1 + rank)


def backward(net: nn.Module, rank: int, step: int = 0, **arguments: Any) -> None:
    x = data(rank, step).to(next(net.parameters()).dtype)
    net(x, **arguments).float().pow(3).mean().backward()


def on_the_wire(x: torch.Tensor, transport: str) -> torch.Tensor:
    """Finite numbers ``[n]``, encoded and decoded: fp32, computed in fp64."""
    if transport == "bf16":
        return x.to(torch.bfloat16).float()
    return torch.cat([_float8_block(block) for block in x.float().split(BLOCK)])


def _float8_block(block: torch.Tensor) -> torch.Tensor:
    values = block.double()
    fraction, exponent = math.frexp(values.abs().max().item() / 448)
    scale = 2.0 ** (max(exponent - (fraction == 0.5), -126) if fraction else -126)
    return (nearest(values / scale, torch.float8_e4m3fn) * scale).float()


def nodes_of(per_node: int) -> DeviceMesh:
    """The ranks of the world on nodes of `per_node` ranks each."""
    return device_mesh(node=dist.get_world_size() // per_node, place=per_node)


def shard_of_mean(
    gradients: Sequence[torch.Tensor],
    owner: int,
    transport: str | None,
    per_node: int = 1,
    within: str | None = None,
) -> torch.Tensor:
    """The mean of a parameter's gradients over ranks, in the shard of one owner: fp32.

    gradients: the full gradients of all ranks. transport: None if they are sent unencoded.
    per_node: the ranks on each node, whose sums are sent; 1: there are no nodes.
    within: the transport within nodes.
    """
    rows = -(-len(gradients[0]) // len(gradients))
    pieces = [gradient[owner * rows : (owner + 1) * rows] for gradient in gradients]
    if per_node > 1:
        sent = [_sent(piece, within) for piece in pieces]
        pieces = [sum(sent[i + 1 : i + per_node], sent[i]) for i in range(0, len(sent), per_node)]
    total = torch.zeros_like(pieces[0])
    for piece in pieces:
        total += _sent(piece, transport)
    return total / len(gradients)


def _sent(piece: torch.Tensor, transport: str | None) -> torch.Tensor:
    if transport is None or not len(piece):
        return piece
    rows = [on_the_wire(row.flatten(), transport) for row in piece]
    return torch.stack(rows).view(piece.shape)
