"""Restoration of the tensor type of float8 weights after other code has rebuilt the parameters."""

import torch.nn as nn
from torch.distributed.tensor import DTensor

from fp8_dist.fsdp.weight import Float8AllGatherWeight
from fp8_dist.linear.module import other_users
from fp8_dist.linear.weight import Float8Weight, float8_weights
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor.float8_tensor import Float8Tensor
from fp8_dist.torch_internals import fsdp_groups, fsdp_parameters, set_dtensor_local


def rewrap_float8_weights(module: nn.Module) -> list[str]:
    """Let FSDP2 gather weights in float8 again after other code has rebuilt their parameters.

    ``convert_to_float8_training`` with ``enable_fsdp_float8_all_gather`` gives weights a tensor
    type that FSDP2 gathers in float8. Code that makes new parameters of plain tensors, such as a
    checkpoint loader, loses the type. Call this function afterwards, before ``fully_shard`` and
    before the optimizer is made. A model that was sharded with the type, for instance on the meta
    device, may be loaded and rewrapped until its first forward. A second call changes nothing.

    A weight that is a DTensor stays the same parameter. A plain weight becomes a new parameter on
    the same storage, with the gradient and attributes of the old one. Layers that shared a weight
    still share it.

    Args:
        module: the model, or a part of it.

    Returns:
        The names of the modules whose weights were wrapped.

    Collectives: none.

    Raises:
        ValueError: ``module`` has no converted layer; another module shares a weight that would be
            wrapped; or FSDP2 already gathers a weight in high precision, because ``fully_shard``
            found it without the type, or because it was gathered after it lost the type. Nothing
            has been changed then.
    """
    weights = float8_weights(module)
    if not weights:
        raise ValueError(
            "rewrap_float8_weights: the module has no Float8Linear; call "
            "convert_to_float8_training first"
        )
    lost = {fqn: weight for fqn, weight in weights.items() if _lost_type(weight)}
    _check_shared_weights(module, lost)
    _check_fsdp(lost)
    new: dict[int, nn.Parameter] = {}
    for weight in lost.values():
        _rewrap(weight, new)
    names = (fqn.rpartition(".")[0] or weight.fqn for fqn, weight in lost.items())
    return list(dict.fromkeys(names))


def _lost_type(weight: Float8Weight) -> bool:
    if not weight.config.fsdp_float8_all_gather or not weight.is_registered:
        return False
    local = local_tensor(weight.parameter())
    return not isinstance(local, Float8AllGatherWeight | Float8Tensor)


def _rewrap(weight: Float8Weight, new: dict[int, nn.Parameter]) -> None:
    """Wrap a weight.

    Args:
        new: the new parameters by the ids of the old ones. A parameter made here is added.
    """
    old = weight.parameter()
    if isinstance(old, DTensor):
        set_dtensor_local(old, Float8AllGatherWeight.wrap(local_tensor(old), weight.name))
        weight.cache.reset()
        return
    if id(old) not in new:
        new[id(old)] = weight.wrapped(old)
        new[id(old)].__dict__.update(old.__dict__)
        new[id(old)].grad = old.grad
    setattr(weight.module, weight.name, new[id(old)])


def _check_shared_weights(module: nn.Module, weights: dict[str, Float8Weight]) -> None:
    """Raise for weights that other modules use as well; the conversion raises for them too."""
    parameters = {fqn: weight.parameter() for fqn, weight in weights.items()}
    if shared := other_users(module, parameters, [weight.module for weight in weights.values()]):
        raise ValueError(
            "rewrap_float8_weights: FSDP2 would gather a weight in float8 for all its users, but "
            f"{'; '.join(shared)}. Leave these layers unconverted (convert_to_float8_training's "
            "module_filter_fn), or untie them"
        )


def _check_fsdp(weights: dict[str, Float8Weight]) -> None:
    """Raise for weights that FSDP2 can only gather in high precision."""
    names = {(weight.module, weight.name): weight.fqn for weight in weights.values()}
    for parameter in fsdp_parameters(fsdp_groups()) if weights else ():
        lost = [names[user] for user in parameter.users if user in names]
        if lost and (parameter.has_gathered or not parameter.has_hooks):
            found = "has gathered it" if parameter.has_gathered else "was set up (fully_shard)"
            raise ValueError(
                f"rewrap_float8_weights: {lost[0]}: FSDP2 {found} after the weight lost "
                "its type, and goes on gathering it in high precision. Call "
                "rewrap_float8_weights(model) before fully_shard"
            )
