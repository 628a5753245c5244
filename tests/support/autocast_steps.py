"""A layer's forward and backward under autocast."""

import torch
from torch import nn

from fp8_dist import Float8Linear, Float8LinearConfig, Float8LinearRecipeName

RECIPES = [recipe.value for recipe in Float8LinearRecipeName]
DTYPES = [torch.bfloat16, torch.float16]


def layer_of(recipe: str, dtype: torch.dtype = torch.float32, bias: bool = True) -> Float8Linear:
    config = Float8LinearConfig.from_recipe_name(recipe)
    return Float8Linear(64, 48, bias, dtype=dtype, config=config)


def forward_and_backward(
    layer: nn.Module, x: torch.Tensor, grad: torch.Tensor, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Output, and gradients of input and parameters, under autocast to ``dtype`` (None: off)."""
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        output = layer(leaf)
    output.backward(grad.to(output.dtype))
    gradients = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    return [output.detach(), leaf.grad, *gradients]
