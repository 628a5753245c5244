"""Refusing ``reshard_after_forward=<int>`` for weights that FSDP2 gathers in float8.

FSDP2 would reshard its all-gather output, which is float8 bytes here, as a parameter to the
smaller mesh, and fail at that with an error about dtypes that require gradients.
"""

from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from fp8_dist.torch_internals import (
    fsdp_groups,
    fsdp_groups_of_module,
    fsdp_modules_with_extensions,
    fsdp_reshards_to_smaller_mesh,
)

# FSDP2's parameter group of each layer whose weight it gathers in float8. The layer itself, a child
# of the sharded module, has no reference to it.
_groups: "WeakKeyDictionary[nn.Module, ReferenceType[Any]]" = WeakKeyDictionary()


def check_sharded_module(module: FSDPModule, name: str) -> None:
    """Refuse a module that ``fully_shard`` was called on, before FSDP2 first runs it."""
    for group in fsdp_groups_of_module(module):
        if fsdp_modules_with_extensions(group):
            _check(group, name)


def check_layer(layer: nn.Module, name: str) -> None:
    """Refuse a layer whose weight FSDP2 is about to gather."""
    if layer not in _groups or _groups[layer]() is None:  # its first gather: look up all at once
        for group in fsdp_groups():
            _groups.update(dict.fromkeys(fsdp_modules_with_extensions(group), ref(group)))
    if layer in _groups:
        _check(_groups[layer](), name)


def group_of(layer: nn.Module) -> Any:
    """FSDP2's parameter group of a layer that passed :func:`check_layer`; else None."""
    group = _groups.get(layer)
    return None if group is None else group()


def _check(group: Any, name: str) -> None:
    if fsdp_reshards_to_smaller_mesh(group):
        raise ValueError(
            f"{name}: fully_shard(..., reshard_after_forward=<int>) can't reshard weights "
            "that it gathers in float8 to a smaller mesh; use True or False there, or leave "
            "enable_fsdp_float8_all_gather off"
        )
