"""Layers in several threads, and objects that must be freed."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from nets import Net

from fp8_dist import Float8Linear, Float8LinearConfig, attach_update, convert_to_float8_training

X = torch.ones(4, 32)


def forward(layer: Float8Linear) -> None:
    layer(X.clone().requires_grad_()).sum().backward()


def in_threads(work: Callable[[list[object]], None]) -> list[object]:
    """Run `work` in four threads that switch often; return what they add to a list, and errors."""
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
    attach_update(layer.optimizer, layer)
    freed = weakref.ref(layer)
    del layer
    gc.collect()
    assert freed() is None
