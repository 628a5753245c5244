"""FSDP2 x tensor and sequence parallelism: weights, activations and gradients gathered in float8.

torchrun --nproc-per-node 4 scripts/examples/fsdp2_tensor_parallel.py
"""

import torch
import torch.distributed as dist
from own_model import Model, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from fp8_dist import Float8LinearConfig, attach_update, convert_to_float8_training, skip_head
from fp8_dist.debug import comm_audit
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    apply_tp_plan,
)

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = Model().to(device)

# First float8, then tensor parallelism, then FSDP2, then the optimizer.
config = Float8LinearConfig(enable_fsdp_float8_all_gather="auto")
convert_to_float8_training(model, config=config, module_filter_fn=skip_head(model))

# Between layers each rank has a part of the sequence, Shard(1). Float8 layers take the styles whose
# names begin with Float8, other layers those of torch.
plan = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.attention": PrepareFloat8ModuleInput(  # one cast and one gather for q, k and v
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "blocks.*.attention.q": Float8ColwiseParallel(),
    "blocks.*.attention.k": Float8ColwiseParallel(),
    "blocks.*.attention.v": Float8ColwiseParallel(),
    "blocks.*.attention.o": Float8RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.mlp_norm": SequenceParallel(),
    "blocks.*.up": Float8ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": Float8RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
apply_tp_plan(model, mesh["tp"], plan)
for module in (*model.blocks, model):
    fully_shard(module, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
attach_update(optimizer, model)  # after each step: one all-reduce for the scales of all weights

for step in range(10):
    with comm_audit(mesh) as audit:
        seed = step * mesh["dp"].size() + mesh["dp"].get_local_rank()  # equal within a TP group
        loss = loss_of(model, seed=seed, device=device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)

if dist.get_rank() == 0:
    print("Communication of the last step:", audit.table(), sep="\n")
dist.destroy_process_group()
