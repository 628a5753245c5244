"""What a run on four ranks exports, transformers loads as an FP8 block checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import batch, build
from nets import full
from ranks import RankPools, device_mesh
from reference import same_bits, weights_used
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_layers,
    float8_quantization_config,
    float8_state_dict,
    skip_head,
    update_float8_scales,
)
from fp8_dist.integrations.transformers import hf_tp_plan
from fp8_dist.tensor_parallel import apply_tp_plan

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
IDS = batch(7)
E4M3 = torch.float8_e4m3fn


def converted(kind: str, recipe: str, gather: Any = False, **sizes: int) -> nn.Module:
    model = build(kind, **sizes)
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, enable_fsdp_float8_all_gather=gather)
    return convert_to_float8_training(model, module_filter_fn=skip_head(model), config=config)


def trained(kind: str, recipe: str, folder: str) -> dict[str, torch.Tensor]:
    """Runs on each rank: two steps on dp 2 x tp 2, an export; the weights in high precision."""
    mesh = device_mesh(dp=2, tp=2)
    model: Any = converted(kind, recipe, "auto", **SIZES)
    apply_tp_plan(model, mesh["tp"], hf_tp_plan(model))
    for block in (*model.model.layers, model):
        fully_shard(block, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        ids = batch(2 * step + mesh.get_local_rank("dp"))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update_float8_scales(model)
    state = float8_state_dict(model, full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        model.config.quantization_config = float8_quantization_config(model)
        model.save_pretrained(folder, state_dict=state)
    masters = {name: full(tensor) for name, tensor in get_model_state_dict(model).items()}
    return masters if dist.get_rank() == 0 else {}


def with_weights_of_forward(model: nn.Module) -> nn.Module:
    """A converted model, as an unconverted one with the weights that its forward multiplies."""
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


@pytest.mark.full
@pytest.mark.parametrize(("kind", "recipe"), [("llama", "blockwise"), ("qwen3", "mxfp8")])
def test_transformers_loads_what_four_ranks_have_trained(
    ranks: RankPools, tmp_path: Path, kind: str, recipe: str
) -> None:
    """A product of a float8 value and a power of two is exact in bf16, so the bits are the same."""
    masters = ranks(4).run(trained, kind, recipe, str(tmp_path))[0]
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(tensor.dtype is E4M3 for tensor in stored.values()) == 14
    assert len(stored) == len(masters) + 14
    for dtype in (torch.float32, torch.bfloat16):
        # (It leaves the dtype of what is not float8 as it is stored.)
        stored |= {name: stored[name].to(dtype) for name in masters if stored[name].dtype != E4M3}
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
        twin = converted(kind, recipe, **SIZES)
        twin.load_state_dict(masters)
        expected, found = with_weights_of_forward(twin).eval(), loaded(tmp_path, dtype)
        for weight in expected.parameters():  # (and no buffers: rotary tables stay fp32)
            weight.data = weight.data.to(dtype)
        weights = dict(found.named_parameters())
        for name, weight in expected.named_parameters():
            assert same_bits(weights[name], weight), name
        with torch.no_grad():
            logits = found(input_ids=IDS).logits
            assert logits.dtype is dtype
            assert same_bits(logits, expected(input_ids=IDS).logits)


def test_experts_biases_and_tied_embeddings(tmp_path: Path) -> None:
    """Routers and fused experts stay in high precision, and are named in the config."""
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
