"""A trainer that streams its float8 weights to an inference engine, which has the same logits.

torchrun --nproc-per-node 5 scripts/examples/weight_sync.py

Ranks 0 to 3 train with FSDP2 x tensor parallelism. Rank 4 serves.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from own_engine import COLUMNS, ROWS, Engine, received, send
from own_model import Model, loss_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fp8_dist import (
    Float8LinearConfig,
    attach_update,
    convert_to_float8_training,
    iter_float8_weights,
    skip_head,
)
from fp8_dist.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, apply_tp_plan

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
mesh = DeviceMesh(device, [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
link = dist.new_group([0, 4])  # all ranks must create every group
prompt = torch.arange(256, device=device).view(4, 64)


def serve() -> None:
    engine = Engine(tp=mesh.size(1)).to(device)
    for _ in range(2):
        while (entry := received(link, device))[0]:
            engine.load(entry[0], *entry[1])
        with torch.no_grad():
            dist.broadcast(engine(prompt), 4, link)


def train() -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    config = Float8LinearConfig.from_recipe_name("blockwise")
    config = replace(config, enable_fsdp_float8_all_gather="auto")
    convert_to_float8_training(model, module_filter_fn=skip_head(model), config=config)
    plan = {f"blocks.*.{name}": Float8ColwiseParallel() for name in COLUMNS}
    plan |= {f"blocks.*.{name}": Float8RowwiseParallel() for name in ROWS}
    apply_tp_plan(model, mesh["tp"], plan)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attach_update(optimizer, model)
    for step in range(10):
        loss = loss_of(model, seed=2 * step + mesh.get_local_rank("dp"), device=device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        if step % 5 == 4:
            sync(model)


def sync(model: torch.nn.Module) -> None:
    stream = iter_float8_weights(model, ranks=[0])  # ranks 1 to 3 get nothing
    sent = sum(send(name, tensors, link) for name, *tensors in stream)
    with torch.no_grad():
        logits = model(prompt)
    if dist.get_rank() == 0:
        send(None, [], link)
        dist.broadcast(served := torch.empty_like(logits), 4, link)
        print(f"{sent:,} bytes sent; {logits.numel():,} logits equal: {logits.equal(served)}")


serve() if dist.get_rank() == 4 else train()
dist.destroy_process_group()
