"""Schemes with one fp32 scale per tensor, matrix, row, column, or slice of other dims."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fp8_dist.device import fuses_casts, rounds_to, short_name, stores_transposed
from fp8_dist.kernels import gemm, quantization
from fp8_dist.kernels.scale import amax, amax_of_tensors, amaxes, fusible_amax, scaling_from_amax
from fp8_dist.scaling.level import DimsLevel, Level, Start
from fp8_dist.scaling.scheme import CastPlan, Quantized, Scales, Scheme, Statistics
from fp8_dist.torch_internals import is_exporting, statically_known_true

_LEVELS = {
    "tensor": Level(None, None, None),
    "matrix": Level(None, None),
    "row": Level(1, None),
    "column": Level(None, 1, None),
}
_TRANSPOSED = {"row": "column", "column": "row"}
_IN_ONE_PASS = ("tensor", "row", "column")


@dataclass(frozen=True, eq=False)
class Dense(Scheme):
    """One fp32 scale per unit, computed from its amax as in :mod:`fp8_dist.kernels.scale`.

    Attributes:
        per: the unit that a scale covers: ``"tensor"``, ``"matrix"`` (the last two dims),
            ``"row"``, ``"column"``, or ``"slice"`` (the dims in ``dims``).
        power_of_2: round the quantization multiplier down to a power of two.
        dims: for ``"slice"``, the dims that a scale covers.
    """

    family: ClassVar[str] = "dense"
    needs_alignment: ClassVar[bool] = True

    _for_row_contraction: ClassVar["Dense"]  # set on each object

    per: str = "tensor"
    power_of_2: bool = False
    dims: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        column = replace(self, per="column") if self.per == "row" else self
        object.__setattr__(self, "_for_row_contraction", column)

    def dequantize_to(self, operand: Quantized, dtype: torch.dtype) -> Tensor:
        if dtype is not torch.bfloat16 or not self.power_of_2:
            return super().dequantize_to(operand, dtype)
        # A float8 value times a power of two is exact in bf16, too.
        (scale,) = operand.scales
        return operand.qdata.to(dtype) * scale.to(dtype)

    def make_levels(self) -> tuple[Level, ...]:
        if self.per == "slice":
            return (DimsLevel(1, 1, covered=self.dims),)
        if self.per not in _LEVELS:
            raise ValueError(f"Dense.per={self.per!r}: use one of {[*_LEVELS, 'slice']}")
        return (_LEVELS[self.per],)

    @property
    def can_gather(self) -> bool:  # type: ignore[override]
        return self.per in ("tensor", "row", "matrix")

    @property
    def has_exponents(self) -> bool:
        return self.power_of_2

    @property
    def covers(self) -> str:
        return f"slice of dims {' '.join(map(str, self.dims))}" if self.dims else self.per

    @property
    def for_row_contraction(self) -> "Dense":
        return self._for_row_contraction

    def transposed(self) -> "Dense | None":
        if self.per == "slice":
            return None
        return replace(self, per=_TRANSPOSED.get(self.per, self.per))

    def unfit_for(self, operand: str, contracts_rows: bool) -> str | None:
        if self.per == "column" and not contracts_rows:
            return (
                f"{operand} has one scale per column, but its first GEMM sums over these; use 'row'"
            )
        return super().unfit_for(operand, contracts_rows)

    def measure(self, x: Tensor, start: Start = (0, 0)) -> Statistics:
        return (amax(x, self.levels[0].covered_dims(x.ndim)),)

    def fusible_statistics(self, x: Tensor) -> Statistics | None:
        return (fusible_amax(x),) if self._is_fusible(x) else None

    def fusible_cast(
        self, x: Tensor, statistics: Statistics, transposed: Sequence[bool], saturate: bool
    ) -> tuple[Scales, list[Tensor]] | None:
        if self.power_of_2 or not self._is_fusible(x) or not rounds_to(self.dtype, x.device):
            return None  # logarithms and conversions in Inductor's kernels give other bits
        if True in transposed:
            rows = math.prod(x.shape[:-1])
            is_aligned = statically_known_true(rows % quantization.ALIGNMENT == 0)
            if not (is_aligned and stores_transposed(x.device)):
                return None
        (value,) = statistics
        how = self.dtype, transposed
        scale, *data = quantization.fusible_copies(x, value, *how, saturate=saturate)
        return (scale,), data

    def _is_fusible(self, x: Tensor) -> bool:
        if self.per != "tensor" or not fuses_casts(x) or is_exporting():
            return False  # an exported program may run without rows
        return x.ndim > 0 and statically_known_true(x.numel() > 0)

    def measure_each(self, xs: Sequence[Tensor], starts: Sequence[Start]) -> list[Statistics]:
        if not self.casts_each:
            return super().measure_each(xs, starts)
        return self.parts_of(self.measure_flat(xs), xs)

    def measure_flat(self, xs: Sequence[Tensor]) -> Tensor:
        return amax_of_tensors(xs[0], list(xs[1:]), self.per == "row")

    @property
    def casts_each(self) -> bool:
        return self.per in ("tensor", "row")

    def cast_each(
        self, xs: Sequence[Tensor], known: Tensor, sizes: Sequence[int], packed: bool
    ) -> tuple[Tensor, Tensor]:
        how = known, sizes, self.dtype, self.power_of_2, self.per == "row"
        return quantization.cast_tensors(xs[0], list(xs[1:]), *how)

    def scales_from(self, statistics: Statistics) -> Scales:
        return (scaling_from_amax(statistics[0], self.dtype, self.power_of_2)[1],)

    def cast(
        self,
        x: Tensor,
        statistics: Statistics | None,
        start: Start,
        transposed: Sequence[bool],
        saturate: bool = True,
    ) -> tuple[Statistics, Scales, list[Tensor]]:
        if statistics is None and self.per in ("tensor", "row"):
            fresh = self.dtype, self.power_of_2, transposed, self.per == "row"
            value, scale, *data = quantization.cast_fresh(x, *fresh)
            return (value,), (scale,), data
        saturate = saturate and statistics is not None
        (value,) = known = self.measure(x) if statistics is None else statistics
        how = self.dtype, self.power_of_2, [0] * len(transposed), transposed
        scale, *data = quantization.cast_copies(x, [value], *how, saturate=saturate)
        return known, (scale,), data

    def cast_and_measure(
        self, x: Tensor, statistics: Statistics, transposed: Sequence[bool]
    ) -> tuple[list[Scales], list[Tensor], Tensor]:
        """Cast with one given scale per tensor, above which values saturate, and measure ``x``.

        Returns:
            The scale, which is NaN if the amax of ``x`` is not finite; the data of each copy; and
            the amax.
        """
        how = self.dtype, self.power_of_2, transposed
        value, scale, *data = quantization.cast_and_measure(x, statistics[0], *how)
        return [(scale,)], data, value

    def fuses(self, x: Tensor) -> bool:
        return self.per == "row" and fuses_casts(x)

    def multiply(
        self, left: Quantized, right: Quantized, out_dtype: torch.dtype, options: gemm.GemmOptions
    ) -> Tensor:
        (a,), (b,) = left.scales, right.scales
        return gemm.scaled_mm(left.qdata, right.qdata, a, b, out_dtype, options)

    def fusible_product(
        self, left: Quantized, right: Quantized, out_dtype: torch.dtype, options: gemm.GemmOptions
    ) -> Tensor | None:
        (a,), (b,) = left.scales, right.scales
        return gemm.fusible_scaled_mm(left.qdata, right.qdata, a, b, out_dtype, options)


def measure_together(x: Tensor, schemes: Sequence[Scheme], start: Start) -> list[Statistics]:
    """:meth:`Scheme.measure` for several schemes, in one pass if one can serve all of them."""
    kinds = _in_one_pass(schemes) if len(schemes) > 1 else None
    if kinds is None:
        return [scheme.measure(x, start) for scheme in schemes]
    return [(value,) for value in amaxes(x, [kind.per for kind in kinds])]


def cast_in_one_pass(
    x: Tensor, plan: CastPlan, statistics: Sequence[Statistics], saturate: bool
) -> tuple[list[Scales], list[Tensor]] | None:
    """:meth:`Scheme.cast` to copies of several schemes, or ``None`` if one pass is not enough.

    Returns the scales of each scheme and the data of each copy.
    """
    kinds = _in_one_pass(plan.schemes)
    if kinds is None or len({(kind.dtype, kind.power_of_2) for kind in kinds}) > 1:
        return None
    values, how = [value for (value,) in statistics], (kinds[0].dtype, kinds[0].power_of_2)
    flat = quantization.cast_copies(x, values, *how, plan.of, plan.transposed, saturate=saturate)
    return [(scale,) for scale in flat[: len(kinds)]], flat[len(kinds) :]


def _in_one_pass(schemes: Sequence[Scheme]) -> list[Dense] | None:
    """The schemes, if one pass over a tensor can serve all of them; else None."""
    kinds = [s for s in schemes if isinstance(s, Dense) and s.per in _IN_ONE_PASS]
    return kinds if len(kinds) == len(schemes) else None


@dataclass(frozen=True, eq=False)
class Unscaled(Scheme):
    """High precision: GEMMs multiply the data, in ``dtype``, without scales.

    Layers whose weights alone are in few bits have it for all operands.
    """

    family: ClassVar[str] = "unscaled"

    dtype: torch.dtype = torch.bfloat16

    def make_levels(self) -> tuple[Level, ...]:
        return ()

    def measure(self, x: Tensor, start: Start = (0, 0)) -> Statistics:
        return ()

    def scales_from(self, statistics: Statistics) -> Scales:
        return ()

    @property
    def is_recast_for_rows(self) -> bool:
        return True  # no scales are folded, and no GEMM takes a transposed copy

    def transposed(self) -> "Unscaled":
        return self

    @property
    def covers(self) -> str:
        return f"nothing ({short_name(self.dtype)})"

    def quantize(self, x: Tensor, scales: Scales, start: Start) -> Tensor:
        return x.to(self.dtype).contiguous()

    def dequantize(self, qdata: Tensor, scales: Scales, start: Start = (0, 0)) -> Tensor:
        return qdata.to(torch.float32)

    def multiply(
        self, left: Quantized, right: Quantized, out_dtype: torch.dtype, options: gemm.GemmOptions
    ) -> Tensor:
        with torch.autocast(left.qdata.device.type, enabled=False):
            return torch.mm(left.qdata, right.qdata).to(out_dtype)


def covering(dims: tuple[int, ...], like: Scheme, ndim: int) -> Dense:
    """The dense scheme whose scales cover the given dims of a tensor of ``ndim`` dims."""
    power_of_2 = isinstance(like, Dense) and like.power_of_2
    for per in ("row", "column"):
        if _LEVELS[per].covered_dims(ndim) == dims:
            return Dense(like.dtype, per, power_of_2)
    return Dense(like.dtype, "slice", power_of_2, dims)
