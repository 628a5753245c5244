#!/usr/bin/env bash
# Runs the tests of the plug-in for torchtitan, in an environment of their own:
#   bash scripts/test_torchtitan.sh             with the newest release of torch
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
# (Not constraints.txt: torchtitan asks for older releases of what it pins.)
"$PY" -P -m pip install --quiet --disable-pip-version-check setuptools || exit 1
"$PY" -P -m pip install --quiet --disable-pip-version-check --no-build-isolation \
    "torch${FP8_DIST_TORCH:+==$FP8_DIST_TORCH}" expecttest hypothesis numpy packaging pytest \
    -e "$REPO_ROOT[torchtitan]" || exit 1

export OMP_NUM_THREADS=1
exec "$PY" -m pytest -q tests/integrations/torchtitan "$@"
