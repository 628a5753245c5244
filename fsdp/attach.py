"""Calls after an optimizer's steps, with checks that these change a model's float8 weights."""

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from fp8_dist.linear.module import Float8Linear
from fp8_dist.linear.optimizer_steps import after_steps, hooked_optimizers, updated_by
from fp8_dist.warn import warn_once


def attach(
    call: Callable[[], None], optimizer: Any, layers: dict[str, Float8Linear], caller: str
) -> RemovableHandle:
    """Run ``call`` after the steps of an optimizer, which may be wrapped or one of several.

    If a container of optimizers runs no hooks itself, those that update a weight of these layers
    count: ``call`` runs once, after the last of them (see ``after_steps``).

    Args:
        call: the function to run.
        optimizer: a torch optimizer, or an object that holds some.
        layers: the layers by name. FSDP2's sharded parameters must be in place.
        caller: the name of the caller, for messages.

    Raises:
        TypeError: no optimizer is found in ``optimizer``.
        ValueError: the optimizer updates none of the weights, though some can be trained.

    Warns once if there should be several ranks (``WORLD_SIZE``) but there is no process group.
    """
    world_size = os.environ.get("WORLD_SIZE") or "1"
    if world_size != "1" and not dist.is_initialized():
        warn_once(
            "no process group",
            f"{caller}: WORLD_SIZE is {world_size}, but there is no process group: each rank "
            "trains a model of its own. Call torch.distributed.init_process_group() first",
        )
    found = hooked_optimizers(optimizer)
    if not found:
        raise TypeError(
            f"{caller}: a {type(optimizer).__name__} is no torch.optim.Optimizer that runs step "
            "hooks, and holds none (as its attribute .optimizer, or by iteration); pass the "
            "optimizer that updates the model"
        )
    trained = {id(layer.weight): name for name, layer in layers.items() if _is_trained(layer)}
    fitting = [each for each in found if not trained.keys().isdisjoint(updated_by(each))]
    if trained and not fitting:
        first = next(iter(trained.values()))
        raise ValueError(
            f"{caller}: the {type(optimizer).__name__} updates none of the module's "
            f"{len(trained)} float8 weights (such as {first}.weight), so its steps would leave "
            "them, and their scales, as they are. Make the optimizer after "
            "convert_to_float8_training, apply_tp_plan and fully_shard, which make new parameters, "
            "and pass the one that updates them"
        )
    return after_steps(fitting or found, call)


def _is_trained(layer: Float8Linear) -> bool:
    return layer.weight.requires_grad
