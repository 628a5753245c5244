"""Frozen configs of casts and GEMMs, their checks, and recipes.

The field names are those of ``torchao.float8`` 0.18, so that a config carries over. ``None`` stays
``None`` in the fields; :meth:`Float8LinearConfig.cast_config` and :meth:`CastConfig.dtype_for`
resolve it.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, get_args

import torch

from fp8_dist.dtypes import FLOAT8_DTYPES, e4m3, e5m2, short_name
from fp8_dist.granularity import ROW, TENSOR, Blocks, Granularity
from fp8_dist.kernels import takes_transposed

Operand = Literal["input", "weight", "grad_output"]
Gemm = Literal["output", "grad_input", "grad_weight"]

# The left and the right operand of each GEMM. Each operand feeds two GEMMs.
GEMM_OPERANDS: dict[Gemm, tuple[Operand, Operand]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}


class CastSpec(NamedTuple):
    """A cast of an operand for a GEMM; ``delayed`` if the scale follows from its history."""

    dtype: torch.dtype
    granularity: Granularity = TENSOR
    delayed: bool = False


class CopySpec(NamedTuple):
    """A float8 copy of an operand; ``transposed`` if it is ``[K, M]`` in memory."""

    cast: CastSpec
    transposed: bool = False


class ScalingType(enum.Enum):
    """Source of the scale of a cast.

    Attributes:
        DYNAMIC: the current amax of the tensor itself.
        DELAYED: the tensor's amax history.
        DISABLED: no cast. The operand stays in high precision.
    """

    DYNAMIC = "dynamic"
    DELAYED = "delayed"
    DISABLED = "disabled"

    def short_str(self) -> str:
        return str(self.value)[:3]


class ScalingGranularity(enum.Enum):
    """The values that one scale covers.

    Attributes:
        TENSORWISE: the whole (global) tensor.
        AXISWISE: one row or column. The scales have size 1 along the reduced dim.
        BLOCKWISE: one block of a matrix. Scales are powers of two.
    """

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"
    BLOCKWISE = "blockwise"

    def short_str(self) -> str:
        return {"tensorwise": "ten", "axiswise": "axs", "blockwise": "blk"}[self.value]


def _check_type(owner: object, field: str, *expected: type) -> None:
    """Raise TypeError unless a field of a config is an instance of one of the types."""
    value = getattr(owner, field)
    if not isinstance(value, expected):
        names = " or ".join(kind.__name__ for kind in expected)
        raise TypeError(f"{type(owner).__name__}.{field} must be a {names}, got {value!r}")


@dataclass(frozen=True)
class CastConfig:
    """Configuration of an operand's cast to float8.

    Attributes:
        scaling_type: the source of the scale.
        scaling_granularity: the values that one scale covers. A
            :class:`fp8_dist.granularity.Granularity` is accepted too.
        target_dtype: a float8 dtype; ``None`` means the operand's default (e4m3 for input and
            weight, e5m2 for grad_output).
        block_size: (rows, columns) of a block, for BLOCKWISE alone: one row for input and
            grad_output, a square for the weight.
        scale_rule: the rounding of the scales of blocks to MX exponents. ``"ceil"`` rounds them up,
            so that no value saturates. ``"floor"`` is the rule of OCP Microscaling Formats v1.0, by
            which the largest values of a block may saturate. ``None`` rounds them up as well, and
            uses the formula of other scales, with its epsilon (:mod:`fp8_dist.kernels.scale`).
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity | Granularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None
    block_size: tuple[int, int] | None = None
    scale_rule: Literal["ceil", "floor"] | None = None

    def __post_init__(self) -> None:
        _check_type(self, "scaling_type", ScalingType)
        _check_type(self, "scaling_granularity", ScalingGranularity, Granularity)
        if self.target_dtype is not None and self.target_dtype not in FLOAT8_DTYPES:
            raise ValueError(
                f"CastConfig.target_dtype={self.target_dtype} is not a float8 dtype; use one of "
                f"{', '.join(map(str, FLOAT8_DTYPES))}, or None for the operand's default"
            )
        self._check_blocks()
        if self.scaling_type is ScalingType.DELAYED and self.granularity is not TENSOR:
            raise ValueError(
                "CastConfig: ScalingType.DELAYED keeps the history of one amax per tensor; rows "
                "and blocks come and go; use TENSORWISE, or ScalingType.DYNAMIC"
            )

    def _check_blocks(self) -> None:
        size, rule = self.block_size, self.scale_rule
        if rule not in ("ceil", "floor", None):
            raise ValueError(f"CastConfig.scale_rule={rule!r}: use 'ceil', 'floor' or None")
        if self.scaling_granularity is not ScalingGranularity.BLOCKWISE:
            if size is not None or rule is not None:
                raise ValueError(
                    f"CastConfig: block_size={size} and scale_rule={rule!r} are for "
                    "ScalingGranularity.BLOCKWISE; drop them, or set that"
                )
            return
        if (
            not isinstance(size, tuple)
            or len(size) != 2
            or not all(type(n) is int and n > 0 for n in size)
        ):
            raise ValueError(
                f"CastConfig.block_size={size!r}: BLOCKWISE needs (rows, columns) of a block, two "
                "positive integers, such as (1, 128)"
            )

    @property
    def granularity(self) -> Granularity:
        """The granularity of the scales in the operand's first GEMM."""
        if isinstance(self.scaling_granularity, Granularity):
            return self.scaling_granularity
        if self.block_size is not None:
            return Blocks.of(*self.block_size, self.scale_rule)
        return TENSOR if self.scaling_granularity is ScalingGranularity.TENSORWISE else ROW

    @property
    def enabled(self) -> bool:
        """Whether the operand is cast; if not, it stays in high precision."""
        return self.scaling_type is not ScalingType.DISABLED

    def dtype_for(self, operand: Operand) -> torch.dtype:
        """The float8 dtype of this cast for ``operand``."""
        if self.target_dtype is not None:
            return self.target_dtype
        return e5m2() if operand == "grad_output" else e4m3()

    def short_str(self, operand: Operand) -> str:
        """Short text such as ``dyn_ten_e4m3fn``, ``dyn_blk_floor_e4m3fn``, or ``dis`` (no cast)."""
        if not self.enabled:
            return self.scaling_type.short_str()
        dtype = short_name(self.dtype_for(operand))
        covers = self.scaling_granularity
        shown = covers.name if isinstance(covers, Granularity) else covers.short_str()
        shown += f"_{self.scale_rule}" if self.scale_rule else ""
        return f"{self.scaling_type.short_str()}_{shown}_{dtype}"


@dataclass(frozen=True)
class Float8GemmConfig:
    """Configuration of one float8 GEMM.

    Attributes:
        use_fast_accum: allow accumulation in the reduced precision of the tensor cores (Hopper).
            The emulation stays exact.
    """

    use_fast_accum: bool = False

    def __post_init__(self) -> None:
        _check_type(self, "use_fast_accum", bool)


class Float8LinearRecipeName(enum.Enum):
    """Names of the ready-made configs of :meth:`Float8LinearConfig.from_recipe_name`."""

    TENSORWISE = "tensorwise"
    """One dynamic scale per tensor; float8 weight, input and output-gradient gathers."""
    ROWWISE = "rowwise"
    """One scale per row of each GEMM's operands, hence two casts of each tensor, along different
    dims. Gathers stay in high precision."""
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    """As rowwise; the weight in the GEMM of grad_input has one scale, and the GEMM of grad_weight
    is left in high precision."""
    ROWWISE_FOLDED = "rowwise_folded"
    """One scale per row; what runs along a contraction is folded into grad_output (see
    :mod:`fp8_dist.linear.rowwise_folded`), so that one copy serves all GEMMs and float8 weight,
    input and output-gradient gathers, without amax all-reduces for what is gathered."""
    BLOCKWISE = "blockwise"
    """One scale per 128 values of a row of input and grad_output, and per 128 x 128 values of the
    weight. One copy of each operand serves all GEMMs and float8 gathers: for the GEMM that
    contracts the tokens it is blocked again (:mod:`fp8_dist.kernels.blocks`). No amax all-reduces
    but for blocks that shards cut."""
    MXFP8 = "mxfp8"
    """As blockwise, with blocks of 32 values and of 32 x 32, and scales that are exponents of MX,
    rounded up (``scale_rule="ceil"``)."""
    DELAYED = "delayed"
    """One scale per tensor, from the history of its amax; float8 gathers as tensorwise, and one
    all-reduce per step in ``sync_float8_amax_and_scale_history``."""


def _is_second(operand: Operand, gemm: Gemm) -> bool:
    """Whether ``gemm`` contracts the rows of the operand."""
    return gemm == "grad_weight" or (operand, gemm) == ("weight", "grad_input")


@dataclass(frozen=True)
class Float8LinearConfig:
    """Configuration of a :class:`fp8_dist.Float8Linear`.

    Attributes:
        cast_config_input: the cast of the input.
        cast_config_weight: the cast of the weight.
        cast_config_grad_output: the cast of the gradient of the output.
        cast_config_input_for_grad_weight: the cast of the input in its second GEMM. ``None``, here
            and for the two other second casts, means the same as in the first.
        cast_config_weight_for_grad_input: the cast of the weight in its second GEMM.
        cast_config_grad_output_for_grad_weight: the cast of the gradient in its second GEMM.
        gemm_config_output: the GEMM of the output.
        gemm_config_grad_input: the GEMM of the gradient of the input.
        gemm_config_grad_weight: the GEMM of the gradient of the weight.
        enable_fsdp_float8_all_gather: FSDP2 gathers the weight as float8. ``"auto"``: it does if
            one float8 copy of the weight serves both of its GEMMs, and gathers high precision
            otherwise (see :attr:`fsdp_float8_all_gather`).
        pad_inner_dim: pad operands to the multiples of 16 that a GPU's float8 GEMM needs;
            otherwise misaligned local shapes are an error on such a device.
        emulate: multiply in a wider type even if the device has a float8 GEMM.
        force_recompute_fp8_weight_in_bwd: torchao's deprecated switch. Only ``False`` is accepted.
        round_scales_to_power_of_2: round the quantization multiplier down to a power of two.
        amax_scope: ``"global"``: every scale is that of the global tensor. ``"rank"``: operands
            that never leave their rank are scaled by their local amax, which saves their
            all-reduce and deviates from the single-device result.
        amax_history_len: length of the amax history of ``ScalingType.DELAYED``.
        cache_float8_shards: keep the float8 copy of a weight's local shard (1 byte per element)
            until the weight changes, so that micro-batches cast once.
        fold_row_scales: cast each operand once, one scale per row, and fold the scales that run
            along a contraction into grad_output (:mod:`fp8_dist.linear.rowwise_folded`). Needs
            AXISWISE dynamic casts and power-of-two scales.
    """

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool | Literal["auto"] = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False
    amax_scope: Literal["global", "rank"] = "global"
    amax_history_len: int = 16
    cache_float8_shards: bool = True
    fold_row_scales: bool = False

    def __post_init__(self) -> None:
        self._check_fields()
        self._check_gemm_pairs()
        self._check_operands()
        self._check_blocks()
        self._check_folding()
        self._check_fsdp_gather()
        self._check_delayed()
        _ = self._copies, self._gemm_options
        if self.force_recompute_fp8_weight_in_bwd:
            raise ValueError(
                "Float8LinearConfig.force_recompute_fp8_weight_in_bwd=True has no meaning here: "
                "the weight is kept as float8 and FSDP2 gathers it again by itself; drop the flag"
            )

    def cast_config(self, operand: Operand, gemm: Gemm) -> CastConfig:
        """The cast of ``operand`` in ``gemm``, with ``None`` fields resolved."""
        second = getattr(self, f"cast_config_{operand}_for_{gemm}", None)
        return second or getattr(self, f"cast_config_{operand}")

    @property
    def fsdp_float8_all_gather(self) -> bool:
        """Whether FSDP2 gathers the weight as float8, with ``"auto"`` resolved."""
        if self.enable_fsdp_float8_all_gather == "auto":
            return self.gather_cast("weight") is not None
        return self.enable_fsdp_float8_all_gather

    def gemm_enabled(self, gemm: Gemm) -> bool:
        """Whether ``gemm`` multiplies float8 operands. Both are cast, or neither."""
        return self.cast_config(GEMM_OPERANDS[gemm][0], gemm).enabled

    # Caches of values that each forward needs. They are filled before any graph is traced.

    @cached_property
    def _uses(self) -> dict[Operand, dict[Gemm, CastSpec | None]]:
        uses: dict[Operand, dict[Gemm, CastSpec | None]] = {o: {} for o in get_args(Operand)}
        for gemm, operands in GEMM_OPERANDS.items():
            for operand in operands:
                uses[operand][gemm] = self._cast_spec(operand, gemm)
        return uses

    @cached_property
    def _casts(self) -> dict[Operand, tuple[CastSpec, ...]]:
        used = {operand: dict.fromkeys(uses.values()) for operand, uses in self._uses.items()}
        return {operand: tuple(cast for cast in casts if cast) for operand, casts in used.items()}

    @cached_property
    def _copies(self) -> tuple[dict[Operand, dict[Gemm, CopySpec]], ...]:
        """The copies without transposition, and with it; see :meth:`copies`."""
        return tuple(
            {
                operand: {
                    # Input and grad_output in blocks are transposed when they are blocked again.
                    gemm: CopySpec(
                        cast,
                        transposes
                        and _is_second(operand, gemm)
                        and (cast.granularity.blocks is None or operand == "weight"),
                    )
                    for gemm, cast in uses.items()
                    if cast
                }
                for operand, uses in self._uses.items()
            }
            for transposes in (False, True)
        )

    @cached_property
    def _gemm_options(self) -> dict[Gemm, tuple[bool, bool, bool]]:
        options: dict[Gemm, tuple[bool, bool, bool]] = {}
        for gemm in GEMM_OPERANDS:
            fast = getattr(self, f"gemm_config_{gemm}").use_fast_accum
            options[gemm] = (fast, self.pad_inner_dim or gemm == "grad_weight", self.emulate)
        return options

    def cast(self, operand: Operand, gemm: Gemm) -> CastSpec | None:
        """The cast of ``operand``, as it is stored, for ``gemm``; ``None``: high precision."""
        return self._uses[operand][gemm]

    def uses(self, operand: Operand) -> dict[Gemm, CastSpec | None]:
        """:meth:`cast` of ``operand`` for each of its two GEMMs."""
        return self._uses[operand]

    def casts(self, operand: Operand) -> tuple[CastSpec, ...]:
        """The different casts of ``operand`` in its two GEMMs, in their order."""
        return self._casts[operand]

    def gather_cast(self, operand: Operand) -> CastSpec | None:
        """The cast of ``operand`` that serves both of its GEMMs; ``None``: gather it uncast."""
        first, second = self._uses[operand].values()
        return first if first == second and first and first.granularity.can_gather else None

    def copies(self, operand: Operand, device: torch.device) -> dict[Gemm, CopySpec]:
        """The float8 copy of ``operand`` that each GEMM takes; others take it in high precision."""
        # An int, because dynamo of torch 2.11 does not support a bool as an index.
        return self._copies[int(not self.emulate and takes_transposed(device))][operand]

    def gemm_options(self, gemm: Gemm) -> tuple[bool, bool, bool]:
        """Options of one of the three GEMMs: (use_fast_accum, pad_inner_dim, emulate).

        The inner dim of grad_weight is always padded: it is the number of rows of the input, and an
        error on the one rank where that is misaligned would hang the others.
        """
        return self._gemm_options[gemm]

    def _cast_spec(self, operand: Operand, gemm: Gemm) -> CastSpec | None:
        config = self.cast_config(operand, gemm)
        if not config.enabled:
            return None
        granularity = config.granularity
        if _is_second(operand, gemm) and not self.fold_row_scales:
            granularity = granularity.second_use
        delayed = config.scaling_type is ScalingType.DELAYED
        return CastSpec(config.dtype_for(operand), granularity, delayed)

    @staticmethod
    def from_recipe_name(recipe_name: "Float8LinearRecipeName | str") -> "Float8LinearConfig":
        """The config of a ready-made recipe: a :class:`Float8LinearRecipeName` or its value.

        Raises:
            ValueError: the name is not a recipe.
        """
        names = [recipe.value for recipe in Float8LinearRecipeName]
        if recipe_name not in (*Float8LinearRecipeName, *names):
            raise ValueError(f"recipe_name={recipe_name!r} is not one of {names}")
        return _RECIPES[Float8LinearRecipeName(recipe_name)]()

    def _check_fields(self) -> None:
        for each in fields(self):
            if each.name.startswith("cast_config"):
                second = (type(None),) if "_for_grad_" in each.name else ()
                _check_type(self, each.name, CastConfig, *second)
            elif each.name == "enable_fsdp_float8_all_gather":
                _check_type(self, each.name, bool, str)
            elif isinstance(each.default, bool | Float8GemmConfig):
                _check_type(self, each.name, type(each.default))
        gather, scope = self.enable_fsdp_float8_all_gather, self.amax_scope
        if gather not in (True, False, "auto"):
            raise ValueError(
                f"Float8LinearConfig.enable_fsdp_float8_all_gather={gather!r}: use True, False or "
                "'auto'"
            )
        if scope not in ("global", "rank"):
            raise ValueError(f"Float8LinearConfig.amax_scope={scope!r}: use 'global' or 'rank'")

    def _check_gemm_pairs(self) -> None:
        for gemm, (left, right) in GEMM_OPERANDS.items():
            enabled = [self.cast_config(operand, gemm).enabled for operand in (left, right)]
            if enabled[0] != enabled[1]:
                off, on = (left, right) if enabled[1] else (right, left)
                raise ValueError(
                    f"Float8LinearConfig: the GEMM of {gemm} multiplies {left} by {right}, and "
                    f"{off} is DISABLED while {on} is not; disable both or neither"
                )

    def _check_operands(self) -> None:
        for operand in get_args(Operand):
            casts = self.casts(operand)
            dtypes = {cast.dtype for cast in casts}
            if len(dtypes) > 1:
                raise ValueError(
                    f"Float8LinearConfig: {operand} is cast to {sorted(map(str, dtypes))} in its "
                    "two GEMMs; both casts need the same target_dtype"
                )
            if len({cast.delayed for cast in casts}) > 1:
                raise ValueError(
                    f"Float8LinearConfig: {operand} has a DELAYED scale in one GEMM and a DYNAMIC "
                    "one in the other; use one scaling_type for both, or DISABLED"
                )

    def _check_blocks(self) -> None:
        for operand in get_args(Operand):
            casts = self.casts(operand)
            if len(casts) > 1 and any(cast.granularity.blocks is not None for cast in casts):
                covers = " and one per ".join(cast.granularity.name for cast in casts)
                raise ValueError(
                    f"Float8LinearConfig: {operand} has one scale per {covers} in its two GEMMs; "
                    "one copy with scales of blocks must serve both, or leave one of them DISABLED"
                )
            for cast in casts:
                blocks = cast.granularity.blocks
                if blocks is None:
                    continue
                rows, columns, *_ = blocks
                wanted = "a square" if operand == "weight" else "one row"
                if rows != (columns if operand == "weight" else 1):
                    raise ValueError(
                        f"Float8LinearConfig: {operand} has blocks of {rows} x {columns}, but one "
                        f"copy must serve both of its GEMMs; its block_size must be {wanted}"
                    )
        for gemm, operands in GEMM_OPERANDS.items():
            each = [self.cast(operand, gemm) for operand in operands]
            if len({bool(cast and cast.granularity.blocks) for cast in each}) > 1:
                raise ValueError(
                    f"Float8LinearConfig: the GEMM of {gemm} multiplies {operands[0]} by "
                    f"{operands[1]}, and only one of them has scales of blocks; set "
                    "ScalingGranularity.BLOCKWISE for both or neither"
                )

        of_blocks = any(
            cast.granularity.blocks for o in get_args(Operand) for cast in self.casts(o)
        )
        if of_blocks and not self.round_scales_to_power_of_2:
            raise ValueError(
                "Float8LinearConfig: the scales of BLOCKWISE casts are powers of two; set "
                "round_scales_to_power_of_2=True"
            )

    def _check_folding(self) -> None:
        if not self.fold_row_scales:
            return
        for operand in get_args(Operand):
            if any(cast.granularity is not ROW or cast.delayed for cast in self.casts(operand)):
                raise ValueError(
                    f"Float8LinearConfig: fold_row_scales=True needs one scale per row, and "
                    f"{operand} has another cast; use ScalingGranularity.AXISWISE, "
                    "ScalingType.DYNAMIC (or DISABLED) in all of its GEMMs"
                )
        if not self.round_scales_to_power_of_2:
            raise ValueError(
                "Float8LinearConfig: fold_row_scales=True casts a gradient again after its scales "
                "were folded in, which is exact for powers of two only; set "
                "round_scales_to_power_of_2=True"
            )

    def _check_fsdp_gather(self) -> None:
        if self.enable_fsdp_float8_all_gather is not True or self.gather_cast("weight"):
            return
        for gemm in ("output", "grad_input"):
            if self.cast("weight", gemm) is None:
                raise ValueError(
                    "Float8LinearConfig: enable_fsdp_float8_all_gather=True gathers the weight "
                    f"in float8 only, but the GEMM of {gemm} has its weight cast DISABLED; leave "
                    "it off, or enable that cast"
                )
        casts = self.casts("weight")
        covers = " and one per ".join(cast.granularity.name for cast in casts)
        found = "its GEMMs take two" if len(casts) > 1 else "it can't be gathered"
        raise ValueError(
            "Float8LinearConfig: enable_fsdp_float8_all_gather=True gathers one float8 copy of the "
            f"weight, but {found}, with one scale per {covers}; leave it off (FSDP2 then gathers "
            "in high precision), or use the recipe rowwise_folded"
        )

    def _check_delayed(self) -> None:
        length = self.amax_history_len
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(
                f"Float8LinearConfig.amax_history_len={length!r}: use an integer of at least 1"
            )
        delayed = [o for o in get_args(Operand) if any(cast.delayed for cast in self.casts(o))]
        if length != type(self).amax_history_len and not delayed:  # the default
            raise ValueError(
                f"Float8LinearConfig.amax_history_len={length} has no effect: it belongs to "
                "ScalingType.DELAYED, which no operand of this config uses; drop it"
            )
        if delayed and self.amax_scope == "rank":
            raise ValueError(
                f"Float8LinearConfig.amax_scope='rank': the scale of {', '.join(delayed)} is "
                "DELAYED, it costs no all-reduce in the step and is that of the global tensor; "
                "use 'global'"
            )


def _alike(cast: CastConfig, **others: Any) -> Float8LinearConfig:
    """A config with the same cast for all operands, overridden by ``others``."""
    casts: dict[str, Any] = {f"cast_config_{operand}": cast for operand in get_args(Operand)}
    return Float8LinearConfig(**casts | others)


def _rowwise(**others: Any) -> Float8LinearConfig:
    rows = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=e4m3())
    return _alike(rows, round_scales_to_power_of_2=True, **others)


def _blocks(size: int, scale_rule: Literal["ceil"] | None = None) -> Float8LinearConfig:
    cast = CastConfig(
        scaling_granularity=ScalingGranularity.BLOCKWISE,
        target_dtype=e4m3(),
        block_size=(1, size),
        scale_rule=scale_rule,
    )
    weight = replace(cast, block_size=(size, size))
    return _alike(cast, cast_config_weight=weight, round_scales_to_power_of_2=True)


def _rowwise_with_gw_hp() -> Float8LinearConfig:
    disabled = CastConfig(scaling_type=ScalingType.DISABLED)
    return _rowwise(
        cast_config_weight_for_grad_input=CastConfig(target_dtype=e4m3()),
        cast_config_input_for_grad_weight=disabled,
        cast_config_grad_output_for_grad_weight=disabled,
    )


_RECIPES: dict[Float8LinearRecipeName, Callable[[], Float8LinearConfig]] = {
    Float8LinearRecipeName.TENSORWISE: Float8LinearConfig,
    Float8LinearRecipeName.ROWWISE: _rowwise,
    Float8LinearRecipeName.ROWWISE_WITH_GW_HP: _rowwise_with_gw_hp,
    Float8LinearRecipeName.ROWWISE_FOLDED: partial(_rowwise, fold_row_scales=True),
    Float8LinearRecipeName.BLOCKWISE: partial(_blocks, 128),
    Float8LinearRecipeName.MXFP8: partial(_blocks, 32, scale_rule="ceil"),
    Float8LinearRecipeName.DELAYED: lambda: _alike(CastConfig(ScalingType.DELAYED)),
}
