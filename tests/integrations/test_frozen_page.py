"""The page of weights stored in float8, by copy and paste."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import run_shown
from hf_models import build
from nets import full
from peft import LoraConfig, get_peft_model
from ranks import RankPools
from reference import same_bits
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from trainer_runs import dataset, llama
from transformers import LlamaForCausalLM

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_quantization_config,
    float8_state_dict,
    freeze_to_float8,
    iter_float8_weights,
    skip_head,
)
from fp8_dist.linear.weights import float8_weights

DOCS = Path(__file__).parents[2] / "docs"
PAGE, SERVING = (DOCS / "frozen.md").read_text(), (DOCS / "serving.md").read_text()
LORA, SHARDED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def block_config(**options: Any) -> Float8LinearConfig:
    return Float8LinearConfig.from_recipe_name("blockwise", scale_format="fp32", **options)


def lora(code: str) -> list[torch.Tensor]:
    """Runs on each rank: the adapters after the page's training."""
    torch.manual_seed(3)
    batches = [{key: ids[None] for key, ids in row.items()} for row in dataset(8)]
    scope: dict[str, Any] = {"model": llama(), "batches": batches}
    # Without the line that stores weights, FSDP2 has some to gather in float8.
    run_shown(code, scope, expected="" if code == LORA else ".* in high precision, because")
    assert {type(weight.parameter()) for weight in float8_weights(scope["model"]).values()} == {
        DTensor
    }
    return [full(p.detach()) for p in scope["model"].parameters() if p.requires_grad]


@pytest.mark.filterwarnings("ignore")
def test_adapters_are_those_beside_a_base_in_high_precision(ranks: RankPools) -> None:
    usual = "\n".join(line for line in LORA.splitlines() if line != "freeze_to_float8(model)")
    assert usual != LORA
    found, expected = (ranks(2).run(lora, code)[0] for code in (LORA, usual))
    assert len(found) == 8
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert any(tensor.any() for tensor in found[1::2])  # B begins with zeros


def exported(folder: Path) -> LlamaForCausalLM:
    model = llama()
    convert_to_float8_training(model, config=block_config(), module_filter_fn=skip_head(model))
    model.config.quantization_config = float8_quantization_config(model)
    model.save_pretrained(folder, state_dict=float8_state_dict(model))
    return model


def load_sharded(folder: str) -> dict[str, torch.Tensor]:
    """Runs on each rank: the state dict of the page's model."""
    scope: dict[str, Any] = {"make_model": llama, "folder": folder, "device": "cpu", "ranks": 4}
    run_shown(SHARDED, scope)
    return float8_state_dict(scope["model"], full_state_dict=True)


def check_files(found: dict[str, torch.Tensor], folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name].contiguous(), tensor), name


@pytest.mark.filterwarnings("ignore")
def test_loading_on_a_mesh(ranks: RankPools, tmp_path: Path) -> None:
    exported(tmp_path)
    for found in ranks(4).run(load_sharded, str(tmp_path)):
        check_files(found, tmp_path)


def test_names_of_a_stream_with_adapters() -> None:
    """As docs/serving.md gives them."""
    _, loop, _ = re.findall(r"```python\n(.*?)```", SERVING, re.DOTALL)
    model: Any = build("qwen3")
    config = Float8LinearConfig.from_recipe_name("blockwise")
    convert_to_float8_training(model, config=config, module_filter_fn=skip_head(model))
    model.requires_grad_(False)
    freeze_to_float8(model)
    expected = [name for name, *_ in iter_float8_weights(model)]
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    names = [name for name, *_ in iter_float8_weights(model)]
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    assert {f"{layer}.base_layer.weight", f"{layer}.lora_A.default.weight"} < {*names}
    sent: list[str] = []
    send = lambda name, *_: sent.append(name)  # noqa: E731
    run_shown(loop, {"model": model, "iter_float8_weights": iter_float8_weights, "send": send})
    assert sent == expected
