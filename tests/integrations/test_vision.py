"""Vision models: SAM's image encoder, a ViT as timm builds them, an MLP of odd sizes."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from expecttest import assert_expected_inline
from ranks import RankPools, device_mesh
from reference import same_bits, sqnr
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import SamVisionConfig, SamVisionModel

from fp8_dist import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    conversion_summary,
    convert_to_float8_training,
    float8_layers,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import comm_audit

RECIPES = [recipe.value for recipe in Float8LinearRecipeName]


class SamEncoder(nn.Module):
    """SAM's image encoder: attention in windows and over the whole image, relative positions."""

    def __init__(self) -> None:
        super().__init__()
        config = SamVisionConfig(
            hidden_size=64,
            output_channels=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=128,
            patch_size=16,
            window_size=3,  # 8 x 8 patches are padded
            global_attn_indexes=[1, 3],
            mlp_dim=128,
            initializer_range=0.05,
        )
        self.sam = SamVisionModel(config)
        for name, parameter in self.sam.named_parameters():
            if "rel_pos" in name or "pos_embed" in name:  # which start as zeros
                nn.init.normal_(parameter, std=0.05)
        self.blocks = self.sam.vision_encoder.layers

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.sam(images).last_hidden_state
        return features


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """A class token: 65 tokens per image, which no power of two divides."""

    def __init__(self, dim: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 16, 16)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 65, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def converted(model: type[nn.Module], recipe: str = "tensorwise", **options: Any) -> nn.Module:
    """A model, the same one each time, in float8 but for a ViT's head."""
    torch.manual_seed(0)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), **options)
    return convert_to_float8_training(
        model(), config=config, module_filter_fn=lambda module, fqn: fqn != "head"
    )


def images(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, 128, 128, generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module) -> tuple[torch.Tensor, float, float]:
    """One step of SGD: the output, and the loss before and after it."""
    output = model(images())
    loss = output.square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 1e-2 * parameter.grad
        return output, loss.item(), model(images()).square().mean().item()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("model", "layers"), [(SamEncoder, 16), (ViT, 8)])
def test_one_device(model: type[nn.Module], layers: int, recipe: str) -> None:
    float8 = converted(model, recipe)
    assert len(float8_layers(float8)) == layers
    torch.manual_seed(0)
    exact = model()
    expected, before, after = step(exact)
    output, before8, after8 = step(float8)
    # The rule of OCP MX saturates the largest values of blocks.
    least, off = (16, 0.1) if recipe == "mxfp8" else (20, 0.05)
    assert sqnr(expected, output) > least
    assert after < before
    assert abs(after8 - after) < 0.1 * (before - after)
    for (name, p), p8 in zip(exact.named_parameters(), float8.parameters(), strict=True):
        if p.grad.norm() > 1e-6:  # the gradient of a key's bias is noise
            assert sqnr(p.grad, p8.grad) > 8, name
    assert before8 == pytest.approx(before, rel=off)


def sharded_step(model: type[nn.Module], recipe: str) -> tuple[bool, str]:
    """Whether gradients under FSDP2 have the bits of unsharded ones; what is gathered."""
    rank, mesh = dist.get_rank(), device_mesh(dp=2)
    float8 = converted(model, recipe, enable_fsdp_float8_all_gather="auto")
    twin = converted(model, recipe)
    for block in float8.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(float8, mesh=mesh)
    precompute_float8_dynamic_scale(float8)
    with comm_audit(mesh) as audit:
        float8(images(rank)).square().mean().backward()
    twin(images(rank)).square().mean().backward()
    same = True
    for mine, other in zip(float8.parameters(), twin.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        dist.all_reduce(other.grad)
        same &= same_bits(mine.grad.full_tensor(), other.grad / 2)
    return same, audit.table()


def test_fsdp2_sam(ranks: RankPools) -> None:
    same, gathered = ranks(2).run_same(sharded_step, SamEncoder, "tensorwise")
    assert same
    assert_expected_inline(
        gathered,
        """\
op              axis  dtype          count  elements      bytes
all_gather      dp    float32            1    68,800    275,200
all_gather      dp    float8_e4m3fn      8   262,144    262,144
all_gather      dp    float32            +     8,448     33,792
reduce_scatter  dp    float32            5   204,096    816,384
total                                   14            1,387,520
  float8                                                262,144
  other                                               1,125,376""",
    )


def test_fsdp2_vit(ranks: RankPools) -> None:
    same, gathered = ranks(2).run_same(sharded_step, ViT, "rowwise_folded")
    assert same
    assert_expected_inline(
        gathered,
        """\
op              axis  dtype          count  elements      bytes
all_gather      dp    float32            1    58,442    233,768
all_gather      dp    float8_e4m3fn      4   196,608    196,608
all_gather      dp    float32            +     5,632     22,528
reduce_scatter  dp    float32            3   158,410    633,640
total                                    8            1,086,544
  float8                                                196,608
  other                                                 889,936""",
    )


class OddMLP(nn.Module):
    """Sizes that a GPU's float8 GEMMs don't take, but for one layer."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (30, 50, 64, 96, 7)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


def takes_float8(module: nn.Module, fqn: str) -> bool:
    return isinstance(module, nn.Linear) and not (
        module.in_features % 16 or module.out_features % 16
    )


def test_odd_sizes_that_are_left_out_are_named() -> None:
    model = convert_to_float8_training(OddMLP(), module_filter_fn=takes_float8)
    assert_expected_inline(
        str(conversion_summary(model)),
        """\
conversion_summary: 1 of 4 weights in float8, 52.4% of 11,733 parameters, 53.4% of FLOPs
FLOPs: of products with weights, without attention's own products and convolutions
  weight                            shape            parameters  FLOPs  reason
  layers.0                          50 x 30  skip         12.8%  13.0%  module_filter_fn returned False
  layers.1                          64 x 50  skip         27.3%  27.8%  module_filter_fn returned False
  layers.2                          96 x 64  float8       52.4%  53.4%
  layers.3                          7 x 96   skip          5.7%   5.8%  module_filter_fn returned False
  (embeddings, norms, biases, ...)                         1.8%""",
    )
    model(torch.randn(3, 30)).sum().backward()


def test_odd_sizes_that_a_gpu_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8_DIST_STRICT_ALIGNMENT", "1")
    model = convert_to_float8_training(OddMLP())
    with pytest.raises(ValueError, match="multiples of 16") as error:
        model(torch.randn(3, 30))
    assert_expected_inline(
        str(error.value),
        """layers.0: float8 GEMMs need local sizes that are multiples of 16 on this device, found out_features 50, in_features 30; set Float8LinearConfig.pad_inner_dim=True or leave the layer unconverted""",
    )


def test_odd_sizes_that_are_padded() -> None:
    config = Float8LinearConfig(pad_inner_dim=True)
    model = convert_to_float8_training(OddMLP(), config=config)
    assert len(float8_layers(model)) == 4
    torch.manual_seed(0)
    exact = OddMLP()
    model.load_state_dict(exact.state_dict())
    x = torch.randn(33, 30)
    assert sqnr(exact(x), model(x)) > 20
    model(x).sum().backward()
