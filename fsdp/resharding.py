"""Refusing ``reshard_after_forward=<int>`` for weights that FSDP2 gathers in float8.

FSDP2 would reshard its all-gather output, which is float8 bytes here, as a parameter to the
smaller mesh, and fail at that with an error about dtypes that require gradients.
"""

from collections.abc import Iterable
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from fp8_dist.torch_internals import (
    fsdp_groups_of_layer,
    fsdp_groups_of_module,
    fsdp_reshards_to_smaller_mesh,
)


def check_sharded_module(module: FSDPModule, name: str) -> None:
    """Refuse a module that ``fully_shard`` was called on, before FSDP2 first runs it."""
    _check(fsdp_groups_of_module(module), name)


def check_layer(layer: nn.Module, name: str) -> None:
    """Refuse a layer whose weight FSDP2 is about to gather."""
    _check(fsdp_groups_of_layer(layer), name)


def _check(groups: Iterable[Any], name: str) -> None:
    if any(fsdp_reshards_to_smaller_mesh(group) for group in groups):
        raise ValueError(
            f"{name}: fully_shard(..., reshard_after_forward=<int>) can't reshard weights "
            "that it gathers in float8 to a smaller mesh; use True or False there, or leave "
            "enable_fsdp_float8_all_gather off"
        )
