"""Delayed scales and state on several ranks: shards, a broadcast full state, DCP."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_patterns import NAMES, load, save
from delayed_steps import DELAYED, amaxes
from nets import Distributed, Net
from rank_tests import on_ranks
from ranks import RankPools
from reference import reloaded
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from fp8_dist import Float8LinearConfig, Float8State, attach_update, convert_to_float8_training
from fp8_dist import sync_float8_amax_and_scale_history as sync
from fp8_dist.debug import comm_audit


def world_of(dp: int, tp: int, seed: int, config: Float8LinearConfig = DELAYED) -> Distributed:
    return Distributed(dp, tp, config=config, net_arguments={"seed": seed})


class Run:
    """A net on a mesh and its optimizer, with all that its recipe keeps between steps."""

    def __init__(self, dp: int, tp: int, seed: int, **how: Any) -> None:
        self.world = world_of(dp, tp, seed, **how)
        self.net = self.world.net
        # DCP steps an optimizer that has no state, to create it; this SGD never gets any.
        make = torch.optim.SGD if tp > 1 else torch.optim.AdamW
        self.optimizer = make(self.net.parameters(), lr=1e-2)
        attach_update(self.optimizer, self.net)

    def train(self, steps: int, seed: int) -> list[float]:
        torch.manual_seed(seed)
        losses = []
        for _ in range(steps):
            loss = self.net(self.world.mine(torch.randn(4, 8, 64))).square().mean()
            loss.backward()
            losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses


def resumed_on_ranks(dp: int, tp: int, how: str) -> dict[str, Any]:
    """From a run with histories into a new model: by each rank's shards, or by a full state."""
    old, new = Run(dp, tp, 0), Run(dp, tp, 1)
    old.train(2, seed=1)
    new.train(1, seed=2)
    with comm_audit() as audit:
        if how == "shards":
            new.net.load_state_dict(copy.deepcopy(old.net.state_dict()))
    twin = old.world.twin
    if how == "rank 0":
        # What only rank 0 was given: the twin's, without the history of the prepared input.
        for _ in range(2):
            twin(torch.randn(4, 8, 64)).sum().backward()
            sync(twin)
        full = reloaded(twin.state_dict()) if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(new.net, full, options=options)
    return {
        "loads": audit.count(),
        "kept": amaxes(new.net),
        "expected": amaxes(old.net if how == "shards" else twin),
        "losses": [run.train(2, seed=3) for run in (old, new)],
        "later": amaxes(new.net),
    }


def test_resuming_on_ranks(ranks: RankPools) -> None:
    results = ranks(4).run(resumed_on_ranks, 2, 2, "shards")
    for found in results:
        assert found["kept"] == found["expected"] == results[0]["kept"]
        assert found["losses"][0] == found["losses"][1]
        # One for each layer; one more for each of the two inputs that TP prepares, on a 2-D mesh.
        assert found["loads"] == 8


def test_a_checkpoint_that_rank_0_broadcasts(ranks: RankPools) -> None:
    results = ranks(4).run(resumed_on_ranks, 2, 2, "rank 0")
    for found in results:
        expected = found["expected"]
        prepared = {name for name in found["kept"] if name.endswith("prepared_input")}
        assert len(prepared) == 2
        assert found["kept"] == results[0]["expected"] | {name: [] for name in prepared}
        assert found["later"] == results[0]["later"]
        assert set(expected) == set(found["kept"]) - prepared


@on_ranks(2, timeout=180)
def test_resuming_from_dcp(tmp_path: Path) -> None:
    """Every pattern gives the losses and histories of an uninterrupted run."""
    folder, old = str(tmp_path), Run(2, 1, 0)
    old.train(2, seed=1)
    before = amaxes(old.net)
    for name in NAMES:
        save(name, old.net, old.optimizer, folder)
    assert amaxes(old.net) == before
    losses = old.train(2, seed=3)
    for name, steps in (("docs", 0), *((name, 2) for name in NAMES)):
        new = Run(2, 1, 1)
        new.train(steps, seed=2)
        load(name, new.net, new.optimizer, folder)
        assert amaxes(new.net) == before, (name, steps)
        assert new.train(2, seed=3) == losses, (name, steps)
        assert amaxes(new.net) == amaxes(old.net), (name, steps)


ELSEWHERE = ("aaa", "model_state_dict", "app_state")


def saved_with_histories(folder: str, dp: int, tp: int) -> dict[str, list[float]]:
    old = Run(dp, tp, 0)
    old.train(2, seed=1)
    for name in ELSEWHERE:
        save(name, old.net, old.optimizer, folder)
    before = amaxes(old.net)
    state = {"model": old.net, "float8": Float8State(old.net)}
    pending = dcp.async_save(state, checkpoint_id=f"{folder}/async")
    pending.result()
    old.train(2, seed=2)
    return before


def loaded_elsewhere(
    folder: str, dp: int, tp: int, config: Float8LinearConfig
) -> dict[str, dict[str, list[float]]]:
    found = {}
    planner = DefaultLoadPlanner(allow_partial_load=True)  # for optimizers of other kinds
    for name in ELSEWHERE:
        new = Run(dp, tp, 1, config=config)
        load(name, new.net, new.optimizer, folder, planner)
        found[name] = amaxes(new.net)
        new.train(1, seed=3)
    new = Run(dp, tp, 1, config=config)
    state = {"model": new.net, "float8": Float8State(new.net)}
    dcp.load(state, checkpoint_id=f"{folder}/async")
    return found | {"async": amaxes(new.net)}


SHORTER = replace(DELAYED, amax_history_len=1)


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        ((2, 2), [((2, 1), DELAYED), ((1, 2), DELAYED), ((2, 1), SHORTER)]),
        ((2, 1), [((1, 2), DELAYED)]),
    ],
    ids=["FSDP2 x TP", "FSDP2"],
)
def test_histories_on_another_mesh(
    ranks: RankPools,
    tmp_path: Path,
    saved_on: tuple[int, int],
    loaded_on: list[tuple[tuple[int, int], Float8LinearConfig]],
) -> None:
    folder = str(tmp_path)
    saved = ranks(math.prod(saved_on)).run_same(saved_with_histories, folder, *saved_on)
    # If TP prepares an input, only that input has a history, under the first layer's name.
    assert sum(map(bool, saved.values())) == (18 - 4 + 2 if saved_on[1] > 1 else 18)
    expected = {name.replace("prepared_input", "input"): row for name, row in saved.items() if row}
    for (dp, tp), config in loaded_on:
        for found in ranks(2).run(loaded_elsewhere, folder, dp, tp, config):
            for pattern, kept in found.items():
                first = {"layers.0.w1.input", "layers.1.w1.input"} if tp > 1 else set()
                rows = {
                    name: [] if name in first else expected.get(name.replace("prepared_", ""), [])
                    for name in kept
                }
                length = config.amax_history_len
                assert kept == {name: row[:length] for name, row in rows.items()}, pattern
                assert any(kept.values())


def in_ddp(folder: str) -> list[dict[str, list[float]]]:
    """Histories after loading checkpoints; until then, each rank of DDP has its own."""
    nets = []
    for seed in (0, 1):
        net = convert_to_float8_training(Net(seed=seed), config=DELAYED)
        nets.append(DistributedDataParallel(net))
        for _ in range(2):
            x = torch.randn(4, 8, 64) * (1 + seed + dist.get_rank())
            nets[-1](x).sum().backward()
            sync(net)
    old, new = nets
    dcp.save({"model": old, "float8": Float8State(old)}, checkpoint_id=folder)
    dcp.load({"model": new, "float8": Float8State(new)}, checkpoint_id=folder)
    state = {"model": get_model_state_dict(old), "float8": Float8State(old)}
    dcp.save(state, checkpoint_id=f"{folder}/again")
    dcp.load(state, checkpoint_id=f"{folder}/again")
    set_model_state_dict(old, state["model"])
    return [amaxes(net) for net in nets]


def test_all_ranks_of_ddp_continue_with_the_histories_of_one(
    ranks: RankPools, tmp_path: Path
) -> None:
    first, second = ranks(2).run_same(in_ddp, str(tmp_path))
    assert first == second
