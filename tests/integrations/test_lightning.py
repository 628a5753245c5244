"""Lightning's Trainer on two ranks: losses, resumed runs, and the code of the page."""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documented import NO_HEAD, run_shown
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from nets import Net, net_plan
from ranks import RankPools
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from fp8_dist import Float8LinearConfig, attach_update, convert_to_float8_training
from fp8_dist.debug import comm_audit
from fp8_dist.tensor_parallel import apply_tp_plan

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather="auto")
STEPS, SAVED_AT, RANKS = 4, 2, 2


def batch(index: int) -> torch.Tensor:
    return torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(index))


def parallelized(net: Net, mesh: DeviceMesh) -> Net:
    convert_to_float8_training(net, config=GATHERED)
    if mesh["tensor_parallel"].size() > 1:
        apply_tp_plan(net, mesh["tensor_parallel"], net_plan(net, False))
    if mesh["data_parallel"].size() > 1:
        for part in (*net.layers, net):
            fully_shard(part, mesh=mesh["data_parallel"])
    return net


class Module(LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = Net(seed=seed)
        self.losses: list[float] = []
        self.configured = False

    def configure_model(self) -> None:
        if not self.configured:
            parallelized(self.net, self.device_mesh)
            self.configured = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        attach_update(optimizer, self.net)
        return optimizer

    def training_step(self, unused: torch.Tensor, index: int) -> torch.Tensor:
        # (A resumed Trainer restarts the data, so draw by the global step.)
        data = self.device_mesh["data_parallel"]
        seed = self.global_step * data.size() + data.get_local_rank()
        loss = self.net(batch(seed)).square().mean()
        self.losses.append(loss.item())
        return loss


def launched() -> None:
    """Set the environment from which Lightning learns about the ranks of the pool."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(NODE_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29500")


def by_trainer(folder: str, sizes: dict[str, int]) -> Any:
    launched()

    def run(seed: int, steps: int, checkpoint: str | None) -> tuple[Trainer, list[float]]:
        module = Module(seed)
        trainer = Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy=ModelParallelStrategy(**sizes),
            max_steps=steps,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(range(100)), ckpt_path=checkpoint)
        return trainer, module.losses

    trainer, losses = run(0, SAVED_AT, None)
    trainer.save_checkpoint(folder)
    return losses, run(1, STEPS, folder)[1], run(0, STEPS, None)[1]


def one_process(data_parallel_size: int) -> list[list[float]]:
    """The losses for the batches of each data-parallel rank, in float8 on one device."""
    net = convert_to_float8_training(Net())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        seeds = range(step * data_parallel_size, (step + 1) * data_parallel_size)
        rank_losses = [net(batch(seed)).square().mean() for seed in seeds]
        torch.stack(rank_losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in rank_losses])
    return losses


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
def test_losses_and_resumed_runs(ranks: RankPools, tmp_path: Path, dp: int, tp: int) -> None:
    sizes = {"data_parallel_size": dp, "tensor_parallel_size": tp}
    found = ranks(RANKS).run(by_trainer, str(tmp_path / "saved"), sizes, timeout=120)
    expected = one_process(dp)
    for rank, (first, resumed, whole) in enumerate(found):
        assert first + resumed == whole, "a resumed run is the same, bit for bit"
        assert whole == pytest.approx([losses[rank % dp] for losses in expected], rel=1e-4)


class Model(nn.Module):
    """A model with blocks that returns its loss, as on the page."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=x.square().mean())


def gathers_of_the_page(folder: str, code: str) -> int:
    """Run the program of a section; return the float8 elements that its model then gathers."""
    launched()
    os.chdir(folder)
    batches = DataLoader([{"x": torch.ones(64)} for _ in range(4)], batch_size=1)
    names: dict[str, Any] = {"build": Model, "batches": batches}
    run_shown(code, names, expected=NO_HEAD)
    model = names["model"] if "model" in names else names["trainer"].lightning_module.model
    with comm_audit() as audit:
        model(x=torch.ones(1, 64)).loss.backward()
    return sum(row.elements for row in audit.rows if row.dtype == torch.float8_e4m3fn)


@pytest.mark.parametrize("section", ["Trainer", "Fabric"])
def test_the_code_of_the_page(ranks: RankPools, tmp_path: Path, section: str) -> None:
    page = (Path(__file__).parents[2] / "docs/lightning.md").read_text()
    text = page.partition(f"## {section}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    gathered = ranks(RANKS).run_same(gathers_of_the_page, str(tmp_path), code, timeout=120)
    assert gathered == 2 * 2 * 64 * 64  # two layers, forward and backward
