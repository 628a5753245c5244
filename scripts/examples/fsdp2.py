"""FSDP2 with float8 all-gathers of weights.

torchrun --nproc-per-node 2 scripts/examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from own_model import Model, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8_dist import Float8LinearConfig, attach_update, convert_to_float8_training, skip_head
from fp8_dist.debug import comm_audit

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
torch.manual_seed(0)
model = Model().to(device)

# First float8, then FSDP2, then the optimizer.
config = Float8LinearConfig(enable_fsdp_float8_all_gather="auto")
convert_to_float8_training(model, config=config, module_filter_fn=skip_head(model))
for module in (*model.blocks, model):
    fully_shard(module, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
attach_update(optimizer, model)  # after each step: one all-reduce for the scales of all weights

for step in range(10):
    with comm_audit(mesh) as audit:
        loss = loss_of(model, seed=step * mesh.size() + mesh.get_rank(), device=device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if mesh.get_rank() == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)

if mesh.get_rank() == 0:
    print("Communication of the last step:", audit.table(), sep="\n")
dist.destroy_process_group()
