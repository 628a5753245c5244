"""Conversion of experts in transformers models to float8, and steps on one device."""

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import captured
from expecttest import assert_expected_inline
from hf_experts import IDS, different, made, step
from hf_models import build
from reference import raised, same_bits, sqnr

from fp8_dist import convert_to_linear, update_float8_scales
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training, float8_experts

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "recipe", "dtype"),
    [
        ("mixtral", "tensorwise", BF16),
        ("olmoe", "blockwise", torch.float32),
        ("gpt_oss", "rowwise_folded", BF16),
    ],
)
def test_loss_follows_the_unconverted_models(kind: str, recipe: Any, dtype: torch.dtype) -> None:
    curves, first = [], []
    for config in (None, Float8ExpertsConfig(recipe)):
        model, losses = build(kind).to(dtype), []
        if config is not None:
            convert_experts_to_float8_training(model, config=config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for i in range(5):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            if i == 0:
                first.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(torch.tensor(losses))
    plain, float8 = curves
    assert float8[0] - float8[-1] > 1
    assert min(sqnr(a, b) for a, b in zip(*first, strict=True)) > 10
    assert 0 < (float8 - plain).abs().max() < 0.02


def test_copies_of_a_converted_model(tmp_path: Path) -> None:
    model, file = made("mixtral", combine="float8"), tmp_path / "model.pt"
    torch.save(model, file)
    expected = step(copy.deepcopy(model))
    assert different(step(torch.load(file, weights_only=False)), expected) == []
    # Load it in a process that has not imported the library.
    code = (
        f"import torch; model = torch.load({str(file)!r}, weights_only=False); "
        f"print(model(input_ids=torch.tensor({IDS.tolist()})).logits.double().sum().item())"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert float(printed) == expected[0].double().sum().item()


def test_converting_twice() -> None:
    model = made("olmoe", "mxfp8")
    weights = [p for p in model.parameters() if p.ndim == 3]
    convert_experts_to_float8_training(model, config=Float8ExpertsConfig("mxfp8"))
    again = [p for p in model.parameters() if p.ndim == 3]
    assert all(p is q for p, q in zip(weights, again, strict=True))
    text = raised(ValueError, lambda: convert_experts_to_float8_training(model))
    assert_expected_inline(
        text,
        """convert_experts_to_float8_training: model.layers.0.mlp.experts is converted already, with another config: Float8ExpertsConfig(recipe='mxfp8', combine='high_precision', enable_fsdp_float8_all_gather='auto', keep_fsdp_float8_cast=True, pad_token_groups_for_grouped_mm=True, emulate=False, weight_format='e4m3', weight_block_size=None). Convert it once, or exclude it in module_filter_fn""",
    )


@pytest.mark.parametrize(("kind", "gathers"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_convert_to_linear_gives_back_the_experts(kind: str, gathers: bool) -> None:
    model, config = build(kind), Float8ExpertsConfig(enable_fsdp_float8_all_gather=gathers)

    def attributes() -> dict[str, Any]:
        parts = {
            f"{name}.{key}": list(value.items()) if isinstance(value, dict) else value
            for name, part in model.named_modules()
            for key, value in vars(part).items()
        }
        return parts | {name: (id(p), type(p.detach())) for name, p in model.named_parameters()}

    before, expected = attributes(), step(build(kind))
    for _ in range(2):
        convert_experts_to_float8_training(model, config=config)
        step(model)
        model.zero_grad()
        assert convert_to_linear(model) is model
        found = attributes()
        assert found.keys() == before.keys()
        # (Lists of parameters are equal only if they hold the same objects.)
        assert [name for name, value in before.items() if found[name] != value] == []
        assert different(step(model), expected) == []
        model.zero_grad()


def test_filter_leaves_experts_to_their_own_implementation() -> None:
    model, plain = build("qwen3_moe"), build("qwen3_moe")
    convert_experts_to_float8_training(model, module_filter_fn=lambda _, fqn: "layers.1" in fqn)
    assert list(float8_experts(model)) == ["model.layers.1.mlp.experts"]
    outputs = [m(IDS, output_hidden_states=True).hidden_states for m in (model, plain)]
    assert [same_bits(a, b) for a, b in zip(*outputs, strict=True)] == [True, True, False]


def test_experts_that_cannot_be_converted() -> None:
    def text(kind: str, error: type[Exception]) -> str:
        return raised(error, lambda: convert_experts_to_float8_training(build(kind)))

    wrong: Any = "mxfp8"
    config = raised(
        TypeError, lambda: convert_experts_to_float8_training(build("llama"), config=wrong)
    )
    texts = [text("llama4", NotImplementedError), text("llama", ValueError), config]
    assert_expected_inline(
        "\n".join(texts),
        """\
convert_experts_to_float8_training: model.layers.0.feed_forward.experts can't be converted: its class does not use transformers' experts interface, which passes the experts of each token (those of Llama 4 multiply every token, scaled by the router before). Exclude it in module_filter_fn
convert_experts_to_float8_training: the model has no experts that are known, or module_filter_fn admits none; those of transformers are known from its release 5 on, and experts of your own need the attribute float8_weight_names
convert_experts_to_float8_training: config must be a Float8ExpertsConfig, got 'mxfp8'; Float8ExpertsConfig.from_recipe_name(name) makes one from a recipe's name""",
    )


def test_experts_are_not_captured() -> None:
    model = made("olmoe", "mxfp8")
    with captured():
        text = raised(NotImplementedError, lambda: update_float8_scales(model))
    assert_expected_inline(
        text,
        """\
update_float8_scales: a CUDA graph is being captured, and can't replay a step of model.layers.0.mlp.experts.gate_up_proj, which belongs to experts, whose numbers of rows the host reads; leave them out, or run steps without a graph""",
    )


def test_autocast() -> None:
    model, plain = convert_experts_to_float8_training(build("olmoe")), build("olmoe")
    with torch.autocast("cpu", BF16):
        (logits, found), (expected, grads) = step(model), step(plain)
    assert logits.dtype == expected.dtype == BF16
    assert sqnr(expected, logits) > 25
    assert min(sqnr(grads[name], found[name]) for name in grads) > 10
    assert {grad.dtype for grad in found.values()} == {torch.float32}


def test_implementations_that_are_set_after_the_conversion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fp8_dist.text._warned", set())
    model, expected = made("qwen3_moe"), step(made("qwen3_moe"))
    copied = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied.set_experts_implementation("fp8_dist")
        assert different(step(copied), expected) == []
    model.set_experts_implementation("eager")
    with pytest.warns(UserWarning, match="experts") as caught:
        assert different(step(model), expected) == []
    assert_expected_inline(
        "\n".join(str(each.message) for each in caught),
        """model.layers.0.mlp.experts: the experts are in float8, so set_experts_implementation('eager') has no effect on them; leave them out by convert_experts_to_float8_training's module_filter_fn to run them so""",
    )
    plain = build("qwen3_moe")
    plain.set_experts_implementation("fp8_dist")
    assert_expected_inline(
        raised(ValueError, lambda: plain(IDS)),
        """experts_implementation='fp8_dist' is for experts in float8, but those of a Qwen3MoeExperts are not converted; call convert_experts_to_float8_training, or load the model with quantization_config=Fp8DistConfig(experts_recipe=...)""",
    )
