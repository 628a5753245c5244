"""Models of transformers whose frozen weights are stored in float8: the Trainer, generate, saving."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import build
from peft import LoraConfig, get_peft_model
from trainer_runs import SequentialTrainer, dataset, launched, llama
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TrainingArguments

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_quantization_config,
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


def test_generation() -> None:
    model, ids = base(), torch.arange(10)[None]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    freeze_to_float8(model)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [("tensorwise", "llama"), ("blockwise", "llama"), ("blockwise", "qwen3_moe")],
)
def test_plain_transformers_loads_what_is_saved(tmp_path: Path, recipe: str, kind: str) -> None:
    """As docs/frozen.md says: the stored bytes in blocks, high precision for other recipes."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    model: Any = build(kind, **{k: v for k, v in sizes.items() if k[0] != "m" or kind != "llama"})
    config = Float8LinearConfig.from_recipe_name(recipe)
    if kind != "llama":
        convert_experts_to_float8_training(model, config=Float8ExpertsConfig(recipe))
    convert_to_float8_training(model, module_filter_fn=skip_head(model), config=config)
    freeze_to_float8(model.requires_grad_(False))
    expected = {fqn: w.high_precision() for fqn, w in float8_weights(model).items()}
    if recipe == "blockwise":
        model.config.quantization_config = float8_quantization_config(model)
        model.save_pretrained(tmp_path, state_dict=float8_state_dict(model))
    else:
        unfreeze_from_float8(model)
        model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    for fqn, values in expected.items():
        assert torch.equal(plain.get_parameter(fqn), values), fqn
