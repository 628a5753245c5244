"""Recipes: the scaling scheme of each operand in each GEMM, and the source of its statistics."""

from collections.abc import Collection
from typing import Literal

import torch

from fp8_dist.kernels.gemm import takes_transposed
from fp8_dist.scaling import CastPlan, Level, Scheme

Operand = Literal["input", "weight", "grad_output"]
Gemm = Literal["output", "grad_input", "grad_weight"]

# The left and the right operand of each GEMM. Each operand feeds two GEMMs.
GEMM_OPERANDS: dict[Gemm, tuple[Operand, Operand]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}


def is_second(operand: Operand, gemm: Gemm) -> bool:
    """Return whether ``gemm`` is the second GEMM of ``operand``, which contracts its rows."""
    return gemm == "grad_weight" or (operand, gemm) == ("weight", "grad_input")


class Recipe:
    """The schemes of all operands, resolved from a :class:`fp8_dist.Float8LinearConfig`.

    Args:
        uses: the scheme of each operand in each of its two GEMMs, or ``None`` for high precision.
        delayed: the operands with DELAYED scaling, whose statistic is computed from the amaxes of
            earlier steps. They have one scale per tensor.
        folds: whether the scales that run along a contraction are folded into grad_output
            (:mod:`fp8_dist.linear.rowwise_folded`).
        emulate: whether GEMMs are emulated. Emulated GEMMs need no transposed copies.

    Attributes:
        uses: as given.
        delayed: the schemes of the operands with DELAYED scaling.
        schemes: the distinct schemes of each operand, in the order of its GEMMs.
        casts: for each operand, the casts that observers see. Each maps the GEMMs that take the
            float8 copy to its scheme.
        gather_scheme: for each operand, the one scheme that serves both of its GEMMs and can be
            gathered. ``None`` if the operand is gathered in high precision.

    Raises:
        ValueError: the schemes do not fit together.
    """

    def __init__(
        self,
        uses: dict[Operand, dict[Gemm, Scheme | None]],
        delayed: Collection[Operand],
        folds: bool,
        emulate: bool,
    ) -> None:
        self.uses, self.folds, self._emulate = uses, folds, emulate
        self.schemes = {
            operand: tuple(dict.fromkeys(scheme for scheme in by_gemm.values() if scheme))
            for operand, by_gemm in uses.items()
        }
        self._check_operands()
        self.casts = {operand: self._casts_of(operand) for operand in uses}
        self.delayed = {operand: self.schemes[operand][0] for operand in delayed}
        self._check_gemms()
        if folds:
            self._check_folding()
        self.gather_scheme = {operand: self._gather_scheme(operand) for operand in uses}
        self._plans = {
            (operand, gemms, transposes): self._plan_of(operand, gemms, transposes)
            for operand, by_gemm in uses.items()
            for gemms in (tuple(by_gemm), *[(gemm,) for gemm in by_gemm])
            for transposes in (False, True)
        }

    def plan(self, operand: Operand, gemms: tuple[Gemm, ...], device: torch.device) -> CastPlan:
        """The float8 copies of ``operand`` for both of its GEMMs, or for one of them."""
        return self._plans[operand, gemms, not self._emulate and takes_transposed(device)]

    def _plan_of(self, operand: Operand, gemms: tuple[Gemm, ...], transposes: bool) -> CastPlan:
        by_gemm: list[tuple[Scheme, bool] | None] = []  # the scheme, and whether it is transposed
        for gemm in gemms:
            scheme, transposed = self.uses[operand][gemm], transposes and is_second(operand, gemm)
            if scheme is not None:
                transposed &= scheme.needs_alignment and not scheme.is_recast_for_rows
            by_gemm.append(None if scheme is None else (scheme, transposed))
        copies = list(dict.fromkeys(filter(None, by_gemm)))
        schemes = tuple(dict.fromkeys(scheme for scheme, _ in copies))
        of = tuple(schemes.index(scheme) for scheme, _ in copies)
        places = tuple(copy and copies.index(copy) for copy in by_gemm)
        return CastPlan(schemes, of, tuple(transposed for _, transposed in copies), places=places)

    def _casts_of(self, operand: Operand) -> dict[tuple[Gemm, ...], Scheme]:
        casts: dict[Scheme, tuple[Gemm, ...]] = {}
        for gemm, scheme in self.uses[operand].items():
            if scheme and self.folds and gemm == "grad_weight" and operand == "grad_output":
                # This cast is by columns, after the scales of the input are folded in.
                scheme = scheme.for_row_contraction
            if scheme:
                casts[scheme] = (*casts.get(scheme, ()), gemm)
        return {gemms: scheme for scheme, gemms in casts.items()}

    def _gather_scheme(self, operand: Operand) -> Scheme | None:
        first, second = self.uses[operand].values()
        return first if first and first == second and first.can_gather else None

    def _check_operands(self) -> None:
        for operand, schemes in self.schemes.items():
            dtypes = {scheme.dtype for scheme in schemes}
            if len(dtypes) > 1:
                raise ValueError(
                    f"Float8LinearConfig: {operand} is cast to {sorted(map(str, dtypes))} in its "
                    "two GEMMs; both casts need the same target_dtype"
                )
            in_blocks = any(level.has_blocks for scheme in schemes for level in scheme.levels)
            if len(schemes) > 1 and in_blocks and schemes[1] != schemes[0].for_row_contraction:
                covers = " and one per ".join(scheme.covers for scheme in schemes)
                raise ValueError(
                    f"Float8LinearConfig: {operand} has one scale per {covers} in its two GEMMs; "
                    "one copy with scales of blocks must serve both, or leave one of them DISABLED"
                )
            for gemm, scheme in self.uses[operand].items():
                if scheme and (why := scheme.unfit_for(operand, is_second(operand, gemm))):
                    raise ValueError(f"Float8LinearConfig: {why}")

    def _check_gemms(self) -> None:
        for gemm, operands in GEMM_OPERANDS.items():
            left, right = (self.uses[operand][gemm] for operand in operands)
            if (left is None) != (right is None):
                off, on = operands if left is None else operands[::-1]
                raise ValueError(
                    f"Float8LinearConfig: the GEMM of {gemm} multiplies {operands[0]} by "
                    f"{operands[1]}, and {off} is DISABLED while {on} is not; disable both or "
                    "neither"
                )
            if left and right and (why := left.unfit_beside(right)):
                raise ValueError(
                    f"Float8LinearConfig: the GEMM of {gemm} multiplies {operands[0]} (one scale "
                    f"per {left.covers}) by {operands[1]} (one per {right.covers}), but {why}; use "
                    "one scaling_granularity for both, such as ScalingGranularity.BLOCKWISE, or "
                    "leave both DISABLED"
                )

    def _check_folding(self) -> None:
        for operand, schemes in self.schemes.items():
            rows = all(scheme.levels == (Level(1, None),) for scheme in schemes)
            if not rows or operand in self.delayed:
                raise ValueError(
                    f"Float8LinearConfig: fold_row_scales=True needs one scale per row, and "
                    f"{operand} has another cast; use ScalingGranularity.AXISWISE, "
                    "ScalingType.DYNAMIC (or DISABLED) in all of its GEMMs"
                )
