#!/usr/bin/env bash
# Runs the tests of the plug-in for torchtitan, in an environment of their own:
#   bash scripts/test_torchtitan.sh             with the release of torch in constraints.txt
#   bash scripts/test_torchtitan.sh ARGS...     and these arguments for pytest
# FP8_DIST_TORCH is another release (spmd_types needs 2.15), FP8_DIST_VENV as in env.sh.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$REPO_ROOT" || exit 1

FP8_DIST_VENV="$FP8_DIST_VENV-torchtitan"
PY="$FP8_DIST_VENV/bin/python"
if ! "$PY" -P -m pip --version > /dev/null 2>&1; then
    create_env || exit 1
fi
# Of constraints.txt these alone: torchtitan asks for older releases of what else it pins. (It imports
# triton, which torch's builds for CPUs don't bring.)
PINNED="$(constraints | grep -E '^(torch|triton)==')"
"$PY" -P -m pip install --quiet --disable-pip-version-check "setuptools>=77" || exit 1
"$PY" -P -m pip install --quiet --disable-pip-version-check --no-build-isolation \
    $PINNED expecttest hypothesis numpy packaging pytest \
    -e "$REPO_ROOT[torchtitan]" || exit 1

export OMP_NUM_THREADS=1
exec "$PY" -m pytest -q tests/integrations/torchtitan "$@"
