"""Tensor and sequence parallelism whose all-gathers of activations and gradients are float8.

torchrun --nproc-per-node 2 scripts/examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from own_model import Model, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from fp8_dist import attach_update, convert_to_float8_training, skip_head
from fp8_dist.debug import comm_audit
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    apply_tp_plan,
)

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = Model().to(device)
convert_to_float8_training(model, module_filter_fn=skip_head(model))

# Between layers each rank has a part of the sequence, Shard(1). Layers in float8 have styles whose
# names begin with Float8, others have torch's.
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
apply_tp_plan(model, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
attach_update(optimizer, model)  # after each step: one all-reduce for the scales of all weights

for step in range(10):
    with comm_audit(mesh) as audit:
        loss = loss_of(model, seed=step, device=device)  # the same batch on all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if mesh.get_rank() == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)

if mesh.get_rank() == 0:
    print("Communication of the last step:", audit.table(), sep="\n")
dist.destroy_process_group()
