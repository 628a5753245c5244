"""Delayed scales on one device: values that are not finite, and calls that are missing."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from delayed_steps import DELAYED, OPERANDS, amaxes, delayed, layer, operands_of
from nets import Net
from reference import raised, same_bits

import fp8_dist.warn
from fp8_dist import (
    Float8LinearConfig,
    attach_precompute,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist import sync_float8_amax_and_scale_history as sync
from fp8_dist.linear import float8_layers


@pytest.mark.parametrize(
    ("where", "value"), zip(OPERANDS, (math.nan, math.inf, -math.inf), strict=True)
)
def test_a_non_finite_value_is_seen_at_once_and_forgotten(where: str, value: float) -> None:
    linear, twin = layer(), layer()
    twin.load_state_dict(linear.state_dict())
    x, grad = torch.randn(6, 32), torch.randn(6, 48)
    for each in (linear, twin):
        for _ in range(2):
            operands_of(each, x, grad)
            sync(each)
    poisoned = {
        "input": x.clone(),
        "weight": linear.weight.detach().clone(),
        "grad_output": grad.clone(),
    }
    poisoned[where].view(-1)[5] = value
    weight = linear.weight.detach().clone()
    with torch.no_grad():
        linear.weight.copy_(poisoned["weight"])
    leaf = poisoned["input"].requires_grad_()
    linear.weight.grad = None
    output = linear(leaf)
    output.backward(poisoned["grad_output"])
    results = {"output": output, "grad_input": leaf.grad, "grad_weight": linear.weight.grad}
    unaffected = {"input": "grad_input", "weight": "grad_weight", "grad_output": "output"}
    for name, result in results.items():
        finite = name == unaffected[where]
        assert (result.isfinite() if finite else result.isnan()).all(), name
    with torch.no_grad():
        linear.weight.copy_(weight)  # as if the step was skipped
    sync(linear)
    assert all(math.isfinite(v) for values in amaxes(linear).values() for v in values)
    ours, theirs = operands_of(linear, x, grad), operands_of(twin, x, grad)
    for operand in OPERANDS:
        assert same_bits(ours[operand].scale, theirs[operand].scale)
        assert same_bits(ours[operand].qdata, theirs[operand].qdata)


def steps_with_warnings(config: Float8LinearConfig, syncs: bool, precompute: bool) -> list[str]:
    fp8_dist.warn._warned.clear()
    net = convert_to_float8_training(Net(), config=config)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if precompute:
        attach_precompute(optimizer, net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            net(torch.randn(2, 4, 64)).sum().backward()
            optimizer.step()
            if syncs:
                sync(net)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("precompute", [False, True])
def test_a_forgotten_sync_is_said_once(precompute: bool) -> None:
    config = delayed("input", "grad_output") if precompute else DELAYED
    assert steps_with_warnings(config, True, precompute) == []
    (text,) = steps_with_warnings(config, False, precompute)
    assert text.startswith("layers.0.w1: 2 optimizer steps were taken since the amax histories of")
    assert text.endswith("call sync_float8_amax_and_scale_history(model) once per step")


def test_errors() -> None:
    net = convert_to_float8_training(Net(), config=DELAYED)
    sync_what = "sync_float8_amax_and_scale_history: the module has no Float8Linear with a DELAYED"
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: precompute_float8_dynamic_scale(net), "with a float8 weight of dynamic scale; ca"),
        (lambda: sync(convert_to_float8_training(Net())), sync_what),
        (lambda: sync(nn.Linear(2, 2)), sync_what),
    ]
    for call, text in calls:
        assert text in raised(ValueError, call)


def test_a_synced_model_keeps_the_precomputed_scales_of_other_operands() -> None:
    net = convert_to_float8_training(Net(), config=delayed("input"))
    for _ in range(2):
        net(torch.randn(2, 4, 64)).sum().backward()
        precompute_float8_dynamic_scale(net)
        sync(net)
        assert all(m.float8_weight.cache.is_fresh(m.weight) for m in float8_layers(net).values())
