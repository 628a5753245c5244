"""Delayed scales and state: histories travel with a state_dict, whose keys are nn.Linear's."""

import copy
import io
import re
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from delayed_steps import DELAYED, amaxes, delayed, histories, recorded, through_a_file, train
from nets import Net
from reference import same_bits
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fp8_dist import (
    Float8LinearConfig,
    Float8State,
    convert_to_float8_training,
    float8_layers,
    warn,
)
from fp8_dist import sync_float8_amax_and_scale_history as sync

TENSORWISE = Float8LinearConfig()


def new(config: Float8LinearConfig = DELAYED, seed: int = 0) -> nn.Module:
    return convert_to_float8_training(Net(seed=seed), config=config)


def losses_after(net: nn.Module) -> list[float]:
    return train(net, 3, seed=5, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))


def test_keys_and_tensors_are_those_of_linear_layers() -> None:
    net = new()
    train(net, 2)
    state = net.state_dict()
    assert list(state) == list(Net().state_dict())
    assert {type(value) for value in state.values()} == {torch.Tensor}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.filterwarnings("ignore:.*has no effect on this layer")
@pytest.mark.parametrize("gather", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(assign: bool, gather: bool) -> None:
    config = replace(DELAYED, enable_fsdp_float8_all_gather=gather)
    net = new(config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, 4, optimizer=optimizer)
    saved = through_a_file({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    resumed = new(config, seed=1)
    train(resumed, 1)  # what it knew before is gone
    resumed(torch.randn(2, 8, 64)).sum().backward()
    resumed.load_state_dict(saved["net"], assign=assign)
    resumed.zero_grad()
    assert amaxes(resumed) == amaxes(net)
    assert set(recorded(resumed).values()) == {None}
    again = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
    again.load_state_dict(saved["optimizer"])
    expected = train(net, 3, seed=2, optimizer=optimizer)
    assert train(resumed, 3, seed=2, optimizer=again) == expected
    assert amaxes(resumed) == amaxes(net)
    for ours, theirs in zip(resumed.parameters(), net.parameters(), strict=True):
        assert same_bits(ours.detach(), theirs.detach())


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kinds of warnings that were given; none yet, so that each may be given again."""
    kinds: set[str] = set()
    monkeypatch.setattr(warn, "_warned", kinds)
    return kinds


def test_checkpoints_of_other_recipes_start_anew(warned: set[str]) -> None:
    for other in (Net(seed=3), new(TENSORWISE, seed=3)):
        net = new()
        train(net, 2)
        warned.clear()
        with pytest.warns(UserWarning, match="has no amax histories .* start anew"):
            net.load_state_dict(through_a_file(other.state_dict()), strict=True)
        assert not any(amaxes(net).values())
        assert losses_after(net)[0] == losses_after(new(TENSORWISE, seed=3))[0]


def test_a_plain_dict_keeps_histories(warned: set[str]) -> None:
    net, other = new(), new(seed=3)
    new().load_state_dict(dict(net.state_dict()))  # there are none: nothing to say
    assert not warned
    train(net, 2)
    before = amaxes(net)
    with pytest.warns(UserWarning, match="plain dict, which says nothing of amax histories"):
        net.load_state_dict(dict(other.state_dict()))
    assert amaxes(net) == before
    # The weights are the new ones: what was cast of the old ones is gone.
    other.load_state_dict(net.state_dict())
    assert losses_after(net) == losses_after(other)


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        (("input",), r"other operands \(kept: input; new: grad_output, weight\)"),
        (("input", "weight", "grad_output"), ""),
    ],
)
def test_checkpoints_with_histories_of_other_operands(
    warned: set[str], operands: tuple[str, ...], message: str
) -> None:
    old, net = new(delayed(*operands)), new()
    for each in (old, net):
        train(each, 2)
    state, expected = through_a_file(old.state_dict()), amaxes(old)
    warned.clear()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        net.load_state_dict(state)
    assert len(given) == bool(message)
    for warning in given:
        assert re.search(message, str(warning.message))
    assert amaxes(net) == {name: expected.get(name, []) for name in amaxes(net)}


def test_checkpoints_with_histories_load_into_other_recipes(warned: set[str]) -> None:
    net = new(seed=3)
    train(net, 2)
    state = through_a_file(net.state_dict())
    for other in (Net(), new(TENSORWISE)):
        other.load_state_dict(state, strict=True)
        assert warned == ({"histories dropped"} if float8_layers(other) else set())
        for name, value in other.state_dict().items():
            assert same_bits(value, net.state_dict()[name])


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16])
def test_lengths_may_differ(length: int) -> None:
    net = new(replace(DELAYED, amax_history_len=3))
    train(net, 4)
    other = new(replace(DELAYED, amax_history_len=length))
    other.load_state_dict(through_a_file(net.state_dict()))
    expected = amaxes(net)
    assert amaxes(other) == {name: values[:length] for name, values in expected.items()}
    train(other, 1)
    for name, values in amaxes(other).items():
        assert values[1:] == expected[name][: length - 1]


def test_what_was_saved_is_a_copy() -> None:
    net = new()
    train(net, 2)
    state, before = copy.deepcopy(net.state_dict()), amaxes(net)
    live = net.state_dict()
    train(net, 20)
    for saved in (state, live):
        twin = new()
        twin.load_state_dict(saved)
        assert amaxes(twin) == before
        train(twin, 20)
    assert amaxes(net) != before


def test_modules_are_moved_with_their_histories() -> None:
    nets = [new(), new()]
    for net in nets:
        train(net, 2)
    nets[0].to(torch.float64).to(torch.float32)
    assert amaxes(nets[0]) == amaxes(nets[1])
    assert losses_after(nets[0]) == losses_after(nets[1])
    nets[0].bfloat16()
    assert amaxes(nets[0]) == amaxes(nets[1])
    nets[0](torch.randn(2, 8, 64, dtype=torch.bfloat16)).sum().backward()
    sync(nets[0])
    assert all(h.history.dtype is torch.float32 for h in histories(nets[0]).values())


def test_pickled_modules_keep_their_histories() -> None:
    net = new()
    train(net, 2)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert amaxes(twin) == amaxes(net)
    assert losses_after(twin) == losses_after(net)


def test_float8_state_is_plain_numbers_under_the_names_of_the_parameters() -> None:
    net = new()
    assert Float8State(Net()).state_dict() == Float8State(new(TENSORWISE)).state_dict() == {}
    assert {
        len(row) for rows in Float8State(net).state_dict().values() for row in rows.values()
    } == {0}
    train(net, 2)
    state = Float8State(net).state_dict()
    found = {f"{name}.{op}": row for name, rows in state.items() for op, row in rows.items()}
    assert found == amaxes(net)
    assert {f"{name}.weight" for name in state} <= set(net.state_dict())
    for i, block in enumerate(net.layers):
        net.layers[i] = checkpoint_wrapper(block)
    assert Float8State(net).state_dict() == state
    assert Float8State(nn.ModuleDict({"_orig_mod": net})).state_dict() == state


def test_float8_state_continues_a_run() -> None:
    net, resumed = new(), new(seed=1)
    train(net, 2)
    train(resumed, 4)
    resumed.load_state_dict(dict(net.state_dict()))
    state = Float8State(net).state_dict()
    state["no such layer"] = {"input": [1.0]}
    Float8State(resumed).load_state_dict(state)
    assert amaxes(resumed) == amaxes(net)
    assert losses_after(resumed) == losses_after(net)
    Float8State(resumed).load_state_dict({})
    assert not any(amaxes(resumed).values())
