#!/usr/bin/env bash
# Creates the environment (or reuses it) and runs every check that this machine can run:
#   bash scripts/test.sh                  linters, type checker, import contracts, all tests
#   bash scripts/test.sh ARGS...          only pytest, with these arguments: tests/test_debug.py -k mixed
# Every stage runs, also after a failed one; the exit status is 0 when all of them passed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
ensure_env "dev" || exit 1

# Tests compare bits and start up to eight ranks: one thread each.
export OMP_NUM_THREADS=1

failed=()

stage() {
    local name="$1"
    shift
    echo "== $name"
    "$@" || failed+=("$name")
}

if [ "$#" -eq 0 ]; then
    stage "ruff check" "$PY" -m ruff check .
    stage "ruff format" "$PY" -m ruff format --check .
    stage "mypy" "$PY" -m mypy
    stage "import contracts" "$PY" -c 'from importlinter.cli import lint_imports_command as run; run()'
fi
stage "pytest" "$PY" -m pytest "$@"

if [ "${#failed[@]}" -gt 0 ]; then
    printf '== failed: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
    exit 1
fi
echo "== all stages passed"
