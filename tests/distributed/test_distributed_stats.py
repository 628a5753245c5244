"""float8_stats and record on meshes: the numbers and casts of one device."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Block, GatedMLP, net_plan
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from recordings import casts, different, written
from reference import all_warnings, raised
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_level import config_named

from fp8_dist import Float8LinearConfig, convert_to_float8_training, update_float8_scales
from fp8_dist.debug import Anomaly, CastStats, comm_audit, float8_stats, record
from fp8_dist.tensor_parallel import (
    apply_tp_plan,
)

# (dp, tp), recipes.
CASES = [
    ((2, 1), ("rowwise", "mxfp8", "delayed")),
    ((1, 2), ("rowwise_with_gw_hp", "blockwise", "delayed")),
    ((2, 2), ("tensorwise", "rowwise_folded", "two levels")),
]


class Net(nn.Module):
    """All operands are bitwise one device's under tensor parallelism: none follows a reduction."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList([GatedMLP(64, 96)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


def batch(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An input, and the gradient of the output; each part with amaxes of its own."""
    generator = torch.Generator().manual_seed(10 * step + part)
    x, grad = torch.randn(2, 2, 8, 64, generator=generator)
    x, grad = (1 + part) * x, 1e-4 * grad
    x[0, 0, :8] *= 1e-6  # some of them underflow
    grad[0, 1] *= 1e-7
    return x.requires_grad_(), grad


def recorded(dp: int, tp: int, recipe: str, folder: Path) -> tuple[list[Any], list[Any], int]:
    """Rows of two steps, on a mesh and on one device; the second step's recordings are written."""
    config = config_named(recipe)
    mesh = device_mesh(dp=dp, tp=tp)
    twin = nn.Sequential(Block(convert_to_float8_training(Net(), config=config).layers[0]))  # type: ignore[index]
    gather = "auto" if dp > 1 else False
    config = dataclasses.replace(config, enable_fsdp_float8_all_gather=gather)
    inner = convert_to_float8_training(Net(), config=config)
    if tp > 1:
        apply_tp_plan(inner, mesh["tp"], net_plan(inner, True))  # type: ignore[arg-type]
    net = nn.Sequential(Block(inner.layers[0]))  # type: ignore[index]
    if dp > 1:
        for module in (*net, net):
            fully_shard(module, mesh=mesh["dp"])
    mine, its = float8_stats(net), float8_stats(twin)
    mine_too = record(net, folder / "ranks", layers="*.w?", steps=1)
    its_too = record(twin, folder / "twin", layers="*", steps=1)
    for step in range(2):
        with mine_too.at(step):
            mine.__enter__()
            x, grad = batch(step, mesh.get_local_rank("dp"))
            if tp > 1:
                x, grad = (t.detach().chunk(tp, 1)[mesh.get_local_rank("tp")] for t in (x, grad))
            net(x.clone().requires_grad_()).backward(grad)
            with comm_audit() as audit:
                mine.__exit__(None)
            assert audit.count() == 1
        with its, its_too.at(step):
            for part in range(dp):
                x, grad = batch(step, part)
                twin(x).backward(grad)
        for model in (net, twin):
            update_float8_scales(model)
    for recorder in (mine_too, its_too):
        written(recorder)
    return mine.rows, its.rows, mine_too.dropped


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mesh", "recipes"), CASES)
def test_the_numbers_and_casts_of_one_device(
    ranks: RankPools,
    tmp_path: Path,
    mesh: tuple[int, int],
    recipes: tuple[str, ...],
) -> None:
    pool = ranks(mesh[0] * mesh[1])
    for recipe in recipes:
        folder = tmp_path / recipe
        results = pool.run(recorded, *mesh, recipe, folder, timeout=180)
        for mine, its, dropped in results:
            assert len(mine) == len(its) >= 2 * 3 * 3
            for row, expected in zip(mine, its, strict=True):
                assert abs(row.sqnr - expected.sqnr) < 0.01, (row, expected)
                assert dataclasses.replace(row, sqnr=expected.sqnr) == expected
            assert any(row.underflow for row in its if isinstance(row, CastStats))
            assert all(math.isfinite(row.sqnr) for row in its)
            assert dropped == 0
        rank_folder = folder / "ranks" / "step000001"
        parts = [part for cast in casts(rank_folder) for part in cast.parts]
        names = {(part["rank"], part["step"], part["call"]) for part in parts}
        assert names == {(rank, 1, 0) for rank in range(pool.world_size)}
        assert different(rank_folder, folder / "twin" / "step000001") == []
        assert len({(part["fqn"], part["operand"]) for part in parts}) == 3 * 3


@pytest.mark.parametrize(("parallel", "size"), [("FSDP2", 2), ("HSDP", 4), ("DDP", 2)])
@on_ranks("size")
def test_a_nan_on_one_rank(parallel: str, size: int) -> None:
    """The first anomaly names rank 1, whose gradient of the output has a NaN."""
    net = convert_to_float8_training(Net(), config=Float8LinearConfig())
    model: nn.Module = net
    if parallel == "DDP":
        model = DistributedDataParallel(net)
    else:
        mesh = device_mesh(**({"replicate": 2} if parallel == "HSDP" else {}), shard=2)
        fully_shard(net, mesh=mesh)
    seen: list[Anomaly] = []
    stats = float8_stats(model, on_anomaly=seen.append)
    output = model(torch.randn(2, 8, 64))  # before: casts of the backward alone are recorded
    grad = torch.full_like(output, 1e-3)
    if dist.get_rank() == 1:
        grad[0, 0, 0] = math.nan
    with stats:
        output.backward(grad)
    first = seen[0]
    # w2 is the only layer in which one value alone is NaN.
    worst = min(seen, key=lambda anomaly: anomaly.value)
    assert worst.value == pytest.approx(100 / (dist.get_world_size() * 2 * 8 * 64))
    assert worst.row.fqn.endswith("w2")
    name = "module.layers.0.w2" if parallel == "DDP" else "layers.0.w2"  # the first in the backward
    assert (first.row.fqn, first.what, first.rank) == (name, "non-finite", 1)
    assert len(stats.rows) == 3


@pytest.mark.parametrize("given", [False, True])
@on_ranks(4)
def test_warnings_are_those_of_one_rank(given: bool) -> None:
    """Of the ranks that share rows, only one warns about a gradient that underflows.

    Without a mesh, all ranks of DDP share rows; with one, the ranks of each pipeline stage.
    """
    net = convert_to_float8_training(Net().layers[0].w1, config=Float8LinearConfig())
    model = nn.Sequential(net if given else DistributedDataParallel(net))
    mesh = device_mesh(pp=2, dp=2)["dp"] if given else None
    stats = float8_stats(model, on_anomaly="warn", mesh=mesh)
    output = model(torch.ones(2, 64))
    grad = torch.full_like(output, 1e-30)
    grad[0, 0] = 1.0
    with all_warnings() as texts, stats:
        output.backward(grad)
    assert len(stats.anomalies) == 1
    assert sum("float8_stats" in text for text in texts) == (
        dist.get_rank() in ((0, 2) if given else (0,))
    )


@on_ranks(2, returns=["w1 input", "w1 weight", "w3 input", "w3 weight"])
def test_a_layer_that_some_ranks_do_not_run() -> list[str]:
    """Rank 1 does not run w3, as experts without tokens."""
    net = convert_to_float8_training(Net().layers[0], config=Float8LinearConfig())
    stats = float8_stats(net)
    with stats, torch.no_grad():
        net.w1(torch.ones(2, 64))
        if dist.get_rank() == 0:
            net.w3(torch.ones(2, 64))
    return [f"{row.fqn} {row.operand}" for row in stats.rows if isinstance(row, CastStats)]


@on_ranks(2)
def test_ranks_with_different_layers_are_refused() -> None:
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(1 + dist.get_rank())))
    stats = float8_stats(convert_to_float8_training(layers))

    def step() -> None:
        with stats, torch.no_grad():
            layers(torch.ones(16, 16))

    text = raised(ValueError, step)
    assert "the ranks have different layers (1: missing on rank 0; " in text
