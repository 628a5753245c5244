"""Delayed scales and state on several ranks: shards, a broadcast full state, DCP."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from delayed_steps import DELAYED, amaxes, through_a_file
from nets import Distributed
from ranks import RankPools
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from fp8_dist import Float8LinearConfig, Float8State, update_float8_scales
from fp8_dist import sync_float8_amax_and_scale_history as sync
from fp8_dist.debug import comm_audit

TENSORWISE = Float8LinearConfig()


def steps(world: Distributed, count: int, seed: int) -> list[float]:
    torch.manual_seed(seed)
    losses = []
    for _ in range(count):
        loss = world.net(world.mine(torch.randn(4, 8, 64))).square().mean()
        loss.backward()
        losses.append(loss.item())
        update_float8_scales(world.net)
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
    """DCP leaves histories out of a model's state: scales are dynamic in a new model's next step."""
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


def loaded_with_histories(
    folder: str, dp: int, tp: int, config: Float8LinearConfig, partial: bool
) -> tuple[Distributed, list[str]]:
    """A new world that continues from a checkpoint; what was refused."""
    new, refused = world_of(dp, tp, 1, config), []
    dcp.load({"net": new.net}, checkpoint_id=folder)
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    try:
        dcp.load({"float8": Float8State(new.net)}, checkpoint_id=folder, planner=planner)
    except CheckpointException as error:
        refused = [str(each) for each in error.failures.values()]
    return new, refused


def saved_with_histories(folder: str, dp: int, tp: int) -> dict[str, Any]:
    """A run that is saved, and goes on."""
    old = world_of(dp, tp, 0)
    steps(old, 2, seed=1)
    before = amaxes(old.net)
    dcp.async_save({"net": old.net, "float8": Float8State(old.net)}, checkpoint_id=folder).result()
    return {"amaxes": before, "losses": steps(old, 3, seed=3)}


def resumed_from(
    folder: str, dp: int, tp: int, config: Float8LinearConfig = DELAYED, partial: bool = False
) -> dict[str, Any]:
    new, refused = loaded_with_histories(folder, dp, tp, config, partial)
    return {"amaxes": amaxes(new.net), "refused": refused, "losses": steps(new, 3, seed=3)}


@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (2, 2)])
def test_histories_through_dcp(ranks: RankPools, tmp_path: Path, dp: int, tp: int) -> None:
    """The same bits on the same mesh; the same histories on another."""
    folder = str(tmp_path)
    expected = ranks(4).run(saved_with_histories, folder, dp, tp)
    # Where TP prepares an input, the layers behind it record none.
    filled = [name for name, row in expected[0]["amaxes"].items() if row]
    assert len(filled) == 18 - 4 * (tp > 1) + 2 * (tp > 1)
    for found, old in zip(ranks(4).run(resumed_from, folder, dp, tp), expected, strict=True):
        assert found == old | {"refused": []}
    shorter = replace(DELAYED, amax_history_len=1)
    for other, config in (((2, 1), DELAYED), ((1, 2), DELAYED), ((2, 1), shorter)):
        for found in ranks(2).run(resumed_from, folder, *other, config, partial=True):
            # Only TP prepares inputs.
            kept = {name: expected[0]["amaxes"].get(name, []) for name in found["amaxes"]}
            length = config.amax_history_len
            assert found["amaxes"] == {name: row[:length] for name, row in kept.items()}
            assert any(kept.values())


def saved_without_histories(folder: str) -> None:
    old = world_of(2, 1, 0, TENSORWISE)
    dcp.save({"net": old.net, "float8": Float8State(old.net)}, checkpoint_id=folder)


def test_dcp_of_another_recipe(ranks: RankPools, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks(2).run(saved_without_histories, folder)
    for partial in (True, False):
        for found in ranks(2).run(resumed_from, folder, 2, 1, partial=partial):
            assert not any(found["amaxes"].values())
            assert any("Missing key" in text for text in found["refused"]) is not partial
    for found in ranks(2).run(resumed_from, folder, 2, 1, TENSORWISE):
        assert found["refused"] == []
