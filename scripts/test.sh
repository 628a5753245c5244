#!/usr/bin/env bash
# Creates the environment (or reuses it) and runs every check that this machine can run:
#   bash scripts/test.sh                  linters, type checker, import contracts, and all tests but
#                                         those marked "full"
#   bash scripts/test.sh --all            these too, and those of the plug-in for torchtitan
#   bash scripts/test.sh ARGS...          only pytest, with these arguments: tests/compile -k bias
#   bash scripts/test.sh --fast ARGS...   only pytest on tests/unit: no process groups, no
#                                         torch.compile; 1 to 3 minutes on two idle cores
#   bash scripts/test.sh --kernel NAME    only what tests the Triton kernels of an operator, such as
#                                         cast_blocks: sweep, special values, compilation
#   bash scripts/test.sh --help           this text
# The first call also installs the environment, which takes one to four minutes more.
# Every stage runs, also after a failed one; the exit status is 0 when all of them passed. Arguments
# that select no test at all are a failure (pytest's status 5), so that a misspelt name is noticed.
set -u
unset CDPATH
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$REPO_ROOT" || exit 1

# check_compiler: torch.compile's default backend compiles C++ that includes Python.h. What is
# missing is said now, not after the installation and in the middle of the tests.
check_compiler() {
    if ! command -v "${CXX:-g++}" > /dev/null; then
        echo "the tests of torch.compile need a C++ compiler, and '${CXX:-g++}' is not found: set" \
            "CXX=..., or on Debian and Ubuntu: apt install g++" >&2
        return 1
    fi
    local python include
    python="$FP8_DIST_VENV/bin/python"
    [ -x "$python" ] || python="$PYTHON"
    # Without an answer there is no such Python, which is ensure_env's to say.
    include="$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2> /dev/null)"
    if [ -n "$include" ] && [ ! -f "$include/Python.h" ]; then
        echo "the tests of torch.compile need Python's headers, and there is no $include/Python.h:" \
            "on Debian and Ubuntu: apt install python3-dev" >&2
        return 1
    fi
}

# kernel_tests NAME: prints the tests of an operator's kernels, one per line.
kernel_tests() {
    local names file
    names="$(sed -nE -e '/^@?launch\.fused\($/{n;s/^ *([a-z0-9_]*\.)?([a-z0-9_]+),.*/\2/p;}' \
        -e 's/^@?launch\.fused\(([a-z0-9_]*\.)?([a-z0-9_]+)[,)].*/\2/p' \
        fp8_dist/kernels/cuda/triton/*.py)"
    if ! grep -qx -- "$1" <<< "$names"; then
        echo "--kernel takes an operator with Triton kernels:" $names >&2
        return 2
    fi
    echo "tests/unit/kernels/test_triton_compiles.py::test_kernels_keep_their_bounds"
    for file in $(grep -lw -- "$1" tests/unit/kernels/test_triton_*.py); do
        case "$file" in *_compiles.py) ;; *) echo "$file" ;; esac
    done
}

all=""
case "${1:-}" in
    --help)
        sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --kernel)
        chosen="$(kernel_tests "${2:-}")" || exit
        export KERNEL="$2" # of which tests/support/compile_kernels.py compiles kernels
        shift 2
        # shellcheck disable=SC2086
        set -- $chosen -n 2 "$@"
        ;;
    --fast)
        shift
        set -- tests/unit -m "not full" -n 2 --dist loadfile "$@"
        ;;
    --all)
        shift
        all=yes
        ;;
esac
[[ "${1:-}" == tests/unit* ]] || check_compiler || exit 1
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

everything="$#"
if [ "$everything" -eq 0 ]; then
    stage "ruff check" "$PY" -m ruff check .
    stage "ruff format" "$PY" -m ruff format --check .
    stage "mypy" "$PY" -m mypy
    stage "import contracts" "$PY" -c 'from importlinter.cli import lint_imports_command as run; run()'
    # Two processes with a pool of ranks each: many tests keep one core busy. Files stay whole, as
    # tests of one share what they start.
    set -- -n 2 --dist loadfile --no-loadscope-reorder --durations=25
    [ -n "$all" ] || set -- "$@" -m "not full"
fi
stage "pytest" "$PY" -m pytest "$@"
if [ -n "$all" ] && [ "$everything" -eq 0 ]; then
    stage "torchtitan" bash scripts/test_torchtitan.sh
fi

if [ "${#failed[@]}" -gt 0 ]; then
    printf '== failed: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
    exit 1
fi
echo "== all stages passed"
