"""The single layers that are compared, and how many operators a call dispatches."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_dist import (
    Float8Linear,
    invalidate_float8_scales,
    sync_float8_amax_and_scale_history,
)
from scripts.common.candidates import FP32, linear_of

Shape = tuple[int, int, int]  # rows, in_features, out_features


@dataclasses.dataclass
class Layer:
    """A layer, its input and the gradient of its output."""

    module: nn.Linear
    x: torch.Tensor
    grad: torch.Tensor

    def run(self) -> torch.Tensor:
        """Forward and backward; returns the output."""
        output = self.module(self.x)
        output.backward(self.grad)
        return output

    def clear(self) -> None:
        """Drops the gradients."""
        self.x.grad = self.module.weight.grad = None

    def change_weight(self) -> None:
        """Drops the gradients and what is known of the weight, as a step of an optimizer does."""
        self.clear()
        if isinstance(self.module, Float8Linear):
            if self.module.histories:
                sync_float8_amax_and_scale_history(self.module)
            invalidate_float8_scales(self.module)


def layer_of(name: str, shape: Shape, device: str, mesh: DeviceMesh | None = None) -> Layer:
    """A candidate's layer with tensors that all candidates share; DTensors if there is a mesh."""
    m, k, n = shape
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if name == FP32 else torch.bfloat16

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    x, w, g = random(m, k), random(n, k) / math.sqrt(k), random(m, n)
    if mesh is not None:
        x, g = (distribute_tensor(t, mesh, [p]) for t, p in ((x, Replicate()), (g, Shard(1))))
        w = distribute_tensor(w, mesh, [Shard(0)])
    with torch.device("meta"):
        linear = nn.Linear(k, n, bias=False)
    linear.weight = nn.Parameter(w)
    return Layer(linear_of(name, linear), x.requires_grad_(), g)


class _Count(TorchDispatchMode):
    """Counts the operators that reach the dispatcher from Python or from autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


def dispatched_by(run: Callable[[], object]) -> int:
    """How many operators a call dispatches, without those that operators call themselves.

    Under a mode the library calls its custom operators, each of which counts once.
    """
    with _Count() as count:
        run()
    return count.operators


def operators_of(run: Callable[[], object]) -> int:
    """How many operators a call dispatches, nested ones included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    # The names of autograd's nodes have another form.
    return sum(re.fullmatch(r"\w+::\w+", event.name) is not None for event in profile.events())
