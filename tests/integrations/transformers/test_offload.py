"""Loaders that rebuild parameters by their type, such as accelerate's for offloading."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, init_empty_weights
from accelerate.hooks import remove_hook_from_module
from hf_models import batch, build
from reference import same_bits
from transformers import AutoModelForCausalLM

from fp8_dist import Float8LinearConfig, convert_to_float8_training, freeze_to_float8, skip_head
from fp8_dist.integrations.transformers import Fp8DistConfig
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training
from fp8_dist.weight.stored import StoredFloat8, StoredScales

IDS = batch(7)
CONFIG = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


def converted(kind: str = "llama", frozen: bool = False) -> Any:
    model = build(kind)
    if kind == "qwen3_moe":
        convert_experts_to_float8_training(model, config=Float8ExpertsConfig("blockwise"))
    convert_to_float8_training(model, config=CONFIG, module_filter_fn=skip_head(model))
    if frozen:
        model.requires_grad_(False)
        freeze_to_float8(model)
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def to_cpu(model: Any, folder: Path) -> Any:
    return cpu_offload(model, execution_device="cpu")


def to_disk(model: Any, folder: Path) -> Any:
    return disk_offload(model, str(folder), execution_device=torch.device("cpu"))


@pytest.mark.filterwarnings("ignore:.*experts:UserWarning")
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("offload", [to_cpu, to_disk])
def test_offloaded_weights(tmp_path: Path, kind: str, offload: Callable[..., Any]) -> None:
    expected, model = logits(converted(kind)), offload(converted(kind), tmp_path)
    assert all(p.is_meta for p in model.parameters())
    for _ in range(2):
        assert same_bits(logits(model), expected)
    if offload is to_cpu:
        remove_hook_from_module(model, recurse=True)
        assert same_bits(logits(model), expected)


def test_a_device_map_with_a_disk(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    parts = ["embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb"]
    places: Any = {f"model.{part}": "cpu" for part in parts} | {"lm_head": "cpu"}
    places["model.layers.1"] = "disk"

    def loaded(device_map: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            tmp_path,
            quantization_config=Fp8DistConfig(),
            device_map=device_map,
            offload_folder=str(tmp_path / "offload"),
        )

    assert same_bits(logits(loaded(places)), logits(loaded(None)))


def test_stored_weights_are_not_rebuilt_of_plain_data() -> None:
    """Plain data has no scheme, and accelerate casts codes to the dtype of the weight."""
    model = cpu_offload(converted(frozen=True), execution_device="cpu")
    text = "from data of torch.float32 alone, .* call fp8_dist.unfreeze_from_float8"
    with pytest.raises(NotImplementedError, match=text):
        logits(model)


@pytest.mark.parametrize("frozen", [False, True])
def test_conversion_without_memory(frozen: bool) -> None:
    with init_empty_weights():
        model = converted(frozen=frozen)
    types = {type(p) for p in model.model.layers.parameters() if p.ndim > 1}
    assert types == ({StoredFloat8} if frozen else {torch.nn.Parameter})
    assert all(p.is_meta and isinstance(p, torch.nn.Parameter) for p in model.parameters())
    if frozen:
        weight, like = model.model.layers[0].mlp.up_proj, converted(frozen=True)
        like = like.model.layers[0].mlp.up_proj
        assert weight.weight.key == like.weight.key
        assert isinstance(weight.weight_scale_inv, StoredScales)
        assert weight.weight_scale_inv.shape == like.weight_scale_inv.shape
