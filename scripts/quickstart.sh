#!/usr/bin/env bash
# Trains a small Llama twice on 4 ranks (FSDP2 x TP with sequence parallelism), in bf16 and with
# float8 GEMMs and communication, and compares the two runs.
#
#   bash scripts/quickstart.sh [options of scripts.train.train, given to both runs; --help lists them]
#
# Creates the environment on first use (see scripts/env.sh). Results: runs/quickstart in the
# repository, or --out DIR. Relative paths mean the current folder.
set -euo pipefail
unset CDPATH
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ensure_env train
export PYTHONPATH="$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PY" -P -m scripts.train.quickstart "$@"
