"""The layers of a model that are converted, and those that become faster."""

import pkgutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from fp8_dist.config import Float8LinearConfig
from fp8_dist.kernels.quantization import ALIGNMENT
from fp8_dist.model.break_even import expectation, tokens_to_gain
from fp8_dist.model.convert import convert_to_float8_training
from fp8_dist.model.filters import skip_head, smallest_parts
from fp8_dist.model.report import WeightSummary, alike_rows, conversion_summary
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training
from fp8_dist.text import kind_of


def function_named(option: str, path: str) -> Callable[..., Any]:
    """Return the function that an option of a command names.

    Args:
        option: such as ``"--model"``.
        path: ``"MODULE:FUNCTION"``.

    Raises:
        ValueError: it is no function, or can't be imported.
    """
    if ":" not in path:
        raise ValueError(f"{option} {path}: it is not MODULE:FUNCTION")
    try:
        function = pkgutil.resolve_name(path)
    except Exception as error:  # whatever the import of the module raises
        raise ValueError(f"{option} {path}: it can't be imported: {_describe(error)}") from error
    if isinstance(function, nn.Module) or not callable(function):
        raise ValueError(f"{option} {path}: it is {kind_of(function)}, not a function")
    return function


def build_model(path: str) -> tuple[nn.Module, str]:
    """Build the model that the option ``--model`` names.

    Args:
        path: ``"MODULE:FUNCTION"``.

    Returns:
        The model, and a description of the device it was built on.

    Raises:
        ValueError: the model can't be built.
    """
    function = function_named("--model", path)
    where = "the meta device"
    try:
        with torch.device("meta"):
            model = function()
    except Exception as meta_error:  # code that reads values of tensors fails there
        where = f"the CPU; on the meta device: {_describe(meta_error)}"
        try:
            model = function()
        except Exception as error:
            raise ValueError(f"--model {path}: the function raised {_describe(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"--model {path}: it returned {kind_of(model)}, not an nn.Module")
    return model, where


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def model_report(
    model: nn.Module, recipe: str, tp: int, tokens: int | None, skip: Sequence[str] = ()
) -> Iterator[str]:
    """Convert a model, and yield lines about the layers that are converted, or would gain speed.

    The last one is a verdict on the model. ``skip``: names for :func:`fp8_dist.skip_head`.
    """
    config = Float8LinearConfig.from_recipe_name(recipe, enable_fsdp_float8_all_gather="auto")
    yield f'recipe {recipe}, enable_fsdp_float8_all_gather="auto"'
    yield f"module_filter_fn=skip_head({', '.join(['model', *map(repr, skip)])})"
    try:
        admits = skip_head(model, *skip)
        with warnings.catch_warnings(action="ignore"):  # the summary has the same information
            model = convert_to_float8_training(model, module_filter_fn=admits, config=config)
    except ValueError as error:
        yield f"refused: {error}"
        yield "Nothing of it is converted. Next: change what is refused, or stay in bf16."
        return
    if any(row.kind == "experts" for row in conversion_summary(model).rows):
        try:
            experts = Float8ExpertsConfig.from_recipe_name(recipe)
            convert_experts_to_float8_training(model, config=experts, module_filter_fn=admits)
        except (ValueError, NotImplementedError) as error:
            yield f"experts stay in high precision: {error}"
        else:
            yield f"experts: Float8ExpertsConfig({recipe!r})"
    summary = conversion_summary(model)
    yield f"\n{summary}"
    yield (
        f'\nfloat8 layers that auto_filter("{recipe}", tp_size={tp}) would leave out (a GPU '
        f"refuses dims that are not multiples of {ALIGNMENT}, unless pad_inner_dim=True)"
    )

    def why_small(row: WeightSummary) -> str:
        """Return why the shards of a layer gain no speed; ``""`` if they gain some."""
        *experts, out, in_ = row.shape
        # Expert parallelism moves whole experts.
        parts = smallest_parts(recipe, (out, in_), ranks=1 if experts else tp)
        return "; ".join(dict.fromkeys(reason for _, reason in parts if reason))

    small = alike_rows(row for row in summary.converted if why_small(row))
    for name, (first, *_) in small:
        out, in_ = first.shape[-2:]
        yield f"  {name}, {out} x {in_}: {why_small(first)}"
    yield "" if small else "  none\n"
    gaining = [row for row in summary.converted if not why_small(row)]
    counts = f"{len(gaining)} of {len(summary.converted)} float8 layers"
    yield f"large enough to gain: {counts} ({summary.share(gaining):.1%} of the parameters)"
    linear = [prod(row.shape) // tp for row in summary.converted if row.kind == "linear"]
    if linear and gaining:
        yield f"the {len(linear)} linear layers: {expectation(linear, tokens)}"
    yield _gain(bool(gaining), linear, tokens)


def _gain(has_gaining: bool, linear: Sequence[int], tokens: int | None) -> str:
    """Say whether a model gains speed, and what to do next, by the sizes of its linear layers."""
    enough = tokens_to_gain(linear)
    if not has_gaining:
        return (
            "Its float8 layers are all too small to gain speed: stay in bf16, unless sending costs "
            "more (python -m scripts.plan counts what a step sends)."
        )
    if not linear:
        return "Next: compare the times of a few steps with bf16, as experts have no estimate."
    if tokens is None:
        return (
            f"On an H100 it gains from about {enough:,} tokens per micro-batch on, if compiled "
            "(FSDP2 needs more). Next: add --tokens N with yours."
        )
    if tokens < enough:
        return (
            f"On an H100 it is slower than in bf16 with {tokens:,} tokens. Next: use {enough:,} or "
            "more per micro-batch, or CUDA graphs, or stay in bf16."
        )
    return (
        f"On an H100 it gains with {tokens:,} tokens, if compiled (FSDP2 needs more). Next: "
        "torch.compile each block, and time it beside bf16."
    )
