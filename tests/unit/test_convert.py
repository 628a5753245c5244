"""Conversion: what is swapped, what carries over, what is said about the rest."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from reference import all_warnings, raised
from torch.nn.utils import parametrizations

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    conversion_summary,
    convert_to_float8_training,
    convert_to_linear,
    freeze_to_float8,
    skip_head,
    unfreeze_from_float8,
)
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training
from fp8_dist.moe.experts import add_weights

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


class OwnForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class OwnExperts(nn.Module):
    float8_weight_names = ("w1",)

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.ones(2, 32, 16))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))
        self.head = nn.Linear(16, 8, bias=False)


def test_children_of_a_linear_layer_are_converted() -> None:
    layer = nn.Linear(16, 16)
    layer.own, layer.more = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16))
    model = nn.Sequential(nn.Linear(16, 16))
    model[0].own = nn.Linear(16, 16)
    for each in (convert_to_float8_training(layer), convert_to_float8_training(model)):
        linear = [part for part in each.modules() if isinstance(part, nn.Linear)]
        assert len(linear) == 2 + (each is not model)
        assert all(isinstance(part, Float8Linear) for part in linear)
        assert [row.parameters for row in conversion_summary(each).rows] == [256] * len(linear)


def test_nothing_converted_is_an_error_that_says_why() -> None:
    computed = torch.nn.utils.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), OwnForward(4, 4), computed)
    text = raised(
        ValueError,
        lambda: convert_to_float8_training(model, module_filter_fn=lambda _, fqn: fqn != "0"),
    )
    assert text.splitlines() == [
        "convert_to_float8_training: no layer of Sequential was converted:",
        "  0: module_filter_fn returned False",
        "  1: its class OwnForward has a forward of its own",
        "  2: its weight is computed from other parameters (a parametrization, weight_norm)",
    ]
    blocks = nn.ModuleList(
        nn.ModuleDict({"up": nn.Linear(4, 8), "own": OwnForward(8, 4)}) for _ in range(32)
    )
    kept = {"module_filter_fn": lambda _, fqn: not fqn.endswith("up")}
    text = raised(ValueError, partial(convert_to_float8_training, blocks, **kept))
    assert text.splitlines()[1:] == [
        "  *.up (32): module_filter_fn returned False",
        "  *.own (32): its class OwnForward has a forward of its own",
    ]
    (text,) = warned(blocks)
    assert "precision: *.own (32) (its class OwnForward has a forward of its own). Excl" in text
    for block in blocks:
        block.other = OwnForward(16, 16)
    (text,) = warned(blocks)
    assert "precision: *.own (32), *.other (32) (its class OwnForward has a forward of" in text
    text = raised(ValueError, lambda: convert_to_float8_training(nn.Sequential(nn.ReLU())))
    assert "Sequential contains no nn.Linear, so nothing was converted" in text


def warned(model: nn.Module, **arguments: Any) -> list[str]:
    """The warnings of a conversion."""
    with all_warnings() as texts:
        convert_to_float8_training(model, **arguments)
    return texts


def test_layers_that_a_gpu_would_refuse_are_named_once() -> None:
    def model() -> nn.Module:
        sizes = [(16, 16), (24, 32), (32, 24), *[(16, 8)] * 5]
        return nn.Sequential(*(nn.Linear(i, o) for i, o in sizes), OwnForward(16, 16))

    (text,) = warned(model())
    assert_expected_inline(
        text,
        """\
convert_to_float8_training: these layers stay in high precision: 8 (its class OwnForward has a forward of its own). Exclude them in module_filter_fn to say that this is meant
A GPU will refuse these converted layers, whose out_features or in_features is not a multiple of 16: 1 (32 x 24), 2 (24 x 32), 3 (8 x 16), 4 (8 x 16), and 3 more. Leave them in high precision (module_filter_fn=skip_head(model)), or set Float8LinearConfig.pad_inner_dim=True""",
    )
    for config in ({"pad_inner_dim": True}, {"emulate": True}):
        (text,) = warned(model(), config=Float8LinearConfig(**config))
        assert "GPU" not in text
    plain = model()[:-1]
    (text,) = warned(plain)
    assert text.startswith("convert_to_float8_training: A GPU will refuse")
    assert warned(plain) == []  # it is converted already
    plain = model()[:-1]
    assert warned(plain, module_filter_fn=skip_head(plain)) == []


class GroupedExperts(nn.Module):
    """Experts like torchtitan's GroupedExperts."""

    def __init__(self, experts: int, dim: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(experts, 2 * dim, dim))
        self.w2 = nn.Parameter(torch.zeros(experts, dim, 2 * dim))


class MoE(nn.Module):
    def __init__(self, experts: int, dim: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(dim, experts), GroupedExperts(experts, dim)


def test_experts_are_named_with_their_shares() -> None:
    model = nn.ModuleDict({"wo": nn.Linear(32, 32, bias=False), "moe": MoE(16, 32)})
    (text,) = warned(model)
    assert_expected_inline(
        text,
        """\
convert_to_float8_training: These converted layers are routers, so float8 changes which experts compute: moe.router (16 x 32). module_filter_fn=skip_head(model) leaves them in high precision
Experts whose weights are 3-D parameters are not nn.Linear and stay in high precision: moe.experts.w1 (16 x 64 x 32), moe.experts.w2 (16 x 32 x 64). They hold 97.7% of the model's parameters. fp8_dist.moe.convert_experts_to_float8_training converts those that it knows""",
    )
    (text,) = warned(nn.ModuleList(MoE(16, 32) for _ in range(6)))
    assert "0.experts.w2 (16 x 32 x 64), 1.experts.w1 (16 x 64 x 32), 1.experts" in text
    assert "and 8 more. They" in text


def test_models_without_experts_are_not_told_of_any() -> None:
    table = nn.Linear(16, 16)
    table.register_parameter("positions", nn.Parameter(torch.zeros(4, 16, 16)))
    conv = parametrizations.weight_norm(nn.Conv1d(16, 16, 3))
    holder = nn.Module()
    holder.bias_table = nn.Parameter(torch.zeros(4, 16, 16))
    attention = nn.MultiheadAttention(16, 2, add_bias_kv=True)
    attention.out_proj = nn.Identity()
    assert warned(nn.ModuleList([nn.Linear(16, 16), table, conv, holder, attention])) == []


def test_tied_weights_stay_tied_or_are_refused() -> None:
    twins = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    twins[1].weight = twins[0].weight
    convert_to_float8_training(twins, config=GATHERED)
    assert twins[0].weight is twins[1].weight

    model = Model()
    model.head.weight = model.embedding.weight
    text = "for all of its users, but head.weight is also embedding.weight. Leave these layers"
    with pytest.raises(ValueError, match=text):
        convert_to_float8_training(model, config=GATHERED)
    assert not any(isinstance(m, Float8Linear) for m in model.modules())
    convert_to_float8_training(model)  # they may be tied without float8 gathers
    assert model.head.weight is model.embedding.weight


def test_another_config_for_a_converted_layer_is_refused() -> None:
    model = convert_to_float8_training(Model())
    with pytest.raises(ValueError, match=r"block.0 is converted already, with another config"):
        convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    convert_to_float8_training(model, config=Float8LinearConfig())


def test_convert_to_linear_refuses() -> None:
    stored = convert_to_float8_training(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    stored[1].requires_grad_(False)
    freeze_to_float8(stored)
    text = raised(ValueError, lambda: convert_to_linear(stored))
    assert text == (
        "convert_to_linear: 1 can't become an nn.Linear: it is stored in float8; call "
        "unfreeze_from_float8 first, before fully_shard"
    )
    assert isinstance(stored[0], Float8Linear)
    unfreeze_from_float8(stored)
    assert [type(layer) for layer in convert_to_linear(stored)] == [nn.Linear] * 2
    experts = convert_experts_to_float8_training(OwnExperts())
    freeze_to_float8(experts.requires_grad_(False))
    assert "the module can't become an nn.Linear: it is stored in float8; call" in raised(
        ValueError, lambda: convert_to_linear(experts)
    )
    built = OwnExperts()
    add_weights(built, ("w1",), Float8ExpertsConfig(), "experts")
    built.float8_weight_names = ()
    text = raised(NotImplementedError, lambda: convert_to_linear(nn.Sequential(built)))
    assert (
        "the experts 0 can't be converted back in place: an OwnExperts is built in float8" in text
    )
    assert "expected a model" in raised(TypeError, lambda: convert_to_linear(3))  # type: ignore[arg-type]
