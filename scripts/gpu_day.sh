#!/usr/bin/env bash
# What to run on a machine with a GPU: the tests that need one, then the benchmark. Results go to
# FOLDER:
#   bash scripts/gpu_day.sh FOLDER              all of it; under ten minutes besides the tests
#   bash scripts/gpu_day.sh FOLDER ARGS...      ARGS go to python -m scripts.bench.gpu
# FOLDER/tests.txt and FOLDER/kernels.txt have what pytest prints, FOLDER/benchmark.md the tables.
# The environment is that of scripts/test.sh. With PY=python in the environment, that interpreter is
# used as it is: it needs torch 2.11 or later for CUDA, pytest, expecttest, hypothesis and tqdm;
# torchao if it is to be compared.
# The benchmark runs after failed tests too; the exit status is 0 when both went well.
set -u -o pipefail
unset CDPATH
if [ $# -eq 0 ]; then
    echo "usage: bash scripts/gpu_day.sh FOLDER [ARGS...]" >&2
    exit 2
fi
mkdir -p "$1" || exit 1
results="$(cd "$1" && pwd)"
shift
given="${PY:-}"
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$REPO_ROOT" || exit 1

if [ -n "$given" ]; then
    PY="$given"
    export PYTHONPATH="$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}"
else
    ensure_env "dev" || exit 1
fi

if ! "$PY" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    "$PY" -c 'import torch; print(f"torch {torch.__version__} finds no CUDA device", end="")' >&2
    echo ": install torch for CUDA into this environment, or set PY=... to an interpreter that has" \
        "it" >&2
    exit 1
fi

status=0
"$PY" -m pytest -q -m "gpu or gpus" tests | tee "$results/tests.txt" || status=1
# Kernels that are tested in Triton's interpreter elsewhere are compiled here.
"$PY" -m pytest -q tests/unit/kernels/test_triton_{kernels,blocks,encoding,rounding}.py |
    tee "$results/kernels.txt" || status=1
"$PY" -m scripts.bench.gpu "$@" | tee "$results/benchmark.md" || status=1
exit "$status"
