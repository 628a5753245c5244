#!/usr/bin/env bash
# What to run on a machine with a GPU, in parts that each end by themselves in under ten minutes:
#   bash scripts/gpu_day.sh FOLDER              all of them
#   bash scripts/gpu_day.sh FOLDER PART...      some
# Each part writes FOLDER/PART.txt as it goes, and FOLDER/summary.txt gets a line when it ends.
#   probe      releases; rates of copies and of GEMMs
#   tests      casts and GEMMs against the CPU's, in parallel processes
#   kernels    GB/s of each kernel with its choice of block sizes
#   layers     layers in each recipe beside bf16 and torchao, on the device's clock and the host's
#   training   tests of training, graphs and ranks, then the time of a training step
#   triton     the Triton kernels' unit tests, then a trace of a layer's step (FOLDER/trace_tensorwise.json)
# A part is stopped after FP8_DIST_PART_SECONDS (default: 570), and what it found is kept.
# The environment is that of scripts/test.sh. With PY=python in the environment, that interpreter is
# used as it is. It needs torch 2.11 or later for CUDA; torchao if it is to be compared; for tests
# pytest, hypothesis and psutil.
# The exit status is 0 when all parts went well.
set -u -o pipefail
unset CDPATH
parts=(probe tests kernels layers training triton)
usage() {
    echo "usage: bash scripts/gpu_day.sh FOLDER [PART...], with parts of: ${parts[*]}" >&2
    exit 2
}
[ $# -gt 0 ] || usage
mkdir -p "$1" || exit 1
results="$(cd "$1" && pwd)"
shift
for part in "$@"; do
    case " ${parts[*]} " in *" $part "*) ;; *) usage ;; esac
done
[ $# -eq 0 ] || parts=("$@")
limit="${FP8_DIST_PART_SECONDS:-570}"
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

export PY results PYTHONUNBUFFERED=1

# in_parallel ARGS: the tests that pytest selects with these arguments, some in each of several
# processes. What a process prints is shown when it ends, or is stopped.
in_parallel() {
    local workers tests
    workers="$(nproc)"
    [ "$workers" -le 12 ] || workers=12
    tests="$("$PY" -m pytest --collect-only -q "$@" | grep '::')" || { echo "no tests"; return 1; }
    echo "$(wc -l <<< "$tests") tests in $workers processes"
    # --foreground: they stay in the group of processes that ends at the part's limit.
    xargs -d '\n' -P "$workers" -n 16 bash -c '
        shown="$(timeout --foreground 240 "$PY" -m pytest -q --tb=short -o faulthandler_timeout=120 "$@" 2>&1)"
        status=$?
        printf "%s\n" "$shown"
        [ "$status" -ne 124 ] || echo "stopped after 240 s: $*"
        exit "$((status > 0))"' _ <<< "$tests"
}
export -f in_parallel

# commands PART: what it runs.
commands() {
    case "$1" in
        probe) echo '"$PY" -m scripts.bench.gpu_probe' ;;
        tests) echo 'in_parallel tests/gpu/test_gpu_gemms.py tests/gpu/test_gpu_casts.py' ;;
        kernels) echo '"$PY" -m scripts.bench.gpu_kernels' ;;
        layers) echo '"$PY" -m scripts.bench.gpu --part layers --budget-minutes 8' ;;
        training)
            echo 'in_parallel tests/gpu/test_gpu_training.py tests/gpu/test_gpu_graphs.py \
                tests/gpu/test_gpu_ranks.py tests/gpu/test_gpus.py; status=$?
            "$PY" -m scripts.bench.gpu --part step --budget-minutes 4 && exit "$status"'
            ;;
        triton)
            echo 'in_parallel tests/unit/kernels/test_triton_{kernels,blocks,encoding,rounding}.py
            status=$?; "$PY" -m scripts.bench.gpu_kernels --trace "$results" --recipes tensorwise && exit "$status"'
            ;;
    esac
}

status=0
for part in "${parts[@]}"; do
    begin=$SECONDS
    timeout --kill-after=10 "$limit" bash -c "$(commands "$part")" > "$results/$part.txt" 2>&1
    case $? in
        0) outcome="went well" ;;
        124 | 137) outcome="stopped at its limit" ;;
        *) outcome="failed" ;;
    esac
    [ "$outcome" = "went well" ] || status=1
    echo "$part: $outcome after $((SECONDS - begin)) s, $part.txt" | tee -a "$results/summary.txt"
done
exit "$status"
