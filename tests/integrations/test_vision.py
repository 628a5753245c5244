"""Vision models: SAM's image encoder, and a ViT, whose 65 tokens no power of two divides."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import sqnr
from torch import nn
from transformers import SamVisionConfig, SamVisionModel, ViTConfig, ViTForImageClassification

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_layers,
    skip_head,
)

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "image_size": 128, "patch_size": 16}


def sam() -> nn.Module:
    """Attention in windows and over the whole image, relative positions."""
    # (Windows of 3 x 3 patches: the 8 x 8 are padded.)
    windows = {"window_size": 3, "global_attn_indexes": [1, 3], "initializer_range": 0.05}
    sizes = {"output_channels": 32, "num_hidden_layers": 4, "mlp_dim": 128}
    model = SamVisionModel(SamVisionConfig(**SIZES, **windows, **sizes))
    for name, parameter in model.named_parameters():
        if "rel_pos" in name or "pos_embed" in name:  # which start as zeros
            nn.init.normal_(parameter, std=0.05)
    return model


def vit() -> nn.Module:
    sizes = {"num_hidden_layers": 2, "intermediate_size": 256, "num_labels": 10}
    return ViTForImageClassification(ViTConfig(**SIZES, **sizes, initializer_range=0.1))


def converted(make: Callable[[], nn.Module], recipe: str, **options: Any) -> nn.Module:
    """A model, the same one each time, in float8 but for the head."""
    torch.manual_seed(0)
    model = make()
    config = replace(Float8LinearConfig.from_recipe_name(recipe), **options)
    return convert_to_float8_training(model, config=config, module_filter_fn=skip_head(model))


def images(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, 128, 128, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module) -> tuple[torch.Tensor, float, float]:
    """One step of SGD: the output, and the loss before and after it."""
    output = model(images())[0]
    loss = output.square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 1e-2 * parameter.grad
        return output, loss.item(), model(images())[0].square().mean().item()


@pytest.mark.parametrize(
    ("make", "recipe"),
    [
        (sam, "tensorwise"),
        (vit, "mxfp8"),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in ((sam, "blockwise"), (vit, "rowwise"), (vit, "delayed"))
        ),
    ],
)
def test_one_device(make: Callable[[], nn.Module], recipe: str) -> None:
    float8 = converted(make, recipe)
    assert len(float8_layers(float8)) == (16 if make is sam else 12)
    torch.manual_seed(0)
    exact = make()
    expected, before, after = step(exact)
    output, before8, after8 = step(float8)
    assert sqnr(expected, output) > 20
    assert after < before
    assert abs(after8 - after) < 0.1 * (before - after)
    for (name, p), p8 in zip(exact.named_parameters(), float8.parameters(), strict=True):
        if p.grad.norm() > 1e-6:  # the gradient of a key's bias is noise
            assert sqnr(p.grad, p8.grad) > 8, name
    assert before8 == pytest.approx(before, rel=0.1)
