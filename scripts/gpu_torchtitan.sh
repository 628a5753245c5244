#!/usr/bin/env bash
# What to run in a checkout of torchtitan 0.3.0, whose tokenizer and text it reads, on a machine with
# GPUs:
#   bash .../fp8_dist/scripts/gpu_torchtitan.sh                    the debug Llama
#   bash .../fp8_dist/scripts/gpu_torchtitan.sh CONFIG ARGS...     a config of torchtitan's llama3, and
#                                                                  options for each run
# It trains on all GPUs, first in bf16 and then in each recipe, with both back ends: with FSDP2, and
# with tensor parallelism of 2 besides where the number of GPUs is even. It prints the last metrics of
# each run, whose log is in outputs/fp8_dist. The exit status is 0 when all runs went well.
# PY is an interpreter (default: python3) that has torchtitan, fp8_dist, and torch for CUDA: 2.15 or
# later for the back end spmd_types.
set -u
PY="${PY:-python3}"
config="${1:-llama3_debugmodel}"
[ $# -gt 0 ] && shift

gpus="$("$PY" -c 'import torch; print(torch.cuda.device_count())')" || exit 1
if [ "$gpus" -eq 0 ]; then
    echo "torch finds no CUDA device; the tests on CPUs are bash scripts/test_torchtitan.sh" >&2
    exit 1
fi
if [ ! -d tests/assets/tokenizer ]; then
    echo "$PWD is no checkout of torchtitan: it has no tests/assets/tokenizer" >&2
    exit 1
fi

logs=outputs/fp8_dist
mkdir -p "$logs"
status=0

# train NAME MODULE CONFIG ARGS...
train() {
    local log="$logs/$1.log" module="$2" config="$3"
    shift 3
    if "$PY" -m torch.distributed.run --standalone --nproc-per-node "$gpus" -m torchtitan.train \
        --module "$module" --config "$config" --training.steps 20 "$@" > "$log" 2>&1; then
        echo "$log: $(grep -o 'step: .*' "$log" | tail -n 1)"
    else
        echo "$log: FAILED"
        status=1
    fi
}

degrees=1
[ $((gpus % 2)) -eq 0 ] && degrees="1 2"
for backend in spmd_types partial_dtensor; do
    for tp in $degrees; do
        options=(--parallelism.spmd_backend "$backend" --parallelism.tensor_parallel_degree "$tp")
        train "bf16-$backend-tp$tp" llama3 "$config" "${options[@]}" "$@"
        for recipe in tensorwise delayed rowwise_folded rowwise rowwise_with_gw_hp; do
            train "$recipe-$backend-tp$tp" fp8_dist.integrations.torchtitan "${config}_$recipe" \
                "${options[@]}" "$@"
        done
    done
done
exit "$status"
