"""The config of experts, and the schemes that follow from it."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fp8_dist.config import CastConfig, Float8LinearConfig, Format, check_field_names, check_fields
from fp8_dist.device import e4m3
from fp8_dist.recipe_names import ExpertsRecipe as ExpertsRecipe
from fp8_dist.scaling import Dense, Scheme, covering


@dataclass(frozen=True)
class Float8ExpertsConfig:
    """Configuration of the grouped GEMMs of experts.

    All operands are cast to e4m3 with power-of-two scales. No scale of tokens or gradients covers
    several rows, because the tokens of an expert come from many ranks.

    Attributes:
        recipe: the scales of weights ``[E, N, K]`` and of rows. ``"rowwise_folded"``: one scale per
            row of both. ``"tensorwise"``: one per expert, and one per row of tokens.
            ``"blockwise"`` (``"mxfp8"``), as for linear layers: one per block of 128 x 128
            (32 x 32) values of an expert, and one per 1 x 128 (1 x 32) values of a row. ``None``:
            GEMMs take all operands in bf16, without scales, for weights that alone are stored in
            few bits (:func:`fp8_dist.freeze_to_float8`).
        weight_format: the format of weights with ``"blockwise"`` and ``"mxfp8"``, as for linear
            layers (:attr:`fp8_dist.CastConfig.format`).
        weight_block_size: the size of a weight's blocks ``[N, K]``, as for linear layers
            (:meth:`fp8_dist.Float8LinearConfig.from_recipe_name`).
        combine: the dtype in which outputs of experts, and in the backward gradients of experts'
            inputs, are sent back to the ranks of their tokens.
        enable_fsdp_float8_all_gather: whether FSDP2 gathers the weights in float8. ``"auto"`` means
            yes, because every recipe here has one copy of the weight.
        keep_fsdp_float8_cast: as in :class:`fp8_dist.Float8LinearConfig`.
        pad_token_groups_for_grouped_mm: pad the tokens of each expert to a multiple of 16, which a
            GPU's grouped GEMM for grad_weight requires. If False, experts are multiplied one by one
            whenever the number of tokens of any expert is not such a multiple.
        emulate: compute in a wider type even on devices with a float8 GEMM.
        linear: the same casts as a config of linear layers, derived from the other fields.

    Raises:
        ValueError: a field has an unsupported value, or one that has no effect with the recipe.
    """

    recipe: ExpertsRecipe | None = "rowwise_folded"
    combine: Literal["high_precision", "float8"] = "high_precision"
    enable_fsdp_float8_all_gather: bool | Literal["auto"] = "auto"
    keep_fsdp_float8_cast: bool = True
    pad_token_groups_for_grouped_mm: bool = True
    emulate: bool = False
    weight_format: Format = "e4m3"
    weight_block_size: tuple[int, int] | None = None
    # A field, because dynamo does not trace a cached_property.
    linear: Float8LinearConfig = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        gather, size = self.enable_fsdp_float8_all_gather, self.weight_block_size
        refused = {"weight_format": self.weight_format != "e4m3", "weight_block_size": size}
        refused = {} if self.recipe in ("blockwise", "mxfp8") else refused
        if self.recipe is None:  # False, or "auto", gathers in high precision
            refused["combine"] = self.combine == "float8"
            refused["enable_fsdp_float8_all_gather"] = gather is True
        if given := [f"{name}={getattr(self, name)!r}" for name, is_on in refused.items() if is_on]:
            raise ValueError(
                f"Float8ExpertsConfig: recipe={self.recipe!r} does not take {', '.join(given)}; "
                "drop it, or use the recipe 'blockwise' or 'mxfp8'"
            )
        if self.recipe == "tensorwise":
            schemes = [Dense(e4m3(), per, True) for per in ("row", "matrix")]
            row, matrix = (CastConfig(scaling_granularity=scheme) for scheme in schemes)
            linear = Float8LinearConfig(row, None, matrix, None, row)
        else:
            linear = Float8LinearConfig.from_recipe_name(
                self.recipe or "bf16", weight_format=self.weight_format, weight_block_size=size
            )
        linear = replace(
            linear,
            enable_fsdp_float8_all_gather=gather,
            keep_fsdp_float8_cast=self.keep_fsdp_float8_cast,
            emulate=self.emulate,
        )
        object.__setattr__(self, "linear", linear)

    @staticmethod
    def from_recipe_name(recipe_name: str, **fields: Any) -> "Float8ExpertsConfig":
        """Return the config of a recipe.

        Args:
            recipe_name: the value of ``recipe``.
            **fields: other fields of the config.

        Raises:
            ValueError: experts do not support the recipe, or a field has a wrong value.
            TypeError: there is no such field.
        """
        check_field_names(Float8ExpertsConfig, fields)
        return Float8ExpertsConfig(recipe_name, **fields)  # type: ignore[arg-type]

    @property
    def rows(self) -> Scheme:
        """The scheme of tokens and of gradients ``[R, K]``."""
        return self.linear.recipe.schemes["input"][0]

    @property
    def weight(self) -> Scheme:
        """The scheme of weights ``[E, N, K]``."""
        return self.linear.recipe.schemes["weight"][0]


def stored_transposed(scheme: Scheme) -> Scheme:
    """The scheme that gives ``[E, K, N]`` the same scales as ``scheme`` gives ``[E, N, K]``."""
    if all(level.rows == level.columns for level in scheme.levels):
        return scheme
    return covering((1,), scheme, 3) if isinstance(scheme, Dense) else scheme.transposed_scheme


# Created once here, because dynamo does not trace the creation of a config.
DEFAULT = Float8ExpertsConfig()
