"""A loop of your own with FSDP2 and a transformers model: its weights are gathered in float8.

torchrun --nproc-per-node 2 scripts/examples/transformers_fsdp2.py

It writes a checkpoint that plain transformers loads to runs/transformers_fsdp2. Needs the extra hf.
"""

import argparse
import inspect

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from fp8_dist import Float8LinearConfig, attach_update, convert_to_float8_training, skip_head
from fp8_dist.debug import comm_audit

TEXT = torch.tensor(list(inspect.getsource(argparse).encode()))
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
)

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
torch.manual_seed(0)  # the same weights on all ranks; or LlamaForCausalLM.from_pretrained(...)
model = LlamaForCausalLM(CONFIG).to(device)

# First float8, then FSDP2, then the optimizer.
config = Float8LinearConfig(enable_fsdp_float8_all_gather="auto")
convert_to_float8_training(model, config=config, module_filter_fn=skip_head(model))
for module in (*model.model.layers, model):
    fully_shard(module, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
attach_update(optimizer, model)  # after each step: one all-reduce for the scales of all weights

for step in range(20):
    generator = torch.Generator().manual_seed(step * mesh.size() + mesh.get_rank())
    starts = torch.randint(len(TEXT) - 64, (8,), generator=generator)
    ids = torch.stack([TEXT[start : start + 64] for start in starts]).to(device)
    with comm_audit(mesh) as audit:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if mesh.get_rank() == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)

# All ranks gather the weights, one writes them.
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(model, options=options)
if mesh.get_rank() == 0:
    model.save_pretrained("runs/transformers_fsdp2", state_dict=state)
    print("Communication of the last step:", audit.table(), sep="\n")
dist.destroy_process_group()
