"""Float8 in a torchtitan trainer config: conversion, parallelism, and updates of scales."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from fp8_dist import attach_update, float8_layers
from fp8_dist.fsdp.gradient_transport import Transport
from fp8_dist.integrations.torchtitan.converter import Float8Converter
from fp8_dist.integrations.torchtitan.parallelize import float8_parallelize
from fp8_dist.transport import Encoding


def with_float8(
    config: Any,
    recipe_name: str = "tensorwise",
    filter_fqns: Sequence[str] = ("lm_head",),
    *,
    gradient_transport: Transport | None = None,
    reduce_transport: Encoding = None,
) -> Any:
    """Let the model of a torchtitan ``Trainer.Config`` train in float8.

    Args:
        config: a config from a function in a ``config_registry``. Its ``model_spec`` is replaced.
        recipe_name: the name of a recipe, as in ``Float8LinearConfig.from_recipe_name``.
        filter_fqns: layers whose name contains one of these strings stay unconverted.
        gradient_transport: the transport of FSDP2's gradients, as in ``set_gradient_transport``.
        reduce_transport: the transport of sums over tensor-parallel ranks, as in ``llama_tp_plan``.
            With either transport, the result depends on the number of ranks.

    Returns:
        ``config``. FSDP2 gathers weights in float8 where the recipe allows it, and tensor
        parallelism gathers inputs and output gradients in float8. Scales are updated after each
        optimizer step.

    Raises:
        ValueError: the recipe or ``reduce_transport`` is unknown, or there is no layer to convert.
    """
    spec = config.model_spec
    converter = Float8Converter.Config(recipe_name=recipe_name, filter_fqns=list(filter_fqns))
    config.model_spec = replace(
        spec,
        model=converter.build().convert(spec.model),
        parallelize_fn=float8_parallelize(
            spec.parallelize_fn,
            gradient_transport=gradient_transport,
            reduce_transport=reduce_transport,
        ),
        post_optimizer_build_fn=partial(_attach, spec.post_optimizer_build_fn),
    )
    return config


def _attach(
    before: Callable[..., None] | None,
    optimizers: Any,
    model_parts: list[nn.Module],
    parallel_dims: Any,
) -> None:
    if before is not None:
        before(optimizers, model_parts, parallel_dims)
    for part in model_parts:
        if float8_layers(part):
            attach_update(optimizers, part)
