"""capture on meshes: the files of all ranks together hold what one device casts."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from nets import MLP, Block, net_plan
from ranks import RankPools, device_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist.debug import CapturedCast, capture, load_capture
from fp8_dist.tensor_parallel import apply_tp_plan

CASES = [
    (2, 1, None, "tensorwise"),
    (1, 2, None, "delayed"),
    (2, 2, None, "rowwise_folded"),
    pytest.param(2, 2, "aot_eager", "tensorwise", marks=pytest.mark.full),
    pytest.param(2, 2, "aot_eager", "delayed", marks=pytest.mark.full),
]
KEY = tuple[str, str, tuple[str, ...]]


class Gated(MLP):
    """Without silu, whose last bit depends on where a value stands in a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.relu(self.w1(x)) * self.w3(x))


class Net(nn.Module):
    """All operands are bitwise one device's under tensor parallelism: none follows a reduction."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList([Gated(64, 96)])


def batch(part: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(part)
    x, grad = torch.randn(2, 2, 8, 64, generator=generator)
    return ((1 + part) * x).requires_grad_(), 1e-4 * grad


def recorded(dp: int, tp: int, recipe: str, backend: str | None, folder: Path) -> list[Path]:
    """What this rank wrote, by two micro-batches of step 3."""
    torch._dynamo.reset()
    mesh = device_mesh(dp=dp, tp=tp)
    config = Float8LinearConfig.from_recipe_name(recipe)
    gather = "auto" if dp > 1 else False
    config = dataclasses.replace(config, enable_fsdp_float8_all_gather=gather)
    inner = convert_to_float8_training(Net(), config=config)
    if tp > 1:
        apply_tp_plan(inner, mesh["tp"], net_plan(inner, True))  # type: ignore[arg-type]
    net = nn.Sequential(Block(inner.layers[0]))  # type: ignore[index]
    if backend is not None:
        net[0].compile(backend=backend, fullgraph=True)
    if dp > 1:
        for module in (*net, net):
            fully_shard(module, mesh=mesh["dp"])
    files = capture(net, folder, fqn="*.w?", steps=3)
    for step in (2, 3):
        with files.at(step):
            for part in range(2):
                x, grad = batch(2 * mesh.get_local_rank("dp") + part)
                if tp > 1:
                    halves = (t.detach().chunk(tp, 1) for t in (x, grad))
                    x, grad = (half[mesh.get_local_rank("tp")] for half in halves)
                net(x.clone().requires_grad_()).backward(grad)
    assert files.left_out == 0
    return files.files


def on_one_device(dp: int, recipe: str, folder: Path) -> list[Path]:
    config = Float8LinearConfig.from_recipe_name(recipe)
    twin = nn.Sequential(Block(convert_to_float8_training(Net(), config=config).layers[0]))  # type: ignore[index]
    with capture(twin, folder).at(3) as files:
        for part in range(2 * dp):
            x, grad = batch(part)
            twin(x).backward(grad)
    return files.files


def content(casts: list[CapturedCast], calls: range) -> dict[KEY, tuple[Any, Any]]:
    """All values in high precision and dequantized, sorted; of each cast of a layer."""
    found: dict[KEY, list[CapturedCast]] = {}
    for each in casts:
        if each.operand != "weight" or each.call in calls:
            found.setdefault((each.fqn, each.operand, each.gemms), []).append(each)
    return {
        key: tuple(
            torch.cat([t.reshape(-1) for t in tensors]).double().sort().values.tolist()
            for tensors in zip(
                *((c.high, c.low.as_tensor(c.high.dtype).dequantize()) for c in each), strict=True
            )
        )
        for key, each in found.items()
    }  # type: ignore[return-value]


@pytest.mark.parametrize(("dp", "tp", "backend", "recipe"), CASES)
def test_the_ranks_hold_what_one_device_casts(
    ranks: RankPools, tmp_path: Path, dp: int, tp: int, backend: str | None, recipe: str
) -> None:
    folder = tmp_path / "ranks"
    files = ranks(dp * tp).run(recorded, dp, tp, recipe, backend, folder, timeout=180)
    mine = [load_capture(path) for of_rank in files for path in of_rank]
    assert sorted(path for of_rank in files for path in of_rank) == sorted(folder.iterdir())
    assert {(c.rank, c.step, c.call) for c in mine} == {
        (rank, 3, call) for rank in range(dp * tp) for call in range(2)
    }
    its = [load_capture(path) for path in on_one_device(dp, recipe, tmp_path / "one")]
    expected = content(its, range(1))
    assert content(mine, range(1)) == expected
    assert len(expected) >= 3 * 3


def chosen(folder: Path) -> tuple[int, list[str]]:
    net = convert_to_float8_training(Net())
    with capture(net, folder, operand="weight", ranks=1) as files:
        for layer in net.layers:  # type: ignore[union-attr]
            layer(torch.ones(2, 64))
    return dist.get_rank(), [path.name for path in files.files]


def test_the_chosen_rank_alone_writes(ranks: RankPools, tmp_path: Path) -> None:
    (_, none), (_, files) = ranks(2).run(chosen, tmp_path)
    assert none == []
    assert len(files) == 3
    assert sorted(files) == sorted(path.name for path in tmp_path.iterdir())
