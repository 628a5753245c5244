"""Update of all scales after an optimizer step, for any recipes: precompute, sync, or both."""

from collections.abc import Iterable
from functools import partial

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8_dist.fsdp.attach import attach
from fp8_dist.fsdp.precompute import check_agreement, precompute_layers, reshard
from fp8_dist.fsdp.sync import sync_float8_amax_and_scale_history
from fp8_dist.linear.module import Float8Linear, float8_layers
from fp8_dist.torch_internals import fsdp_groups_of_module, fsdp_parameters


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="update_float8_scales updates what graphs ask for when they run; call it outside of "
    "code that is compiled with fullgraph=True"
)
def update_float8_scales(module: nn.Module) -> None:
    """Update the scales of a model after an optimizer step, as its recipes need it.

    Call it on all ranks after every ``optimizer.step()``, for any recipe, or let
    :func:`attach_update` call it. It runs

    * :func:`fp8_dist.precompute_float8_dynamic_scale` for the weights with DYNAMIC scales that
      FSDP2 gathers in float8, or that are distributed by tensor parallelism alone. Weights that
      FSDP2 gathers in high precision are scaled after each gather, and weights that are whole on
      every rank need no other rank's amax.
    * :func:`fp8_dist.sync_float8_amax_and_scale_history` if an operand has DELAYED scales.

    Args:
        module: the model, or a part of it that contains the FSDP modules of its layers.

    Collectives: those of the two functions, if they run, which is the same on all ranks. The first
    call for a module may compare its layers between ranks, as in precompute.

    Raises:
        ValueError: ranks differ in the layers of ``module``, it has no converted layer, or one of
            the two functions refuses a weight.
        NotImplementedError, torch._dynamo.exc.Unsupported: as in the two functions.
    """
    check_agreement(module, "update_float8_scales")
    layers = _converted_layers(module, "update_float8_scales")
    precomputed = _layers_to_precompute(module, layers)
    if precomputed:
        precompute_layers(module, precomputed)
    if any(layer.histories for layer in layers.values()):
        sync_float8_amax_and_scale_history(module)


def attach_update(optimizer: Optimizer | Iterable[Optimizer], module: nn.Module) -> RemovableHandle:
    """Call :func:`update_float8_scales` after every optimizer step.

    The arguments are those of :func:`fp8_dist.attach_precompute`. No hook runs for a step that
    ``torch.amp.GradScaler`` skips: with DELAYED scales call :func:`update_float8_scales` in the
    loop instead.

    Returns:
        A handle whose ``remove()`` ends the calls.

    Raises:
        ValueError: ``module`` has no converted layer, or the optimizer updates none of its float8
            weights.
        TypeError: ``optimizer`` is not a torch optimizer and holds none.
    """
    layers = _converted_layers(module, "attach_update")
    reshard(module, "attach_update")  # the parameters that an optimizer updates
    return attach(partial(update_float8_scales, module), optimizer, layers, "attach_update")


def _converted_layers(module: nn.Module, caller: str) -> dict[str, Float8Linear]:
    layers = float8_layers(module)
    if not layers:
        raise ValueError(
            f"{caller}: the module has no Float8Linear; call convert_to_float8_training first"
        )
    return {name or layer.fqn: layer for name, layer in layers.items()}


def _layers_to_precompute(
    module: nn.Module, layers: dict[str, Float8Linear]
) -> dict[str, Float8Linear]:
    """Return the layers whose next forward or FSDP2 gather uses a precomputed scale."""
    fsdp_modules = [part for part in module.modules() if isinstance(part, FSDPModule)]
    groups = [group for part in fsdp_modules for group in fsdp_groups_of_module(part)]
    users = {user for parameter in fsdp_parameters(groups) for user in parameter.users}

    def takes_precomputed_scale(layer: Float8Linear) -> bool:
        if all(cast.delayed for cast in layer.config.casts("weight")):
            return False
        distributed = layer.float8_weight.layout() is not None
        tensor_parallel = distributed and (layer, "weight") not in users
        return layer.config.fsdp_float8_all_gather or tensor_parallel

    return {name: layer for name, layer in layers.items() if takes_precomputed_scale(layer)}
