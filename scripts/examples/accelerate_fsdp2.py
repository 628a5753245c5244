"""A transformers model with accelerate's FSDP2, which gathers its weights in float8.

accelerate launch --config_file scripts/examples/accelerate_fsdp2.yaml \
    scripts/examples/accelerate_fsdp2.py

Writes a checkpoint to runs/accelerate, which plain transformers can load. Needs the extra hf.

accelerate shards models only on GPUs. On CPUs this command trains with DDP instead:

ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 scripts/examples/accelerate_fsdp2.py
"""

import argparse
import inspect
import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
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

accelerator = Accelerator()
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if accelerator.num_processes != ranks:
    raise RuntimeError(
        f"{ranks} processes were started, but accelerate uses {accelerator.num_processes}: each "
        "would train a model of its own. On CPUs, start them with ACCELERATE_USE_CPU=true torchrun"
    )
torch.manual_seed(0)
model = LlamaForCausalLM(CONFIG)
# First float8, then the optimizer, then accelerate, which shards.
config = Float8LinearConfig(enable_fsdp_float8_all_gather="auto")
convert_to_float8_training(model, config=config, module_filter_fn=skip_head(model))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
starts = torch.randint(len(TEXT) - 64, (160,))
batches = DataLoader([TEXT[start : start + 64] for start in starts], batch_size=8)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
attach_update(optimizer, model)  # after each step: one all-reduce for the scales of all weights

for step, ids in enumerate(batches):
    with comm_audit() as audit:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"step {step} loss {loss.item():.3f}", flush=True)

state = accelerator.get_state_dict(model)  # on all ranks; whole on the main process
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained("runs/accelerate", state_dict=state)
    print("Communication of the last step:", audit.table(), sep="\n")
accelerator.end_training()
