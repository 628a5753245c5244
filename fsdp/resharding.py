"""Checks of FSDP2 modules: unsupported settings with float8 gathers, and calls in a backward.

With ``reshard_after_forward=<int>`` FSDP2 would reshard its all-gather output to the smaller mesh
as a parameter. Here the output is float8 bytes, and FSDP2 would fail with an error about dtypes
that require gradients.
"""

from collections.abc import Iterable
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from fp8_dist.linear.module import Float8Linear
from fp8_dist.torch_internals import (
    fsdp_groups,
    fsdp_groups_of_module,
    fsdp_is_running,
    fsdp_parameters,
    fsdp_reshards_to_smaller_mesh,
    in_backward,
)

# FSDP2's parameter group of each layer whose weight it gathers in float8. The layer itself, a child
# of the sharded module, has no reference to its group.
_groups: "WeakKeyDictionary[nn.Module, ReferenceType[Any]]" = WeakKeyDictionary()
_compared: "WeakSet[nn.Module]" = WeakSet()  # layers compared with others that share their weight


def check_sharded_module(module: FSDPModule, name: str) -> None:
    """Check a module that ``fully_shard`` was called on, before FSDP2 first runs it."""
    for group in fsdp_groups_of_module(module):
        if any(parameter.has_hooks for parameter in fsdp_parameters([group])):
            _check(group, name)


def check_outside_of_backward(module: nn.Module, caller: str) -> None:
    """Raise in the middle of a backward, which still needs the parameters that FSDP2 gathered."""
    if not in_backward():
        return
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule) and any(
            fsdp_is_running(group) for group in fsdp_groups_of_module(part)
        ):
            raise ValueError(
                f"{caller}: called within a backward of {name or 'the root'} (from a hook?), which "
                "still needs what FSDP2 has gathered; call it after optimizer.step(), or attach it "
                "(attach_update)"
            )


def check_layer(layer: Float8Linear, name: str) -> None:
    """Check a layer whose weight FSDP2 is about to gather."""
    if layer not in _groups or _groups[layer]() is None:  # its first gather: look up all at once
        for group in fsdp_groups():
            for parameter in fsdp_parameters([group]):
                if parameter.has_hooks:
                    _groups.update((module, ref(group)) for module, _ in parameter.users)
    if layer not in _groups:
        return
    group = _groups[layer]()
    _check(group, name)
    if layer not in _compared:
        for parameter in fsdp_parameters([group]):
            (asked, _), *others = parameter.users
            if parameter.has_hooks and asked is layer:
                _check_rounding(layer, [module for module, _ in others])
        _compared.add(layer)


def _check_rounding(layer: Float8Linear, others: Iterable[nn.Module]) -> None:
    """Raise if layers share a weight, but round its scale differently.

    Whether they use the same cast is checked by each layer when it gets the gathered weight.
    """
    own = layer.config
    for other in others:
        if not isinstance(other, Float8Linear):
            continue
        same_cast = other.config.gather_cast("weight") == own.gather_cast("weight")
        if same_cast and other.config.round_scales_to_power_of_2 != own.round_scales_to_power_of_2:
            raise ValueError(
                f"{layer.fqn} and {other.fqn} share a weight that FSDP2 gathers in float8, but "
                "one config has round_scales_to_power_of_2 and the other has not; convert layers "
                "that share a weight with one config"
            )


def group_of(layer: nn.Module) -> Any:
    """Return FSDP2's parameter group of a layer that passed :func:`check_layer`; else None."""
    group = _groups.get(layer)
    return None if group is None else group()


def _check(group: Any, name: str) -> None:
    if fsdp_reshards_to_smaller_mesh(group):
        raise ValueError(
            f"{name}: fully_shard(..., reshard_after_forward=<int>) can't reshard weights "
            "that it gathers in float8 to a smaller mesh; use True or False there, or leave "
            "enable_fsdp_float8_all_gather off"
        )
