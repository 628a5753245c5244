"""What one scale of an operand covers: one small class per granularity.

An N-D operand ``[..., K]`` is a matrix whose rows are along its last dim. Everything that depends
on what a scale covers is a method here. CONTRIBUTING.md says how to add a granularity.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch.distributed.tensor import Placement

from fp8_dist.mesh import sharded_dim


class Granularity:
    """What one scale covers. Stateless: a subclass has one instance, and is compared by it.

    Attributes:
        name: for messages ("one scale per row"), and in graphs.
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
        """What a scale covers in the operand's second GEMM; ``self`` if one copy serves both."""
        return self

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """A view of a tensor in which a scale covers whole dims: those of :meth:`covered_dims`."""
        return x

    def covered_dims(self, ndim: int) -> tuple[int, ...] | None:
        """The dims of the grouped view that one scale covers, with size 1; ``None``: all, 0-dim."""
        raise NotImplementedError

    def scale_shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of the scales of a tensor, which is that of its amaxes."""
        grouped = shape
        if self.is_grouped:
            grouped = self.grouped(torch.empty(tuple(shape), device="meta")).shape
        return self._per_dim(grouped, covered=1)

    def offset(self, offset: Sequence[int]) -> list[int]:
        """Where a shard's scales begin among those of the tensor, if it begins at ``offset``."""
        self._check_not_grouped()
        return self._per_dim(offset, covered=0)

    def amax_axes(self, placements: Sequence[Placement], ndim: int) -> tuple[int, ...]:
        """The mesh axes over which local amaxes are reduced: those that shard a covered dim."""
        self._check_not_grouped()
        covered = self.covered_dims(ndim)
        covered = tuple(range(ndim)) if covered is None else covered
        return tuple(i for i, p in enumerate(placements) if sharded_dim(p, ndim) in covered)

    def can_move(self, dims: Sequence[int], ndim: int) -> bool:
        """Whether float8 data can be redistributed, after its cast, from shards of these dims."""
        return not dims

    @property
    def scales_move(self) -> bool:
        """Whether scales are gathered with the data. (Otherwise all ranks have the same one.)"""
        return self.can_gather and self.covered_dims(2) is not None

    def to_rows(self, scale: torch.Tensor) -> torch.Tensor:
        """The scales as a Float8Tensor holds them: ``[..., C]``, the numbers of each row.

        They move with their rows. Only a granularity that groups dims needs another form.
        """
        return scale

    def from_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """What :meth:`to_rows` was given, of as many rows."""
        return rows

    def fixed_dims(self, ndim: int) -> tuple[int, ...]:
        """The dims of data along which the scale of a Float8Tensor does not follow it."""
        return (ndim - 1,) if self.is_grouped else self.covered_dims(ndim) or ()

    def gemm_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """The scale of an operand, as the matrix ``[M, K]``, in the shape that a GEMM takes.

        0-dim, ``[M, 1]`` or ``[1, K]``: a GEMM applies scales along the dims that its result keeps.
        ``[M, K]``: no float8 GEMM takes such scales; the product is computed in a wider type.
        """
        raise NotImplementedError

    @property
    def is_grouped(self) -> bool:
        """Whether a scale covers parts of dims: :meth:`grouped` is another view."""
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
        return granularity_named, (self.name,)  # also a copy is the one instance


_BY_NAME: dict[str, Granularity] = {}


def granularity_named(name: str) -> Granularity:
    """The granularity of this name."""
    if name.startswith(_PerSlice.PREFIX):
        return _per_slice(tuple(map(int, name.removeprefix(_PerSlice.PREFIX).split())))
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
    """Given dims, as ``cast_to_float8`` takes them, or as moving dims leaves those of a row."""

    PREFIX = "slice of dims "

    def __init__(self, dims: tuple[int, ...]) -> None:
        self.name = self.PREFIX + " ".join(map(str, dims))
        self._dims = dims

    def covered_dims(self, ndim: int) -> tuple[int, ...]:
        return self._dims


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
