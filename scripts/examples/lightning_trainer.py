"""Lightning's Trainer with FSDP2, whose weight all-gathers are float8.

torchrun --nproc-per-node 2 scripts/examples/lightning_trainer.py

Writes a checkpoint to runs/lightning. Needs the extra lightning.
"""

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from own_model import Model, loss_of
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from fp8_dist import Float8LinearConfig, attach_update, convert_to_float8_training, skip_head
from fp8_dist.debug import comm_audit


class Float8Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def configure_model(self) -> None:
        if isinstance(self.model, FSDPModule):
            return  # Lightning calls this again for validate and test
        config = Float8LinearConfig(enable_fsdp_float8_all_gather="auto")
        convert_to_float8_training(
            self.model, config=config, module_filter_fn=skip_head(self.model)
        )
        mesh = self.device_mesh["data_parallel"]
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        attach_update(optimizer, self.model)  # after each step: one all-reduce for all scales
        return optimizer

    def training_step(self, seed: torch.Tensor, index: int) -> torch.Tensor:
        loss = loss_of(self.model, seed=int(seed), device=self.device)
        if self.global_rank == 0:
            print(f"step {index} loss {loss.item():.3f}", flush=True)
        return loss


seed_everything(0, verbose=False)  # the same weights on all ranks
trainer = Trainer(
    devices=2,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    max_epochs=1,
    logger=False,
    enable_progress_bar=False,
    enable_checkpointing=False,
)
module = Float8Module()
trainer.fit(module, DataLoader(range(20), batch_size=1))
trainer.save_checkpoint("runs/lightning")

with comm_audit(module.device_mesh) as audit:
    loss_of(module.model, seed=0, device=module.device).backward()
if trainer.is_global_zero:
    print("Communication of a forward and backward:", audit.table(), sep="\n")
dist.destroy_process_group()
