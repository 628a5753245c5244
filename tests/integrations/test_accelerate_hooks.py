"""Models that accelerate dispatches or offloads, before or after their conversion."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from reference import same_bits
from torch import nn

from fp8_dist import (
    Float8LinearConfig,
    attach_update,
    conversion_summary,
    convert_to_float8_training,
    convert_to_linear,
)

CPU = torch.device("cpu")
GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def dispatched(model: nn.Module) -> None:
    places: Any = {"0": "cpu", "1": "cpu", "2": "cpu"}
    dispatch_model(model, places, force_hooks=True)


def hooked_twice(model: nn.Module) -> None:
    for layer in model.children():
        for _ in range(2):
            add_hook_to_module(layer, ModelHook(), append=True)


@pytest.mark.parametrize("config", [None, GATHERED])
@pytest.mark.parametrize("hook", [dispatched, hooked_twice])
def test_layers_with_hooks_compute_in_float8(
    hook: Callable[[nn.Module], None], config: Float8LinearConfig | None
) -> None:
    model, x = net(), torch.randn(32, 64)
    plain, expected = net()(x), convert_to_float8_training(net())(x)
    hook(model)
    for _ in range(2):
        assert convert_to_float8_training(model, config=config) is model
        assert not conversion_summary(model).skipped
        assert same_bits(model(x), expected)
        assert same_bits(copy.deepcopy(model)(x), expected)
        convert_to_linear(model)
        assert same_bits(model(x), plain)
    convert_to_float8_training(model, config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    attach_update(optimizer, model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(x).square().mean().backward()
    optimizer.step()
    for parameter, then in zip(model.parameters(), before, strict=True):
        assert not same_bits(parameter.detach().add(0), then)
    found = model(x)
    remove_hook_from_module(model, recurse=True)
    assert same_bits(model(x), found)


def test_offloaded_layers_compute_in_float8() -> None:
    model, x = net(), torch.randn(32, 64)
    plain, expected = net()(x), convert_to_float8_training(net())(x)
    cpu_offload(model, execution_device=CPU)
    convert_to_float8_training(model)
    assert same_bits(model(x), expected)
    convert_to_linear(model)
    assert same_bits(model(x), plain)
