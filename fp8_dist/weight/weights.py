"""The float8 weights of modules and models: how they are found, saved, loaded and placed."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fp8_dist.device import current_capture
from fp8_dist.mesh import has_strided_placements, local_tensor, with_local
from fp8_dist.text import kind_of
from fp8_dist.torch_internals import (
    is_plain,
    normal_tensors,
    parameters_of_ddp,
    set_dtensor_local,
)
from fp8_dist.weight.float8_weight import Float8Weight, ScalesReady
from fp8_dist.weight.known import KnownWeight
from fp8_dist.weight.stored_weight import check_has_no_codes

# The remedy in messages about a model without float8 weights.
CONVERT_FIRST = (
    "call convert_to_float8_training of fp8_dist first (for experts, "
    "fp8_dist.moe.convert_experts_to_float8_training)"
)


def weights_of(module: nn.Module) -> Mapping[str, Float8Weight]:
    """The float8 parameters of a module itself, by name."""
    weights: Mapping[str, Float8Weight] = getattr(module, "float8_weights", {})
    return weights


def save_weights(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace a module's float8 parameters in its ``state_dict``, unless ``keep_vars`` is set.

    A state dict hook of modules whose class is not converted.
    """
    for name, weight in weights_of(module).items():
        parameter = weight.parameter()
        if state.get(prefix + name, parameter) is parameter:
            continue
        if stored := weight.stored():
            state |= {prefix + key: value for key, value in stored.entries().items()}
        else:
            state[prefix + name] = weight.plain(parameter)


def load_weights(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any
) -> None:
    """Convert the entries of a state dict to the types of the weights.

    A pre-hook of ``load_state_dict``.
    """
    for weight in weights_of(module).values():
        if stored := weight.stored():
            stored.load(state, prefix)
            continue
        key = prefix + weight.name
        check_has_no_codes(state, key, weight.fqn)
        entry, local = state.get(key), local_tensor(weight.master())
        if entry is None or not isinstance(local, KnownWeight):
            continue
        local.forget_to_load()
        assigns = metadata.get("assign_to_params_buffers", False)
        if assigns and isinstance(entry, DTensor) and is_plain(local_tensor(entry)):
            # FSDP2 and graphs expect the same type.
            state[key] = with_local(entry, local.like(local_tensor(entry)))


@normal_tensors()
def attach_statistics(weights: Iterable[Float8Weight]) -> None:
    """Attach a cache of statistics to weights whose scales cover values of several ranks.

    Call it once the weights are distributed, before graphs are traced. Parameters that are DTensors
    stay the same. A declared weight, which is a plain tensor, becomes a parameter on the same
    storage. (For DTensors that other code made, precompute does so; graphs are then traced again.)
    """
    for weight in weights:
        if (kept := weight.kept()) is None:
            continue
        old = weight.parameter()
        plain = local_tensor(old)
        local = plain if isinstance(plain, KnownWeight) else KnownWeight(plain.detach())
        if not has_strided_placements(kept.layout.placements):
            local.reserve(kept)
        if isinstance(old, DTensor):
            set_dtensor_local(old, local)
        elif local is not plain:
            warn_of_ddp([weight])
            new = nn.Parameter(local, requires_grad=old.requires_grad)
            new.grad = old.grad
            weight.replace(new)


def warn_of_ddp(weights: Iterable[Float8Weight]) -> None:
    """Warn if parameters that DDP reduces will be replaced: DDP does not reduce the new ones."""
    ids = parameters_of_ddp()
    if replaced := [weight for weight in weights if id(weight.parameter()) in ids]:
        warnings.warn(
            f"{replaced[0].fqn}.{replaced[0].name} becomes another parameter, whose gradient the "
            "DistributedDataParallel that was made before does not reduce: wrap the model in a new "
            "one",
            stacklevel=4,
        )


def checked_module(module: object, call: str = "") -> nn.Module:
    """Return ``module``; raise TypeError if it is not an nn.Module.

    ``call``: a function with the names of its arguments, for the error.
    """
    if not isinstance(module, nn.Module):
        prefix = f"{call}: " if call else ""
        raise TypeError(f"{prefix}expected a model (an nn.Module), got {kind_of(module)}")
    return module


def float8_weights(module: nn.Module) -> dict[str, Float8Weight]:
    """All float8 parameters in ``module`` by FQN, in the order of ``named_modules()``.

    Raises:
        TypeError: ``module`` is not an nn.Module.
    """
    return {
        f"{fqn}.{name}" if fqn else name: weight
        for fqn, part in checked_module(module).named_modules()
        for name, weight in weights_of(part).items()
        if weight.module is part  # torch.compile's wrapper has its inner module's attributes
    }


def weights_of_model(module: nn.Module, caller: str) -> dict[str, Float8Weight]:
    """Return the float8 weights of a module by FQN, or raise ValueError if there are none."""
    weights = float8_weights(module)
    if not weights:
        raise ValueError(f"{caller}: the module has no converted layer; {CONVERT_FIRST}")
    return weights


def check_captured(weights: Mapping[str, Float8Weight], caller: str) -> None:
    """Raise NotImplementedError if a CUDA graph can't train one of the weights."""
    for fqn, weight in weights.items():
        if reason := weight.why_not_captured():
            raise NotImplementedError(
                f"{caller}: a CUDA graph is being captured, and can't replay a step of {fqn}, "
                f"which {reason}, or run steps without a graph"
            )


def mark_scales_ready(weights: Iterable[Float8Weight]) -> None:
    """Record an event that later gathers wait for, after this stream computed scales and casts."""
    if on_gpu := [weight for weight in weights if weight.device.type == "cuda"]:
        event = torch.cuda.current_stream().record_event()
        ready = ScalesReady(event, current_capture(), waiting=set())
        for weight in on_gpu:
            weight.scales_ready = ready


def weights_by_layer(module: nn.Module) -> dict[str, Float8Weight]:
    """All float8 parameters in ``module``, by the name of the layer whose ``weight`` it is.

    A parameter of another name, such as one of experts, has its FQN.
    """
    return {
        fqn.removesuffix("weight").removesuffix(".") if weight.name == "weight" else fqn: weight
        for fqn, weight in float8_weights(module).items()
    }


def float8_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The modules in ``module`` that have float8 parameters, by name."""
    return {fqn: part for fqn, part in module.named_modules() if weights_of(part)}
