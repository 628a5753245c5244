"""Delayed scales on one device: which amaxes they follow, what does not disturb them, errors."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn as nn
from delayed_steps import (
    DELAYED,
    DTYPES,
    OPERANDS,
    Run,
    amaxes,
    delayed,
    disturbed_steps,
    layer,
    operands_of,
    quantized,
    recorded,
    scaling,
    train,
)
from nets import Net
from reference import all_warnings, raised, same_bits
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    invalidate_float8_scales,
    precompute_float8_dynamic_scale,
)
from fp8_dist import sync_float8_amax_and_scale_history as sync


@pytest.mark.parametrize(("length", "power_of_2"), [(1, True), (3, False), (16, True)])
def test_scales_follow_the_largest_amax_of_the_history(length: int, power_of_2: bool) -> None:
    config = replace(DELAYED, amax_history_len=length, round_scales_to_power_of_2=power_of_2)
    linear = layer(config)
    seen: dict[str, list[float]] = {operand: [] for operand in OPERANDS}
    for factor in (1.0, 30.0, 0.1, 2.0, 2.5, 0.01, 0.02, 100.0):
        tensors = {
            "input": torch.randn(6, 32) * factor,
            "weight": torch.randn(48, 32) * factor,
            "grad_output": torch.randn(6, 48) * factor**2,
        }
        with torch.no_grad():
            linear.weight.copy_(tensors["weight"])
        found = operands_of(linear, tensors["input"], tensors["grad_output"])
        for operand, tensor in tensors.items():
            now = max(abs(v) for v in tensor.flatten().tolist())
            m, scale = scaling(max(seen[operand][:length] or [now]), DTYPES[operand], power_of_2)
            assert same_bits(found[operand].scale, scale)
            # A value above the largest of the history saturates.
            assert same_bits(found[operand].qdata, quantized(tensor, m, DTYPES[operand]))
            seen[operand].insert(0, now)
        sync(linear)
        assert amaxes(linear) == {f".{o}": values[:length] for o, values in seen.items()}


@pytest.mark.parametrize(
    "chosen", [s for n in (1, 2, 3) for s in itertools.combinations(OPERANDS, n)], ids="+".join
)
def test_each_operand_may_have_a_delayed_scale(chosen: tuple[str, ...]) -> None:
    linear = layer(delayed(*chosen))
    assert set(linear.histories) == set(chosen)
    x, grad = torch.randn(6, 32), torch.randn(6, 48)
    first = operands_of(linear, x, grad)
    sync(linear)
    with torch.no_grad():
        linear.weight.mul_(3)
    second = operands_of(linear, x * 3, grad * 3)
    for operand in OPERANDS:
        kept = same_bits(first[operand].scale, second[operand].scale)
        assert kept is (operand in chosen)
        assert same_bits(first[operand].qdata, second[operand].qdata) is (operand not in chosen)


def test_scales_stay_dynamic_until_something_was_seen() -> None:
    linear = layer()
    x, grad = torch.randn(6, 32), torch.randn(6, 48)
    for _ in range(3):
        zeros = operands_of(linear, x, torch.zeros(6, 48))["grad_output"]
        assert zeros.scale.isfinite()
        assert not zeros.qdata.float().any()
        sync(linear)
    assert amaxes(linear)[".grad_output"] == []
    assert len(amaxes(linear)[".input"]) == 3
    found = operands_of(linear, x, grad)["grad_output"]
    m, scale = scaling(grad.abs().max().item(), torch.float8_e5m2)
    assert same_bits(found.scale, scale)
    assert same_bits(found.qdata, quantized(grad, m, torch.float8_e5m2))
    sync(linear)
    operands_of(linear, x, torch.zeros(6, 48))  # zeros later on leave the scale alone
    sync(linear)
    assert max(amaxes(linear)[".grad_output"]) == grad.abs().max().item()


def test_micro_batches_and_syncs() -> None:
    linear = layer()
    x, grad = torch.randn(6, 32), torch.randn(6, 48)
    first = operands_of(linear, x, grad)
    for _ in range(20):
        sync(linear)  # nothing new after the first: the scale stays
    assert all(len(values) == 1 for values in amaxes(linear).values())
    found = [operands_of(linear, x * n, grad / n) for n in (2.0, 7.0, 0.5, 3.0)]
    for operand in OPERANDS:
        assert all(same_bits(each[operand].scale, first[operand].scale) for each in found)
    largest = {".input": (x * 7).abs().max(), ".grad_output": (grad / 0.5).abs().max()}
    assert {name: recorded(linear)[name] for name in largest} == {
        name: amax.item() for name, amax in largest.items()
    }
    sync(linear)
    assert all(len(values) == 2 for values in amaxes(linear).values())
    assert amaxes(linear)[".input"][0] == largest[".input"].item()
    assert set(recorded(linear).values()) == {None}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_leaves_no_trace(mode: Callable) -> None:
    nets = [convert_to_float8_training(Net(), config=DELAYED) for _ in range(2)]
    losses = []
    for net, evaluates in zip(nets, (True, False), strict=True):

        def evaluate(net: nn.Module, evaluates: bool = evaluates) -> None:
            before = recorded(net), amaxes(net)
            with mode():
                if evaluates:
                    net(torch.randn(2, 8, 64) * 100)
            assert (recorded(net), amaxes(net)) == before

        def evaluate_average(net: nn.Module) -> None:
            weights = [p.detach().clone() for p in net.parameters()]
            with torch.no_grad():
                torch._foreach_mul_(list(net.parameters()), 100.0)
                evaluate(net)
                torch._foreach_copy_(list(net.parameters()), weights)

        def forward(x: torch.Tensor, net: nn.Module = net) -> torch.Tensor:
            evaluate(net)  # after a sync
            evaluate_average(net)
            out = net(x)
            evaluate(net)  # between forward and backward
            return out

        losses.append(train(net, 3, batches=2, forward=forward))
    assert losses[0] == losses[1]
    assert amaxes(nets[0]) == amaxes(nets[1])


@pytest.mark.parametrize("trains_in_evaluation_mode", [False, True])
def test_a_frozen_part_without_a_backward(trains_in_evaluation_mode: bool) -> None:
    """Its forwards record in whichever mode it is, but for those of a model that is evaluated."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    convert_to_float8_training(model, config=DELAYED)
    model[0].requires_grad_(False).eval()
    model.train(not trains_in_evaluation_mode)
    model[0].eval()
    for factor in (1.0, 1000.0):
        x = torch.randn(8, 32) * factor
        model(x).square().mean().backward()
        mode = model.training
        model.eval()
        if not trains_in_evaluation_mode:
            model(x * 10)  # with gradients
        model.train(mode)
        model[0].eval()
        sync(model)
    assert amaxes(model)["0.input"][0] == x.abs().max().item()


def test_operands_that_no_gemm_takes() -> None:
    for frozen in ("weight", "input", "both"):
        linear = layer()
        linear.weight.requires_grad_(frozen == "input")
        x = torch.randn(6, 32, requires_grad=frozen == "weight")
        for _ in range(3):
            linear(x).sum().backward()
            sync(linear)
        expected = {".input": 3, ".weight": 3, ".grad_output": 0 if frozen == "both" else 3}
        assert {name: len(values) for name, values in amaxes(linear).items()} == expected


SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.fp8_dist.amax.default])
HOW: dict[str, Callable[[nn.Module], Run]] = {
    "eager": lambda net: net,
    "checkpointed": lambda net: partial(checkpoint, net, use_reentrant=False),
    "selectively": lambda net: partial(checkpoint, net, use_reentrant=False, context_fn=SELECTIVE),
}


def test_activation_checkpointing_changes_nothing() -> None:
    results = []
    for how in (*HOW.values(), lambda net: partial(checkpoint, net, use_reentrant=True)):
        net = convert_to_float8_training(Net(layers=1), config=DELAYED)
        run = how(net)
        losses = train(net, 4, batches=2, forward=lambda x, run=run: run(x.requires_grad_()))
        results.append([losses, amaxes(net), *(p.tolist() for p in net.parameters())])
    assert all(found == results[0] for found in results)


@pytest.mark.parametrize("how", HOW)
def test_passes_that_are_no_steps_leave_no_trace(how: str) -> None:
    (kept, mine), (expected, theirs) = disturbed_steps(HOW[how])
    assert kept == expected
    assert all(len(values) == 3 for values in kept.values())
    assert all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_layer_that_is_called_twice_records_both_calls() -> None:
    linear = convert_to_float8_training(nn.Linear(32, 32), config=DELAYED)
    x = torch.randn(6, 32)
    for factor in (1e-3, 1e3):
        second = linear(x) * factor
        linear(second).sum().backward()
        largest = max(x.abs().max(), second.abs().max())
        assert recorded(linear)[".input"] == largest
        linear.zero_grad()


def test_gradients_that_a_hook_accumulates_elsewhere() -> None:
    linear, sums = layer(), []

    def take(weight: torch.Tensor) -> None:
        sums.append(weight.grad)
        weight.grad = None

    linear.weight.register_post_accumulate_grad_hook(take)
    for factor in (3.0, 1.0):
        linear(torch.ones(6, 32) * factor).sum().backward()
    assert len(sums) == 2
    assert recorded(linear)[".input"] == 3.0


@pytest.mark.parametrize("how", ["frozen", "of an adapter", "computed"])
def test_weights_whose_own_gradient_tells_nothing(how: str) -> None:
    linear, adapter = layer(), nn.Linear(32, 48)
    if how == "computed":
        weight_norm(linear)
    else:
        linear.weight.requires_grad_(False)
    run = linear if how != "of an adapter" else lambda x: linear(x) + adapter(x)
    before = nn.Linear(32, 32)  # something to train below it
    net = nn.ModuleList([linear, adapter, before])
    passes: list[float] = []
    for factors in ((1e9, 1e3), (3.0, 2.0, 1.0)):
        net.zero_grad()  # of earlier passes
        passes = [before(torch.ones(6, 32) * f).abs().max().item() for f in factors]
        for factor in factors:
            run(before(torch.ones(6, 32) * factor)).sum().backward()
            run(before(torch.ones(6, 32) * 1e9))
            torch.autograd.grad(run(x := torch.full((6, 32), 1e9, requires_grad=True)).sum(), x)
    assert recorded(linear)[".input"] == max(passes)
    invalidate_float8_scales(linear)
    assert set(recorded(linear).values()) == {None}


def test_a_layer_without_a_backward_records_in_its_forward() -> None:
    linear = layer().requires_grad_(False)
    for factor in (3.0, 1.0):
        linear(torch.ones(6, 32) * factor)
    assert recorded(linear)[".input"] == 3.0
    with torch.no_grad():
        linear(torch.full((6, 32), 1e9))
    assert recorded(linear)[".input"] == 3.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", OPERANDS)
def test_a_non_finite_value_is_seen_at_once_and_forgotten(where: str, value: float) -> None:
    linear, twin = layer(), layer()
    twin.load_state_dict(linear.state_dict())
    x, grad = torch.randn(6, 32), torch.randn(6, 48)
    for each in (linear, twin):
        for _ in range(2):
            operands_of(each, x, grad)
            sync(each)
    weight = linear.weight.detach().clone()
    poisoned = {"input": x.clone(), "weight": weight.clone(), "grad_output": grad.clone()}
    poisoned[where].view(-1)[5] = value
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
    net = convert_to_float8_training(Net(), config=config)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with all_warnings() as texts:
        for _ in range(4):
            net(torch.randn(2, 4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if precompute:
                precompute_float8_dynamic_scale(net)
            if syncs:
                sync(net)
    return texts


@pytest.mark.parametrize("precompute", [False, True])
def test_a_forgotten_sync_is_said_once(precompute: bool) -> None:
    config = delayed("input", "grad_output") if precompute else DELAYED
    assert steps_with_warnings(config, True, precompute) == []
    (text,) = steps_with_warnings(config, False, precompute)
    assert text.startswith("layers.0.w1: 2 steps have run since the amax histories of DELAYED")
    assert text.endswith("optimizer step, or attach_update(optimizer, model) once")


def test_errors() -> None:
    net = convert_to_float8_training(Net(), config=DELAYED)
    sync_what = "sync_float8_amax_and_scale_history: the module has no Float8Linear with a DELAYED"
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: precompute_float8_dynamic_scale(net), "with a float8 weight of dynamic scale; ca"),
        (lambda: sync(convert_to_float8_training(Net())), sync_what),
        (lambda: sync(nn.Linear(2, 2)), sync_what),
    ]
    for call, text in calls:
        message = raised(ValueError, call)
        assert text in message
        assert message.endswith("update_float8_scales(model) instead, which serves all recipes")


def test_a_layer_that_is_not_used_does_not_make_the_host_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its history stays empty. The host reads amaxes only to find whether a history begins."""
    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name("delayed")
    used, unused = (Float8Linear(16, 16, config=config) for _ in range(2))
    model, read = torch.nn.ModuleList([used, unused]), []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: read.append(x.shape) or tolist(x))
    for _ in range(3):
        used(torch.randn(4, 16)).sum().backward()
        sync(model)
    assert len(read) == 1  # in the first step
    assert all(h.history is not None for h in used.histories.values())
    assert all(h.history is None for h in unused.histories.values())


def test_a_sync_keeps_the_scale_of_a_computed_weight() -> None:
    linear = layer()
    weight_norm(linear)
    linear(torch.randn(6, 32)).sum().backward()
    sync(linear)
    assert linear.histories["weight"].statistic is not None


def test_a_frozen_weight_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = layer(delayed("weight"))
    linear.weight.requires_grad_(False)
    monkeypatch.setattr("fp8_dist.operand.history.current_capture", lambda: 1)
    message = raised(NotImplementedError, lambda: linear(torch.randn(6, 32)))
    assert "would replay one step of a DELAYED scale" in message
