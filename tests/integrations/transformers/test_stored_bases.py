"""Models of transformers whose frozen weights are stored in float8: the Trainer, generate, saving."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from trainer_runs import SequentialTrainer, dataset, launched, llama
from transformers import LlamaForCausalLM, TrainingArguments

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    freeze_to_float8,
    skip_head,
)
from fp8_dist.integrations.transformers import Float8Callback

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
