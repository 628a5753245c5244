"""``repr`` of a converted layer: recipe and float8 gathers."""

from dataclasses import replace

from recipe_algebra import floor_of_mxfp8

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingType,
)

from_recipe = Float8LinearConfig.from_recipe_name


def layer(config: Float8LinearConfig | None = None) -> Float8Linear:
    return Float8Linear(16, 32, bias=False, config=config)


def test_the_recipe_and_what_differs_from_it() -> None:
    for name in ("bf16", *(recipe.value for recipe in Float8LinearRecipeName)):
        assert f" recipe={name}, float8_gathers=" in repr(layer(from_recipe(name)))
    plain = Float8LinearConfig()
    off = CastConfig(scaling_type=ScalingType.DISABLED)
    fields = ("cast_config_input_for_grad_weight", "cast_config_grad_output_for_grad_weight")
    for config, shown in (
        (
            replace(plain, enable_fsdp_float8_all_gather="auto", pad_inner_dim=True),
            "recipe=tensorwise, pad_inner_dim=True, float8_gathers=weight|input|grad_output",
        ),
        (
            replace(from_recipe("rowwise"), round_scales_to_power_of_2=False),
            "recipe=rowwise, round_scales_to_power_of_2=False, float8_gathers=none",
        ),
        (floor_of_mxfp8(), "recipe=custom, round_scales_to_power_of_2=True, float8_g"),
        (replace(plain, **dict.fromkeys(fields, off)), "recipe=custom, float8_gathers="),
    ):
        assert shown in repr(layer(config))
