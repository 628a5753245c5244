"""A model's linear layers in another arithmetic for one run, with callbacks for their results.

The layers stay in the model. For the run their forwards are replaced, so that hooks, wrappers and
FSDP2, which exchanges a layer's parameters, work as before.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_dist.config import Float8LinearConfig
from fp8_dist.debug.recipes.untouched import replace_forward
from fp8_dist.linear.module import Float8Linear
from fp8_dist.tensor.float8_tensor import Float8Tensor
from fp8_dist.torch_internals import in_backward

# A callback for a layer's result: the layer's name, "output" or "grad_input", and the tensor.
Seen = Callable[[str, str, torch.Tensor], None]


class Call(NamedTuple):
    """Call of a layer, which can be repeated in the same arithmetic or another.

    Attributes:
        name, layer: the layer and its name.
        input: on the CPU; it requires a gradient if the call's input did.
        autocast: a context manager for the autocast under which the layer ran.
    """

    name: str
    layer: nn.Linear
    input: torch.Tensor
    autocast: Any

    def repeat(self, arithmetic: "Arithmetic", grad: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the output, or for its gradient those of the input and weight that need one.

        The layer and the graph around it are not changed.
        """
        layer, weight = self.layer, self.layer.weight
        # Without grad mode in a forward: activation checkpointing counts the saved tensors.
        with torch.set_grad_enabled(grad is not None), self.autocast:
            x = self.input.detach().to(weight.device).requires_grad_(self.input.requires_grad)
            w = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
            bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), False)
            output = arithmetic(self.name, layer, x, w, bias)
        if grad is None:
            return [output.detach()]
        inputs = [tensor for tensor in (x, w) if tensor.requires_grad]
        return list(torch.autograd.grad(output, inputs, grad)) if inputs else []


# A callback for a call of a layer: with None in its forward, and with the gradient of the output in
# its backward.
SeenCall = Callable[[Call, torch.Tensor | None], None]


class Arithmetic:
    """Arithmetic of the layers in a run: high precision, or float8 by a config."""

    def __init__(self, config: Float8LinearConfig | None) -> None:
        self._config = config
        if config is not None:
            # Padded, because a GPU's GEMM may refuse the sizes of a rank's parts. Nothing is
            # gathered in float8 here.
            changes: dict[str, Any] = {"enable_fsdp_float8_all_gather": "auto"}
            changes |= {"pad_inner_dim": True, "cache_float8_shards": False}
            self._config = dataclasses.replace(config, **changes)
        self._stand_ins: dict[nn.Linear, Float8Linear] = {}

    def __call__(
        self,
        name: str,
        layer: nn.Linear,
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the output of a layer with these parameters."""
        if self._config is None:
            return F.linear(x, weight, bias)
        stand_in = self._stand_ins.get(layer)
        if stand_in is None:
            stand_in = self._stand_ins[layer] = _stand_in(name, layer, self._config)
        stand_in.float8_weight.cache.drop()
        stand_in.weight, stand_in.bias = weight, bias  # type: ignore[assignment]
        return stand_in(x)


def _stand_in(name: str, layer: nn.Linear, config: Float8LinearConfig) -> Float8Linear:
    """Return a float8 layer of the same shape, with copies of the layer's amax histories."""
    sizes = layer.in_features, layer.out_features
    made = Float8Linear(*sizes, bias=layer.bias is not None, device="meta", config=config)
    made.fqn = name
    if isinstance(layer, Float8Linear):
        known = {name: layer.histories.get(name) for name in made.histories}
        made.histories.update({k: copy.deepcopy(v) for k, v in known.items() if v is not None})
    return made.train(layer.training)


@contextmanager
def layers_in(
    arithmetic: Arithmetic,
    layers: Mapping[str, nn.Linear],
    seen: Seen,
    seen_call: SeenCall | None = None,
) -> Iterator[None]:
    """Run layers in an arithmetic inside the block, and pass their results to callbacks."""
    forwards = {layer: layer.__dict__.get("forward") for layer in layers.values()}
    for name, layer in layers.items():
        replace_forward(layer, partial(_forward, arithmetic, name, layer, seen, seen_call))
    try:
        yield
    finally:
        for layer, forward in forwards.items():
            replace_forward(layer, forward)


def _forward(
    arithmetic: Arithmetic,
    name: str,
    layer: nn.Linear,
    seen: Seen,
    seen_call: SeenCall | None,
    input: torch.Tensor,
) -> torch.Tensor:
    """The forward of a layer in a run."""
    weight: Any = layer.weight
    if any(isinstance(t, DTensor | Float8Tensor) for t in (input, weight)):
        raise NotImplementedError(
            f"compare_recipes: {name} computes on a {type(weight).__name__} weight and a "
            f"{type(input).__name__} input. Tensor parallelism and float8 gathers are not "
            "supported: compare before the model is parallelized, or under fully_shard alone "
            "with enable_fsdp_float8_all_gather=False"
        )
    # The views are graph nodes of this layer alone, between the hooks of others, such as FSDP2's.
    x = input.view_as(input)
    output = arithmetic(name, layer, x, weight, layer.bias)
    repeats = in_backward()  # activation checkpointing
    if not repeats:
        seen(name, "output", output)
    if x.requires_grad:
        x.register_hook(partial(seen, name, "grad_input"))
    if seen_call is not None:
        kept = x.detach().to("cpu", copy=True).requires_grad_(x.requires_grad)
        call = Call(name, layer, kept, _autocast(x.device.type))
        if not repeats:
            seen_call(call, None)
        if output.requires_grad:
            output.register_hook(partial(seen_call, call))
    return output.view_as(output)


def _autocast(device: str) -> Any:
    """Return a context manager for the autocast that is in force."""
    enabled = torch.is_autocast_enabled(device)
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=enabled)
