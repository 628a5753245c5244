"""Levels of scales: the blocks of a tensor that share a scale, and the ranks that share a block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8_dist.kernels.blocks import blocks_along
from fp8_dist.mesh import Layout, Pieces, local_pieces, sharded_dim

# Offset of a part of a tensor within its first blocks: (row, column).
Start = tuple[int, int]


@dataclass(frozen=True)
class Level:
    """One statistic, and one scale, for each block of a tensor ``[..., M, K]``.

    Attributes:
        rows, columns: the size of a block along M and K, or ``None`` for the whole dim.
        leading: the size of a block along each dim before these: 1, or ``None`` for the whole dim.
        statistic: the dtype of the statistic, fp32 or uint8. Values are not negative, and their
            bits, read as integers, must be in the order of the values.
        scale: the dtype of the scale.

    Examples: ``Level(None, None, None)`` has one scale per tensor, 0-dim; ``Level(1, None)`` one
    per row, ``[..., M, 1]``; ``Level(1, 16)`` one per 16 values of a row, ``[..., M, K / 16]``;
    ``Level(None, None)`` one per matrix, ``[..., 1, 1]``.
    """

    rows: int | None
    columns: int | None
    leading: int | None = 1
    statistic: torch.dtype = torch.float32
    scale: torch.dtype = torch.float32

    is_scalar: ClassVar[bool]  # whether one 0-dim scale covers the whole tensor

    def __post_init__(self) -> None:
        covers_all = self.rows is None and self.columns is None and self.leading is None
        object.__setattr__(self, "is_scalar", covers_all)

    def block(self, dim: int, ndim: int) -> int | None:
        """The size of a block along a dim of a tensor, or ``None`` for the whole dim."""
        if dim == ndim - 1:
            return self.columns
        return self.rows if dim == ndim - 2 else self.leading

    @property
    def has_blocks(self) -> bool:
        """Whether a block has several, but not all, indices along M or K."""
        return (self.rows or 1) > 1 or (self.columns or 1) > 1

    @property
    def follows_rows(self) -> bool:
        """Whether each scale belongs to a single row, ``[..., C]``, and can move with it."""
        return self.rows == 1 and self.leading == 1

    def shape(self, shape: Sequence[int], start: Start = (0, 0)) -> list[int]:
        """The shape of the scales of a tensor, or of a part that begins at ``start``."""
        if self.is_scalar:
            return []
        ndim, counts = len(shape), []
        for dim, n in enumerate(shape):
            block = self.block(dim, ndim)
            if block is None or block == 1:
                counts.append(1 if block is None else n)
            else:
                counts.append(blocks_along(n, block, start[dim - ndim] % block))
        return counts

    def pieces(self, layout: Layout) -> list[Pieces]:
        """The indices of the scales of this rank's part, along each dim of the global scales."""
        if self.is_scalar:
            return []
        pieces: list[Pieces] = []
        for dim, part in enumerate(local_pieces(layout)):
            block = self.block(dim, len(layout.shape))
            spans = [(0, 1)] if block is None else [(a // block, -(-b // block)) for a, b in part]
            pieces.append(tuple(spans) or ((0, 0),))
        return pieces

    def amax(self, x: Tensor, start: Start = (0, 0)) -> Tensor:
        """The largest magnitude in each block of a local tensor, fp32.

        It is NaN if a value is NaN, and 0 for a block without values.
        """
        largest = x.abs().to(torch.float32)
        for dim, size in enumerate(x.shape):
            block, first, count = self.block(dim, x.ndim), 0, 1
            if block == 1:
                continue
            if block is None:
                block = max(size, 1)
            else:
                first = start[dim - x.ndim] % block
                count = blocks_along(size, block, first)
            missing = [first, count * block - first - size]
            largest = pad(largest, [0, 0] * (x.ndim - 1 - dim) + missing)
            largest = largest.unflatten(dim, (count, block)).amax(dim + 1)
        return largest.view(self.shape(x.shape, start))

    def covered_dims(self, ndim: int) -> tuple[int, ...] | None:
        """The dims that a scale covers completely; ``None`` means all dims."""
        if self.is_scalar:
            return None
        return tuple([dim for dim in range(ndim) if self.block(dim, ndim) is None])


@dataclass(frozen=True)
class DimsLevel(Level):
    """One fp32 scale for each index of the dims that are not ``covered``."""

    covered: tuple[int, ...] = ()

    def block(self, dim: int, ndim: int) -> int | None:
        return None if dim in self.covered else 1


def axes_of_level(level: Level, layout: Layout) -> tuple[int, ...]:
    """The mesh axes along which ranks share blocks of this level."""
    ndim = len(layout.shape)
    dims = [sharded_dim(p, ndim) for p in layout.placements]
    blocks = {dim: level.block(dim, ndim) for dim in dims if dim is not None}
    in_blocks = {dim: block for dim, block in blocks.items() if block is not None and block > 1}
    shared = {dim for dim, block in blocks.items() if block is None}
    if any(layout.cuts_blocks(dim, block) for dim, block in in_blocks.items()):
        shared |= set(in_blocks)  # a block may be cut along both dims
    return tuple([i for i, dim in enumerate(dims) if dim in shared and layout.mesh.size(i) > 1])
