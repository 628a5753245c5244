#!/usr/bin/env bash
# torchtitan's debug Llama with float8 gathers in FSDP2 and tensor parallelism, on 8 GPUs.
# Run it in a checkout of torchtitan 0.3.0, whose tokenizer and text it reads:
#   bash .../fp8_dist/scripts/examples/torchtitan.sh
torchrun --nproc-per-node 8 -m torchtitan.train \
    --module fp8_dist.integrations.torchtitan --config llama3_debugmodel_tensorwise \
    --parallelism.tensor_parallel_degree 2
