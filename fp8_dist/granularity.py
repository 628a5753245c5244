"""Granularities of scales, one small class for each.

An N-D operand ``[..., K]`` is a matrix whose rows are along its last dim. Everything that depends
on the values that a scale covers is a method here. CONTRIBUTING.md explains how to add a
granularity.
"""

import re
from collections.abc import Sequence
from functools import cache

import torch
from torch.distributed.tensor import Placement

from fp8_dist.kernels import blocks_along, expanded, exponents_shape, powers_of_2
from fp8_dist.mesh import sharded_dim


class Granularity:
    """The values that one scale covers.

    Granularities are stateless and compared by identity: a subclass has one instance.

    Attributes:
        name: identifies the granularity in messages ("one scale per row") and in graphs.
        can_gather: float8 data can be gathered: one scale serves all, or whole rows move, each with
            its scales (see :meth:`to_rows`).
    """

    name: str
    can_gather: bool = False

    def __init__(self) -> None:
        if self.name in _BY_NAME:
            raise ValueError(f"there is a granularity called {self.name!r} already; use that one")
        _BY_NAME[self.name] = self

    @property
    def second_use(self) -> "Granularity":
        """Granularity in the operand's second GEMM; ``self`` if one copy serves both."""
        return self

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """A view of a tensor in which a scale covers whole dims, see :meth:`covered_dims`."""
        return x

    def covered_dims(self, ndim: int) -> tuple[int, ...] | None:
        """The dims of the grouped view that one scale covers; ``None``: all.

        Scales have size 1 along these dims, and are 0-dim if a scale covers all.
        """
        raise NotImplementedError

    def scale_shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of the scales of a tensor, and of its amaxes."""
        grouped = shape
        if self.is_grouped:
            grouped = self.grouped(torch.empty(tuple(shape), device="meta")).shape
        return self._per_dim(grouped, covered=1)

    def offset(self, offset: Sequence[int]) -> list[int]:
        """Offset of a shard's scales among those of the tensor, if the shard is at ``offset``."""
        self._check_not_grouped()
        return self._per_dim(offset, covered=0)

    def amax_axes(self, placements: Sequence[Placement], ndim: int) -> tuple[int, ...]:
        """The mesh axes over which local amaxes are reduced: those that shard a covered dim."""
        self._check_not_grouped()
        covered = self.covered_dims(ndim)
        covered = tuple(range(ndim)) if covered is None else covered
        return tuple(i for i, p in enumerate(placements) if sharded_dim(p, ndim) in covered)

    def can_move(self, dims: Sequence[int], ndim: int) -> bool:
        """Whether a float8 tensor that is sharded along these dims can be redistributed."""
        return not dims

    @property
    def scales_move(self) -> bool:
        """Whether scales are gathered with the data. Otherwise all ranks have the same scale."""
        return self.can_gather and self.covered_dims(2) is not None

    def to_rows(self, scale: torch.Tensor) -> torch.Tensor:
        """The scales in the form of a Float8Tensor: ``[..., C]``, the scales of each row.

        They move with their rows. Only a granularity that groups dims needs to convert them.
        """
        return scale

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`to_rows`, for any number of rows."""
        return rows

    def fixed_dims(self, ndim: int) -> tuple[int, ...]:
        """The dims along which the scale of a Float8Tensor can't be sliced like its data."""
        return (ndim - 1,) if self.is_grouped else self.covered_dims(ndim) or ()

    @property
    def blocks(self) -> tuple[int, int, int, int] | None:
        """The blocks of block scales, see :mod:`fp8_dist.kernels.blocks`; None for others."""
        return None

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of scales: fp32, or uint8 for blocks, which keep exponents."""
        return torch.float32 if self.blocks is None else torch.uint8

    def scale_values(self, scale: torch.Tensor) -> torch.Tensor:
        """The scales in fp32."""
        return scale

    def matrix_scale(self, scale: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The scale of a matrix of ``shape``, fp32, in a shape that broadcasts with it."""
        return self.gemm_scale(scale)

    @property
    def whole(self) -> "Granularity":
        """Granularity of the full tensor; it differs from ``self`` for a part (see :meth:`at`)."""
        return self

    def at(self, offset: Sequence[int]) -> "Granularity":
        """Granularity of the part of the tensor that begins at ``offset``."""
        return self

    def gemm_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """The scale of an operand, as a matrix ``[M, K]``, in the shape that a GEMM takes.

        The shape is 0-dim, ``[M, 1]`` or ``[1, K]``: a GEMM applies scales along the dims that its
        result keeps. It may be ``[M, K]``, which no float8 GEMM takes: the product is then computed
        in a wider type.
        """
        raise NotImplementedError

    @property
    def is_grouped(self) -> bool:
        """Whether a scale covers parts of dims, so that :meth:`grouped` returns another view."""
        return type(self).grouped is not Granularity.grouped

    def _per_dim(self, numbers: Sequence[int], covered: int) -> list[int]:
        dims = self.covered_dims(len(numbers))
        each = enumerate(numbers)
        return [] if dims is None else [covered if dim in dims else n for dim, n in each]

    def _check_not_grouped(self) -> None:
        if self.is_grouped:
            raise NotImplementedError(
                f"{type(self).__name__} overrides grouped, so it must override offset and amax_axes"
            )

    def __repr__(self) -> str:
        return f"<one scale per {self.name}>"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return granularity_named, (self.name,)  # a copy is the same instance


_BY_NAME: dict[str, Granularity] = {}
# A dict instead of a functools cache, about which dynamo warns.
_BLOCKS: dict[tuple[int, int, str | None, tuple[int, int], bool], "Blocks"] = {}
# The suffix of a name for each rule of the exponents of blocks.
_RULES = {None: "", "ceil": " (MX)", "floor": " (MX, floor)"}


def granularity_named(name: str) -> Granularity:
    """The granularity with this name."""
    if name.startswith(_PerSlice.PREFIX):
        return _per_slice(tuple(map(int, name.removeprefix(_PerSlice.PREFIX).split())))
    if name not in _BY_NAME and name.startswith(Blocks.PREFIX):
        return Blocks.parse(name)  # made in another process
    return _BY_NAME[name]


class _PerTensor(Granularity):
    name = "tensor"
    can_gather = True

    def covered_dims(self, ndim: int) -> None:
        return None

    def can_move(self, dims: Sequence[int], ndim: int) -> bool:
        return True

    def gemm_scale(self, scale: torch.Tensor) -> torch.Tensor:
        return scale


class _PerRow(Granularity):
    name = "row"
    can_gather = True

    @property
    def second_use(self) -> Granularity:
        return COLUMN

    def covered_dims(self, ndim: int) -> tuple[int, ...]:
        return (ndim - 1,)

    def can_move(self, dims: Sequence[int], ndim: int) -> bool:
        return ndim - 1 not in dims  # rows move whole

    def gemm_scale(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.reshape(-1, 1)


class _PerColumn(Granularity):
    name = "column"

    def covered_dims(self, ndim: int) -> tuple[int, ...]:
        return tuple(range(ndim - 1))

    def gemm_scale(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.reshape(1, -1)


class _PerSlice(Granularity):
    """One scale covers given dims: those of ``cast_to_float8``, or of rows after dims moved."""

    PREFIX = "slice of dims "

    def __init__(self, dims: tuple[int, ...]) -> None:
        self.name = self.PREFIX + " ".join(map(str, dims))
        self._dims = dims

    def covered_dims(self, ndim: int) -> tuple[int, ...]:
        return self._dims


class Blocks(Granularity):
    """Blocks of ``rows x columns`` values, whose scales are powers of two of one byte each.

    Blocks of one row run along the contraction of an operand's first GEMM, and whole rows can be
    redistributed. For the GEMM that contracts the rows, data is blocked again
    (:func:`fp8_dist.kernels.reblock`), so one copy serves both GEMMs. A copy in square blocks
    serves both as well.

    Attributes:
        rows, columns: the size of a block.
        rule: the rule of the exponents: "ceil", "floor" or None (see
            :mod:`fp8_dist.kernels.blocks`).
        start: offset of a part of a tensor in its first block, per dim.
        is_cut: ranks have parts of unequal size, or parts of one block, which can't be joined as
            float8. The same on all ranks.
    """

    PREFIX = "block of "
    can_gather = True

    def __init__(
        self,
        rows: int,
        columns: int,
        rule: str | None = None,
        start: tuple[int, int] = (0, 0),
        is_cut: bool = False,
    ) -> None:
        self.rows, self.columns, self.rule, self.start = rows, columns, rule, start
        self.is_cut = is_cut
        self.name = f"{self.PREFIX}{rows} x {columns}"
        self.name += _RULES[rule]
        self.name += f" from {start[0]}, {start[1]}" if any(start) else ""
        self.name += ", cut" if is_cut else ""

    @staticmethod
    def of(
        rows: int,
        columns: int,
        rule: str | None = None,
        start: tuple[int, int] = (0, 0),
        is_cut: bool = False,
    ) -> "Blocks":
        """The one instance with these attributes. A graph makes its own, which is not kept."""
        key = rows, columns, rule, start, is_cut
        if key in _BLOCKS:
            return _BLOCKS[key]
        made = Blocks(*key)
        if not torch.compiler.is_compiling():
            _BLOCKS[key] = _BY_NAME[made.name] = made
        return made

    @staticmethod
    def parse(name: str) -> "Blocks":
        """The granularity with this name."""
        rows, columns, *start = map(int, re.findall(r"\d+", name))
        at = (start[0], start[1]) if start else (0, 0)
        rule = next((rule for rule, shown in _RULES.items() if shown and shown in name), None)
        return Blocks.of(rows, columns, rule, at, name.endswith("cut"))

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        return (self.rows, self.columns, *self.start)

    @property
    def whole(self) -> Granularity:
        return Blocks.of(self.rows, self.columns, self.rule)

    @property
    def is_grouped(self) -> bool:
        return True

    @property
    def scales_move(self) -> bool:
        return True

    def at(self, offset: Sequence[int], is_cut: bool = False) -> "Blocks":
        row = offset[-2] % self.rows if self.rows > 1 else 0
        start = (self.start[0] + row) % self.rows, (self.start[1] + offset[-1]) % self.columns
        return Blocks.of(self.rows, self.columns, self.rule, start, is_cut or self.is_cut)

    def transposed(self) -> "Blocks":
        """Granularity of the transposed matrix."""
        return Blocks.of(self.columns, self.rows, self.rule, self.start[::-1], self.is_cut)

    def scale_shape(self, shape: Sequence[int]) -> list[int]:
        return exponents_shape(shape, self.blocks)

    def scale_values(self, scale: torch.Tensor) -> torch.Tensor:
        return powers_of_2(scale)

    def matrix_scale(self, scale: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        matrix = scale.reshape(exponents_shape(shape, self.blocks))
        return expanded(powers_of_2(matrix), shape, self.blocks)

    def offset(self, offset: Sequence[int]) -> list[int]:
        *others, row, column = offset
        return [*others, row // self.rows, column // self.columns]

    def amax_axes(self, placements: Sequence[Placement], ndim: int) -> tuple[int, ...]:
        """The mesh axes that may cut blocks. Whether they do depends on sizes."""
        dims = [ndim - 2] if self.rows > 1 else []
        dims += [ndim - 1] if self.columns > 1 else []
        return tuple(i for i, p in enumerate(placements) if sharded_dim(p, ndim) in dims)

    def can_move(self, dims: Sequence[int], ndim: int) -> bool:
        return self.rows == 1 and ndim - 1 not in dims  # rows move whole

    def fixed_dims(self, ndim: int) -> tuple[int, ...]:
        return (ndim - 1,) if self.rows == 1 else (ndim - 2, ndim - 1)

    def part_of_scales(
        self, scale: torch.Tensor, dim: int, start: int, length: int
    ) -> torch.Tensor:
        """Slice the scales along ``dim`` for a part of a tensor, which may cut blocks."""
        from_end = dim - scale.ndim
        block = {-1: self.columns, -2: self.rows}.get(from_end, 1)
        begin = start + {-1: self.start[1], -2: self.start[0]}.get(from_end, 0)
        count = blocks_along(length, block, begin % block)
        return scale.narrow(dim, begin // block if count else 0, count)


TENSOR = _PerTensor()
ROW = _PerRow()
COLUMN = _PerColumn()


def covering(dims: tuple[int, ...], ndim: int) -> Granularity:
    """The granularity whose scales cover the given dims of a tensor of ``ndim`` dims."""
    for known in (ROW, COLUMN):
        if known.covered_dims(ndim) == dims:
            return known
    return _per_slice(dims)


@cache
def _per_slice(dims: tuple[int, ...]) -> Granularity:
    return _PerSlice(dims)
