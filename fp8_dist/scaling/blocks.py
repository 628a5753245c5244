"""The schemes of block scales: one-byte exponents, also for values of four bits, or fp32 scales."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fp8_dist import mesh
from fp8_dist.device import fuses_casts
from fp8_dist.kernels import blocks as kernels
from fp8_dist.kernels.e2m1 import E2M1_X2, pack_e2m1, unpack_e2m1
from fp8_dist.kernels.gemm import GemmOptions, block_scaled_mm, takes_transposed
from fp8_dist.kernels.quantization import transposed_copy
from fp8_dist.mesh import Layout
from fp8_dist.scaling.level import Level, Start
from fp8_dist.scaling.scheme import Quantized, Scales, Scheme, Statistics
from fp8_dist.torch_internals import cached_but_in_graphs

# Float8 data ``[M, K]``, its scales, and the description of their blocks for kernels.
_InBlocks = tuple[Tensor, Tensor, list[int]]

# How messages show the rule of the exponents, after the size of a block.
_RULES = {None: "", "ceil": " (MX)", "floor": " (MX, floor)"}


@dataclass(frozen=True, eq=False)
class BlockScheme(Scheme):
    """Base class of the schemes with one scale per block of ``rows x columns`` values.

    Blocks of one row lie along the dim that an operand's first GEMM contracts, and whole rows can
    be redistributed. For the GEMM that contracts the rows, :meth:`for_rows` casts the float8 copy
    again, in blocks of one column. A copy in square blocks serves both GEMMs.

    Attributes:
        rows, columns: the size of a block.
        source: what is cast: the tensor itself ("master"), or the tensor rounded to bf16 ("bf16").
    """

    needs_alignment: ClassVar[bool] = True
    can_gather: ClassVar[bool] = True

    rows: int = 1
    columns: int = 128
    source: str = field(default="master", kw_only=True)

    def transposed(self) -> "BlockScheme":
        return replace(self, rows=self.columns, columns=self.rows)

    @property
    def is_recast_for_rows(self) -> bool:
        return self.rows == 1

    def dequantize(self, qdata: Tensor, scales: Scales, start: Start = (0, 0)) -> Tensor:
        values, factors = qdata.to(torch.float32), kernels.fp32_scales(scales[0])
        return kernels.scaled_by(values, factors, self._blocks(start))

    def dequantize_to(self, operand: Quantized, dtype: torch.dtype) -> Tensor:
        if dtype is not torch.bfloat16 or not self.has_exponents:
            return super().dequantize_to(operand, dtype)
        # A product with a power of two is exact in fp32, and so is rounded once in bf16, too.
        x, (scales,) = operand.qdata, operand.scales
        blocks = self._blocks(operand.start)
        a, b = x, scales
        if x.ndim > 2 and not (x.shape[-2] % self.rows or blocks[2]):
            # Matrices of whole blocks can be flattened to one matrix, which kernels take.
            a, b = x.flatten(0, -2), scales.flatten(0, -2)
        return kernels.dequantize_blocks(a, b, blocks, dtype).view(x.shape)

    def unfit_for(self, operand: str, contracts_rows: bool) -> str | None:
        wanted = "a square" if operand == "weight" else "one row"
        if self.rows == (self.columns if operand == "weight" else 1):
            return None
        return (
            f"{operand} has blocks of {self.rows} x {self.columns}, but one copy must serve both "
            f"of its GEMMs; its block_size must be {wanted}"
        )

    def unfit_beside(self, other: Scheme) -> str | None:
        if isinstance(other, BlockScheme) and other.is_storage and other.columns != self.columns:
            return f"blocks of a row must have equal sizes, {self.columns} or {other.columns}"
        return None if isinstance(other, BlockScheme) else super().unfit_beside(other)

    def multiply(
        self, left: Quantized, right: Quantized, out_dtype: torch.dtype, options: GemmOptions
    ) -> Tensor:
        (a,), (b,), of = left.scales, right.scales, right.scheme
        assert isinstance(of, BlockScheme)
        if a.dtype is not b.dtype:
            a, b = kernels.fp32_scales(a), kernels.fp32_scales(b)
        blocks = self._blocks(left.start), of._blocks(right.start)
        return block_scaled_mm(left.qdata, right.qdata, a, b, *blocks, out_dtype, options[2])

    def for_rows(self, operand: Quantized, layout: Layout | None) -> Quantized:
        """Cast the float8 copy of an operand again, in blocks of one column.

        A new block spans several tokens, whose rows may be on several ranks, and need not be
        adjacent there.

        Collectives: for each group over the axes that shard the operand's rows, an all-reduce (MAX)
        of 1 byte per new block of the global operand, 4 bytes for fp32 scales.
        """
        if not self.is_recast_for_rows:
            return operand
        matrix, (scales,), *_ = matrix_operand(operand)
        known = matrix, scales, self._blocks(operand.start)
        axes: list[int] = []  # that shard the rows
        if layout is not None:
            dims = [mesh.sharded_dim(p, operand.qdata.ndim) for p in layout.placements]
            axes = [i for i in layout.sharded_axes() if dims[i] != operand.qdata.ndim - 1]
        if layout is None or not axes:
            transposed = takes_transposed(matrix.device)
            data, new_scales = self._reblocked(known, transposed)
            scheme = _resized(self, self.columns, 1)
            return Quantized(data.t() if transposed else data, (new_scales,), scheme)
        leading, here = layout.shape[:-1], operand.qdata.shape[:-1]
        tokens = torch.arange(math.prod(leading), device=matrix.device).view(leading)
        tokens = mesh.narrowed(tokens, layout.offset()[:-1], here).reshape(-1)
        group = tokens.div(self.columns, rounding_mode="floor")
        count = -(-math.prod(leading) // self.columns)
        new, values = _resized(self, 1, 1), kernels.dequantize_blocks(*known, torch.float32)
        new_scales = new.scales_of_amaxes(kernels.amaxes_of_groups(values, group, count))
        new_scales = mesh.all_reduce_max(new_scales, mesh.groups_over(layout.mesh, axes))
        row_scales = (new_scales.index_select(0, group),)
        return Quantized(new.quantize(values, row_scales, (0, 0)), row_scales, new)

    def scales_of_amaxes(self, amaxes: Tensor) -> Tensor:
        """The scales of blocks from a matrix of amaxes; they must not decrease with the amax."""
        return self.scales_from((amaxes,))[0]

    def _reblocked(self, known: _InBlocks, transposed: bool) -> tuple[Tensor, Tensor]:
        """Cast float8 data ``[M, K]`` to blocks of one column; the data and the scales."""
        new = _resized(self, self.columns, 1)
        values = kernels.dequantize_blocks(*known, torch.float32)
        scales = new.scales_from(new.measure(values))
        data = new.quantize(values, scales, (0, 0))
        return transposed_copy(data, self.columns) if transposed else data, scales[0]

    def _blocks(self, start: Start) -> list[int]:
        """The description of blocks for kernels: rows, columns, first row and first column."""
        return [self.rows, self.columns, start[0] % self.rows, start[1] % self.columns]

    def _taken(self, x: Tensor) -> Tensor:
        """The tensor that is cast instead of ``x``."""
        return x.to(torch.bfloat16) if self.source == "bf16" else x


@dataclass(frozen=True, eq=False)
class Blocks(BlockScheme):
    """One exponent per block (:mod:`fp8_dist.kernels.blocks`).

    Exponents are statistics as well as scales. They grow with the amax, so the exponent of a block
    is the largest exponent of its parts.

    Attributes:
        rule: the rule of the exponents, "ceil", "floor" or None
            (:attr:`fp8_dist.CastConfig.scale_rule`).
    """

    family: ClassVar[str] = "blocks"

    rule: str | None = None

    def make_levels(self) -> tuple[Level, ...]:
        return (Level(self.rows, self.columns, 1, torch.uint8, torch.uint8),)

    @property
    def covers(self) -> str:
        return f"block of {self.rows} x {self.columns}{_RULES[self.rule]}"

    def measure(self, x: Tensor, start: Start = (0, 0)) -> Statistics:
        blocks = self._blocks(start)
        return (kernels.block_exponents(self._taken(x), self._values, blocks, self.rule),)

    def scales_from(self, statistics: Statistics) -> Scales:
        return statistics

    def cast(
        self,
        x: Tensor,
        statistics: Statistics | None,
        start: Start,
        transposed: Sequence[bool],
        saturate: bool = True,
    ) -> tuple[Statistics, Scales, list[Tensor]]:
        x, blocks = self._taken(x), self._blocks(start)
        if statistics is None:
            exponents, *data = kernels.cast_blocks(x, self._values, blocks, self.rule, transposed)
            return (exponents,), (exponents,), data
        data = kernels.quantize_block_copies(x, statistics[0], self._values, blocks, transposed)
        return statistics, statistics, data

    def measure_each(self, xs: Sequence[Tensor], starts: Sequence[Start]) -> list[Statistics]:
        if not self.casts_each or len(xs) == 1 or any(map(any, starts)):
            return super().measure_each(xs, starts)
        return self.parts_of(self.measure_flat(xs), xs)

    def measure_flat(self, xs: Sequence[Tensor]) -> Tensor:
        how = None, self._values, self._blocks((0, 0))
        return kernels.cast_tensors_in_blocks(xs[0], list(xs[1:]), *how, rule=self.rule)

    @property
    def casts_each(self) -> bool:
        return self.source == "master"  # a table would have the addresses of copies

    def cast_each(
        self, xs: Sequence[Tensor], known: Tensor, sizes: Sequence[int], packed: bool
    ) -> tuple[Tensor, Tensor]:
        how = known, self._values, self._blocks((0, 0))
        return kernels.cast_tensors_in_blocks(xs[0], list(xs[1:]), *how, packed=packed), known

    def quantize(self, x: Tensor, scales: Scales, start: Start) -> Tensor:
        _, _, (data,) = self.cast(x, scales, start, [False])
        return data

    def fuses(self, x: Tensor) -> bool:
        return fuses_casts(x)

    def _reblocked(self, known: _InBlocks, transposed: bool) -> tuple[Tensor, Tensor]:
        return kernels.reblock(*known, self.columns, self._new_rule, transposed)

    def scales_of_amaxes(self, amaxes: Tensor) -> Tensor:
        return kernels.block_exponents(amaxes, self.dtype, [1, 1, 0, 0], self._new_rule)

    @property
    def _values(self) -> torch.dtype:
        """The dtype to whose values the data is rounded."""
        return self.packed_dtype or self.dtype

    @property
    def _new_rule(self) -> str | None:
        """The rule of the exponents of :meth:`for_rows`, which must not saturate again."""
        return self.rule and "ceil"


@dataclass(frozen=True, eq=False)
class Mxfp4(Blocks):
    """Values of E2M1, with one exponent per block (:mod:`fp8_dist.kernels.e2m1`).

    The data is e4m3, which can represent all of these values, so GEMMs are as in :class:`Blocks`.

    Attributes:
        rule: the rule of the exponents, "ceil", "even" or "floor".
    """

    family: ClassVar[str] = "mxfp4"
    packed_dtype: ClassVar[torch.dtype | None] = E2M1_X2

    rows: int = 32
    columns: int = 32
    rule: str | None = "floor"

    @property
    def covers(self) -> str:
        return f"block of {self.rows} x {self.columns} (MXFP4, {self.rule})"

    @property
    def is_storage(self) -> bool:
        return self.rows != self.columns

    @property
    def largest(self) -> float:
        return 6.0

    @property
    def saturates_above(self) -> float:
        return 7.0

    def unfit_for(self, operand: str, contracts_rows: bool) -> str | None:
        if operand != "weight":
            return f"{operand} can't be cast to MXFP4, which is for weights; cast it to e4m3"
        fits = (self.rows, self.columns) == (1, 32) or self.rows == self.columns
        if fits and self.dtype is torch.float8_e4m3fn and not self.columns % 32:
            return None
        return (
            f"weight has format='mxfp4', target_dtype={self.dtype} and blocks of {self.rows} x "
            f"{self.columns}, but MXFP4 is multiplied as float8_e4m3fn (which AMD's gfx94x do not "
            "have), in squares of a multiple of 32; use block_size=(32, 32) or (128, 128), or "
            "(1, 32) with the recipe mxfp8"
        )

    def for_rows(self, operand: Quantized, layout: Layout | None) -> Quantized:
        return _in_e4m3(self).for_rows(operand, layout)  # blocks of one column are not packed

    def pack(self, qdata: Tensor) -> Tensor:
        return pack_e2m1(qdata).view(E2M1_X2)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        unpack_e2m1(packed, out)

    def cast_packed(self, x: Tensor, statistics: Statistics, start: Start) -> tuple[Scales, Tensor]:
        packed = kernels.pack_blocks(self._taken(x), statistics[0], self._blocks(start))
        return statistics, packed.view(E2M1_X2)


@dataclass(frozen=True, eq=False)
class Fp32Blocks(BlockScheme):
    """One fp32 scale per block (:mod:`fp8_dist.kernels.blocks`); statistics are amaxes.

    :meth:`for_rows` rounds values a second time, because the new scales are not powers of two times
    the old ones.
    """

    family: ClassVar[str] = "fp32_blocks"

    def make_levels(self) -> tuple[Level, ...]:
        return (Level(self.rows, self.columns),)

    @property
    def covers(self) -> str:
        return f"block of {self.rows} x {self.columns} (fp32)"

    def measure(self, x: Tensor, start: Start = (0, 0)) -> Statistics:
        return (kernels.block_amaxes(self._taken(x), self._blocks(start)),)

    def scales_from(self, statistics: Statistics) -> Scales:
        return (kernels.fp32_block_scales(statistics[0], self.dtype),)

    def quantize(self, x: Tensor, scales: Scales, start: Start) -> Tensor:
        x, (scale,) = self._taken(x), scales
        return kernels.quantize_by_scales(x, scale, self.dtype, self._blocks(start))


def matrix_operand(operand: Quantized) -> Quantized:
    """Reshape an operand ``[..., K]`` to a matrix ``[M, K]``."""
    qdata = operand.qdata
    is_matrix = qdata.ndim == 2
    for scale in operand.scales:  # those of a transposed copy have the dims of the tensor
        is_matrix = is_matrix and scale.ndim <= 2
    if is_matrix:
        return operand
    scales = []
    for level, scale in zip(operand.scheme.levels, operand.scales, strict=True):
        if not level.is_scalar:
            rows = 1 if level.leading is None else math.prod(scale.shape[:-1])
            scale = scale.reshape(rows, scale.shape[-1])
        scales.append(scale)
    data = qdata.reshape(math.prod(qdata.shape[:-1]), qdata.shape[-1])
    return operand._replace(qdata=data, scales=tuple(scales))


def transposed(operand: Quantized, scheme: Scheme | None = None) -> Quantized:
    """Transpose the matrices of an operand, as a view.

    ``scheme``: the scheme of the result; by default the transposed scheme of the operand.
    """
    scales: Scales = ()
    for scale in operand.scales:
        scales += (scale.mT if scale.ndim else scale,)
    return Quantized(
        operand.qdata.mT,
        scales,
        scheme or operand.scheme.transposed_scheme,
        operand.start[::-1],
        operand.splits_blocks,
    )


@cached_but_in_graphs
def _in_e4m3(scheme: Mxfp4) -> Blocks:
    return Blocks(scheme.dtype, scheme.rows, scheme.columns, "ceil")


# Making a scheme takes 10 us. Float8 data that is cast again is not rounded to bf16 first.
@cached_but_in_graphs
def _resized(scheme: BlockScheme, rows: int, columns: int) -> BlockScheme:
    return replace(scheme, rows=rows, columns=columns, source="master")
