"""Delayed scales and state: histories travel with a state_dict, whose keys are nn.Linear's."""

import copy
import io
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from delayed_steps import DELAYED, amaxes, histories, recorded, through_a_file, train
from nets import Net
from reference import same_bits

from fp8_dist import Float8LinearConfig, convert_to_float8_training
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


def test_checkpoints_of_other_recipes_start_anew() -> None:
    for other in (Net(seed=3), new(TENSORWISE, seed=3)):
        net = new()
        train(net, 2)
        net.load_state_dict(through_a_file(other.state_dict()), strict=True)
        assert not any(amaxes(net).values())
        assert losses_after(net)[0] == losses_after(new(TENSORWISE, seed=3))[0]


def test_checkpoints_with_histories_load_into_other_recipes() -> None:
    net = new(seed=3)
    train(net, 2)
    state = through_a_file(net.state_dict())
    for other in (Net(), new(TENSORWISE)):
        other.load_state_dict(state, strict=True)
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
