"""transformers' ``Conv1D`` layers (GPT-2), converted as linear layers.

A Conv1D is a linear layer whose weight is ``[in, out]``. The linear layer that it becomes has the
transposed weight, for the optimizer and for everything else that reads parameters. Its
``state_dict`` has the weight of the Conv1D, so checkpoints keep their names and shapes.
"""

from typing import Any, TypeGuard

import torch
from torch import nn

from fp8_dist.linear.class_change import change_class
from fp8_dist.linear.optimizer_steps import note_replaced


def conv1d_class(module: nn.Module) -> type[nn.Module] | None:
    """Return transformers' class Conv1D if a module is one, without an import of transformers."""
    known = ("transformers.pytorch_utils", "Conv1D")
    return next((c for c in type(module).__mro__ if (c.__module__, c.__name__) == known), None)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is an nn.Linear or a Conv1D."""
    return isinstance(module, nn.Linear) or conv1d_class(module) is not None


def linear_class(module: nn.Module) -> type[nn.Module]:
    """Return the class whose forward a linear layer must have to be converted."""
    return conv1d_class(module) or nn.Linear


def linear_shape(module: Any) -> tuple[int, int]:
    """Return ``(out_features, in_features)`` of an nn.Linear or a Conv1D."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    return module.nf, module.nx


def become_linear(module: Any, fqn: str) -> None:
    """Turn a Conv1D into an nn.Linear in place, with a new parameter, the transposed weight."""
    module.out_features, module.in_features = linear_shape(module)
    change_class(module, nn.Linear)
    old = module.weight
    new = nn.Parameter(old.detach().t().contiguous(), requires_grad=old.requires_grad)
    note_replaced(old, new, module, "weight", fqn)
    module.weight = new


def save_as_conv1d(module: nn.Module) -> None:
    """Let a ``state_dict`` of a linear layer have the weight of a Conv1D, from now on.

    A weight that is stored in float8 is saved as it is stored, beside its scales.
    """
    module.register_state_dict_post_hook(_save)
    module.register_load_state_dict_pre_hook(_load)


def note_linear(parent: Any) -> None:
    """Tell a PEFT layer that its base layer is a linear layer now, and no Conv1D."""
    if getattr(parent, "fan_in_fan_out", False) is True:
        parent.fan_in_fan_out = False


def _save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    if _is_in_high_precision(weight := state.get(f"{prefix}weight")):
        state[f"{prefix}weight"] = weight.t()  # a view, so that dcp.load writes to the weight


def _load(module: nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    if _is_in_high_precision(weight := state.get(f"{prefix}weight")):
        state[f"{prefix}weight"] = weight.t().contiguous()


def _is_in_high_precision(weight: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(weight, torch.Tensor) and weight.dtype.itemsize > 1
