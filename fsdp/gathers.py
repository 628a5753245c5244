"""Hooks into FSDP2's sharding, and checks before it gathers or reshards weights.

Importing this module makes FSDP2 gather weights in float8 where layers ask for it. Before its first
gather, FSDP2 compares layers between ranks, and warns about gathers in high precision that no
config asks for.
"""

from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from fp8_dist import fsdp_internals as internals
from fp8_dist.device import call_at_replays
from fp8_dist.fsdp.weight import wrap_sharded
from fp8_dist.mesh import local_tensor
from fp8_dist.text import warn_once
from fp8_dist.torch_internals import in_backward
from fp8_dist.weight import agreement
from fp8_dist.weight.float8_weight import Float8Weight
from fp8_dist.weight.stored import Stored
from fp8_dist.weight.weights import checked_module, float8_modules, weights_of


def _weights_of(parameter: internals.FsdpParameter) -> list[Float8Weight]:
    """The float8 weights of the modules that share a parameter."""
    return [w for module, name in parameter.users if (w := weights_of(module).get(name))]


def _when_sharded(parameter: internals.FsdpParameter) -> None:
    """Wrap a sharded parameter; before the first gather of its group, check the group."""
    weights = _weights_of(parameter)
    for weight in weights:
        weight.fsdp = parameter
        weight.check_sharded()
    wrap_sharded(parameter, weights)
    if (group := parameter.group) and group.fsdp_params[0] is parameter.own:
        _compare_between_ranks(group)
        _check_gathers(group)


def _compare_between_ranks(group: Any) -> None:
    """Compare the layers of the model that a parameter group belongs to, once.

    This includes layers whose weights FSDP2 gathers in high precision, because their forward
    reduces amaxes.
    """
    if not any(agreement.needs_comparison(module) for module in group.modules):
        return
    for module in filter(agreement.needs_comparison, internals.fsdp_roots_of(group)):
        modules = float8_modules(module)
        # A rank takes part too if it has converted only other parts of the model.
        if modules or agreement.is_part_of_converted(module):
            agreement.check_layers(module, modules, "FSDP2's first gather")
        else:
            agreement.mark_compared(module)


def _when_reset(parameter: internals.FsdpParameter) -> None:
    """Wrap the local tensor of a parameter again, if other code has replaced it by a plain one."""
    weights = _weights_of(parameter)
    if weights and weights[0].fsdp is not None:
        wrap_sharded(parameter, weights)


def _when_not_reset(parameter: internals.FsdpParameter) -> None:
    """Raise ValueError if FSDP2 would gather the old values of a float8 weight.

    In high precision FSDP2 gathers them without an error, and trains a parameter that no forward
    uses.
    """
    if isinstance(local_tensor(parameter.sharded), Stored):
        return  # (its hooks are those of the new local tensor)
    weights = _weights_of(parameter)
    if weights:
        weight = weights[0]
        raise ValueError(
            f"{weight.fqn}: the local tensor of {weight.name} was replaced (by "
            "torch.utils.swap_tensors, or by nn.Module._apply of a module within the FSDP module), "
            "but FSDP2 still gathers the old one. Write the new values instead, by "
            "parameter.copy_(values) under torch.no_grad(); or call "
            "fsdp_model._apply(lambda tensor: tensor), after which FSDP2 gathers what was replaced"
        )


internals.when_fsdp_shards(_when_sharded)
internals.when_fsdp_resets(_when_reset)
internals.before_fsdp_gathers_others(_when_not_reset)
internals.divide_fsdp_gradients_once()


def reshard(module: nn.Module, caller: str) -> list[Any]:
    """Reshard all FSDP modules, which puts their sharded parameters back in place; return them.

    In the capture of a CUDA graph, let its replays do so, too.
    """
    modules = checked_module(module).named_modules()
    names = {m: n or "the root" for n, m in modules if isinstance(m, FSDPModule)}
    for part, name in names.items() if in_backward() else ():
        if any(map(internals.fsdp_is_running, internals.fsdp_groups_of_module(part))):
            raise ValueError(
                f"{caller}: called within a backward of {name} (from a hook?), which still needs "
                "the unsharded parameters; call it after optimizer.step(), or attach it "
                "(attach_update)"
            )
    for part in names:
        part.reshard()
        call_at_replays(id(part), part.reshard)
    return list(names)


def _check_gathers(group: Any) -> None:
    """Refuse float8 gathers that reshard to a smaller mesh; warn once if others could be float8."""
    shards = internals.fsdp_reduce_scatter_group(group)
    reshards = internals.fsdp_reshards_to_smaller_mesh(group)
    is_divided = shards is not None and shards.size() > 1
    for parameter in internals.fsdp_parameters([group]):
        weights = [weights_of(module).get(name) for module, name in parameter.users]
        if (first := weights[0]) is None:
            continue
        if reshards and hasattr(local_tensor(parameter.sharded), "fsdp_pre_all_gather"):
            # FSDP2 would reshard its all-gather output to the smaller mesh and make it a parameter.
            # But the output is float8 bytes, which can't require gradients.
            raise ValueError(
                f"{first.fqn}: fully_shard(..., reshard_after_forward=<int>) can't reshard "
                "weights that it gathers in float8 to a smaller mesh; use True or False there, or "
                "leave enable_fsdp_float8_all_gather off, and freeze_to_float8 out"
            )
        if is_divided and not reshards and all(map(_leaves_gather_open, weights)):
            warn_once(
                "gather in high precision",
                f"{first.fqn} and layers like it: FSDP2 gathers their weights in high "
                "precision, because enable_fsdp_float8_all_gather is not set in their config. Set "
                'it to "auto" to gather float8, 1 byte per element, or to False to leave it so',
            )


def _leaves_gather_open(weight: Float8Weight | None) -> bool:
    if weight is None or weight.is_stored:
        return False
    can_gather = weight.config.recipe.gather_scheme["weight"] is not None
    return can_gather and weight.config.enable_fsdp_float8_all_gather is None
