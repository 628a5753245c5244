#!/usr/bin/env bash
# Trains a small Llama three times on 4 ranks (FSDP2 x TP with sequence parallelism): in bf16, in
# float8, and with gradients and sums in float8 too. Compares the runs.
#
#   bash scripts/quickstart.sh [options of scripts.train.train, for all runs; --help lists them]
#
# Creates the environment on first use (see scripts/env.sh). Results: runs/quickstart in the
# repository, or --out DIR. Relative paths mean the current folder.
set -euo pipefail
unset CDPATH
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ensure_env train
export PYTHONPATH="$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PY" -P -m scripts.train.quickstart "$@"
