#!/usr/bin/env bash
# Runs the tests of the plug-in for torchtitan, in an environment of their own:
#   bash scripts/test_torchtitan.sh             with the release of torch in docs/torchtitan.md
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
source "$FP8_DIST_VENV/bin/activate"
export PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The page's commands, so that they are known to work.
installs="$(sed -n '/^python3 -m venv/,/^```/{/^pip install/p}' docs/torchtitan.md)"
if [ -n "${FP8_DIST_TORCH:-}" ]; then
    installs="$(sed "s/ torch==[^ ]*/ torch==$FP8_DIST_TORCH/; s/ triton==[^ ]*/ triton/" \
        <<< "$installs")"
fi
bash -e -c "$installs" || exit 1
pip install expecttest hypothesis numpy packaging psutil pytest pytest-xdist || exit 1

export OMP_NUM_THREADS=1
exec "$PY" -m pytest -q -n 2 --dist loadfile tests/integrations/torchtitan "$@"
