#!/usr/bin/env bash
# Makes runs/gpu_day.tgz on a machine without a GPU, for scripts/gpu_day.sh on a borrowed one: Triton
# kernels and their launchers compiled for a Hopper, torchao, and the id of this commit.
#   bash scripts/prepare_gpu_day.sh
# The kernels are found there if the machine has the same release of Triton for the same Python, here
# that of torch 2.11 (Triton 3.6.0) and Python 3.12: FP8_DIST_TORCH and PYTHON name others.
set -eu -o pipefail
unset CDPATH
PYTHON="${PYTHON:-python3.12}"
: "${FP8_DIST_TORCH:=2.11.0}"
export FP8_DIST_TORCH
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
FP8_DIST_VENV="$FP8_DIST_VENV-gpu-day"
cd "$REPO_ROOT"
ensure_env "bench"

rm -rf "$GPU_PACKED"
mkdir -p "$GPU_PACKED/site" runs
git describe --always --dirty --abbrev=12 > "$GPU_PACKED/commit"
library_sum > "$GPU_PACKED/library_sum"
TRITON_CACHE_DIR="$GPU_PACKED/triton" "$PY" -m scripts.bench.gpu_ahead
pip_install --no-deps --target "$GPU_PACKED/site" torchao
# Launches need a kernel's machine code and its description alone; torchao has tests named "test".
find "$GPU_PACKED/triton" -type f ! -name '*.cubin' ! -name '*.json' ! -name '*.so' -delete
rm -rf "$GPU_PACKED/site/test"
find "$GPU_PACKED/site" -name __pycache__ -prune -exec rm -rf {} +
tar -czf runs/gpu_day.tgz -C "$GPU_PACKED" .
ls -l runs/gpu_day.tgz
