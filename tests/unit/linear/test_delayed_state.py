"""Delayed scales and state: histories travel with a state_dict, whose keys are nn.Linear's."""

import copy
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from delayed_steps import DELAYED, amaxes, histories, recorded, train
from nets import Net
from reference import reloaded, same_bits, weights_used
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException

from fp8_dist import Float8LinearConfig, Float8State, convert_to_float8_training
from fp8_dist import sync_float8_amax_and_scale_history as sync

TENSORWISE = Float8LinearConfig()


def new(config: Float8LinearConfig = DELAYED, seed: int = 0) -> nn.Module:
    return convert_to_float8_training(Net(seed=seed), config=config)


def losses_after(net: nn.Module) -> list[float]:
    return train(net, 3, seed=5, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.filterwarnings("ignore:.*has no effect on this layer")
@pytest.mark.parametrize(("assign", "gather"), [(False, True), (True, False)])
def test_a_resumed_run_is_the_uninterrupted_one(assign: bool, gather: bool) -> None:
    config = replace(DELAYED, enable_fsdp_float8_all_gather=gather)
    net = new(config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, 4, optimizer=optimizer)
    saved = reloaded({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
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
    monkeypatch.setattr("fp8_dist.text._warned", kinds)
    return kinds


def test_a_plain_dict_starts_histories_anew() -> None:
    net, other = new(), new(seed=3)
    train(net, 2)
    net.load_state_dict(dict(other.state_dict()))
    # The weights are the new ones, and no cast of the old ones is used.
    other.load_state_dict(net.state_dict())
    assert losses_after(net) == losses_after(other)


def test_lengths_may_differ() -> None:
    net = new(replace(DELAYED, amax_history_len=3))
    train(net, 4)
    expected = amaxes(net)
    for length in (1, 2, 3, 5):
        other = new(replace(DELAYED, amax_history_len=length))
        other.load_state_dict(reloaded(net.state_dict()))
        assert amaxes(other) == {name: values[:length] for name, values in expected.items()}
        train(other, 1)
        for name, values in amaxes(other).items():
            assert values[1:] == expected[name][: length - 1]


def test_what_was_copied_or_saved_stays_as_it_was() -> None:
    net = new()
    train(net, 2)
    net(torch.randn(2, 8, 64)).sum().backward()
    before, twin, live = (amaxes(net), recorded(net)), copy.deepcopy(net), net.state_dict()
    assert (amaxes(twin), recorded(twin)) == before
    train(twin, 20)
    assert (amaxes(net), recorded(net)) == before != (amaxes(twin), recorded(twin))
    train(net, 20)
    twin.load_state_dict(live)
    assert amaxes(twin) == before[0] != amaxes(net)


def test_modules_are_moved_and_pickled_with_their_histories() -> None:
    nets = [new(), new()]
    for net in nets:
        train(net, 2)
    nets[0] = reloaded(nets[0], weights_only=False)
    nets[0].to(torch.float64).to(torch.float32)
    assert amaxes(nets[0]) == amaxes(nets[1])
    assert losses_after(nets[0]) == losses_after(nets[1])
    nets[0].bfloat16()
    assert amaxes(nets[0]) == amaxes(nets[1])
    nets[0](torch.randn(2, 8, 64, dtype=torch.bfloat16)).sum().backward()
    sync(nets[0])
    assert all(h.history.dtype is torch.float32 for h in histories(nets[0]).values())


def test_float8_state_is_plain_numbers_under_the_names_of_the_parameters() -> None:
    net = new()
    entries = Float8State(net).state_dict()
    assert Float8State(Net()).state_dict() == Float8State(new(TENSORWISE)).state_dict() == entries
    assert {len(row) for rows in entries.values() for row in rows.values()} == {0}
    train(net, 2)
    # The state_dict is that of linear layers.
    assert list(net.state_dict()) == list(Net().state_dict())
    assert {type(value) for value in net.state_dict().values()} == {torch.Tensor}
    state = Float8State(net).state_dict()
    found = {f"{name}.{op}": row for name, rows in state.items() for op, row in rows.items()}
    kept = amaxes(net)
    assert found == kept
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


def test_float8_state_alone_replaces_casts() -> None:
    net, x = new(), torch.randn(2, 4, 64)
    train(net, 2)
    scales = []
    for factor in (1, 4):
        state = Float8State(net).state_dict()
        for rows in state.values():
            rows["weight"] = [factor * amax for amax in rows["weight"]]
        Float8State(net).load_state_dict(state)
        with weights_used(net) as used:
            net(x)
        scales.append(torch.stack([weight.scale for weight in used.values()]))
    torch.testing.assert_close(scales[1], 4 * scales[0])


def test_a_run_goes_back_to_what_it_has_kept(warned: set[str]) -> None:
    net, other = new(), new(seed=1)
    train(other, 2, seed=7)
    Float8State(net).load_state_dict(Float8State(other).state_dict())
    train(net, 2)
    kept, before = copy.deepcopy(net.state_dict()), amaxes(net)
    train(net, 2)
    net.load_state_dict(kept)
    assert amaxes(net) == before
    # An evaluation uses histories too.
    Float8State(net).load_state_dict(Float8State(other).state_dict())
    with torch.no_grad():
        net(torch.randn(2, 8, 64))
    net.load_state_dict(kept)
    assert amaxes(net) == before
    assert not warned
    Float8State(net).load_state_dict(Float8State(other).state_dict())
    net.load_state_dict(kept)
    assert amaxes(net) == amaxes(other)


@pytest.mark.parametrize("saved", [None, "tensorwise", "rowwise_folded", "delayed"])
def test_a_run_goes_on_in_another_recipe(tmp_path: Path, saved: str | None) -> None:
    """Every recipe loads the checkpoints of the others."""

    def model(recipe: str | None, seed: int) -> nn.Module:
        config = None if recipe is None else Float8LinearConfig.from_recipe_name(recipe)
        return Net(seed=seed) if config is None else new(config, seed)

    old = model(saved, 0)
    if saved == "delayed":
        train(old, 2)
    dcp.save({"model": old.state_dict(), "float8": Float8State(old)}, checkpoint_id=tmp_path)
    for recipe in (None, "tensorwise", "delayed"):
        net = model(recipe, 1)
        state = {"model": net.state_dict(), "float8": Float8State(net)}
        dcp.load(state, checkpoint_id=tmp_path)
        net.load_state_dict(state["model"])
        assert all(map(same_bits, net.parameters(), old.parameters()))
        kept = amaxes(old) if recipe == saved else {}
        assert amaxes(net) == {name: kept.get(name, []) for name in amaxes(net)}
        if recipe == "delayed":
            train(net, 1)
            assert all(row for name, row in amaxes(net).items())


def test_float8_state_is_not_pickled(tmp_path: Path) -> None:
    """DCP would pickle an object that is nested in a dict, and nothing would load its state."""
    state = {"run": {"float8": Float8State(new())}}
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(CheckpointException, match="Float8State can't be pickled: DCP calls state_d"),
    ):
        dcp.save(state, checkpoint_id=tmp_path)
