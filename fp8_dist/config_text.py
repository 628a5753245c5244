"""Text about configs: the recipe of a config, its options, and its fields by name."""

import enum
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

from fp8_dist.config import Float8LinearConfig, Float8LinearRecipeName
from fp8_dist.recipe import GEMM_OPERANDS

CUSTOM = "custom"  # what is shown for casts of no recipe


@lru_cache
def config_text(config: Float8LinearConfig) -> str:
    """Return the recipe, the options that differ from it, and the float8 gathers."""
    recipe, options = _recipe_and_options(config)
    gathers = ["weight"] if config.fsdp_float8_all_gather else []
    for operand, scheme in config.recipe.gather_scheme.items():
        if scheme and operand != "weight":
            gathers.append(operand)
    gathers_text = f"float8_gathers={'|'.join(gathers) or 'none'}"
    return ", ".join([f"recipe={recipe}", *options, gathers_text])


@lru_cache
def recipe_of(config: Float8LinearConfig) -> str:
    """Return the name of the recipe that has the casts of a config, or ``CUSTOM``."""
    return _recipe_and_options(config)[0]


@lru_cache
def field_texts(config: Any) -> dict[str, str]:
    """Return the values of a config's fields by name, and of casts and GEMMs by their own fields.

    A cast that is None is shown as the one that it stands for.
    """
    texts: dict[str, str] = {}
    for name in _shown_fields(config):
        value = getattr(config, name)
        if value is None and "_for_" in name:
            value = getattr(config, name.partition("_for_")[0])
        if is_dataclass(value) and _shown_fields(value):
            for part in _shown_fields(value):
                texts[f"{name}.{part}"] = _shown(getattr(value, part))
        else:
            texts[name] = _shown(value)
    return texts


def _shown_fields(config: Any) -> list[str]:
    return [field.name for field in fields(config) if field.repr]


def _shown(value: object) -> str:
    return str(value) if isinstance(value, enum.Enum) else repr(value)


def _recipe_and_options(config: Float8LinearConfig) -> tuple[str, list[str]]:
    """Return the recipe that has the casts of a config, and the options that differ from it."""
    named = Float8LinearConfig.from_recipe_name
    recipes = {n: named(n) for n in ("bf16", *(name.value for name in Float8LinearRecipeName))}
    if config.cast_config_weight.format == "mxfp4":
        names = "blockwise", "mxfp8"
        recipes = {f"{n}, weight_format=mxfp4": named(n, weight_format="mxfp4") for n in names}
    alike = {name: recipe for name, recipe in recipes.items() if _casts(recipe) == _casts(config)}
    alike = alike or {CUSTOM: Float8LinearConfig()}
    options = {name: _options_beside(config, recipe) for name, recipe in alike.items()}
    return min(options.items(), key=lambda item: len(item[1]))


def _casts(config: Float8LinearConfig) -> list[object]:
    uses = GEMM_OPERANDS.items()
    return [config.cast_config(operand, gemm) for gemm, operands in uses for operand in operands]


def _options_beside(config: Float8LinearConfig, recipe: Float8LinearConfig) -> list[str]:
    """Return the fields that differ from the recipe, except for casts and those shown elsewhere."""
    return [
        f"{field.name}={getattr(config, field.name)}"
        for field in fields(config)
        if not field.name.startswith(("cast_config", "enable_fsdp_float8_all_gather"))
        and getattr(config, field.name) != getattr(recipe, field.name)
    ]
