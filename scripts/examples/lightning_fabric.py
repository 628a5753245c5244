"""Lightning Fabric with FSDP2, whose weight all-gathers are float8.

torchrun --nproc-per-node 2 scripts/examples/lightning_fabric.py

Needs the extra lightning.
"""

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from own_model import Model, loss_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fp8_dist import Float8LinearConfig, attach_update, convert_to_float8_training, skip_head
from fp8_dist.debug import comm_audit


def parallelize(model: Model, mesh: DeviceMesh) -> Model:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather="auto")
    convert_to_float8_training(model, config=config, module_filter_fn=skip_head(model))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
fabric = Fabric(devices=2, strategy=strategy)
fabric.launch()
fabric.seed_everything(0, verbose=False)  # the same weights on all ranks
model = fabric.setup(Model())
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
attach_update(optimizer, model)  # after each step: one all-reduce for the scales of all weights

for step in range(20):
    with comm_audit(fabric.strategy.device_mesh) as audit:
        seed = step * fabric.world_size + fabric.global_rank
        loss = loss_of(model, seed=seed, device=fabric.device)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if fabric.is_global_zero:
        print(f"step {step} loss {loss.item():.3f}", flush=True)

fabric.save("runs/fabric", {"model": model, "optimizer": optimizer})
if fabric.is_global_zero:
    print("Communication of the last step:", audit.table(), sep="\n")
dist.destroy_process_group()
