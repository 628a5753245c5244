"""The single layers and layers of experts to compare, and the timing of `scripts.bench.linear`."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import nn

from fp8_dist import Float8Linear, invalidate_float8_scales, sync_float8_amax_and_scale_history
from fp8_dist.moe import Float8ExpertsConfig, grouped_linear
from scripts.bench import timing
from scripts.bench.timing import Timed
from scripts.common.candidates import linear_of
from scripts.common.recipes import BF16

Shape = tuple[int, int, int]  # rows, in_features, out_features


@dataclasses.dataclass
class Layer:
    """A layer, its input and the gradient of its output."""

    module: nn.Linear
    x: torch.Tensor
    grad: torch.Tensor

    def run(self) -> torch.Tensor:
        """Run forward and backward, and return the output."""
        output = self.module(self.x)
        output.backward(self.grad)
        return output

    def clear(self) -> None:
        """Drop the gradients."""
        self.x.grad = self.module.weight.grad = None

    def change_weight(self) -> None:
        """Drop the gradients and the weight's cached statistics, as an optimizer step does."""
        self.clear()
        if isinstance(self.module, Float8Linear):
            if self.module.histories:
                sync_float8_amax_and_scale_history(self.module)
            invalidate_float8_scales(self.module)


def normal(device: str) -> Callable[..., torch.Tensor]:
    """A function that draws normal tensors, the same for all candidates."""
    generator = torch.Generator(device).manual_seed(0)
    return lambda *size: torch.randn(size, generator=generator, device=device).bfloat16()


def layer_of(name: str, shape: Shape, device: str) -> Layer:
    """A candidate's layer, with the same values of tensors for all candidates."""
    (m, k, n), random = shape, normal(device)
    x, w, g = random(m, k), random(n, k) / math.sqrt(k), random(m, n)
    with torch.device("meta"):
        linear = nn.Linear(k, n, bias=False)
    linear.weight = nn.Parameter(w)
    return Layer(linear_of(name, linear), x.requires_grad_(), g)


class Experts:
    """Groups of rows of the given sizes, a weight for each, and the gradient of the output."""

    def __init__(
        self, name: str, groups: Sequence[int], features: tuple[int, int], device: str
    ) -> None:
        rows, (k, n), random = sum(groups), features, normal(device)
        self.x = random(rows, k).requires_grad_()
        self.weight = (random(len(groups), n, k) / k**0.5).requires_grad_()
        self.grad = random(rows, n)
        self.offs = torch.tensor([*accumulate(groups)], dtype=torch.int32, device=device)
        self.config = None if name == BF16 else Float8ExpertsConfig.from_recipe_name(name)

    def run(self) -> None:
        """Run forward and backward."""
        if self.config is None:
            output = F.grouped_mm(self.x, self.weight.mT, offs=self.offs)
        else:
            product = grouped_linear(self.x, self.weight, self.offs, self.config)
            assert isinstance(product, torch.Tensor)
            output = product
        output.backward(self.grad)

    def clear(self) -> None:
        """Drop the gradients."""
        self.x.grad = self.weight.grad = None


def shape_text(shape: Shape) -> str:
    """A shape as text for people."""
    return " x ".join(map(str, shape))


def measure(shape: Shape, args: argparse.Namespace) -> dict[str, float]:
    """The median seconds of each candidate for one shape."""
    timed = {}
    for name in args.candidates or timing.CANDIDATES:
        layer = layer_of(name, shape, args.device)
        timed[name] = Timed(layer.run, layer.change_weight)
    calls = max(1, min(50, 10**7 // math.prod(shape)))  # more calls for smaller shapes
    return timing.medians(timed, args, calls=calls, description=shape_text(shape))


def run(args: argparse.Namespace) -> int:
    by_title = {f"linear {shape_text(shape)}": measure(shape, args) for shape in args.shapes}
    return timing.finish(args, by_title)
