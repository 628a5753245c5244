"""Hooks of any optimizer's step.

Before a step, a hook raises if the optimizer holds replaced parameters. After it, a hook runs the
attached updates.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as step_hooks
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from fp8_dist import torch_internals as internals

# The attribute of an optimizer that holds the calls after its steps. (In a global table, a call
# would keep its module alive, and with it an optimizer that is an attribute of the module.)
_CALLS = "_fp8_dist_after_steps"
# Replaced parameters: the (first) module that had it, its name there, the FQN of the module.
_replaced: Any = WeakTensorKeyDictionary()


def after_steps(optimizers: Sequence[Optimizer], call: Callable[[], None]) -> RemovableHandle:
    """Run ``call`` each time all of these optimizers have stepped.

    Optimizers are expected to step in the given order, and ``call`` runs after the step of the last
    one. If they step within a backward pass, each as soon as its gradients are ready and in any
    order, it runs when the backward pass has ended.

    ``call`` runs in a global hook, because torch runs global hooks after an optimizer's own
    post-step hooks, which may write to weights.
    """
    _register_once(step_hooks.register_optimizer_step_post_hook, _on_optimizer_step)
    queued_in: int | None = None  # the last backward pass that the call was queued for

    def stepped(is_last: bool) -> None:
        nonlocal queued_in
        if not internals.in_backward():
            if is_last:
                call()
        elif queued_in != internals.backward_id():
            queued_in = internals.backward_id()
            internals.when_backward_ends(call)

    calls: list[OrderedDict[int, Callable[[], None]]] = [
        vars(optimizer).setdefault(_CALLS, OrderedDict()) for optimizer in optimizers
    ]
    handle = RemovableHandle(calls[-1], extra_dict=calls[:-1])
    for queue in calls:
        queue[handle.id] = partial(stepped, is_last=queue is calls[-1])
    return handle


def note_replaced(
    old: torch.Tensor, new: torch.Tensor, module: nn.Module, name: str, fqn: str
) -> None:
    """Refuse later steps of optimizers that hold ``old``, if the module trains another parameter.

    Args:
        new: the new parameter ``name`` of the module.
        fqn: the name of the module, for messages.
    """
    _register_once(step_hooks.register_optimizer_step_pre_hook, check_not_replaced)
    _replaced.pop(new, None)
    if old not in _replaced:
        _replaced[old] = weakref.ref(module), name, fqn


@internals.disabled_in_graphs()
def check_not_replaced(optimizer: Optimizer, *_: Any) -> None:
    """Check that no parameter of an optimizer was replaced by one that is trained.

    Raises:
        ValueError: one was replaced, so a step would not update the new parameter.
    """
    ids = held_by(optimizer)
    for old, (module, name, fqn) in _replaced.items():
        current = getattr(module(), name, None) if id(old) in ids else None
        if current is not None and current is not old and current.requires_grad:
            raise ValueError(
                f"{fqn}.{name}: this {type(optimizer).__name__} holds the parameter that the layer "
                "had before freeze_to_float8, unfreeze_from_float8 or declare_placements, so its "
                "steps would leave the weight as it is. Make the optimizer afterwards"
            )


def hooked_optimizers(optimizer: Any) -> list[Optimizer]:
    """The optimizers in an object whose steps run torch's hooks, in the order of their steps.

    These are the object itself, the ``.optimizer`` of a wrapper (accelerate's AcceleratedOptimizer,
    a learning rate scheduler), or the optimizers that a container iterates over (torchtitan's
    OptimizersContainer, a list).
    """
    if isinstance(optimizer, Optimizer) and internals.runs_step_hooks(optimizer):
        return [optimizer]
    if (wrapped := getattr(optimizer, "optimizer", None)) is not None:
        return hooked_optimizers(wrapped)
    parts = optimizer if isinstance(optimizer, Iterable) else ()
    optimizers = [part for part in parts if isinstance(part, Optimizer)]
    return [inner for part in optimizers for inner in hooked_optimizers(part)]


def held_by(optimizer: Optimizer) -> set[int]:
    """The ids of an optimizer's parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


@cache
def _register_once(register: Callable[..., RemovableHandle], hook: Callable[..., None]) -> None:
    register(hook)


@internals.disabled_in_graphs()
def _on_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for call in list(vars(optimizer).get(_CALLS, {}).values()):
        call()
