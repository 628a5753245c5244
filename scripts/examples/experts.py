"""A transformers mixture of experts: expert parallelism x FSDP2, tokens and weights in float8.

torchrun --nproc-per-node 4 scripts/examples/experts.py
"""

import argparse
import inspect

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from fp8_dist import Float8LinearConfig, attach_update, convert_to_float8_training, skip_head
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import average_gradients_over, clip_grad_norm_
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training, float8_experts
from fp8_dist.tensor_parallel import Float8ExpertParallel

TEXT = torch.tensor(list(inspect.getsource(argparse).encode()))
CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    moe_intermediate_size=128,
    num_experts=8,
    num_experts_per_tok=2,
    output_router_logits=True,  # adds the balancing loss to the loss
)

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
mesh = init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "ep"))
torch.manual_seed(0)  # the same weights on all ranks; or Qwen3MoeForCausalLM.from_pretrained(...)
model = Qwen3MoeForCausalLM(CONFIG).to(device)

# First float8, then expert parallelism, then FSDP2, then the optimizer.
convert_experts_to_float8_training(model, config=Float8ExpertsConfig("rowwise_folded"))
config = Float8LinearConfig(enable_fsdp_float8_all_gather="auto")
convert_to_float8_training(model, config=config, module_filter_fn=skip_head(model))
for experts in float8_experts(model).values():
    parallelize_module(experts, mesh["ep"], Float8ExpertParallel())
    fully_shard(experts, mesh=mesh["dp"])
    average_gradients_over(experts, mesh)  # they are sums over the tokens of all EP ranks
everywhere = mesh._flatten("dp_ep")
for module in (*model.model.layers, model):
    fully_shard(module, mesh=everywhere)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
attach_update(optimizer, model)  # after each step: one all-reduce for the scales of all weights

for step in range(10):
    generator = torch.Generator().manual_seed(step * mesh.size() + dist.get_rank())
    starts = torch.randint(len(TEXT) - 64, (8,), generator=generator)
    ids = torch.stack([TEXT[start : start + 64] for start in starts]).to(device)
    with comm_audit(mesh) as audit:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)

if dist.get_rank() == 0:
    print("Communication of the last step:", audit.table(), sep="\n")
dist.destroy_process_group()
