#!/usr/bin/env bash
# Runs the shorter tests (all but those marked "full"), and the one that compiles every Triton kernel
# and fails where one spills registers, with several releases of torch and the Triton of each, every
# release in an environment of its own:
#   bash scripts/test_releases.sh                   the oldest that is supported, CI's, the newest
#   bash scripts/test_releases.sh 2.14.1 newest     these
#   bash scripts/test_releases.sh 2.11.0 -- tests/unit -k fp8   what test.sh takes, after the --
# Every release is tried, also after a failed one; a table of pytest's last lines ends the run, and
# the exit status is 0 if all passed. The environments (.venv-torch-<release>, or
# $FP8_DIST_VENV-torch-<release>) are kept and used again; what they have in other releases than
# constraints.txt is printed when they are made. Releases other than CI's may come with their GPU
# libraries: 6 GB each.
set -u
unset CDPATH
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$REPO_ROOT" || exit 1

oldest="$(sed -n 's/^dependencies = .*torch>=\([0-9.]*\).*/\1.0/p' pyproject.toml)"
pinned="$(sed -n 's/^torch==//p' constraints.txt)"

releases=()
while [ "$#" -gt 0 ] && [ "$1" != "--" ]; do
    releases+=("$1")
    shift
done
[ "${1:-}" = "--" ] && shift
[ "$#" -eq 0 ] && set -- -m "not full or compiles" -n 2 --dist loadfile --no-loadscope-reorder
[ "${#releases[@]}" -eq 0 ] && releases=("$oldest" "$pinned" newest)

newest() {
    "$PYTHON" -m pip index versions torch --disable-pip-version-check 2> /dev/null |
        sed -n '1s/.*(\(.*\))/\1/p'
}

kept="$FP8_DIST_VENV"
lines=()
status=0
for release in "${releases[@]}"; do
    if [ "$release" = newest ]; then
        release="$(newest)"
        if [ -z "$release" ]; then
            echo "pip doesn't say which releases of torch there are" >&2
            exit 1
        fi
    fi
    echo "== torch $release"
    log="$(mktemp)"
    FP8_DIST_VENV="$kept-torch-$release" FP8_DIST_TORCH="$release" \
        bash scripts/test.sh "$@" 2>&1 | tee "$log"
    [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
    # pytest's last line, or that of what kept it from running.
    line="$(grep -E '(passed|failed|error).* in [0-9.]+s' "$log" | tail -1)"
    lines+=("$(printf '%-10s %s' "$release" "${line:-$(tail -1 "$log")}")")
    rm -f "$log"
done
printf '\n== torch     tests\n'
printf '   %s\n' "${lines[@]}"
exit "$status"
