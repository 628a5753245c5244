"""A model's state dict in the layout of FP8 block checkpoints, on one device."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from nets import Net
from reference import raised, same_bits, weights_used
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    ScalingType,
    convert_to_float8_training,
    float8_layers,
    float8_quantization_config,
    float8_state_dict,
    freeze_to_float8,
    iter_float8_weights,
)
from fp8_dist import dequantized as values

BLOCKWISE = Float8LinearConfig.from_recipe_name("blockwise")
MXFP8 = Float8LinearConfig.from_recipe_name("mxfp8")
SIZES = {"dim": 192, "hidden": 320}  # 128 divides neither


def converted(config: Float8LinearConfig = BLOCKWISE, **sizes: Any) -> Net:
    net = Net(**SIZES | sizes)
    for weight in net.parameters():  # blocks of different magnitudes
        weight.data *= torch.linspace(-8, 8, weight.shape[-1]).exp()
    convert_to_float8_training(net, config=config)
    return net


def dequantized(weight: torch.Tensor, scale_inv: torch.Tensor, block: int) -> torch.Tensor:
    """Dequantize by the layout's definition: an element's scale is that of its block."""
    wide = scale_inv.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return weight.to(torch.float32) * wide[: weight.shape[0], : weight.shape[1]]


@pytest.mark.parametrize(
    ("config", "block", "gather"), [(BLOCKWISE, 128, False), (MXFP8, 32, "auto")]
)
def test_bits_are_those_that_a_forward_multiplies(
    config: Float8LinearConfig, block: int, gather: Any
) -> None:
    net = converted(replace(config, enable_fsdp_float8_all_gather=gather))
    with weights_used(net) as used:
        net(torch.randn(2, 4, SIZES["dim"]))
    state = float8_state_dict(net)
    assert len(used) == len(float8_layers(net)) == 6
    for name, weight in used.items():
        qdata, scale = state[f"{name}.weight"], state[f"{name}.weight_scale_inv"]
        assert same_bits(qdata, weight.qdata)
        assert scale.dtype is torch.float32
        assert scale.shape == tuple(-(-n // block) for n in qdata.shape)
        assert same_bits(dequantized(qdata, scale, block), weight.dequantize())


def test_everything_else_is_as_in_the_state_dict() -> None:
    net = nn.Sequential(nn.Embedding(8, 128), converted(dim=128), nn.BatchNorm1d(4).bfloat16())
    state, plain = float8_state_dict(net), get_model_state_dict(net)
    layers = {f"{name}.weight" for name in float8_layers(net)}
    assert state.keys() - plain.keys() == {f"{name}_scale_inv" for name in layers}
    others = plain.keys() - layers
    assert others <= state.keys()
    assert {"0.weight", "1.layers.0.w3.bias", "2.running_mean", "2.num_batches_tracked"} <= others
    assert all(same_bits(state[name], plain[name]) for name in others)
    assert state["2.weight"].dtype is torch.bfloat16
    # A weight and its scales are adjacent, as in the files of other exporters.
    names = list(state)
    assert names[names.index("1.layers.0.w1.weight") + 1] == "1.layers.0.w1.weight_scale_inv"


def test_values_that_changed_are_cast_anew() -> None:
    net = converted()
    net(torch.randn(4, SIZES["dim"])).sum().backward()
    name, first = "layers.0.w1.weight", float8_state_dict(net)
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(3)
    assert not same_bits(first[name], float8_state_dict(net)[name])


def test_zeros_and_nan() -> None:
    net = converted()
    with torch.no_grad():
        net.layers[0].w1.weight.zero_()  # type: ignore[union-attr]
        net.layers[1].w1.weight[0, 0] = torch.nan  # type: ignore[union-attr,index]
    state = float8_state_dict(net)
    assert not state["layers.0.w1.weight"].to(torch.float32).any()
    assert state["layers.0.w1.weight_scale_inv"].gt(0).all()
    broken = state["layers.1.w1.weight_scale_inv"].isnan()
    assert broken[0, 0]
    assert broken.sum() == 1


def test_layers_that_share_a_weight_share_its_cast() -> None:
    first, second = nn.Linear(128, 128), nn.Linear(128, 128)
    second.weight = first.weight
    net = nn.Sequential(first, second, first)
    convert_to_float8_training(net, config=BLOCKWISE)
    state = float8_state_dict(net)
    assert state["0.weight"] is state["1.weight"] is state["2.weight"]
    assert state["0.weight_scale_inv"] is state["2.weight_scale_inv"]


def test_a_layer_alone_and_options_on_one_device() -> None:
    layer = convert_to_float8_training(nn.Linear(128, 128), config=BLOCKWISE)
    assert list(float8_state_dict(layer)) == ["weight", "weight_scale_inv", "bias"]
    assert float8_quantization_config(layer)["modules_to_not_convert"] == []
    net = converted()
    state = float8_state_dict(net, full_state_dict=True, cpu_offload=True)
    plain = float8_state_dict(net)
    assert state.keys() == plain.keys()
    assert all(same_bits(state[name], plain[name]) for name in plain)


def in_mxfp4(recipe: str, *sizes: int) -> nn.Sequential:
    """Linear layers of these sizes; the first one has a block of zeros, and tiny values."""
    config = Float8LinearConfig.from_recipe_name(recipe, weight_format="mxfp4")
    net = nn.Sequential(*map(nn.Linear, sizes[:-1], sizes[1:]))
    net[0].weight.data[:128, :128] = 0
    net[0].weight.data[:, 128:] *= torch.logspace(0, -30, sizes[1])[:, None]
    convert_to_float8_training(net, config=replace(config, pad_inner_dim=True))
    return net


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise"])
def test_mxfp4_is_what_a_forward_multiplies(recipe: str) -> None:
    net = in_mxfp4(recipe, 192, 320, 101)
    with weights_used(net) as used:
        net(torch.randn(4, 192))
    state = float8_state_dict(net, format="mxfp4")
    names = [f"{i}.{end}" for i in "01" for end in ("weight_blocks", "weight_scales", "bias")]
    assert list(state) == names
    for name, weight in used.items():
        blocks, scales = state[f"{name}.weight_blocks"], state[f"{name}.weight_scales"]
        rows, columns = weight.shape
        assert blocks.shape == (rows, columns // 32, 16)
        assert blocks.dtype is scales.dtype is torch.uint8
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(2).long()
        values = torch.cat([E2M1, -E2M1])[codes] * torch.exp2(scales.double() - 127)[..., None]
        assert same_bits(values.flatten(1).float(), weight.dequantize())
    # Stored weights, weights that layers share, and the stream.
    net.requires_grad_(False)
    freeze_to_float8(net, module_filter_fn=lambda _, fqn: fqn == "1", format="mxfp4")
    net.append(net[0])
    items = list(iter_float8_weights(net, format="mxfp4", bucket_bytes=1))
    assert all(scale_inv is None for *_, scale_inv in items)
    found = {name: tensor for name, tensor, _ in items}
    assert found["0.weight_blocks"] is found["2.weight_blocks"]
    assert all(same_bits(found[name], state[name]) for name in names)


def test_what_mxfp4_lacks() -> None:
    net, odd = in_mxfp4("mxfp8", 64, 64), in_mxfp4("mxfp8", 70, 64)
    net[0].weight.data[40, 1] = torch.inf  # type: ignore[operator,index,union-attr]
    texts = [
        raised(ValueError, partial(float8_state_dict, each, format=format))
        for each, format in (
            (net, "fp4"),
            (converted(MXFP8), "mxfp4"),
            (odd, "mxfp4"),
            (net, "mxfp4"),
        )
    ]
    assert_expected_inline(
        "\n".join(texts),
        """\
float8_state_dict: format is 'fp4'; pass one of ['float8', 'mxfp4']
float8_state_dict: layers.0.w1.weight was converted with recipe=mxfp8, float8_gathers=input|grad_output, but a checkpoint in mxfp4 holds weights in MXFP4; load the state dict into a model that was converted with weight_format="mxfp4", and export that
float8_state_dict: 0.weight, [64, 70], has K = 70, and MXFP4 has whole blocks of 32; pass format="float8"
0.weight has a block with NaN or infinity, which MXFP4 doesn't have; load an earlier checkpoint, and export that""",
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8", "off"])
@pytest.mark.parametrize("is_stored", [False, True])
def test_other_weights_beside_mxfp4_are_in_high_precision(recipe: str, is_stored: bool) -> None:
    released = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64).bfloat16()))
    released.requires_grad_(False)
    freeze_to_float8(released, format="mxfp4", block_size=(1, 32))
    other = nn.Sequential(nn.Linear(64, 32).bfloat16()).requires_grad_(False)
    off = CastConfig(ScalingType.DISABLED)
    config = Float8LinearConfig(off, None, off, None, off)
    config = config if recipe == "off" else Float8LinearConfig.from_recipe_name(recipe)
    net = nn.ModuleDict({"attention": convert_to_float8_training(other, config=config)})
    net["experts"] = released
    if is_stored and recipe not in ("rowwise", "off"):
        freeze_to_float8(other)
    state = float8_state_dict(net, format="mxfp4")
    ends = ("weight_blocks", "weight_scales", "bias")
    names = ["attention.0.weight", "attention.0.bias", *(f"experts.0.{end}" for end in ends)]
    assert list(state) == names
    assert state["attention.0.weight"].dtype is torch.bfloat16
    assert same_bits(state["attention.0.weight"], values(other[0]))
    assert same_bits(
        state["experts.0.weight_blocks"],
        float8_state_dict(released, format="mxfp4")["0.weight_blocks"],
    )
    items = list(iter_float8_weights(net, format="mxfp4"))
    assert [name for name, *_ in items] == names
    found = float8_quantization_config(net, format="mxfp4")
    assert found["modules_to_not_convert"] == ["attention.0"]


@pytest.mark.parametrize(("config", "block"), [(BLOCKWISE, 128), (MXFP8, 32)])
def test_quantization_config(config: Float8LinearConfig, block: int) -> None:
    others = {"embed": nn.Embedding(8, 64), "norm": nn.LayerNorm(64), "head": nn.Linear(64, 8)}
    net = nn.ModuleDict({"net": Net(), **others})
    convert_to_float8_training(net["net"], config=config)
    found = float8_quantization_config(net)
    assert found == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": ["head"],
    }
    assert json.loads(json.dumps(found)) == found
    mxfp4 = nn.ModuleDict({"net": in_mxfp4("mxfp8", 64, 64), **others})
    found = float8_quantization_config(mxfp4, format="mxfp4")
    assert found == {"quant_method": "mxfp4", "modules_to_not_convert": ["head"]}


@pytest.mark.parametrize("call", [float8_state_dict, float8_quantization_config])
def test_other_recipes_are_refused(call: Any) -> None:
    for recipe in ("tensorwise", "delayed", "rowwise_folded", "rowwise"):
        net = converted(Float8LinearConfig.from_recipe_name(recipe))
        message = raised(ValueError, partial(call, net))
        assert message.startswith(
            f"{call.__name__}: layers.0.w1.weight was converted with recipe={recipe},"
        )
        assert "holds float8_e4m3fn weights with one scale per square block; load the" in message


def test_refused_models() -> None:
    tied = nn.ModuleDict({"embed": nn.Embedding(128, 128), "head": nn.Linear(128, 128)})
    tied["head"].weight = tied["embed"].weight
    with torch.device("meta"):
        meta = Net()
    for net in (tied, meta):
        convert_to_float8_training(net, config=BLOCKWISE)
    cast = replace(BLOCKWISE.cast_config_weight, target_dtype=torch.float8_e5m2)
    e5m2 = replace(BLOCKWISE, cast_config_weight=cast, cast_config_weight_for_grad_input=cast)
    refused: list[tuple[nn.Module, str]] = [
        (Net(), "float8_state_dict: the module has no converted layer; call "),
        (
            nn.Sequential(converted(BLOCKWISE), converted(MXFP8)),
            "0.layers.0.w1.weight and 1.layers.0.w1.weight are in blocks of different sizes",
        ),
        (tied, "head.weight is also embed.weight, which would stay in high precision; leave"),
        (meta, "layers.0.w1.weight is on the meta device and has no values; load a"),
        (converted(e5m2), "holds float8_e4m3fn weights"),
    ]
    for net, text in refused:
        assert text in raised(ValueError, partial(float8_state_dict, net))
