"""DDP with float8 GEMMs; gradients travel in high precision.

torchrun --nproc-per-node 2 scripts/examples/ddp.py
"""

import torch
import torch.distributed as dist
from own_model import Model, loss_of
from torch.nn.parallel import DistributedDataParallel

from fp8_dist import attach_update, convert_to_float8_training, skip_head

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
torch.manual_seed(0)
model = Model().to(device)

# First float8, then DDP, then the optimizer.
convert_to_float8_training(model, module_filter_fn=skip_head(model))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
attach_update(optimizer, model)  # after each step: the scales of all weights, without a message

for step in range(20):
    loss = loss_of(model, seed=step * dist.get_world_size() + dist.get_rank(), device=device)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
