"""Recordings of meshes: a replay on one CPU has their bits, and names a fault of one rank."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Distributed
from ranks import RankPools
from recordings import corrupt_gathers
from torch import distributed as dist
from two_level import config_named

from fp8_dist import update_float8_scales
from fp8_dist.debug import CastStats, comm_audit, record
from fp8_dist.debug.replay.findings import Replay

# By recipe, whether shards are uneven, and so cut blocks.
REPLAYED = {"tensorwise": False, "delayed": False, "rowwise_folded": True, "blockwise": True}
REPLAYED |= {"rowwise_with_gw_hp": False, "two levels": True}
FAULTY, STEP = 2, 1  # the rank and the step of a fault


def train(recipe: str, fault: str, folder: Path, arguments: dict[str, Any]) -> None:
    """Record two steps, and write."""
    world = Distributed(2, 2, config=config_named(recipe), **arguments)
    optimizer, faulty = torch.optim.AdamW(world.net.parameters()), dist.get_rank() == FAULTY
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with record(world.net, folder, layers="*") as recorder:
            for step in range(STEP + 1):
                generator = torch.Generator().manual_seed(step)
                x = world.mine(torch.randn(4, 14, 64, generator=generator)).clone()
                if faulty and step == STEP and fault == "nan":
                    x[1, 2, 3] = float("nan")
                if faulty and step == STEP and fault in ("scale", "byte"):
                    corrupt_gathers(fault, (64, 128), patch)
                world.net(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if faulty and step == STEP - 1 and fault == "weight":
                    with torch.no_grad():  # before the scales of the next step are computed
                        world.net.layers[1].w3.weight.to_local()[3, 5] = 1e30  # type: ignore[union-attr,operator]
                update_float8_scales(world.net)
        recorder.write()
    dist.barrier()


def replayed(folder: Path) -> Replay:
    *anomalies, written = sorted(folder.iterdir())
    assert written.name.startswith(f"step{STEP:06d}")
    assert "incomplete" not in str([written, anomalies])
    return Replay(written)


def train_each(runs: list[tuple[str, str, Path, dict[str, Any]]]) -> None:
    for run in runs:
        train(*run)


WHERE = {
    "weight": ("layers.1.w3", "weight", ["output", "grad_input"], (67, 5)),
    "nan": ("layers.0.w1", "input", ["output", "grad_weight"], (1, 2, 3)),
    "scale": ("layers.0.w2", "weight", ["output"], (0, 0)),
    "byte": ("layers.0.w2", "weight", ["output"], (5, 7)),
}


@pytest.mark.parametrize(
    ("recipe", "faults"), [("rowwise_folded", ("weight", "scale")), ("mxfp8", ("nan", "byte"))]
)
def test_a_fault_of_one_rank_is_named(
    ranks: RankPools, tmp_path: Path, recipe: str, faults: tuple[str, str]
) -> None:
    sizes = {"net_arguments": {"hidden": 256}}
    ranks(4).run(
        train_each, [(recipe, fault, tmp_path / fault, sizes) for fault in faults], timeout=300
    )
    for fault in faults:
        fqn, operand, gemms, element = WHERE[fault]
        first = replayed(tmp_path / fault).findings[0]
        assert (first.step, first.fqn, first.operand) == (STEP, fqn, operand), (fault, first)
        assert (list(first.gemms), first.element, first.ranks) == (gemms, element, (FAULTY,)), first


@pytest.mark.parametrize("recipe", REPLAYED)
def test_a_replay_has_the_bits_of_a_mesh(ranks: RankPools, tmp_path: Path, recipe: str) -> None:
    """Some recipes run on uneven shards, which cut blocks, and without sequence parallelism."""
    uneven = {"net_arguments": {"hidden": 90}, "sequence_parallel": False}
    ranks(4).run(train, recipe, "", tmp_path, uneven if REPLAYED[recipe] else {})
    replay = replayed(tmp_path)
    assert not replay.findings
    checked, steps = dict(replay.checked), STEP + 1
    assert checked.pop("casts equal those of one device, bit for bit") >= steps * 2 * 3 * 3
    gemms = checked.pop("GEMMs are equal bit for bit")
    assert gemms >= steps * 2 * 5 * 4
    assert checked == {"operands equal what was cast, bit for bit": 2 * gemms}


def test_what_ranks_do_not_share(ranks: RankPools, tmp_path: Path) -> None:
    """A rank without casts, an empty micro-batch, and values that differ."""
    ranks(2).run(train_apart, tmp_path, timeout=200)
    assert not Replay(next((tmp_path / "uneven").iterdir())).findings
    (first, *_) = Replay(next((tmp_path / "input").iterdir())).findings
    text = "ranks have several values: rank 0 has 4, rank 1 has 9"
    found = first.operand, first.text, first.element, first.ranks
    assert found == ("input", text, (1, 2, 3), (0, 1))


def train_apart(folder: Path) -> None:
    rank = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = Distributed(dp=2, config=config_named("rowwise_folded"))
        with record(world.net, folder / "uneven", layers="*") as recorder:
            for batch in (0 if rank else 2, 2):
                world.net(torch.randn(batch, 4, 64)).square().mean().backward()
        assert all(row.scale_min > 0 for row in recorder.rows if isinstance(row, CastStats))
        recorder.write()
        with record(world.twin, folder / "alone") as recorder:  # on no mesh, as under DDP
            if rank:
                world.twin(torch.ones(2, 4, 64))
        assert {row.step for row in recorder.rows} == {0}
        optimizer = torch.optim.SGD(world.twin.parameters())
        with comm_audit() as audit, record(world.twin, folder / "evaluated") as recorder:
            world.twin(torch.ones(2, 4, 64)).sum().backward()
            optimizer.step()
            if rank:  # evaluates alone
                world.twin(torch.ones(2, 4, 64))
        assert (recorder.step, audit.count("all_gather")) == (1, 2)
        world = Distributed(tp=2, config=config_named("tensorwise"), sequence_parallel=False)
        x = world.mine(torch.ones(4, 14, 64).cumsum(2)).clone()
        x[1, 2, 3] += 5 * rank
        with record(world.net, folder / "input", layers="*") as recorder:
            world.net(x).square().mean().backward()
        recorder.write()
    dist.barrier()
