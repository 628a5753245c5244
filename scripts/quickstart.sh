#!/usr/bin/env bash
# Trains a small Llama twice on 4 ranks (FSDP2 x TP with sequence parallelism), in bf16 and with
# float8 GEMMs and communication, and compares the two runs.
#
#   bash scripts/quickstart.sh [options of scripts/train.py, given to both runs]
#
# Creates the environment on first use (see scripts/env.sh). Results: runs/quickstart.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ensure_env train

cd "$REPO_ROOT"
out=runs/quickstart
# Four ranks share the machine: more threads per rank would only get in each other's way.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

for recipe in bf16 tensorwise; do
    echo "== training: $recipe, dp 2 x tp 2"
    "$PY" -m torch.distributed.run --standalone --nproc-per-node 4 scripts/train.py \
        --dp 2 --tp 2 --seed 0 "$@" --recipe "$recipe" --out "$out/$recipe"
done

echo "== comparing"
# The verdict decides the exit status only for the run it is made for: other options may train
# too shortly to learn anything.
strict=""
if [ "$#" -eq 0 ]; then
    strict=--assert
fi
"$PY" scripts/compare.py "$out/bf16" "$out/tensorwise" --out "$out" $strict
