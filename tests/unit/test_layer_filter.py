"""skip_head: heads, adapters and misaligned layers stay in high precision."""

from collections import OrderedDict

import pytest
import torch
from reference import raised
from torch import nn

from fp8_dist import Float8Linear, convert_to_float8_training, skip_head


def skipped(model: nn.Module, with_model: bool) -> set[str]:
    """The names of the linear layers that are left unconverted."""
    convert_to_float8_training(model, module_filter_fn=skip_head(model if with_model else None))
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {name for name, m in linear.items() if not isinstance(m, Float8Linear)}


def nested(*names: str) -> nn.Module:
    """A module with a linear layer at each of these names."""
    root = nn.Module()
    for name in names:
        parent = root
        *path, last = name.split(".")
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]
        parent.add_module(last, nn.Linear(16, 16))
    return root


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize(
    "head",
    [
        "lm_head",  # transformers' causal models
        "output",  # torchtitan, torchtune
        "module.lm_head",  # DistributedDataParallel
        "_orig_mod.output",  # torch.compile
        "language_model.lm_head",
        "lm_head.decoder",  # RoBERTa
        "1.lm_head",  # nn.Sequential(body, nn.ModuleDict({"lm_head": ...}))
        "module.model.output",
        "_fsdp_wrapped_module._checkpoint_wrapped_module.output",
        "score",  # transformers' classifiers
        "module.classifier",
        "classifier.out_proj",
        "classification_head.dense",
        "qa_outputs",
        "embed_out",
        "cls.predictions.decoder",
        "base_model.model.score.modules_to_save.default",  # PEFT
        "layers.0.q_proj.lora_A.default",
    ],
)
def test_heads_by_their_names(head: str, with_model: bool) -> None:
    others = ["layers.0.attention.output", "layers.0.output.dense", "outputs", "attention.output"]
    others += ["layers.0.score", "layers.0.q_proj.base_layer", "encoder.classifier"]
    assert skipped(nested(head, *others), with_model) == {head}


class CausalLM(nn.Module):
    """Stands for transformers' PreTrainedModel, whose ``get_output_embeddings`` names the head."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.model = nn.Linear(16, 16)
        self.decoder = nn.Sequential(OrderedDict(dense=nn.Linear(16, 16), proj=nn.Linear(16, 16)))
        self.heads = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.head = head

    def get_output_embeddings(self) -> object:
        if self.head == "not implemented":
            raise NotImplementedError
        return {
            "decoder.proj": self.decoder.proj,
            "decoder": self.decoder,
            "heads": self.heads,
            "list": list(self.heads),
            "none": None,
        }[self.head]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("decoder.proj", {"decoder.proj"}),
        ("decoder", {"decoder.dense", "decoder.proj"}),
        ("heads", {"heads.0", "heads.1"}),
        ("list", {"heads.0", "heads.1"}),
        ("none", set()),
        ("not implemented", set()),
    ],
)
def test_heads_that_the_model_names(head: str, expected: set[str], wrapped: bool) -> None:
    model: nn.Module = CausalLM(head)
    if wrapped:
        model = nn.ModuleDict({"text": model})
        expected = {f"text.{name}" for name in expected}
    assert skipped(model, True) == expected


def test_without_the_model_only_names_are_known() -> None:
    assert skipped(CausalLM("decoder.proj"), False) == set()


def test_sizes_that_a_gpu_refuses() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 24), nn.Linear(24, 16))
    assert skipped(model, True) == {"1", "2"}
    not_head = skip_head(model)
    assert not not_head(nn.Linear(40, 16), "gate")
    assert not_head.reason("gate") == "skip_head: in = 40 is not a multiple of 16"


def test_it_may_be_combined() -> None:
    model = nested("a", "b", "lm_head")
    no_head = skip_head(model)
    convert_to_float8_training(
        model, module_filter_fn=lambda m, fqn: no_head(m, fqn) and fqn != "b"
    )
    assert isinstance(model.a, Float8Linear)
    assert type(model.b) is type(model.lm_head) is nn.Linear


def test_a_model_that_is_all_head_says_so() -> None:
    model = nested("output")
    text = raised(
        ValueError, lambda: convert_to_float8_training(model, module_filter_fn=skip_head(model))
    )
    assert text.endswith("output: skip_head: it is the model's head")


def test_what_is_not_a_model_is_refused() -> None:
    text = raised(TypeError, lambda: skip_head(torch.ones(2)))  # type: ignore[arg-type]
    assert "module_filter_fn=skip_head(model)" in text
