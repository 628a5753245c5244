"""Delayed scales and state: histories travel with a state_dict, whose keys are nn.Linear's."""

import copy
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from delayed_steps import DELAYED, amaxes, histories, recorded, train
from nets import Distributed, Net
from ranks import RankPools
from reference import same_bits
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist import sync_float8_amax_and_scale_history as sync
from fp8_dist.debug import comm_audit

TENSORWISE = Float8LinearConfig()


def new(config: Float8LinearConfig = DELAYED, seed: int = 0) -> nn.Module:
    return convert_to_float8_training(Net(seed=seed), config=config)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


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


# On several ranks.


def steps(world: Distributed, count: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(count):
        loss = world.net(world.mine(torch.randn(4, 8, 64))).square().mean()
        loss.backward()
        losses.append(loss.item())
        sync(world.net)
    return losses


def world_of(dp: int, tp: int, seed: int, config: Float8LinearConfig = DELAYED) -> Distributed:
    return Distributed(dp, tp, config=config, net_arguments={"seed": seed})


def resumed_on_ranks(dp: int, tp: int, how: str) -> dict[str, Any]:
    """From a run with histories into a new model: by each rank's shards, or by a full state."""
    old, new = world_of(dp, tp, 0), world_of(dp, tp, 1)
    steps(old, 2, seed=1)
    steps(new, 1, seed=2)
    with comm_audit() as audit:
        if how == "shards":
            new.net.load_state_dict(copy.deepcopy(old.net.state_dict()))
    loads = audit.count()
    if how == "rank 0":
        # What only rank 0 was given: the twin's, without the history of the prepared input.
        twin = old.twin
        for _ in range(2):
            twin(torch.randn(4, 8, 64)).sum().backward()
            sync(twin)
        full = through_a_file(twin.state_dict()) if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(new.net, full, options=options)
    kept = amaxes(new.net)
    expected = amaxes(old.net if how == "shards" else old.twin)
    return {
        "loads": loads,
        "kept": kept,
        "expected": expected,
        "losses": [steps(world, 2, seed=3) for world in (old, new)],
        "later": amaxes(new.net),
    }


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_resuming_on_ranks(ranks: RankPools, dp: int, tp: int) -> None:
    results = ranks(dp * tp).run(resumed_on_ranks, dp, tp, "shards")
    for found in results:
        assert found["kept"] == found["expected"] == results[0]["kept"]
        assert found["losses"][0] == found["losses"][1]
        # One for each layer; one more for each of the two inputs that TP prepares, on a 2-D mesh.
        assert found["loads"] == 6 + 2 * (dp * tp == 4)


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
def test_a_checkpoint_that_rank_0_broadcasts(ranks: RankPools, dp: int, tp: int) -> None:
    results = ranks(dp * tp).run(resumed_on_ranks, dp, tp, "rank 0")
    for found in results:
        expected = found["expected"]
        prepared = {name for name in found["kept"] if name.endswith("prepared_input")}
        assert len(prepared) == 2 * (tp > 1)
        assert found["kept"] == results[0]["expected"] | {name: [] for name in prepared}
        assert found["later"] == results[0]["later"]
        assert set(expected) == set(found["kept"]) - prepared


def distributed_checkpoint(folder: str, dp: int, tp: int, as_dict: bool) -> dict[str, Any]:
    """DCP keeps tensors alone: histories are lost, and scales dynamic in the next step."""
    old = world_of(dp, tp, 0)
    steps(old, 2, seed=1)
    dcp.save({"net": old.net.state_dict()}, checkpoint_id=folder)
    found = {}
    for config in (DELAYED, TENSORWISE):
        new = world_of(dp, tp, 1, config)
        state = {"net": get_model_state_dict(new.net) if as_dict else new.net.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        if as_dict:
            set_model_state_dict(new.net, state["net"])
        else:
            new.net.load_state_dict(state["net"])
        x = new.mine(torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(3)))
        loss = new.net(x).square().mean()
        loss.backward()
        found[config.cast_config_input.scaling_type.value] = loss.item()
        if config is DELAYED:
            found["histories"] = any(amaxes(new.net).values())
            sync(new.net)
    return found


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
def test_distributed_checkpoints(
    ranks: RankPools, tmp_path: Path, dp: int, tp: int, as_dict: bool
) -> None:
    for found in ranks(dp * tp).run(distributed_checkpoint, str(tmp_path), dp, tp, as_dict):
        assert found["delayed"] == found["dynamic"]
        assert found["histories"] is False
