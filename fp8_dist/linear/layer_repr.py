"""Texts of a float8 layer's config and scale, for its ``repr``."""

from dataclasses import fields
from functools import lru_cache
from typing import get_args

import torch
from torch.distributed.tensor import DTensor

from fp8_dist.config import Float8LinearConfig, Float8LinearRecipeName
from fp8_dist.linear.amax_history import AmaxHistory
from fp8_dist.linear.weight_cache import ScaleState, WeightCache
from fp8_dist.recipe import GEMM_OPERANDS, Gemm, Operand
from fp8_dist.tensor.float8_tensor import Float8Tensor
from fp8_dist.torch_internals import dtensor_local

_SHOWN_STATES = {
    ScaleState.UNKNOWN: "unknown",
    ScaleState.PENDING: "pending",
    ScaleState.STALE: "stale",
    ScaleState.PRECOMPUTED: "fresh",
    ScaleState.FROM_GATHER: "fresh",
    ScaleState.FROM_FORWARD: "fresh",
}


@lru_cache
def config_text(config: Float8LinearConfig) -> str:
    """The recipe or the casts, the options that differ from it, and the float8 gathers."""
    by_recipe = [
        (recipe.value, _options_beside(config, Float8LinearConfig.from_recipe_name(recipe)))
        for recipe in Float8LinearRecipeName
        if _casts(config) == _casts(Float8LinearConfig.from_recipe_name(recipe))
    ]
    if by_recipe:
        name, options = min(by_recipe, key=lambda found: len(found[1]))
        shown = [f"recipe={name}", *options]
    else:
        shown = [f"casts={_casts_text(config)}", *_options_beside(config, Float8LinearConfig())]
    travels = {
        operand: config.recipe.gather_scheme[operand] is not None for operand in get_args(Operand)
    }
    travels["weight"] = config.fsdp_float8_all_gather
    gathers = [operand for operand in ("weight", "input", "grad_output") if travels[operand]]
    return ", ".join([*shown, f"float8_gathers={'|'.join(gathers) or 'none'}"])


def scale_text(
    parameter: torch.Tensor | None, cache: WeightCache, history: AmaxHistory | None
) -> str:
    """Return the state of a weight's scale, as the next use would find it.

    Collectives: none. Nothing is waited for, and no state is changed.
    """
    if history is not None:
        known = 0 if history.history is None else len(history.history)
        return f"delayed ({known} of {history.length} amaxes)"
    local = dtensor_local(parameter) if isinstance(parameter, DTensor) else parameter
    if isinstance(local, Float8Tensor):  # FSDP2 gathered it together with its scale
        return _SHOWN_STATES[ScaleState.FROM_GATHER]
    return _SHOWN_STATES[ScaleState.UNKNOWN if parameter is None else cache.state_of(parameter)]


def _casts(config: Float8LinearConfig) -> list[object]:
    uses = [(operand, gemm) for gemm, operands in GEMM_OPERANDS.items() for operand in operands]
    return [config.cast_config(operand, gemm) for operand, gemm in uses]


def _casts_text(config: Float8LinearConfig) -> str:
    names: list[tuple[str, Operand, Gemm]] = [
        ("i", "input", "output"),
        ("w", "weight", "output"),
        ("go", "grad_output", "grad_input"),
        ("i_gw", "input", "grad_weight"),
        ("w_gi", "weight", "grad_input"),
        ("go_gw", "grad_output", "grad_weight"),
    ]
    casts: dict[str, str] = {}
    for name, operand, gemm in names:
        cast = config.cast_config(operand, gemm).short_str(operand)
        if cast != casts.get(name.partition("_")[0]):
            casts[name] = cast
    return ",".join(f"{name}:{cast}" for name, cast in casts.items())


def _options_beside(config: Float8LinearConfig, recipe: Float8LinearConfig) -> list[str]:
    """The fields that differ from the recipe, except for casts and fields shown elsewhere."""
    return [
        f"{field.name}={getattr(config, field.name)}"
        for field in fields(config)
        if not field.name.startswith("cast_config")
        and field.name != "enable_fsdp_float8_all_gather"
        and getattr(config, field.name) != getattr(recipe, field.name)
    ]
