"""The script that tries plans of transformers' models, on a few of them."""

import re

import pytest

from scripts.measure import hf_plans


def test_it_tells_right_refused_and_untried_models(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["llama", "olmo", "bert", "gemma3"]
    assert hf_plans.main(["--assert", "--only", *kinds]) == 0
    planned, without, untried = (
        part.partition("\n\n")[2] for part in capsys.readouterr().out.split("models ")[1:4]
    )
    llama, olmo = planned.splitlines()[2:4]
    assert llama.startswith("| LlamaForCausalLM ")
    assert llama.count(" dB ") == 2
    assert re.match(r"\| OlmoForCausalLM +\| refused: model: .* \| \d+ / \d+ dB ", olmo)
    assert "BertLMHeadModel" in without
    assert "Gemma3ForConditionalGeneration" in untried


def test_a_plan_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [hf_plans.Found("wrong", "6 / 5 dB"), hf_plans.Found("right", "120 / 40 dB")]
    monkeypatch.setattr(hf_plans, "run_on_ranks", lambda *_, **__: [{"llama": found}] * 2)
    assert hf_plans.main(["--assert", "--only", "llama"]) == 1
    assert "wrong: 6 / 5 dB" in hf_plans.blocks({"llama": found})["models with a plan"]


def test_unknown_types_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        hf_plans.main(["--only", "llama", "no_such_model"])
    assert "no_such_model" in capsys.readouterr().err
