"""What is known of a weight's scales: the states, copies of a layer, models in several threads."""

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from nets import Net

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    attach_precompute,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.linear import optimizer_steps
from fp8_dist.linear.weight_cache import ScaleState

X = torch.ones(4, 32)


def forward(layer: Float8Linear) -> None:
    layer(X.clone().requires_grad_()).sum().backward()


def freeze(layer: Float8Linear) -> None:
    layer.weight.requires_grad_(False)


def evaluate(layer: Float8Linear) -> None:
    with torch.no_grad():
        layer(X)


def step(layer: Float8Linear) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=0.5).step()


def step_of_another(layer: Float8Linear) -> None:
    step(Float8Linear(32, 16))


def write(layer: Float8Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def wait(layer: Float8Linear) -> None:
    assert layer.float8_weight.cache.known


def gather(layer: Float8Linear) -> None:
    layer.float8_weight.gather_cast(layer.float8_weight.shard())


def drop(layer: Float8Linear) -> None:
    layer.float8_weight.cache.drop()


def look(layer: Float8Linear) -> None:
    """A new version is noticed when the weight is next used."""
    layer.float8_weight.cache.is_fresh(layer.weight)


Events = tuple[Callable[[Float8Linear], None], ...]
precompute = precompute_float8_dynamic_scale


STATES: list[tuple[Events, ScaleState]] = [
    ((), ScaleState.UNKNOWN),
    ((forward,), ScaleState.FROM_FORWARD),
    ((gather,), ScaleState.FROM_GATHER),
    ((precompute,), ScaleState.PRECOMPUTED),
    ((precompute, wait), ScaleState.PRECOMPUTED),
    ((precompute, forward), ScaleState.PRECOMPUTED),
    ((forward, precompute), ScaleState.PRECOMPUTED),
    ((precompute, drop), ScaleState.STALE),
    ((precompute, step), ScaleState.STALE),
    ((precompute, write, look), ScaleState.STALE),
    ((precompute, step, forward), ScaleState.FROM_FORWARD),
    ((precompute, step, precompute), ScaleState.PRECOMPUTED),
    ((precompute, step_of_another), ScaleState.PRECOMPUTED),
    ((forward, step), ScaleState.UNKNOWN),
    ((gather, step), ScaleState.UNKNOWN),
    ((forward, write, look), ScaleState.UNKNOWN),
    ((forward, drop), ScaleState.UNKNOWN),
    # The weight may be a copy of a parameter that the other optimizer updates.
    ((forward, step_of_another), ScaleState.UNKNOWN),
    ((forward, step, forward, step_of_another), ScaleState.FROM_FORWARD),
    ((forward, evaluate, look), ScaleState.UNKNOWN),
    # A rank that has the whole weight needs no other to find its scale again.
    ((precompute, evaluate), ScaleState.FROM_FORWARD),
    ((freeze, forward, look), ScaleState.UNKNOWN),
    ((precompute, freeze, forward, look), ScaleState.UNKNOWN),
    ((freeze, precompute), ScaleState.UNKNOWN),
    ((precompute, Float8Linear.double), ScaleState.UNKNOWN),
    ((forward, Float8Linear.double), ScaleState.UNKNOWN),
]


@pytest.mark.filterwarnings("ignore:.*after the scales were")
def test_states() -> None:
    for events, state in STATES:
        layer = Float8Linear(32, 16)
        for event in events:
            event(layer)
        assert layer.float8_weight.cache.state is state, events


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_precompute_in_inference_mode_serves_training(recipe: str) -> None:
    layer = Float8Linear(32, 16, config=Float8LinearConfig.from_recipe_name(recipe))
    forward(layer)
    expected, layer.weight.grad = layer.weight.grad, None
    with torch.inference_mode():
        precompute(layer)
    forward(layer)
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, expected)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))]
)
def test_a_copy_has_a_weight_of_its_own(copied: Callable[[Float8Linear], Float8Linear]) -> None:
    layer = Float8Linear(32, 16)
    precompute(layer)
    twin = copied(layer)
    assert twin.float8_weight.cache.state is ScaleState.UNKNOWN
    assert layer.float8_weight.cache.state is ScaleState.PRECOMPUTED
    # (A shallow copy of a module shares the dict of its parameters.)
    twin._parameters = {**twin._parameters, "weight": nn.Parameter(torch.full((16, 32), 2.0))}
    assert (twin.float8_weight.shard() == 2).all()
    assert not (layer.float8_weight.shard() == 2).all()


def test_nothing_is_kept_of_a_layer_that_is_freed() -> None:
    gc.collect()
    before = len(optimizer_steps._watchers)
    layer = Float8Linear(32, 16)
    forward(layer)
    assert len(optimizer_steps._watchers) == before + 1
    del layer  # without the garbage collector: the weight refers to its layer weakly
    assert len(optimizer_steps._watchers) == before


def in_threads(work: Callable[[list[object]], None]) -> list[object]:
    """What four threads at once, which take turns often, add to a list; and their errors."""
    found: list[object] = []

    def guarded() -> None:
        try:
            work(found)
        except Exception as error:
            found.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=guarded) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return found


def test_models_train_in_several_threads() -> None:
    def train(_: list[object]) -> None:
        for _ in range(20):
            layers = [Float8Linear(32, 16) for _ in range(5)]
            optimizer = torch.optim.SGD([layer.weight for layer in layers], lr=0.1)
            for layer in layers:
                forward(layer)
            optimizer.step()

    assert in_threads(train) == []


def test_precompute_of_weights_on_several_devices() -> None:
    layers = [Float8Linear(16, 16, device=device) for device in ("cpu", "meta")]
    precompute_float8_dynamic_scale(nn.Sequential(*layers))
    for layer in layers:
        (statistics,) = (layer.float8_weight.cache.known or {}).values()
        assert all(each.device == layer.weight.device for each in statistics)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded", "delayed"])
def test_one_model_is_evaluated_in_several_threads(recipe: str) -> None:
    net = convert_to_float8_training(Net(), config=Float8LinearConfig.from_recipe_name(recipe))
    inputs = [torch.randn(2, 4, 64) for _ in range(2)]
    with torch.no_grad():
        expected = [net(x) for x in inputs]

    def evaluate_often(wrong: list[object]) -> None:
        for i in range(60):
            with torch.no_grad():
                wrong.extend([] if torch.equal(net(inputs[i % 2]), expected[i % 2]) else [i])

    assert in_threads(evaluate_often) == []


def test_a_replaced_parameter_is_freed_at_the_next_forward() -> None:
    layer = Float8Linear(32, 16)
    forward(layer)
    old = weakref.ref(layer.weight)
    layer.weight = nn.Parameter(torch.randn(16, 32))
    forward(layer)
    assert old() is None


def test_a_module_that_holds_its_optimizer_is_freed() -> None:
    layer = Float8Linear(32, 16)
    layer.optimizer = torch.optim.SGD([layer.weight], lr=0.1)  # type: ignore[assignment]
    attach_precompute(layer.optimizer, layer)
    freed = weakref.ref(layer)
    del layer
    gc.collect()
    assert freed() is None
