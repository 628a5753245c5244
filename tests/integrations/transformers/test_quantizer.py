"""Fp8DistConfig: from_pretrained makes float8 layers, and saves plain models."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from reference import raised, same_bits
from safetensors.torch import load_file, save_file
from trainer_runs import dataset, llama
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from fp8_dist import (
    Float8LinearConfig,
    attach_update,
    conversion_summary,
    convert_to_float8_training,
    float8_layers,
    skip_head,
)
from fp8_dist.integrations.transformers import Fp8DistConfig
from fp8_dist.integrations.transformers.quantizer import Fp8DistQuantizer

E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of an unconverted model."""
    folder = tmp_path_factory.mktemp("checkpoint")
    llama().save_pretrained(folder)
    return folder


def load(folder: Path | str, *args: Any, **kwargs: Any) -> LlamaForCausalLM:
    config = Fp8DistConfig(*args, **kwargs)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert isinstance(model, LlamaForCausalLM)
    return model


def steps(model: LlamaForCausalLM, count: int) -> list[float]:
    """Train, and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    attach_update(optimizer, model)
    texts = torch.stack([text["input_ids"] for text in dataset(8 * count)])
    model.train()
    losses = []
    for x in texts.split(8):
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def evaluated(model: LlamaForCausalLM) -> float:
    x = torch.stack([text["input_ids"] for text in dataset(8)])
    with torch.no_grad():
        return float(model.eval()(input_ids=x, labels=x).loss)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed", "mxfp8"])
def test_loaded_as_if_converted(checkpoint: Path, recipe: str) -> None:
    model, other = load(checkpoint, recipe), llama()
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(other, config=config, module_filter_fn=skip_head(other))
    assert float8_layers(model).keys() == float8_layers(other).keys()
    state, expected = model.state_dict(), other.state_dict()
    assert state.keys() == expected.keys()
    assert all(same_bits(state[key], expected[key]) for key in state)
    assert all(weight.requires_grad for weight in model.parameters())
    assert steps(model, 2) == steps(other, 2)


def test_the_model_is_an_ordinary_one_and_saved_as_that(checkpoint: Path, tmp_path: Path) -> None:
    model, plain = load(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.to_dict() == plain.config.to_dict()
    assert not model.is_quantized
    assert getattr(model, "hf_quantizer", None) is None
    assert not hasattr(model, "quantization_method")
    model.to(torch.bfloat16).float()  # transformers refuses this for quantized models
    steps(model, 3)
    model.save_pretrained(tmp_path)
    plain.save_pretrained(tmp_path / "plain")
    assert (tmp_path / "config.json").read_text() == (tmp_path / "plain/config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not float8_layers(again)
    assert all(same_bits(w, again.state_dict()[key]) for key, w in model.state_dict().items())
    assert evaluated(again) == pytest.approx(evaluated(model), abs=2e-3)


def test_modules_that_are_left_out(checkpoint: Path) -> None:
    model = load(checkpoint, modules_to_not_convert=["o_proj", "layers.1.mlp"])
    left = {name for name, _ in llama().named_modules() if name.endswith("_proj")}
    left -= float8_layers(model).keys()
    mlp = {f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert left == mlp | {f"model.layers.{i}.self_attn.o_proj" for i in range(2)}
    reasons = {row.name: row.reason for row in conversion_summary(model).rows if not row.converted}
    assert reasons["lm_head"] == "skip_head: it is the model's head, by its name"
    assert reasons["model.layers.1.mlp.up_proj"] == "modules_to_not_convert: layers.1.mlp"


def test_names_that_are_refused(checkpoint: Path) -> None:
    unknown = raised(ValueError, lambda: load(checkpoint, modules_to_not_convert=["o_prj", "mlp"]))
    assert "modules_to_not_convert: o_prj: no module of the LlamaForCausalLM has such" in unknown
    assert unknown.endswith(
        "of model.named_modules(); did you mean 'o_proj' or 'v_proj' or 'q_proj'?"
    )
    text = raised(TypeError, lambda: Fp8DistConfig(modules_to_not_convert="mlp"))  # type: ignore[arg-type]
    assert "takes a list of names, got a string: write ['mlp']" in text
    assert "tensorwize" in raised(ValueError, lambda: Fp8DistConfig("tensorwize"))


def test_codes_are_not_loaded_as_values(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    entries = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    entries |= {name: entries[name].to(E4M3), f"{name}_scale_inv": torch.ones(())}
    save_file(entries, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = "up_proj.weight is in float8 in the checkpoint, and would be loaded without its scales"
    assert text in raised(ValueError, lambda: load(tmp_path))


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(float8_layers(model)) == 14


def test_transformers_own_tensor_parallelism_is_refused() -> None:
    model, quantizer = llama(), Fp8DistQuantizer(Fp8DistConfig())
    model.config.distributed_config = DistributedConfig(tp_size=2)
    assert_expected_inline(
        raised(NotImplementedError, lambda: quantizer.update_parallel_plan(model, {})),
        """Fp8DistConfig: transformers' tensor parallelism (tp_size) does not tell float8 layers what their scales cover; load the model without it, and call apply_tp_plan(model, mesh, hf_tp_plan(model))""",
    )
