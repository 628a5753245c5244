"""Models of transformers whose frozen weights are stored in float8: the Trainer, generate, saving."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import build
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from trainer_runs import SequentialTrainer, dataset, launched, llama
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TrainingArguments

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_state_dict,
    freeze_to_float8,
    skip_head,
    unfreeze_from_float8,
)
from fp8_dist.integrations.transformers import Float8Callback
from fp8_dist.linear.weights import float8_weights
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training

CONFIG = Float8LinearConfig.from_recipe_name("blockwise")


def base() -> LlamaForCausalLM:
    model = llama()
    convert_to_float8_training(model, module_filter_fn=skip_head(model), config=CONFIG)
    return model.requires_grad_(False)


def trained(store: bool, folder: Path) -> list[float]:
    torch.manual_seed(1)
    model = get_peft_model(base(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    if store:
        assert len(freeze_to_float8(model)) == 14
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        save_steps=3,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        use_cpu=True,
        report_to=[],
    )
    with launched():
        trainer = SequentialTrainer(
            model=model, args=arguments, train_dataset=dataset(), callbacks=[Float8Callback()]
        )
        trainer.train()
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore")
def test_the_trainer(tmp_path: Path) -> None:
    plain, stored = (trained(store, tmp_path / str(store)) for store in (False, True))
    assert len(plain) == 6
    assert stored == plain


def test_generation_and_saving(tmp_path: Path) -> None:
    model, ids = base(), torch.arange(10)[None]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    freeze_to_float8(model)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    state = model.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    assert saved[name].dtype is torch.float8_e4m3fn
    assert torch.equal(saved[f"{name}_scale_inv"], state[f"{name}_scale_inv"])


def merged(model: LlamaForCausalLM) -> LlamaForCausalLM:
    torch.manual_seed(2)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    found: LlamaForCausalLM = adapted.merge_and_unload()
    return found


def stored_as(recipe: str, kind: str = "llama", **sizes: int) -> Any:
    model: Any = build(kind, **{"hidden_size": 128, "intermediate_size": 256} | sizes)
    config = Float8LinearConfig.from_recipe_name(recipe)
    if kind != "llama":
        experts = Float8ExpertsConfig.from_recipe_name(recipe)
        convert_experts_to_float8_training(model, config=experts)
    convert_to_float8_training(model, module_filter_fn=skip_head(model), config=config)
    freeze_to_float8(model.requires_grad_(False))
    return model


def same_when_loaded(model: Any, folder: Path, **options: Any) -> None:
    """Check that plain transformers loads the values that a model's stored weights stand for."""
    before = vars(model.config).get("quantization_config")
    model.save_pretrained(folder, **options)
    assert vars(model.config).get("quantization_config") == before
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for fqn, weight in float8_weights(model).items():
        expected = weight.high_precision()
        assert torch.equal(plain.get_parameter(fqn), expected), fqn
    assert torch.equal(plain.lm_head.weight, model.lm_head.weight)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded", "blockwise"])
def test_plain_transformers_loads_what_is_saved(tmp_path: Path, recipe: str) -> None:
    model = stored_as(recipe)
    same_when_loaded(model, tmp_path / "stored")
    same_when_loaded(merged(model), tmp_path / "merged")
    unfreeze_from_float8(model)
    model.save_pretrained(tmp_path / "unfrozen")
    assert "quantization_config" not in (tmp_path / "unfrozen" / "config.json").read_text()
    high = {name: value.detach() for name, value in model.state_dict().items()}
    frozen = stored_as(recipe)
    frozen.save_pretrained(tmp_path / "values", state_dict=high)
    assert "quantization_config" not in (tmp_path / "values" / "config.json").read_text()


def test_a_base_that_is_stored_in_part(tmp_path: Path) -> None:
    """By the part alone, whose module has no config; a converted layer stays trainable."""
    model: Any = build("llama", hidden_size=128, intermediate_size=256)
    convert_to_float8_training(model, module_filter_fn=skip_head(model), config=CONFIG)
    model.model.layers[0].requires_grad_(False)
    freeze_to_float8(model.model.layers)
    same_when_loaded(model, tmp_path / "part")
    written = json.loads((tmp_path / "part" / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.up_proj" in written["modules_to_not_convert"]
    assert "model.layers.0.mlp.up_proj" not in written["modules_to_not_convert"]
    same_when_loaded(model, tmp_path / "whole", state_dict=model.state_dict())


def test_what_plain_transformers_would_not_multiply_is_not_saved(tmp_path: Path) -> None:
    cut = stored_as("blockwise", hidden_size=192)
    with pytest.raises(ValueError, match=r"\[192, 192\], which is not divisible by its blocks of"):
        cut.save_pretrained(tmp_path)
    experts = stored_as("blockwise", "qwen3_moe", moe_intermediate_size=128)
    text = r"experts.gate_up_proj is stored in .* pass state_dict=float8_state_dict.*unfreeze_from"
    for options in ({}, {"state_dict": experts.state_dict()}):
        with pytest.raises(ValueError, match=text):
            experts.save_pretrained(tmp_path, **options)
    assert not list(tmp_path.glob("*.safetensors"))
    same_when_loaded(experts, tmp_path, state_dict=float8_state_dict(experts))
    unfreeze_from_float8(experts)
    experts.save_pretrained(tmp_path / "unfrozen")
