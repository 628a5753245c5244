"""transformers loads exports from any mesh as FP8 block checkpoints."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import run_shown
from expecttest import assert_expected_inline
from hf_models import batch, build
from moe_layers import cast
from rank_tests import on_ranks
from ranks import device_mesh
from reference import raised, same_bits, weights_used
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    Mxfp4Config,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_layers,
    float8_quantization_config,
    float8_state_dict,
    iter_float8_weights,
    skip_head,
)
from fp8_dist.integrations.transformers.experts import ADAPTER
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training, float8_experts
from fp8_dist.moe.experts import weight_of
from fp8_dist.tensor_parallel import Float8ExpertParallel, Float8ExpertTensorParallel

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
PAGE = Path(__file__).parents[3] / "docs/export.md"
IDS = batch(7)
E4M3 = torch.float8_e4m3fn


def converted(kind: str, recipe: str, gather: Any = False, **sizes: int) -> nn.Module:
    model = build(kind, **sizes)
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, enable_fsdp_float8_all_gather=gather)
    return convert_to_float8_training(model, module_filter_fn=skip_head(model), config=config)


def with_weights_of_forward(model: nn.Module) -> nn.Module:
    """Unconvert a model, with the dequantized weights that its forward multiplies."""
    with weights_used(model) as used, torch.no_grad():
        model(input_ids=IDS)
    assert used.keys() == float8_layers(model).keys()
    for name, layer in float8_layers(model).items():
        plain = layer.to_linear()
        plain.weight = nn.Parameter(used[name].dequantize())
        model.set_submodule(name, plain)
    return model


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    blocks = AutoConfig.from_pretrained(folder).quantization_config["weight_block_size"]
    dequantize = FineGrainedFP8Config(dequantize=True, weight_block_size=tuple(blocks))
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=dequantize, output_loading_info=True
    )
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_the_trainers(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use the lines of the page that save, and those that load and convert."""
    text = PAGE.read_text().partition("## MXFP4")
    blocks = [re.findall(r"```python\n(.*?)```", part, re.DOTALL) for part in text]
    save, in_bf16, load = blocks[0][0], blocks[0][1], blocks[2][-1]
    export, write = save.split("\n", 1)
    assert "FineGrainedFP8Config" in load
    model: Any = converted(kind, "blockwise", **SIZES).eval()
    model.config.dtype = dtype
    for parameter in model.parameters():  # but not the buffers of rotary embeddings
        parameter.data = parameter.data.to(dtype)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    scope = globals() | {"model": model}
    run_shown("\n".join([export, in_bf16 if dtype is torch.bfloat16 else "", write]), scope)
    reloaded, convert = load.rsplit("\nconfig = ", 1)
    run_shown(reloaded, scope)
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        assert not same_bits(scope["model"](input_ids=IDS).logits, expected)
        exec(f"config = {convert}", scope)
        assert len(float8_layers(scope["model"])) == len(float8_layers(model))
        assert same_bits(scope["model"](input_ids=IDS).logits, expected)


def test_experts_biases_and_tied_embeddings(tmp_path: Path) -> None:
    """Routers and unconverted experts stay in high precision, and are named in the config."""
    sizes = {**SIZES, "attention_bias": True, "tie_word_embeddings": True}
    model: Any = converted("qwen3_moe", "blockwise", **sizes)
    model.config.quantization_config = config = float8_quantization_config(model)
    model.save_pretrained(tmp_path, state_dict=float8_state_dict(model))
    parts = [f"model.layers.{i}.mlp.{part}" for i in range(2) for part in ("experts", "gate")]
    assert config["modules_to_not_convert"] == [*parts, "lm_head"]
    found = loaded(tmp_path, torch.float32)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    with torch.no_grad():
        expected = with_weights_of_forward(model)(input_ids=IDS).logits
        assert same_bits(found(input_ids=IDS).logits, expected)


EXPERTS = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
# The names of the matrices of an expert in checkpoints: gate, up and down.
NAMES = {
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
}


def with_experts(kind: str, recipe: Any, **sizes: int) -> Any:
    """A model with converted linear layers and experts, whose weights differ in magnitude."""
    model = converted(kind, recipe, "auto", **EXPERTS | sizes)
    for parameter in model.parameters():
        if parameter.ndim == 3:
            parameter.data *= torch.logspace(0, -3, parameter.shape[1])[:, None]
    return convert_experts_to_float8_training(model, config=Float8ExpertsConfig(recipe))


@pytest.mark.parametrize(
    ("kind", "recipe", "block"), [("qwen3_moe", "blockwise", 128), ("mixtral", "mxfp8", 32)]
)
def test_experts_are_entries_of_their_own(
    tmp_path: Path, kind: str, recipe: str, block: int
) -> None:
    model, twin = with_experts(kind, recipe), converted(kind, recipe, "auto", **EXPERTS)
    twin.load_state_dict(model.state_dict())
    state = float8_state_dict(model)
    model.config.quantization_config = config = float8_quantization_config(model)
    assert not any("experts" in name for name in config["modules_to_not_convert"])
    model.save_pretrained(tmp_path, state_dict=state)
    stored = load_file(tmp_path / "model.safetensors")
    module, (gate, up, down) = NAMES[kind]
    with torch.no_grad():
        for i, layer in enumerate(twin.model.layers):
            pairs = zip(layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, strict=True)
            for e, (both, last) in enumerate(pairs):
                for name, weight in zip((gate, up, down), (*both.chunk(2), last), strict=True):
                    key = f"model.layers.{i}.{module}.{e}.{name}.weight"
                    values, scales = cast(weight, block, block, "ceil" if block == 32 else None)
                    assert same_bits(stored[key].double(), values)
                    found = stored[f"{key}_scale_inv"]
                    assert same_bits(found, scales[::block, ::block].float())
                    weight.copy_(values * scales)
    assert sum("experts" in name for name in stored) == 2 * 4 * 3 * 2
    with torch.no_grad():
        expected = with_weights_of_forward(twin)(input_ids=IDS).logits
        assert same_bits(loaded(tmp_path, torch.float32)(input_ids=IDS).logits, expected)


# With tensor parallelism, a rank's part of gate and up is two pieces of the weight.
@pytest.mark.parametrize(
    ("style", "dp", "recipe"),
    [
        (Float8ExpertParallel, 2, "blockwise"),
        (Float8ExpertTensorParallel, 1, "blockwise"),
        (Float8ExpertTensorParallel, 2, "mxfp8"),
    ],
)
@on_ranks(2, "dp", returns=[])
def test_experts_of_ranks_are_exported_as_those_of_one_device(
    style: type[ParallelStyle], dp: int, recipe: str
) -> list[str]:
    mesh = device_mesh(dp=dp, tp=2)
    model, twin = with_experts("mixtral", recipe), with_experts("mixtral", recipe)
    for experts in float8_experts(model).values():
        parallelize_module(experts, mesh["tp"], style())
        if style is Float8ExpertParallel:
            fully_shard(experts, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(1))
    if dp > 1:
        fully_shard(model, mesh=mesh["dp"])
    expected, found = float8_state_dict(twin), float8_state_dict(model, full_state_dict=True)
    wrong = [name for name in expected if not same_bits(found[name], expected[name])]
    for name, weight, scale_inv in iter_float8_weights(model, bucket_bytes=2**18):
        wrong += [] if same_bits(weight, expected[name]) else [f"{name} of the stream"]
        assert scale_inv is None or same_bits(scale_inv, expected[f"{name}_scale_inv"])
    if style is Float8ExpertParallel:
        wrong += wrong_shards(model, twin, expected)
    return wrong if found.keys() == expected.keys() else ["keys"]


def wrong_shards(model: Any, twin: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """The names of entries whose shards are wrong. (An entry has all experts of a module.)"""
    wrong = []
    for name, tensor in float8_state_dict(model).items():
        if ".experts." in name:
            assert isinstance(tensor, DTensor)
            assert tensor.ndim == 3
            is_scale = name.endswith("_scale_inv")
            local = tensor.to_local()
            tensor = DTensor.from_local(
                local if is_scale else local.view(torch.uint8),
                tensor.device_mesh,
                tensor.placements,
                shape=tensor.shape,
                stride=tensor.stride(),
            ).full_tensor()
            matrices = tensor if is_scale else tensor.view(E4M3)
            own, end = name.removesuffix("_scale_inv"), "_scale_inv" if is_scale else ""
            entries = revert_weight_conversion(twin, {own: matrices})
            wrong += [n for n, t in entries.items() if not same_bits(t, expected[f"{n}{end}"])]
    return wrong


def in_mxfp4(kind: str, recipe: Any = "mxfp8") -> Any:
    """A model with experts in MXFP4, whose intermediate size is not a multiple of 128."""
    model = build(kind, hidden_size=128, intermediate_size=160, moe_intermediate_size=160)
    for parameter in model.parameters():
        if parameter.ndim == 3:
            parameter.data *= torch.logspace(0, -3, parameter.shape[1])[:, None]
    config = Float8ExpertsConfig(recipe, weight_format="mxfp4")
    return convert_experts_to_float8_training(model, config=config)


@pytest.mark.parametrize("recipe", ["mxfp8", "blockwise"])
def test_gpt_oss_is_read_in_mxfp4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """transformers reads experts in MXFP4 that the lines of the page saved."""
    section = PAGE.read_text().partition("## MXFP4")[2]
    (lines,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    model = in_mxfp4("gpt_oss", recipe)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    run_shown(lines, globals() | {"model": model})
    for dtype in (torch.float32, torch.bfloat16):
        found, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / "checkpoint",
            dtype=dtype,
            quantization_config=Mxfp4Config(dequantize=True),
            output_loading_info=True,
        )
        assert not any(report.values()), report
        for name, experts in float8_experts(model).items():
            for own in ("gate_up_proj", "down_proj"):
                read = found.get_parameter(f"{name}.{own}").detach()
                cast = weight_of(experts, own).output
                multiplied = cast.scheme.dequantize(cast.qdata, cast.scales, cast.start)
                assert same_bits(read, multiplied.mT.to(dtype)), f"{name}.{own}"
        assert same_bits(found.lm_head.weight, model.lm_head.weight.to(dtype))


def test_experts_in_mxfp4_are_entries_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_mxfp4("qwen3_moe")
    state, plain = float8_state_dict(model, format="mxfp4"), float8_state_dict(model)
    for name in (name for name in plain if f"{name}_scale_inv" in plain):
        scales = plain[f"{name}_scale_inv"].repeat_interleave(32, 0).repeat_interleave(32, 1)
        codes, exponents = state.pop(name), state.pop(f"{name.removesuffix('weight')}scale")
        read = Fp8Dequantize(None)._dequantize_one(codes, exponents, torch.float32)
        assert same_bits(read, plain[name].float() * scales)
    assert not any("experts" in name for name in state)
    monkeypatch.setattr(type(ADAPTER), "entries", lambda _, __, name, x: {name: x.transpose(1, 2)})
    text = raised(ValueError, lambda: float8_state_dict(model, format="mxfp4"))
    assert "experts.gate_up_proj, [4, 320, 128], is transposed as it is saved" in text


@on_ranks(4, returns=[])
def test_shards_of_gpt_oss_in_mxfp4() -> list[str]:
    """Shards of [E, K, N], by experts or by features, are exported as [E, N, K]."""
    mesh = device_mesh(dp=2, tp=2)
    one_device = float8_state_dict(in_mxfp4("gpt_oss"), format="mxfp4")
    wrong = []
    for dim in (0, 2, 1):
        model = in_mxfp4("gpt_oss")
        for experts in float8_experts(model).values():
            parallelize_module(experts, mesh["tp"], Float8ExpertParallel())
            fully_shard(
                experts,
                mesh=mesh["dp"],
                shard_placement_fn=lambda p: Shard(dim if p.ndim == 3 else 0),  # noqa: B023
            )
        whole = float8_state_dict(model, full_state_dict=True, format="mxfp4")
        wrong += [name for name in one_device if not same_bits(whole[name], one_device[name])]
        if dim == 1:  # the rows of down_proj, 160, are two parts of 80
            text = raised(ValueError, lambda: float8_state_dict(model, format="mxfp4"))  # noqa: B023
            assert "down_proj, [4, 160, 128], is placed as [Shard(dim=1), Shard(dim=0)]" in text
            continue
        for name, tensor in float8_state_dict(model, format="mxfp4").items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            wrong += [] if same_bits(whole, one_device[name]) else [f"{dim} {name}"]
    return wrong


def test_experts_that_are_refused() -> None:
    folded = convert_experts_to_float8_training(converted("qwen3_moe", "blockwise"))
    cut = with_experts("qwen3_moe", "blockwise", moe_intermediate_size=64)
    texts = [raised(ValueError, lambda: float8_state_dict(each)) for each in (folded, cut)]  # noqa: B023
    assert_expected_inline(
        "\n".join(texts),
        """\
float8_state_dict: model.layers.0.mlp.experts.gate_up_proj was converted with Float8ExpertsConfig(recipe='rowwise_folded', combine='high_precision', enable_fsdp_float8_all_gather='auto', keep_fsdp_float8_cast=True, pad_token_groups_for_grouped_mm=True, emulate=False, weight_format='e4m3', weight_block_size=None), but a checkpoint in float8 holds float8_e4m3fn weights with one scale per square block; load the state dict into a model that was converted with the recipe "blockwise", and export that
float8_state_dict: checkpoints divide model.layers.0.mlp.experts.gate_up_proj, [128, 128], into parts of [64, 128], which cut blocks of 128 x 128; leave the experts unconverted (module_filter_fn), or convert with the recipe "mxfp8", whose blocks are 32 x 32""",
    )
    alone = convert_experts_to_float8_training(
        build("qwen3_moe"), config=Float8ExpertsConfig("mxfp8")
    )
    assert "self_attn.q_proj" in str(float8_quantization_config(alone)["modules_to_not_convert"])
    assert float8_state_dict(alone)["model.layers.0.mlp.experts.3.up_proj.weight"].dtype is E4M3
