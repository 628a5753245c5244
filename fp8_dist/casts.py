"""What one operand is cast to: frozen configs of casts and GEMMs, and what they mean together."""

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fp8_dist.dtypes import FLOAT8_DTYPES, e4m3, e5m2, short_name

Operand = Literal["input", "weight", "grad_output"]
Gemm = Literal["output", "grad_input", "grad_weight"]

# The left and the right operand of each GEMM, and the operand whose second use it is.
GEMM_OPERANDS: dict[Gemm, tuple[Operand, Operand]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}


# What one scale covers, of an operand as a matrix ``[rows, columns]``.
Covers = Literal["tensor", "row", "column"]


class Cast(NamedTuple):
    """A cast of an operand as its GEMM takes it.

    Attributes:
        dtype: the float8 dtype.
        covers: what one scale covers. An N-D operand is the matrix ``[..., columns]``.
        delayed: the scale comes from the history.
    """

    dtype: torch.dtype
    covers: Covers = "tensor"
    delayed: bool = False


class ScalingType(enum.Enum):
    """Where the scale of a cast comes from."""

    DYNAMIC = "dynamic"
    """From the amax of the tensor itself, now."""
    DELAYED = "delayed"
    """From the tensor's amax history."""
    DISABLED = "disabled"
    """No cast: the operand stays in high precision."""

    def short_str(self) -> str:
        return {"dynamic": "dyn", "delayed": "del", "disabled": "dis"}[self.value]


class ScalingGranularity(enum.Enum):
    """What one scale covers."""

    TENSORWISE = "tensorwise"
    """The whole (global) tensor."""
    AXISWISE = "axiswise"
    """One row or column: size 1 along the reduced dim."""

    def short_str(self) -> str:
        return {"tensorwise": "ten", "axiswise": "axs"}[self.value]


def check_type(owner: object, field: str, *expected: type) -> None:
    """Raise TypeError unless a field of a config is an instance of one of the types."""
    value = getattr(owner, field)
    if not isinstance(value, expected):
        names = " or ".join(kind.__name__ for kind in expected)
        raise TypeError(f"{type(owner).__name__}.{field} must be a {names}, got {value!r}")


@dataclass(frozen=True)
class CastConfig:
    """How one operand is cast to float8.

    Attributes:
        scaling_type: where the scale comes from.
        scaling_granularity: what one scale covers.
        target_dtype: a float8 dtype; ``None`` means the operand's default (e4m3 for input and
            weight, e5m2 for grad_output).
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_type(self, "scaling_type", ScalingType)
        check_type(self, "scaling_granularity", ScalingGranularity)
        if self.target_dtype is not None and self.target_dtype not in FLOAT8_DTYPES:
            raise ValueError(
                f"CastConfig.target_dtype={self.target_dtype} is not a float8 dtype; use one of "
                f"{', '.join(map(str, FLOAT8_DTYPES))}, or None for the operand's default"
            )
        if (
            self.scaling_type is ScalingType.DELAYED
            and self.scaling_granularity is ScalingGranularity.AXISWISE
        ):
            raise ValueError(
                "CastConfig: ScalingType.DELAYED keeps the history of one amax per tensor, rows "
                "come and go; use TENSORWISE, or ScalingType.DYNAMIC"
            )

    @property
    def enabled(self) -> bool:
        """False where the operand stays in high precision."""
        return self.scaling_type is not ScalingType.DISABLED

    def dtype_for(self, operand: Operand) -> torch.dtype:
        """The float8 dtype of this cast when it is applied to ``operand``."""
        if self.target_dtype is not None:
            return self.target_dtype
        return e5m2() if operand == "grad_output" else e4m3()

    def short_str(self, operand: Operand) -> str:
        """For example ``dyn_ten_e4m3fn``, or ``dis`` where nothing is cast."""
        if not self.enabled:
            return self.scaling_type.short_str()
        dtype = short_name(self.dtype_for(operand))
        return f"{self.scaling_type.short_str()}_{self.scaling_granularity.short_str()}_{dtype}"


@dataclass(frozen=True)
class Float8GemmConfig:
    """How one float8 GEMM accumulates.

    Attributes:
        use_fast_accum: accumulate in the reduced precision of the tensor cores (Hopper). It
            allows a faster kernel and never demands one: the emulation stays exact.
    """

    use_fast_accum: bool = False

    def __post_init__(self) -> None:
        check_type(self, "use_fast_accum", bool)
