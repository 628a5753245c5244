"""Context managers that restore a model after a forward and backward."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore a model at the end of the block, also after an error.

    Parameters have no gradients at the start of the block. Afterwards, gradients, buffers, forwards
    that were replaced on an instance, and torch's generators are as before, and parameters that
    FSDP2 has gathered are freed. Parameters must not be written to.
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
    """Free the parameters that FSDP2 has gathered, and put the sharded ones back in place."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def same_randomness(model: nn.Module) -> Iterator[None]:
    """Restore torch's generators, of the CPU and of the model's devices, after the block."""
    found = {parameter.device for parameter in model.parameters()}
    kinds = {device.type for device in found} - {"cpu", "meta"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in sorted(kinds):
            devices = [device for device in found if device.type == kind]
            stack.enter_context(torch.random.fork_rng(devices=devices, device_type=kind))
        yield


def replace_forward(module: nn.Module, forward: Any) -> None:
    """Replace the forward of an instance; None restores the forward of its class."""
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward
