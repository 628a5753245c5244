"""The layers of transformers models that one rule leaves out, and the messages about others."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from trainer_runs import SIZES, dataset, launched
from transformers import PreTrainedModel, Trainer, TrainingArguments

from fp8_dist import Float8Linear, auto_filter, convert_to_float8_training, skip_head
from fp8_dist.integrations.transformers import Float8Callback, Fp8DistConfig

ENCODER = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
# By class: its config class, the config, and the layers that stay in high precision.
MODELS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "LlamaForSequenceClassification": ("LlamaConfig", SIZES | {"pad_token_id": 0}, {"score"}),
    # A head is left out even if its sizes are multiples of 16.
    "LlamaForTokenClassification": ("LlamaConfig", SIZES | {"num_labels": 16}, {"score"}),
    "BertForQuestionAnswering": ("BertConfig", ENCODER, {"qa_outputs"}),
    "RobertaForSequenceClassification": (
        "RobertaConfig",
        ENCODER,
        {"classifier.dense", "classifier.out_proj"},
    ),
    "DistilBertForSequenceClassification": (
        "DistilBertConfig",
        {"vocab_size": 64, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
        {"pre_classifier", "classifier"},
    ),
    # There is no head with a known name, but the sizes of two layers are not multiples of 16.
    "LlamaForCausalLM": (
        "LlamaConfig",
        SIZES | {"intermediate_size": 120, "num_hidden_layers": 1},
        {"lm_head", *(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))},
    ),
}


def build(name: str, **changes: Any) -> PreTrainedModel:
    config, sizes, _ = MODELS[name]
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, name)(
        getattr(transformers, config)(**sizes | changes)
    )
    return model


def left_out(model: nn.Module) -> set[str]:
    linear = {fqn: m for fqn, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {fqn for fqn, m in linear.items() if not isinstance(m, Float8Linear)}


def by_skip_head(model: nn.Module) -> set[str]:
    return left_out(convert_to_float8_training(model, module_filter_fn=skip_head(model)))


def by_the_callback(model: nn.Module, folder: Path) -> set[str]:
    with launched():
        arguments = TrainingArguments(str(folder), use_cpu=True, report_to="none")
        Trainer(model, arguments, train_dataset=dataset(8), callbacks=[Float8Callback()])
    return left_out(model)


@pytest.mark.parametrize("name", MODELS)
def test_one_rule(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = MODELS[name][2]
    assert by_skip_head(build(name)) == expected
    plain = build(name)
    filters = skip_head(plain), auto_filter("tensorwise", model=plain)
    for fqn in expected:
        assert not any(each(plain.get_submodule(fqn), fqn) for each in filters)
        one, other = (each.reasons[fqn].partition(": ")[2] for each in filters)
        assert one == other, "auto_filter does not only find it small"
    assert by_the_callback(build(name), tmp_path / "trainer") == expected
    build(name).save_pretrained(tmp_path / "model")
    model = type(build(name)).from_pretrained(
        tmp_path / "model", quantization_config=Fp8DistConfig()
    )
    assert left_out(model) == expected
    # Converted layers run even if sizes must be multiples of 16, as on a GPU.
    monkeypatch.setenv("FP8_DIST_STRICT_ALIGNMENT", "1")
    model(input_ids=torch.arange(1, 17).view(1, 16))[0].sum().backward()


def test_adapters_and_wrapped_heads(tmp_path: Path) -> None:
    def adapted() -> Any:
        lora = LoraConfig(r=16, target_modules="all-linear", task_type="SEQ_CLS")
        return get_peft_model(build("LlamaForSequenceClassification"), lora)

    model = adapted()
    linear = {fqn for fqn, m in model.named_modules() if isinstance(m, nn.Linear)}
    expected = {fqn for fqn in linear if "lora_" in fqn or ".score." in fqn}
    assert len(expected) == 2 * 14 + 2
    assert by_skip_head(model) == expected
    assert by_the_callback(adapted(), tmp_path) == expected
    names_alone = skip_head()
    assert {fqn for fqn in linear if not names_alone(nn.Linear(16, 16), fqn)} == expected
    admits = auto_filter("tensorwise")
    large = nn.Linear(8192, 8192, device="meta")
    assert {fqn for fqn in linear if not admits(large, fqn)} == expected
