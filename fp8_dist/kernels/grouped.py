"""GEMMs of groups of rows: ``[R, ...]``, the rows of one group after those of the other.

``torch._scaled_grouped_mm`` multiplies all groups in one kernel. It takes e4m3 data with one fp32
scale per row or column, and writes bf16. If it sums over rows, these must be contiguous in memory,
and groups must begin at multiples of 16 bytes. So both operands are transposed, and groups padded
in the same pass.

On a Blackwell it also takes exponents of blocks of 1 x 32 (MX), in tiles of 128 x 4, which begin
anew with each group. Sums over rows then have groups of multiples of 32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_dist.device import device_has_grouped_gemm, device_kind, e4m3
from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.gemm import in_tiles, row_major
from fp8_dist.kernels.quantization import ALIGNMENT, padded
from fp8_dist.torch_internals import native_scaled_grouped_mm

_grouped_mm = partial(native_scaled_grouped_mm, out_dtype=torch.bfloat16)


class Padded(NamedTuple):
    """Groups of which each is padded to a multiple of some number of rows.

    Attributes:
        source: the row at each place, int64 ``[P]``; -1 for padding.
        ends: the end of each group's places, int32 ``[E]``.
    """

    source: Tensor
    ends: Tensor


@dataclass(frozen=True)
class Groups:
    """The rows of each group, among rows that are sorted by group.

    Attributes:
        on_host: the number of rows of each group, int64 ``[E]``, on the host.
        sizes: the same, on the device.
        of_row: the group of each row, int64 ``[R]``.
        ends: the end of each group's rows, int32 ``[E]``.
    """

    on_host: Tensor
    sizes: Tensor
    of_row: Tensor
    ends: Tensor
    _padded: dict[int, Padded] = field(default_factory=dict)
    _blocks: dict[int, "Groups"] = field(default_factory=dict)

    @staticmethod
    def of(sizes: Tensor, on_host: Tensor, rows: int) -> "Groups":
        """The groups of given sizes, whose sum is ``rows``."""
        return Groups(on_host, sizes, _group_of_each(sizes, rows), _ends(sizes))

    @cached_property
    def counts(self) -> list[int]:
        """The sizes as numbers, which operators read. A graph does not know them."""
        return self.on_host.tolist()

    def slices(self) -> Iterator[tuple[int, int, int]]:
        """Yield each group that has rows, their begin, and their number."""
        begins = accumulate(self.counts, initial=0)
        for group, (begin, count) in enumerate(zip(begins, self.counts, strict=False)):
            if count:
                yield group, begin, count

    def is_aligned(self, multiple: int) -> bool:
        """Whether all groups have multiples of so many rows."""
        return not any(count % multiple for count in self.counts)

    def padded(self, multiple: int) -> Padded:
        """Pad each group to a multiple of so many rows. The host does not wait."""
        if multiple not in self._padded:
            self._padded[multiple] = self._pad(multiple)
        return self._padded[multiple]

    def of_blocks(self, size: int) -> "Groups":
        """The groups of blocks of so many rows, of which the last one of a group may have fewer."""
        if size not in self._blocks:
            sizes, on_host = ((n + (size - 1)) // size for n in (self.sizes, self.on_host))
            self._blocks[size] = Groups.of(sizes, on_host, int(on_host.sum()))
        return self._blocks[size]

    def _pad(self, multiple: int) -> Padded:
        if self.is_aligned(multiple):
            return Padded(torch.arange(len(self.of_row), device=self.of_row.device), self.ends)
        more = self.sizes.neg() % multiple
        sizes = self.sizes + more
        group = _group_of_each(sizes, sum(n + -n % multiple for n in self.counts))
        before = more.cumsum(0) - more  # padding before a group
        source = torch.arange(len(group), device=group.device) - before[group]
        return Padded(source.masked_fill_(source >= self.ends[group], -1), _ends(sizes))


def _group_of_each(sizes: Tensor, rows: int) -> Tensor:
    groups = torch.arange(len(sizes), device=sizes.device)
    return torch.repeat_interleave(groups, sizes, output_size=rows)


def _ends(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0, dtype=torch.int32)


@custom_op(
    "transposed_groups(Tensor x, Tensor source) -> Tensor",
    fake=lambda x, source: x.new_empty((x.shape[1], len(source))),
)
def transposed_groups(x: Tensor, source: Tensor) -> Tensor:
    """Copy rows of float8 data ``[R, K]`` to the columns of ``[K, P]``.

    ``source``: the row of each column, int64 ``[P]``; a column of -1 becomes 0.
    """
    return _rows_of(x.view(torch.uint8), source).t().contiguous().view(x.dtype)


def has_grouped_gemm(
    x: Tensor, sizes: Sequence[int], out_dtype: torch.dtype, emulate: bool
) -> bool:
    """Return whether the device multiplies groups of float8 data in one kernel.

    Args:
        x: an operand.
        sizes: the sizes of a matrix of a group, apart from its rows.
    """
    return (
        not emulate
        and x.dtype == e4m3()
        and out_dtype is torch.bfloat16
        and device_has_grouped_gemm(x.device)
        and not any(size % ALIGNMENT for size in sizes)
        and len(x) > 0
    )


def grouped_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, groups: Groups
) -> Tensor:
    """Multiply the rows of each group by its matrix, where :func:`has_grouped_gemm`.

    Args:
        a: float8 ``[R, K]``.
        b: float8 ``[E, K, N]``. Unless its columns are contiguous, it is copied.
        scale_a: fp32 ``[R, 1]``.
        scale_b: fp32, expandable to ``[E, 1, N]``.

    Returns:
        bf16 ``[R, N]``.
    """
    experts, _, columns = b.shape
    of_columns = scale_b.expand(experts, 1, columns).reshape(experts, columns).contiguous()
    return _grouped_mm(a, row_major(b.mT).mT, scale_a.reshape(-1), of_columns, groups.ends)


def grouped_scaled_sums(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, groups: Groups
) -> Tensor:
    """Sum ``a[r] b[r]^T`` over the rows of each group, where :func:`has_grouped_gemm`.

    Args:
        a, b: float8 ``[N, P]`` and ``[K, P]``, of :func:`transposed_groups`, padded to 16 rows.
        scale_a, scale_b: fp32, expandable to ``[E, 1, N]`` and ``[E, 1, K]``.

    Returns:
        bf16 ``[E, N, K]``.
    """
    experts, ends = len(groups.counts), groups.padded(ALIGNMENT).ends
    each = ((scale_a, a), (scale_b, b))
    scales = [scale.expand(experts, 1, len(x)).reshape(-1) for scale, x in each]
    return without_empty(_grouped_mm(a, b.t(), *scales, ends), groups)


def without_empty(sums: Tensor, groups: Groups) -> Tensor:
    """Set the sums ``[E, N, K]`` of groups without rows to 0, in place."""
    for group, count in enumerate(groups.counts):
        if not count:
            sums[group].zero_()
    return sums


MX = 32  # the size of the blocks that devices multiply in groups


def has_grouped_mx_gemm(x: Tensor, exponents: Tensor, sizes: Sequence[int], block: int) -> bool:
    """Return whether a device with :func:`has_grouped_gemm` multiplies groups of MX blocks, too.

    Args:
        exponents: the scales of ``x``.
        sizes: the sizes of a matrix of a group, apart from its rows.
        block: the size of a block.
    """
    return (
        block == MX
        and exponents.dtype is torch.uint8
        and not any(size % MX for size in sizes)
        and device_kind(x.device) == "blackwell"
    )


def grouped_mx_mm(
    a: Tensor, b: Tensor, exponents_a: Tensor, exponents_b: Tensor, groups: Groups
) -> Tensor:
    """Multiply the rows of each group by its matrix, where :func:`has_grouped_mx_gemm`.

    Args:
        a: float8 ``[R, K]``.
        b: float8 ``[E, K, N]``. Unless its columns are contiguous, it is copied.
        exponents_a: uint8 ``[R, K / 32]``.
        exponents_b: uint8 ``[E, K / 32, N / 32]``, of blocks of 32 x 32.

    Returns:
        bf16 ``[R, N]``.
    """
    source = groups.padded(_TILE_ROWS).source
    of_a = in_tiles(_rows_of(exponents_a, source)).view(torch.float8_e8m0fnu)
    of_columns = exponents_b.mT.repeat_interleave(MX, dim=1)
    rows = padded(of_columns, (0, 0, 0, -of_columns.shape[1] % _TILE_ROWS)).flatten(0, 1)
    of_a, of_b = of_a.view(len(source), -1), in_tiles(rows).view(torch.float8_e8m0fnu)
    return _grouped_mm(a, row_major(b.mT).mT, of_a, of_b.view(len(b), -1), groups.ends)


def grouped_mx_sums(
    a: Tensor, b: Tensor, exponents_a: Tensor, exponents_b: Tensor, groups: Groups
) -> Tensor:
    """Sum ``a[r] b[r]^T`` over the rows of each group, where :func:`has_grouped_mx_gemm`.

    Args:
        a, b: float8 ``[N, P]`` and ``[K, P]``, contiguous; groups are padded to 32 rows.
        exponents_a, exponents_b: uint8 ``[P / 32, N]`` and ``[P / 32, K]``.

    Returns:
        bf16 ``[E, N, K]``.
    """
    blocks = groups.of_blocks(MX)
    scales = [_tiles_of_groups(each, blocks) for each in (exponents_a, exponents_b)]
    return without_empty(_grouped_mm(a, b.t(), *scales, groups.padded(MX).ends), groups)


_TILE_ROWS, _TILE_COLUMNS = 128, 4


def _rows_of(x: Tensor, source: Tensor) -> Tensor:
    """Copy rows to places; a place of -1 becomes 0."""
    return x.index_select(0, source.clamp(min=0)).masked_fill_((source < 0).unsqueeze(1), 0)


def _tiles_of_groups(exponents: Tensor, blocks: Groups) -> Tensor:
    """Exponents ``[P / 32, N]`` in tiles of ``[N, P / 32]``, those of one group after the other."""
    source, columns = blocks.padded(_TILE_COLUMNS).source, blocks.of_blocks(_TILE_COLUMNS)
    tiles = in_tiles(_rows_of(exponents, source).t())
    tiles = tiles.view(-1, len(columns.of_row), _TILE_ROWS * _TILE_COLUMNS)
    # The tiles of a group are rows of as many tiles as the group has.
    rows, per_row = len(tiles), columns.sizes[columns.of_row]
    column = torch.arange(len(columns.of_row), device=per_row.device)
    place = column + (columns.ends - columns.sizes)[columns.of_row] * (rows - 1)
    places = place + torch.arange(rows, device=per_row.device).unsqueeze(1) * per_row
    found = torch.empty_like(tiles).flatten(0, 1)
    found.index_copy_(0, places.flatten(), tiles.flatten(0, 1))
    return found.view(torch.float8_e8m0fnu).view(rows * _TILE_ROWS, -1)
