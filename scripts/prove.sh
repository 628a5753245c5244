#!/usr/bin/env bash
# Proves the library on all GPUs of this machine, or on 4 CPU ranks where there is none:
#   bash scripts/prove.sh [options of scripts.prove; --help lists them]
# Creates the environment on first use (see scripts/env.sh). Results: runs/prove.
#   RANKS   the number of ranks (default: one per GPU)
#   PY      an interpreter, used as it is. It needs torch 2.11 or later, numpy, psutil and tqdm;
#           torchao for its times; for the stage "tests" pytest, pytest-xdist, expecttest, hypothesis
set -euo pipefail
unset CDPATH
given="${PY:-}"
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$REPO_ROOT"
if [ -n "$given" ]; then
    PY="$given"
else
    ensure_env "bench,test"
fi
export PYTHONPATH="$REPO_ROOT${PYTHONPATH:+:$PYTHONPATH}"
ranks="${RANKS:-$("$PY" -c 'import torch; print(torch.cuda.device_count() or 4)')}"
# torchrun alone would end with a traceback, not with the verdict.
torchrun='import sys, torch.distributed.run as run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
try: run.main()
except ChildFailedError as error:
    told = error.get_first_failure()[1].message
    sys.exit(told["message"] if isinstance(told, dict) else told)'
exec "$PY" -c "$torchrun" --standalone --nproc-per-node "$ranks" -m scripts.prove "$@"
