"""fp8_dist.tune: its errors, and that it leaves a model as it is."""

import copy

import pytest
import torch
from torch import nn

from fp8_dist import Float8LinearConfig, convert_to_float8_training, float8_layers, freeze_to_float8
from fp8_dist.model import tune as module
from fp8_dist.model.tune import tune


def converted(recipe: str = "delayed") -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 48))
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=config)


def test_where_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="tokens must be positive, got 0"):
        tune(converted(), 0)
    with pytest.raises(ValueError, match="tune: the model has no float8 layers; call"):
        tune(nn.Linear(16, 16), 8)
    with pytest.raises(
        ValueError, match="on cpu, but block sizes are those of a GPU's kernels; move"
    ):
        tune(converted(), 8)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    model = converted()
    for layer in float8_layers(model).values():
        monkeypatch.setattr(type(layer.float8_weight), "device", torch.device("cuda"))
    with pytest.raises(
        NotImplementedError, match="there is no Triton in this environment, so that"
    ):
        tune(model, 8)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise_folded", "blockwise"])
def test_the_model_stays_as_it_is(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_check", lambda layers, tokens: None)
    torch.manual_seed(0)
    model = converted(recipe)
    model[2].requires_grad_(False)
    freeze_to_float8(model)
    twin, x = copy.deepcopy(model), torch.randn(6, 32)
    state = torch.get_rng_state()
    with torch.no_grad():
        tune(model, 6)
    assert torch.equal(torch.get_rng_state(), state)
    assert [line.split(", ")[1] for line in capsys.readouterr().err.splitlines()] == [
        "layers like 0 (32 -> 48)",
        "layers like 1 (48 -> 32)",
        "layers like 2 (32 -> 48)",
    ]
    for each in (model, twin):
        output = each(x)
        output.square().sum().backward()
    found, expected = model.state_dict(), twin.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value.view(torch.uint8), expected[name].view(torch.uint8))
    for mine, theirs in zip(model[0].parameters(), twin[0].parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    tune(model, 6, progress=False)
    assert not capsys.readouterr().err
    pairs = zip(float8_layers(model).values(), float8_layers(twin).values(), strict=True)
    for mine, theirs in ((a.histories, b.histories) for a, b in pairs):
        assert [h.current for h in mine.values()] == [h.current for h in theirs.values()]
