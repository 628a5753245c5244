#!/usr/bin/env bash
# Runs one of the three calls of a day on a machine with a GPU; docs/gpu.md says what each finds:
#   bash scripts/gpu_day.sh A FOLDER     is it right? 260 s
#   bash scripts/gpu_day.sh B FOLDER     how fast is it? 260 s
#   bash scripts/gpu_day.sh C FOLDER     does it train? 137 s
# Options of `python -m scripts.bench.gpu_day` may follow; their paths are from the root of the
# checkout. Results are in FOLDER/results.jsonl as soon as they are found, and FOLDER/log_A.tgz has
# what was printed. B and C can follow each other on a machine that takes long to start.
#   PY         an interpreter, used as it is (default: the environment of scripts/test.sh). It needs
#              torch 2.11 or later for CUDA, pytest and pytest-xdist; for the training tqdm and numpy
#   GPU_PACK   what scripts/prepare_gpu_day.sh made elsewhere (default: runs/gpu_day.tgz, if there)
# The exit status is 0 when all cases went well.
set -u -o pipefail
unset CDPATH
since="$(date +%s.%N)"
case "${1:-}" in A | B | C) ;; *) set -- ;; esac
if [ $# -lt 2 ]; then
    echo "usage: bash scripts/gpu_day.sh A|B|C FOLDER [OPTION...]" >&2
    exit 2
fi
call="$1"
mkdir -p "$2" || exit 1
results="$(cd "$2" && pwd)"
shift 2
given="${PY:-}"
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
pack="$(absolute "${GPU_PACK:-$REPO_ROOT/runs/gpu_day.tgz}")"
cd "$REPO_ROOT" || exit 1

if [ -n "$given" ]; then
    PY="$given"
    export PYTHONPATH="$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}"
else
    ensure_env "dev" || exit 1
fi
if [ -f "$pack" ]; then
    packed="$(mktemp -d)" && tar -xzf "$pack" -C "$packed" || exit 1
    export PYTHONPATH="$packed/site${PYTHONPATH:+:$PYTHONPATH}"
    FP8_DIST_COMMIT="$(cat "$packed/commit")"
    export FP8_DIST_COMMIT
fi
"$PY" -c '
import sys, torch
if not torch.cuda.is_available():
    found = f"torch {torch.__version__} finds no CUDA device: install torch for CUDA into this"
    sys.exit(f"{found} environment, or set PY=... to an interpreter that has it")
' || exit 1
export PYTHONUNBUFFERED=1
exec "$PY" -m scripts.bench.gpu_day "$call" "$results" --since "$since" "$@"
