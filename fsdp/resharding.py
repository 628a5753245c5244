"""Refusing ``reshard_after_forward=<int>`` for weights that FSDP2 gathers in float8.

FSDP2 would reshard its all-gather output, which is float8 bytes here, as a parameter to the
smaller mesh, and fail at that with an error about dtypes that require gradients.
"""

from collections.abc import Iterator
from inspect import getclosurevars
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule


def check_sharded_module(module: FSDPModule, name: str) -> None:
    """Refuse a module that ``fully_shard`` was called on, before FSDP2 first runs it."""
    state = module._get_fsdp_state()
    _check(getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group], name)


def check_layer(layer: nn.Module, name: str) -> None:
    """Refuse a layer whose weight FSDP2 is about to gather."""
    _check(_groups_of(layer), name)


def _groups_of(layer: nn.Module) -> Iterator[Any]:
    """The parameter groups that hold a layer's parameters, once FSDP2 has been initialized.

    A layer inside of a sharded module doesn't know about it, but each group leaves a hook on the
    modules that own its parameters, which makes a ``state_dict`` hold shards.
    """
    for hook in layer._state_dict_pre_hooks.values():
        if hook.__qualname__.startswith("FSDPParamGroup."):
            yield getclosurevars(hook).nonlocals["self"]


def _check(groups: Any, name: str) -> None:
    for group in groups:
        if group is None or group.post_forward_mesh_info in (None, group.mesh_info):
            continue
        if any(hasattr(p, "_extensions_data") for p in group.fsdp_params):
            raise ValueError(
                f"{name}: fully_shard(..., reshard_after_forward=<int>) can't reshard weights "
                "that it gathers in float8 to a smaller mesh; use True or False there, or leave "
                "enable_fsdp_float8_all_gather off"
            )
