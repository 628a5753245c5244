"""Checks of weights before FSDP2 gathers them in float8, and before it puts them back.

Importing this module makes FSDP2 check its groups, and compare layers between ranks, before its
first gather.
"""

from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from fp8_dist.linear.agreement import (
    check_layers,
    is_part_of_converted,
    mark_compared,
    needs_comparison,
)
from fp8_dist.linear.weight import float8_modules, weights_of
from fp8_dist.torch_internals import (
    before_fsdp_gathers,
    fsdp_groups_of_module,
    fsdp_is_running,
    fsdp_parameters,
    fsdp_reshards_to_smaller_mesh,
    fsdp_roots_of,
    in_backward,
)


def _before_first_gather(group: Any) -> None:
    """Compare a parameter group's layers between ranks, check it, and note its parameters."""
    _compare_between_ranks(group)
    for parameter in fsdp_parameters([group]):
        for module, name in parameter.users:
            weight = weights_of(module).get(name)
            if weight is None:
                continue
            weight.gathered_over = parameter.mesh
            weight.gathered_as = None if parameter.has_hooks else parameter.param_dtype
            if parameter.has_hooks:
                _check_reshards(group, weight.fqn)
            weight.waits_in_fsdp = parameter.has_unreduced
            if not weight.under_fsdp:
                weight.note_sharded(parameter.parameter)


def _compare_between_ranks(group: Any) -> None:
    """Compare the layers of the model that a parameter group belongs to, once.

    This includes layers whose weights FSDP2 gathers in high precision, because their forward
    reduces amaxes.
    """
    if not any(needs_comparison(module) for module in group.modules):
        return
    for module in filter(needs_comparison, fsdp_roots_of(group)):
        modules = float8_modules(module)
        # A rank that has converted only other parts of the model takes part too.
        if modules or is_part_of_converted(module):
            check_layers(module, modules, "FSDP2's first gather")
        else:
            mark_compared(module)


before_fsdp_gathers(_before_first_gather)


def reshard(module: nn.Module, caller: str) -> None:
    """Reshard all FSDP modules, which puts their sharded parameters back in place."""
    names = {m: n or "the root" for n, m in module.named_modules() if isinstance(m, FSDPModule)}
    groups = {part: fsdp_groups_of_module(part) for part in names}
    for part, name in names.items() if in_backward() else ():
        if any(map(fsdp_is_running, groups[part])):
            raise ValueError(
                f"{caller}: called within a backward of {name} (from a hook?), which still needs "
                "what FSDP2 has gathered; call it after optimizer.step(), or attach it "
                "(attach_update)"
            )
    for part, name in names.items():
        for group in groups[part]:
            if any(parameter.has_hooks for parameter in fsdp_parameters([group])):
                _check_reshards(group, name)
        part.reshard()


def _check_reshards(group: Any, name: str) -> None:
    # FSDP2 would make a parameter of its all-gather output, resharded to the smaller mesh. Here the
    # output is float8 bytes, so it would fail with an error about dtypes that require gradients.
    if fsdp_reshards_to_smaller_mesh(group):
        raise ValueError(
            f"{name}: fully_shard(..., reshard_after_forward=<int>) can't reshard weights "
            "that it gathers in float8 to a smaller mesh; use True or False there, or leave "
            "enable_fsdp_float8_all_gather off, and freeze_to_float8 out"
        )
