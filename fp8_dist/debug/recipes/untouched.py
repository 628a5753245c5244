"""A model that runs forward and backward, and is left as it was."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run a model inside of the block; afterwards, also after an error, it is as before.

    Gradients are put aside, and inside of the block there are none. Gradients, buffers, forwards
    that were replaced on an instance, and torch's generators come back. What FSDP2 has gathered is
    freed. Parameters must not be written to.
    """
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    forwards = {module: module.__dict__.get("forward") for module in model.modules()}
    with same_randomness(model):
        try:
            for parameter in gradients:
                parameter.grad = None
            yield
        finally:
            reshard(model)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            with torch.no_grad():
                for module, name, buffer, values in buffers:
                    buffer.copy_(values)
                    module._buffers[name] = buffer
            for module, forward in forwards.items():
                replace_forward(module, forward)


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 has gathered: the parameters are the sharded ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def same_randomness(model: nn.Module) -> Iterator[None]:
    """Afterwards torch's generators, of the CPU and of the model's devices, are as before."""
    found = {parameter.device for parameter in model.parameters()}
    kinds = {device.type for device in found} - {"cpu", "meta"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in sorted(kinds):
            devices = [device for device in found if device.type == kind]
            stack.enter_context(torch.random.fork_rng(devices=devices, device_type=kind))
        yield


def replace_forward(module: nn.Module, forward: Any) -> None:
    """Give an instance a forward of its own; None: that of its class."""
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward
