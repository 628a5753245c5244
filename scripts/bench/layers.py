"""The single layers that are compared."""

import dataclasses
import math

import torch
from torch import nn

from fp8_dist import (
    Float8Linear,
    invalidate_float8_scales,
    sync_float8_amax_and_scale_history,
)
from scripts.common.candidates import linear_of

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


def layer_of(name: str, shape: Shape, device: str) -> Layer:
    """A candidate's layer with tensors that all candidates share."""
    m, k, n = shape
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).bfloat16()

    x, w, g = random(m, k), random(n, k) / math.sqrt(k), random(m, n)
    with torch.device("meta"):
        linear = nn.Linear(k, n, bias=False)
    linear.weight = nn.Parameter(w)
    return Layer(linear_of(name, linear), x.requires_grad_(), g)


def shape_text(shape: Shape) -> str:
    """A shape as people read it."""
    return " x ".join(map(str, shape))
