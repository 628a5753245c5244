"""Frozen configs of casts and GEMMs, their validation, and the configs of named recipes.

The field names are those of ``torchao.float8`` 0.18, so that a config carries over. A field that is
``None`` stays ``None``; :meth:`Float8LinearConfig.cast_config` and :meth:`CastConfig.dtype_for`
resolve it.
"""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from fp8_dist.device import FLOAT8_DTYPES, e4m3, e5m2, short_name
from fp8_dist.recipe import GEMM_OPERANDS, Gemm, Operand, Recipe, is_second
from fp8_dist.recipe_names import Float8LinearRecipeName as Float8LinearRecipeName
from fp8_dist.scaling import Blocks, Dense, Fp32Blocks, Mxfp4, Scheme, Unscaled
from fp8_dist.text import did_you_mean, wrong_type


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


ScaleFormat = Literal["ue8m0", "fp32"]
WeightSource = Literal["master", "bf16"]
ScaleRule = Literal["ceil", "even", "floor"]
Format = Literal["e4m3", "mxfp4"]


def check_fields(config: Any) -> None:
    """Check that the type or the value of each field of a config matches its annotation.

    Raises:
        ValueError: a field that takes certain values has another one.
        TypeError: a field has a value of another type.
    """
    hints = get_type_hints(type(config))
    for field in fields(config):
        hint, value = hints[field.name], getattr(config, field.name, None)
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        literals = [part for part in parts if get_origin(part) is Literal]
        choices = [choice for literal in literals for choice in get_args(literal)]
        kinds = [get_origin(part) or part for part in parts if get_origin(part) is not Literal]
        is_flag = isinstance(value, bool) and bool not in kinds  # bool is a subclass of int
        if field.init and (is_flag or not (value in choices or isinstance(value, tuple(kinds)))):
            names = [str(None) if kind is NoneType else kind.__name__ for kind in kinds]
            names += map(repr, choices)
            raise (ValueError if choices else TypeError)(
                f"{type(config).__name__}.{field.name} must be {' or '.join(names)}, got "
                f"{wrong_type(value, kinds)}{did_you_mean(value, map(str, choices))}"
            )


def check_config(caller: str, config: Any, expected: Any) -> None:
    """Raise TypeError if ``config`` is not an instance of the class ``expected``."""
    if not isinstance(config, expected):
        name, given = expected.__name__, wrong_type(config, [expected])
        raise TypeError(
            f"{caller}: config must be a {name}, got {given}; {name}.from_recipe_name(name) makes "
            "one from a recipe's name"
        )


def check_field_names(config: type, names: Iterable[str], others: str = "") -> None:
    """Check that a config has fields of these names.

    Args:
        config: the class of the config.
        names: the names of arguments of ``config.from_recipe_name``.
        others: text about arguments that are not fields.

    Raises:
        TypeError: there is no field of one of these names.
    """
    known = [field.name for field in fields(config) if field.init]
    if unknown := [name for name in names if name not in known]:
        raise TypeError(
            f"{config.__name__}.from_recipe_name: there is no field {', '.join(unknown)}; fields "
            f"are {', '.join(known)}{others and f', and arguments of casts are {others}'}"
            f"{did_you_mean(unknown[0], known)}"
        )


@dataclass(frozen=True)
class CastConfig:
    """Configuration of an operand's cast to float8.

    Attributes:
        scaling_type: the source of the scale.
        scaling_granularity: the values that one scale covers, or a
            :class:`fp8_dist.scaling.Scheme`.
        target_dtype: a float8 dtype. ``None`` means the dtype of the scheme, if
            ``scaling_granularity`` is one, and otherwise the operand's default (e4m3 for input and
            weight, e5m2 for grad_output).
        block_size: (rows, columns) of a block, for BLOCKWISE only. Input and grad_output take
            blocks of one row, the weight takes square blocks; in mxfp4 also (1, 32), beside inputs
            in such blocks.
        scale_rule: the rounding of block scales to MX exponents. ``"ceil"`` rounds them up, so that
            no value saturates. ``"floor"`` is the rule of OCP Microscaling Formats v1.0, with which
            the largest values of a block may saturate. ``"even"``, for mxfp4, rounds the amax to
            E2M1 first, as Quark and torchao do. ``None`` means ``"floor"`` for mxfp4. For e4m3,
            ``None`` rounds up like ``"ceil"``, but uses the formula of scales that are not of
            blocks, with its epsilon (:mod:`fp8_dist.kernels.scale`).
        scale_format: the format of block scales. ``"ue8m0"``: powers of two. ``"fp32"``: amax
            divided by the largest float8 value, as in the FP8 checkpoints of DeepSeek and Qwen
            (:mod:`fp8_dist.kernels.blocks`).
        source: what a BLOCKWISE cast rounds: the tensor (``"master"``), or the tensor after it was
            rounded to bf16 (``"bf16"``), like an inference engine that receives bf16 weights.
        format: the values of a BLOCKWISE cast. ``"mxfp4"`` is for weights: the four-bit values of
            MXFP4 (:mod:`fp8_dist.kernels.e2m1`), in square blocks whose size is a multiple of 32,
            or in blocks of 1 x 32. FSDP2 gathers them at half a byte each. Experimental.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity | Scheme = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None
    block_size: tuple[int, int] | None = None
    scale_rule: ScaleRule | None = None
    scale_format: ScaleFormat = "ue8m0"
    source: WeightSource = "master"
    format: Format = "e4m3"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.target_dtype is not None and self.target_dtype not in FLOAT8_DTYPES:
            raise ValueError(
                f"CastConfig.target_dtype={self.target_dtype} is not a float8 dtype; use one of "
                f"{', '.join(map(str, FLOAT8_DTYPES))}, or None for the operand's default"
            )
        self._check_blocks()
        tensorwise = self.scaling_granularity is ScalingGranularity.TENSORWISE
        if self.scaling_type is ScalingType.DELAYED and not tensorwise:
            raise ValueError(
                "CastConfig: ScalingType.DELAYED keeps the history of one amax per tensor, because "
                "per-row amaxes change shape between steps; use TENSORWISE, or ScalingType.DYNAMIC"
            )

    def _check_blocks(self) -> None:
        size, rule = self.block_size, self.scale_rule
        block_fields = ("block_size", "scale_rule", "scale_format", "source", "format")
        given = {f: v for f in block_fields if (v := getattr(self, f)) != getattr(CastConfig, f)}
        if self.scaling_granularity is not ScalingGranularity.BLOCKWISE:
            if given:
                shown = ", ".join(f"{field}={value!r}" for field, value in given.items())
                raise ValueError(
                    f"CastConfig: {shown}: these are for ScalingGranularity.BLOCKWISE; drop them, "
                    "or set that, as the recipes blockwise and mxfp8 do"
                )
            return
        is_plain = self.scale_format == "ue8m0" and self.target_dtype in (None, torch.float8_e4m3fn)
        if rule == "even" if self.format == "e4m3" else not is_plain:
            raise ValueError(
                f"CastConfig: format={self.format!r} does not go with scale_format="
                f"{self.scale_format!r}, scale_rule={rule!r} and target_dtype={self.target_dtype}: "
                "mxfp4 has e4m3fn data and power-of-two scales, and it alone has 'even'; change one"
            )
        if self.scale_format == "fp32" and rule is not None:
            raise ValueError(
                f"CastConfig: scale_rule={rule!r} is for scales that are powers of two; drop it, "
                "or use scale_format='ue8m0'"
            )
        if size is None or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
            raise ValueError(
                f"CastConfig.block_size={size!r}: BLOCKWISE needs (rows, columns) of a block, two "
                "positive integers, such as (1, 128)"
            )

    def scheme(self, operand: Operand, power_of_2: bool) -> Scheme:
        """The scaling scheme of ``operand`` in its first GEMM.

        ``power_of_2``: whether scales are rounded to powers of two.
        """
        covers, dtype = self.scaling_granularity, self.dtype_for(operand)
        if isinstance(covers, Scheme):
            return covers if self.target_dtype is None else replace(covers, dtype=dtype)
        if self.block_size is not None:
            if self.format == "mxfp4":
                rule = self.scale_rule or Mxfp4.rule
                return Mxfp4(dtype, *self.block_size, rule, source=self.source)
            if self.scale_format == "fp32":
                return Fp32Blocks(dtype, *self.block_size, source=self.source)
            return Blocks(dtype, *self.block_size, self.scale_rule, source=self.source)
        per = "tensor" if covers is ScalingGranularity.TENSORWISE else "row"
        return Dense(dtype, per, power_of_2)

    @property
    def enabled(self) -> bool:
        """Whether the operand is cast. Otherwise it stays in high precision."""
        return self.scaling_type is not ScalingType.DISABLED

    def dtype_for(self, operand: Operand) -> torch.dtype:
        """The float8 dtype of this cast for ``operand``."""
        if self.target_dtype is not None:
            return self.target_dtype
        if isinstance(self.scaling_granularity, Scheme):
            return self.scaling_granularity.dtype
        return e5m2() if operand == "grad_output" else e4m3()

    def short_str(self, operand: Operand) -> str:
        """Short text such as ``dyn_ten_e4m3fn`` or ``dyn_blk_floor_e4m3fn``; ``dis`` for no cast.

        A scheme that is given as an object is shown by its key.
        """
        kind, covers = self.scaling_type.short_str(), self.scaling_granularity
        if not self.enabled:
            return kind
        if isinstance(covers, Scheme):
            return f"{kind}_{self.scheme(operand, False).key}"
        scales = "fp32" if self.scale_format == "fp32" else None
        source = "of_bf16" if self.source == "bf16" else None
        dtype = short_name(self.dtype_for(operand)) if self.format == "e4m3" else self.format
        words = kind, covers.short_str(), self.scale_rule, scales, source, dtype
        return "_".join(filter(None, words))


@dataclass(frozen=True)
class Float8GemmConfig:
    """Configuration of one float8 GEMM.

    Attributes:
        use_fast_accum: allow accumulation in the reduced precision of the tensor cores (Hopper).
            The emulation stays exact.
    """

    use_fast_accum: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Float8LinearConfig:
    """Configuration of a :class:`fp8_dist.Float8Linear`.

    Attributes:
        cast_config_input: the cast of the input.
        cast_config_weight: the cast of the weight.
        cast_config_grad_output: the cast of the gradient of the output.
        cast_config_input_for_grad_weight: the cast of the input in its second GEMM. ``None`` means
            the same cast as in its first GEMM.
        cast_config_weight_for_grad_input: likewise for the weight.
        cast_config_grad_output_for_grad_weight: likewise for the gradient of the output.
        gemm_config_output: the GEMM of the output.
        gemm_config_grad_input: the GEMM of the gradient of the input.
        gemm_config_grad_weight: the GEMM of the gradient of the weight.
        enable_fsdp_float8_all_gather: whether FSDP2 gathers the weight as float8. With ``"auto"``
            it does if one float8 copy of the weight serves both of its GEMMs, and otherwise gathers
            in high precision (see :attr:`fsdp_float8_all_gather`). ``None`` means False, with a
            warning at FSDP2's first gather if ``"auto"`` would gather as float8.
        keep_fsdp_float8_cast: whether an update of scales also casts the weight that FSDP2 gathers
            as float8, and keeps the cast for all gathers until the next update. It takes 1 byte per
            element of the shard (half a byte in four bits). Writes that are not noticed
            (docs/state.md) then have no effect before the next update.
        pad_inner_dim: pad operands to the multiples of 16 that a GPU's float8 GEMM needs. Without
            it, misaligned local shapes raise an error on such a device.
        emulate: multiply in a wider type even if the device has a float8 GEMM.
        force_recompute_fp8_weight_in_bwd: torchao's deprecated switch. Only ``False`` is accepted.
        round_scales_to_power_of_2: round the quantization multiplier down to a power of two, except
            for casts with ``scale_format="fp32"``.
        amax_history_len: length of the amax history of ``ScalingType.DELAYED``.
        fold_row_scales: cast each operand once, with one scale per row, and fold the scales that
            run along a contraction into grad_output (:mod:`fp8_dist.linear.rowwise_folded`). Needs
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
    enable_fsdp_float8_all_gather: bool | Literal["auto"] | None = None
    keep_fsdp_float8_cast: bool = True
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False
    amax_history_len: int = 16
    fold_row_scales: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.recipe
        self._check_power_of_2()
        self._check_fsdp_gather()
        self._check_delayed()
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
            return self.recipe.gather_scheme["weight"] is not None
        return bool(self.enable_fsdp_float8_all_gather)

    def gemm_enabled(self, gemm: Gemm) -> bool:
        """Whether ``gemm`` multiplies float8 operands. Either both are cast, or neither is."""
        return self.cast_config(GEMM_OPERANDS[gemm][0], gemm).enabled

    @cached_property  # because every forward needs it; filled before any graph is traced
    def recipe(self) -> Recipe:
        """The scheme of each operand in each GEMM."""
        uses: dict[Operand, dict[Gemm, Scheme | None]] = {o: {} for o in get_args(Operand)}
        types: dict[Operand, set[ScalingType]] = {operand: set() for operand in uses}
        interned: dict[Scheme, Scheme] = {}  # equal schemes become one, which is compared faster
        for gemm, operands in GEMM_OPERANDS.items():
            for operand in operands:
                config, scheme = self.cast_config(operand, gemm), None
                if config.enabled:
                    types[operand].add(config.scaling_type)
                    scheme = config.scheme(operand, self.round_scales_to_power_of_2)
                    if is_second(operand, gemm) and not self.fold_row_scales:
                        scheme = scheme.for_row_contraction
                    scheme = interned.setdefault(scheme, scheme)
                uses[operand][gemm] = scheme
        if mixed := [operand for operand, kinds in types.items() if len(kinds) > 1]:
            raise ValueError(
                f"Float8LinearConfig: {mixed[0]} has a DELAYED scale in one GEMM and a DYNAMIC one "
                "in the other; use one scaling_type for both, or DISABLED"
            )
        delayed = [operand for operand, kinds in types.items() if ScalingType.DELAYED in kinds]
        return Recipe(uses, delayed, self.fold_row_scales, self.emulate)

    def gemm_options(self, gemm: Gemm) -> tuple[bool, bool, bool, bool]:
        """Options of one of the three GEMMs: (use_fast_accum, pad_inner_dim, emulate, any_order).

        The inner dim of grad_weight is always padded. It is the number of rows of the input, which
        may be misaligned on one rank only, and an error on that rank would hang the others.
        ``any_order`` is False for the output, whose bits must not depend on how columns are cut.
        """
        config: Float8GemmConfig = getattr(self, f"gemm_config_{gemm}")
        pads = self.pad_inner_dim or gemm == "grad_weight"
        return config.use_fast_accum, pads, self.emulate, gemm != "output"

    @staticmethod
    def from_recipe_name(
        recipe_name: "Float8LinearRecipeName | str",
        *,
        scale_format: ScaleFormat = "ue8m0",
        weight_source: WeightSource = "master",
        weight_format: Format = "e4m3",
        weight_block_size: tuple[int, int] | None = None,
        **fields: Any,
    ) -> "Float8LinearConfig":
        """Return the config of a ready-made recipe.

        Args:
            recipe_name: a :class:`Float8LinearRecipeName` or its value; or ``"bf16"``: GEMMs take
                all operands in bf16, without scales, for weights that alone are stored in few bits
                (:func:`fp8_dist.freeze_to_float8`).
            scale_format: the ``scale_format`` of the casts of input and weight, for BLOCKWISE (see
                :class:`CastConfig`). The scales of grad_output remain powers of two, so that
                grad_weight needs no second rounding.
            weight_source: the ``source`` of the weight's cast, for BLOCKWISE and MXFP8.
            weight_format: the ``format`` of the weight's cast, for BLOCKWISE and MXFP8. The scales
                of ``"mxfp4"`` follow the rule ``"floor"``.
            weight_block_size: the ``block_size`` of the weight's cast, for BLOCKWISE and MXFP8;
                ``None``: the recipe's. ``"mxfp4"`` also takes ``(1, 32)``, as in released
                checkpoints. The GEMM of grad_input then casts the values again, in blocks of one
                column.
            **fields: fields of the config that differ from the recipe's.

        Raises:
            ValueError: the name is not a recipe, the recipe does not take the other arguments, or
                the fields do not go together.
            TypeError: there is no such field, or a field has the wrong type.
        """
        names = [*_RECIPES]
        name = getattr(recipe_name, "value", recipe_name)  # of an enum, which may be torchao's
        if name not in names:
            raise ValueError(
                f"recipe_name={recipe_name!r} is not one of {names}{did_you_mean(name, names)}"
            )
        cast_arguments = "scale_format, weight_source, weight_format and weight_block_size"
        check_field_names(Float8LinearConfig, fields, cast_arguments)
        found = _RECIPES[name]()
        if scale_format != "ue8m0" and name != "blockwise":
            raise ValueError(
                f"the recipe {name} has no scale_format={scale_format!r}: it is for the "
                "recipe blockwise; drop it"
            )
        input = replace(found.cast_config_input, scale_format=scale_format)
        weight = replace(
            found.cast_config_weight,
            scale_rule=found.cast_config_weight.scale_rule if weight_format == "e4m3" else None,
            scale_format=scale_format,
            source=weight_source,
            format=weight_format,
            block_size=weight_block_size or found.cast_config_weight.block_size,
        )
        casts = {"cast_config_input": input, "cast_config_weight": weight}
        for field, cast in casts.items():
            if field in fields and cast != getattr(found, field):
                raise ValueError(
                    f"Float8LinearConfig.from_recipe_name: {field} replaces the cast that "
                    f"{cast_arguments} change; set the fields of {field} itself"
                )
        return replace(found, **casts | fields)

    def _check_power_of_2(self) -> None:
        given = [getattr(self, field.name) for field in fields(self) if "cast_config" in field.name]
        casts = [cast for cast in given if cast and cast.enabled]
        if self.round_scales_to_power_of_2:
            if any(isinstance(cast.scaling_granularity, Scheme) for cast in casts):
                raise ValueError(
                    "Float8LinearConfig: round_scales_to_power_of_2=True has no effect on a "
                    "scaling scheme of your own; drop it, and round in the scheme"
                )
            return
        if any(cast.block_size and cast.scale_format == "ue8m0" for cast in casts):
            raise ValueError(
                "Float8LinearConfig: the scales of BLOCKWISE casts are powers of two; set "
                "round_scales_to_power_of_2=True"
            )
        if self.fold_row_scales:
            raise ValueError(
                "Float8LinearConfig: fold_row_scales=True casts a gradient again after its scales "
                "were folded in, which is exact for powers of two only; set "
                "round_scales_to_power_of_2=True"
            )

    def _check_fsdp_gather(self) -> None:
        if self.recipe.gather_scheme["weight"] or self.enable_fsdp_float8_all_gather is not True:
            return
        schemes = self.recipe.uses["weight"].values()
        casts = [f"one scale per {s.covers}" if s else "high precision" for s in schemes]
        raise ValueError(
            "Float8LinearConfig: enable_fsdp_float8_all_gather=True gathers one float8 copy of the "
            f"weight, but its GEMMs take it with {' and with '.join(casts)}; leave it off (FSDP2 "
            "then gathers in high precision), or use the recipe rowwise_folded"
        )

    def _check_delayed(self) -> None:
        length = self.amax_history_len
        if length < 1:
            raise ValueError(
                f"Float8LinearConfig.amax_history_len={length!r}: use an integer of at least 1"
            )
        if length != type(self).amax_history_len and not self.recipe.delayed:  # the default
            raise ValueError(
                f"Float8LinearConfig.amax_history_len={length} has no effect: it belongs to "
                "ScalingType.DELAYED, which no operand of this config uses; drop it"
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


_RECIPES: dict[str, Callable[[], Float8LinearConfig]] = {
    "tensorwise": Float8LinearConfig,
    "rowwise": _rowwise,
    "rowwise_with_gw_hp": _rowwise_with_gw_hp,
    "rowwise_folded": partial(_rowwise, fold_row_scales=True),
    "blockwise": partial(_blocks, 128),
    "mxfp8": partial(_blocks, 32, scale_rule="ceil"),
    "delayed": lambda: _alike(CastConfig(ScalingType.DELAYED)),
    "bf16": lambda: _alike(CastConfig(scaling_granularity=Unscaled())),
}
