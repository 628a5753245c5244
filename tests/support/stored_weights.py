"""Models with frozen weights, stored in float8 or not, and the results of their passes."""

from collections.abc import Callable

import torch
import torch.nn as nn
from reference import same_bits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_layers,
    freeze_to_float8,
)

named = Float8LinearConfig.from_recipe_name
CONFIGS = {
    "tensorwise": named("tensorwise"),
    "rowwise_folded": named("rowwise_folded"),
    "blockwise": named("blockwise"),
    "vllm": named("blockwise", scale_format="fp32"),
    "mxfp8": named("mxfp8"),
    "mxfp4": named("mxfp8", weight_format="mxfp4"),
    "mxfp4 of blockwise": named("blockwise", weight_format="mxfp4"),
}
# Of weights that are stored in blocks of 1 x 32, and cast by the recipe from there.
RELEASED = {
    "1 x 32 of mxfp8": named("mxfp8"),
    "1 x 32 of tensorwise": named("tensorwise"),
    "1 x 32 of rowwise": named("rowwise"),
    "1 x 32 of rowwise_folded": named("rowwise_folded"),
    "1 x 32 of delayed": named("delayed"),
    "1 x 32 in bf16": named("bf16"),
}
Run = tuple[torch.Tensor, ...]


def converted(name: str = "blockwise", dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Two frozen layers with blocks of different magnitudes. 128 does not divide all features."""
    torch.manual_seed(0)
    known = CONFIGS | RELEASED
    net = nn.Sequential(nn.Linear(512, 320), nn.ReLU(), nn.Linear(320, 192)).to(dtype)
    for weight in (net[0].weight, net[2].weight):
        weight.data *= torch.linspace(-4, 4, weight.shape[1]).exp()
    convert_to_float8_training(net, config=known.get(name) or named(name))
    return net.requires_grad_(False)


def frozen(name: str = "blockwise", dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    net = converted(name, dtype)
    assert freeze(net) == ["0.weight", "2.weight"]
    return net


def freeze(net: nn.Module) -> list[str]:
    """Store the frozen weights in float8, or, if they are mxfp4, packed."""
    (packs,) = {
        layer.config.cast_config_weight.format == "mxfp4" for layer in float8_layers(net).values()
    }
    return freeze_to_float8(net, format="mxfp4" if packs else "float8")


def released(name: str) -> nn.Sequential:
    """A frozen net whose weights are stored in blocks of 1 x 32, and cast from there."""
    net = converted(name)
    assert freeze_to_float8(net, format="mxfp4", block_size=(1, 32)) == ["0.weight", "2.weight"]
    return net


def run(net: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> Run:
    """The outputs and input gradients of two passes."""
    x = torch.randn(48, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = []
    for _ in range(2):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = net(x)
            output.float().square().sum().backward()
        assert x.grad is not None
        found += [output, x.grad]
    return tuple(found)


def same(a: Run, b: Run) -> bool:
    return all(map(same_bits, a, b))


class New(TorchDispatchMode):
    """Collects the shapes and dtypes of tensors that operators make, on storages of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if not func.is_view and isinstance(tensor, torch.Tensor):
                self.made.append((tuple(tensor.shape), tensor.dtype))
        return found
