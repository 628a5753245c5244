"""Conversions in place: what refers to a layer goes on working, and an inverse leaves nothing."""

import copy
import gc
import pickle
from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import pytest
import torch
from reference import raised, reloaded, same_bits
from torch import nn

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    attach_update,
    conversion_summary,
    convert_to_float8_training,
    convert_to_linear,
    float8_layers,
    freeze_to_float8,
    unfreeze_from_float8,
)
from fp8_dist.moe import convert_experts_to_float8_training

PLAIN = Float8LinearConfig()
GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
DELAYED = Float8LinearConfig.from_recipe_name("delayed")
IGNORED = "_ddp_params_and_buffers_to_ignore"  # what DDP reads

Change = Callable[[nn.Module], object]


class Named(nn.Linear):
    """A subclass with a method of its own, but nn.Linear's forward."""

    def sizes(self) -> tuple[int, int]:
        return self.out_features, self.in_features


class Experts(nn.Module):
    float8_weight_names = ("up", "down")

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(2, 32, 32)) for _ in range(2))


def ignore(*args: Any) -> None:
    """A hook that does nothing."""


class Model(nn.Module):
    """Layers that are referred to in many ways, and have whatever a layer may have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Named(32, 32), nn.Linear(32, 32, bias=False)
        self.tied, self.frozen = nn.Linear(32, 32, bias=False), nn.Linear(32, 32).eval()
        self.tied.weight = weight = self.second.weight
        self.first.inner = nn.Linear(32, 32)
        self.again, self.experts = self.first, Experts()
        self.frozen.requires_grad_(False)
        self.order = [self.first, self.second, self.tied, self.frozen]
        self.first.config, self.first.fqn, self.first.histories = {"of": "the user"}, "mine", [1]
        self.second.forward = self.second.forward  # as accelerate leaves it when it removes a hook
        for layer in (*self.order, self.experts):
            layer.register_forward_hook(ignore)
            layer.register_full_backward_hook(ignore)
            layer.register_state_dict_post_hook(ignore)
            layer.register_load_state_dict_pre_hook(ignore)
            layer.register_load_state_dict_post_hook(ignore)
        weight.lr_scale, weight.grad = 0.1, torch.ones(32, 32)  # type: ignore[attr-defined]
        weight.register_hook(ignore)
        weight.register_post_accumulate_grad_hook(ignore)
        setattr(self, IGNORED, ["frozen.bias"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.order:
            x = layer(x)
        return x


class Same:
    """A value that is only equal to a Same of the same object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} {self.value!r:.80}"


def frozen_form(value: object) -> object:
    """A comparable copy of a value, which later changes of the value don't reach."""
    if isinstance(value, dict):
        return Same(value), {key: Same(each) for key, each in value.items()}
    if isinstance(value, list):
        return Same(value), [*map(Same, value)]
    if isinstance(value, MethodType):  # held itself, it would be called
        return value.__func__, Same(value.__self__)
    return Same(value)


def snapshot(model: nn.Module, parameters: str = "same") -> dict[str, object]:
    """All attributes of modules and parameters; ``parameters="new"`` ignores their identity."""
    found: dict[str, object] = {}
    for name, part in model.named_modules(remove_duplicate=False):
        found[f"class of {name}"] = type(part)
        for key, value in vars(part).items():
            is_new = key == "_parameters" and parameters == "new"
            found[f"{name}.{key}"] = list(value) if is_new else frozen_form(value)
    for name, p in model.named_parameters(remove_duplicate=False):
        facts = [type(p), type(p.detach()), p.dtype, p.device, p.requires_grad, dict(vars(p))]
        facts += [frozen_form(p._backward_hooks), frozen_form(p._post_accumulate_grad_hooks)]
        own = [] if parameters == "new" else [Same(p.grad), p.detach().add(0).tolist()]
        found[f"parameter {name}"] = facts + own
    return found


def differing(found: dict[str, object], expected: dict[str, object]) -> list[str]:
    return [
        f"{name}: {found.get(name, 'nothing')} instead of {expected.get(name, 'nothing')}"
        for name in {**expected, **found}
        if name not in found or name not in expected or found[name] != expected[name]
    ]


def convert(model: nn.Module, config: Float8LinearConfig = PLAIN) -> nn.Module:
    return convert_to_float8_training(model, config=config)


def convert_all(model: nn.Module, config: Float8LinearConfig = GATHERED) -> nn.Module:
    return convert_experts_to_float8_training(convert(model, config))


def use(model: nn.Module) -> None:
    """Train the layers, save and load the model, and copy it."""
    grad = model.second.weight.grad
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach_update(optimizer, model)
    model(torch.ones(16, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.second.weight.grad = grad
    model.load_state_dict(model.state_dict())
    copy.deepcopy(model)


def freeze_and_back(model: nn.Module) -> None:
    assert freeze_to_float8(model) == ["frozen.weight"]
    use(model)
    unfreeze_from_float8(model)


# A change of a model, and what undoes it.
PAIRS: dict[str, tuple[Change, Change]] = {
    "layers": (convert, convert_to_linear),
    "delayed": (partial(convert, config=DELAYED), convert_to_linear),
    "both": (convert_all, convert_to_linear),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_nothing_is_left_of_a_conversion(pair: str) -> None:
    model, (there, back) = Model(), PAIRS[pair]
    before = snapshot(model)
    for _ in range(2):
        assert there(model) is model
        assert differing(snapshot(model), before)
        if float8_layers(model):
            use(model)
        assert back(model) is model
        assert differing(snapshot(model), before) == []


@pytest.mark.parametrize("config", [PLAIN, GATHERED])
def test_nothing_is_left_of_freezing(config: Float8LinearConfig) -> None:
    model = Model()
    plain = snapshot(model, "new")
    convert_all(model, config)
    before = snapshot(model, "new")
    freeze_and_back(model)
    assert differing(snapshot(model, "new"), before) == []
    convert_to_linear(model)
    assert differing(snapshot(model, "new"), plain) == []


def test_what_ddp_ignores_follows_the_weights() -> None:
    """For whatever module was frozen or unfrozen: a part, a wrapper, a copy."""
    model = convert(nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32))))
    wrapper = nn.ModuleDict({"base": model.requires_grad_(False)})
    for module in (model, wrapper):
        freeze_to_float8(module)
    copied = copy.deepcopy(wrapper)
    unfreeze_from_float8(model[1])
    names = ["0.weight", "0.weight_scale_inv"]
    assert list(getattr(model, IGNORED)) == names
    assert list(getattr(wrapper, IGNORED)) == [f"base.{name}" for name in names]
    assert len(list(getattr(pickle.loads(pickle.dumps(copied)), IGNORED))) == 4
    unfreeze_from_float8(model)
    assert not hasattr(model, IGNORED)
    assert list(getattr(wrapper, IGNORED)) == []
    unfreeze_from_float8(copied)
    assert not any(hasattr(module, IGNORED) for module in copied.modules())


# References to layers


@pytest.mark.parametrize("config", [PLAIN, GATHERED])
def test_what_refers_to_a_layer_reaches_the_converted_one(config: Float8LinearConfig) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = layer = Named(32, 32)
            self.listed, self.pair = [layer], (layer, "name")
            self.by_name, self.method = {"layer": layer}, layer.__call__
            self.closure = lambda x: layer(x)
            self.part = nn.Sequential(layer, nn.ReLU())[:1]

    model, x = Net(), torch.randn(16, 32)
    plain = model.layer(x)
    convert(model, config)
    expected = model.layer(x)
    assert not same_bits(expected, plain)
    calls = [model.listed[0], model.pair[0], model.by_name["layer"], model.method, model.closure]
    for call in (*calls, model.part):
        found = call(x)
        assert same_bits(found, expected)
        found.sum().backward()
    assert model.layer.weight.grad is not None
    assert isinstance(model.layer, Named)
    assert model.layer.sizes() == (32, 32)
    copies = [copy.deepcopy(model.layer), pickle.loads(pickle.dumps(model.layer))]
    for copied in (*copies, reloaded(model.layer, weights_only=False)):
        assert type(copied) is type(model.layer)
        assert same_bits(copied(x), expected)
        assert type(convert_to_linear(copied)) is Named
        assert same_bits(copied(x), plain)


def double(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 2 * nn.functional.linear(x, layer.weight, layer.bias)


def closure(layer: nn.Module) -> Callable[..., Any]:
    forward = layer.forward
    return lambda x: 2 * forward(x)


OWN_FORWARDS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "closure": closure,
    "partial": lambda layer: partial(layer.forward),
    "method": lambda layer: MethodType(double, layer),
    "function": lambda layer: partial(double, layer),
    "another layer's": lambda layer: nn.Linear(32, 32).forward,
    "decorated": lambda layer: torch.no_grad()(layer.forward),
}


@pytest.mark.parametrize("keeps_name", [False, True])
def test_a_forward_that_was_replaced_for_all_layers_is_not_dropped(
    keeps_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = nn.Linear.forward

    def doubled(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        return 2 * original(self, input)

    monkeypatch.setattr(nn.Linear, "forward", wraps(original)(doubled) if keeps_name else doubled)
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(16, 32)
    expected = model(x)
    for call in (lambda: convert(model), lambda: Float8Linear.from_float(model[0])):
        assert "nn.Linear.forward was replaced by " in raised(ValueError, call)
    assert same_bits(model(x), expected)
    assert not float8_layers(model)
    monkeypatch.undo()
    assert list(float8_layers(convert(model))) == ["0"]


def test_layers_whose_forward_was_replaced_are_left_out() -> None:
    model, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(7))), torch.randn(16, 32)
    for i, replace in enumerate(OWN_FORWARDS.values()):
        model[i].forward = replace(model[i])
    expected = model[:6](x)
    with pytest.warns(UserWarning, match=r"these layers stay .*: 0 \(its forward was replaced by"):
        convert(model)
    assert list(float8_layers(model)) == ["6"]
    assert same_bits(model[:6](x), expected)
    for row in conversion_summary(model).rows[:6]:
        assert "its forward was replaced by " in row.reason
    text = raised(ValueError, lambda: Float8Linear.from_float(model[0]))
    assert "from_float: the forward of the layer was replaced" in text
    for replace in OWN_FORWARDS.values():
        model[6].forward = replace(model[6])
        text = raised(ValueError, lambda: convert_to_linear(model))
        assert text == (
            "convert_to_linear: 6 can't become an nn.Linear: it has a forward that was replaced "
            "after the conversion; delete the attribute first"
        )
        del model[6].forward


def test_a_bound_forward_of_before_stays_bound_to_the_layer() -> None:
    layer, x = nn.Linear(32, 32), torch.randn(16, 32)
    before, expected = layer.forward, layer(x)
    layer.forward = layer.forward  # as accelerate leaves it when it removes a hook
    model = convert(nn.Sequential(layer))
    assert same_bits(before(x), expected)
    assert before.__self__ is layer
    assert same_bits(model(x), layer.forward(x))
    assert not same_bits(model(x), expected)


class WithProperty(nn.Linear):
    @property
    def config(self) -> str:
        return "mine"


class WithHelper(nn.Linear):
    def to_linear(self) -> None:
        """A method with the name of one of Float8Linear."""


def test_layers_whose_class_must_stay_are_left_out() -> None:
    reasons = {
        WithProperty: "its config has the name of an attribute",
        WithHelper: "its to_linear has the name of an attribute",
    }
    model = nn.Sequential(*(kind(32, 32) for kind in reasons), nn.Linear(32, 32))
    listed = ".*; ".join(rf"{i} \({reason}" for i, reason in enumerate(reasons.values()))
    with pytest.warns(UserWarning, match=listed):
        convert(model)
    assert list(float8_layers(model)) == ["2"]


def test_layers_whose_attributes_must_stay_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].histories, model[1]._settle = nn.Linear(32, 32), 1
    with pytest.warns(UserWarning, match="0 .its histories has the name of .*1 .its _settle has"):
        convert(model)
    assert list(float8_layers(model)) == ["0.histories"]


def test_from_float_takes_over_hooks() -> None:
    calls: list[nn.Module] = []
    layer = nn.Linear(32, 32)
    layer.register_load_state_dict_pre_hook(lambda module, *_: calls.append(module))
    layer.fqn, layer.note = "mine", "kept"
    new = Float8Linear.from_float(layer, fqn="name")
    assert (new.fqn, new.note, layer.fqn) == ("name", "kept", "mine")
    state = layer.state_dict()
    layer.load_state_dict(state)
    del layer
    gc.collect()
    new.load_state_dict(state)
    copied = copy.deepcopy(new)
    copied.load_state_dict(state)
    assert calls[1:] == [new, copied]
    again = Float8Linear.from_float(new, DELAYED)
    assert (again.config, new.config) == (DELAYED, PLAIN)
    for each in (again, new):
        assert convert_to_linear(each).fqn == "mine"
        assert vars(each).keys() - vars(nn.Linear(32, 32)).keys() == {"fqn", "note"}


# Optimizers that were made before


def step(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether a step changes the weight of the model."""
    before = model[0].weight.detach().clone()  # type: ignore[index]
    model(torch.ones(16, 32)).sum().backward()
    optimizer.step()
    return not same_bits(model[0].weight.detach(), before)  # type: ignore[index]


def test_an_optimizer_of_before_works_or_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    adam = [torch.optim.AdamW(model.parameters())]
    convert(model)
    assert step(adam[0], model)
    convert_to_linear(model)
    convert(model, GATHERED)
    attach_update(adam[0], model)
    assert step(adam[0], model)
    convert_to_linear(model)
    assert step(adam[0], model)
    model.requires_grad_(False)
    freeze_to_float8(convert(model))
    adam[0].step()  # nothing that it holds is trained
    unfreeze_from_float8(model)
    model.requires_grad_(True)
    bias = model[0].bias.detach().clone()
    text = "the AdamW updates none of the module's 2 float8 weights (such as 0.weight)"
    assert text in raised(ValueError, lambda: attach_update(adam[0], model))
    mixed = torch.optim.AdamW([*adam[0].param_groups[0]["params"], model[1].weight])
    calls = (lambda: step(adam[0], model), lambda: attach_update(mixed, model))
    for call in calls:
        assert raised(ValueError, call) == (
            "0.weight: this AdamW holds the parameter that the layer had before freeze_to_float8, "
            "unfreeze_from_float8 or declare_placements, so its steps would leave the weight as it "
            "is. Make the optimizer afterwards"
        )
    assert same_bits(model[0].bias, bias)  # nothing was changed
    adam.clear()
    assert step(torch.optim.SGD(model.parameters(), lr=0.1), model)
