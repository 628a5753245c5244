"""The scheme of block scales: powers of two, stored as one-byte exponents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fp8_dist.device import fuses_casts
from fp8_dist.kernels import (
    GemmOptions,
    block_exponents,
    block_exponents_of_each,
    block_scaled_mm,
    cast_blocks,
    exponents_of_groups,
    powers_of_2,
    quantize_block_copies,
    quantize_blocks_of_each,
    reblock,
    reblock_groups,
    scaled_by,
    takes_transposed,
)
from fp8_dist.mesh import (
    Layout,
    all_reduce_max,
    global_offset,
    groups_over,
    narrowed,
    sharded_dim,
)
from fp8_dist.scaling.level import Level, Start
from fp8_dist.scaling.scheme import (
    Quantized,
    Scales,
    Scheme,
    Statistics,
)
from fp8_dist.torch_internals import cached_but_in_graphs

# How messages show the rule of the exponents, after the size of a block.
_RULES = {None: "", "ceil": " (MX)", "floor": " (MX, floor)"}


@dataclass(frozen=True, eq=False)
class Blocks(Scheme):
    """One exponent per block of ``rows x columns`` values (:mod:`fp8_dist.kernels.blocks`).

    Blocks of one row lie along the contraction of an operand's first GEMM, and whole rows can be
    redistributed. For the GEMM that contracts the rows, :meth:`for_rows` casts this copy again in
    blocks of one column. A copy in square blocks serves both GEMMs.

    Exponents are statistics as well as scales. They grow with the amax, so the exponent of a block
    is the largest exponent of its parts.

    Attributes:
        rows, columns: the size of a block.
        rule: the rule of the exponents, "ceil", "floor" or None
            (:attr:`fp8_dist.CastConfig.scale_rule`).
    """

    family: ClassVar[str] = "blocks"
    needs_alignment: ClassVar[bool] = True
    can_gather: ClassVar[bool] = True

    rows: int = 1
    columns: int = 128
    rule: str | None = None

    def make_levels(self) -> tuple[Level, ...]:
        return (Level(self.rows, self.columns, 1, torch.uint8, torch.uint8),)

    @property
    def covers(self) -> str:
        return f"block of {self.rows} x {self.columns}{_RULES[self.rule]}"

    def turned(self) -> "Blocks":
        return replace(self, rows=self.columns, columns=self.rows)

    @property
    def is_recast_for_rows(self) -> bool:
        return self.rows == 1

    def dequantize(self, qdata: Tensor, scales: Scales, start: Start = (0, 0)) -> Tensor:
        return scaled_by(qdata.to(torch.float32), powers_of_2(scales[0]), self._blocks(start))

    def unfit_for(self, operand: str, second: bool) -> str | None:
        wanted = "a square" if operand == "weight" else "one row"
        if self.rows == (self.columns if operand == "weight" else 1):
            return None
        return (
            f"{operand} has blocks of {self.rows} x {self.columns}, but one copy must serve both "
            f"of its GEMMs; its block_size must be {wanted}"
        )

    def measure(self, x: Tensor, start: Start = (0, 0)) -> Statistics:
        return (block_exponents(x, self.dtype, self._blocks(start), self.rule),)

    def measure_each(self, xs: Sequence[Tensor], starts: Sequence[Start]) -> list[Statistics]:
        blocks = [number for start in starts for number in self._blocks(start)]
        shapes = [self.levels[0].shape(x.shape, at) for x, at in zip(xs, starts, strict=True)]
        flat = block_exponents_of_each(xs[0], list(xs[1:]), self.dtype, blocks, self.rule)
        parts = flat.split([math.prod(shape) for shape in shapes])
        return [(part.view(shape),) for part, shape in zip(parts, shapes, strict=True)]

    def scales_from(self, statistics: Statistics) -> Scales:
        return statistics

    def cast(
        self,
        x: Tensor,
        statistics: Statistics | None,
        start: Start,
        transposed: Sequence[bool],
        fits: bool = False,
    ) -> tuple[Statistics, Scales, list[Tensor]]:
        blocks = self._blocks(start)
        if statistics is None:
            exponents, *data = cast_blocks(x, self.dtype, blocks, self.rule, transposed)
            return (exponents,), (exponents,), data
        data = quantize_block_copies(x, statistics[0], self.dtype, blocks, transposed)
        return statistics, statistics, data

    def fuses(self, x: Tensor) -> bool:
        return fuses_casts(x)

    def cast_each(
        self, xs: Sequence[Tensor], statistics: Sequence[Statistics], starts: Sequence[Start]
    ) -> list[tuple[Scales, Tensor]]:
        blocks = [number for start in starts for number in self._blocks(start)]
        exponents = torch.cat([each.reshape(-1) for (each,) in statistics])
        flat = quantize_blocks_of_each(xs[0], list(xs[1:]), exponents, self.dtype, blocks)
        data = flat.split([x.numel() for x in xs])
        each = zip(xs, statistics, data, strict=True)
        return [(known, qdata.view(x.shape)) for x, known, qdata in each]

    def multiply(
        self, left: Quantized, right: Quantized, out_dtype: torch.dtype, options: GemmOptions
    ) -> Tensor:
        (a,), (b,), of = left.scales, right.scales, right.scheme
        assert isinstance(of, Blocks)
        blocks = self._blocks(left.start), of._blocks(right.start)
        return block_scaled_mm(left.qdata, right.qdata, a, b, *blocks, out_dtype, options[2])

    def for_rows(self, operand: Quantized, layout: Layout | None) -> Quantized:
        """Cast the float8 copy of an operand again, in blocks of one column.

        A new block spans several tokens. Their rows may be on several ranks, and need not be
        adjacent.

        Collectives: for each group over the axes that shard the operand's rows, an all-reduce (MAX)
        of 1 byte per new block of the global operand.
        """
        if not self.is_recast_for_rows:
            return operand
        matrix, (exponents,) = as_matrix(operand).qdata, as_matrix(operand).scales
        blocks, rule = self._blocks(operand.start), self.rule and "ceil"
        axes = () if layout is None else _axes_of_tokens(layout)
        if layout is None or not axes:
            transposed = takes_transposed(matrix.device)
            data, found = reblock(matrix, exponents, blocks, self.columns, rule, transposed)
            scheme = _cached_blocks(self.dtype, self.columns, 1, self.rule)
            return Quantized(data.t() if transposed else data, (found,), scheme)
        leading, here = layout.shape[:-1], operand.qdata.shape[:-1]
        tokens = torch.arange(math.prod(leading), device=matrix.device).view(leading)
        tokens = narrowed(tokens, global_offset(layout)[:-1], here).reshape(-1)
        group = tokens.div(self.columns, rounding_mode="floor")
        count = -(-math.prod(leading) // self.columns)
        found = exponents_of_groups(matrix, exponents, blocks, group, count, rule)
        found = all_reduce_max(found, groups_over(layout.mesh, axes))
        data, each = reblock_groups(matrix, exponents, blocks, group, found)
        return Quantized(data, (each,), _cached_blocks(self.dtype, 1, 1, self.rule))

    def _blocks(self, start: Start) -> list[int]:
        """The description of blocks for kernels: rows, columns, first row and first column."""
        return [self.rows, self.columns, start[0] % self.rows, start[1] % self.columns]


def as_matrix(operand: Quantized) -> Quantized:
    """Reshape an operand ``[..., K]`` to a matrix ``[M, K]``."""
    qdata = operand.qdata
    if qdata.ndim == 2:
        return operand
    scales = []
    for level, scale in zip(operand.scheme.levels, operand.scales, strict=True):
        if not level.is_scalar:
            rows = 1 if level.leading is None else math.prod(scale.shape[:-1])
            scale = scale.reshape(rows, scale.shape[-1])
        scales.append(scale)
    data = qdata.reshape(math.prod(qdata.shape[:-1]), qdata.shape[-1])
    return operand._replace(qdata=data, scales=tuple(scales))


def turned(operand: Quantized) -> Quantized:
    """Transpose a matrix, as a view."""
    scheme = _turned(operand.scheme)
    scales = tuple([scale.t() if scale.ndim else scale for scale in operand.scales])
    return Quantized(operand.qdata.t(), scales, scheme, operand.start[::-1], operand.is_cut)


# Making a scheme takes 10 us.
_cached_blocks = cached_but_in_graphs(Blocks)


@cached_but_in_graphs
def _turned(scheme: Scheme) -> Scheme:
    found = scheme.turned()
    assert found is not None, f"{scheme} can't be transposed"
    return found


def _axes_of_tokens(layout: Layout) -> tuple[int, ...]:
    ndim = len(layout.shape)
    dims = [sharded_dim(p, ndim) for p in layout.placements]
    return tuple(
        axis
        for axis, dim in enumerate(dims)
        if dim is not None and dim != ndim - 1 and layout.mesh.size(axis) > 1
    )
