#!/usr/bin/env bash
# Makes runs/gpu_day.tgz for scripts/gpu_day.sh on a borrowed machine without a network: torchao, and
# the id of this commit.
#   bash scripts/prepare_gpu_day.sh
set -eu -o pipefail
unset CDPATH
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$REPO_ROOT"
ensure_env "bench"

packed="$(mktemp -d)"
trap 'rm -rf "$packed"' EXIT
mkdir -p "$packed/site" runs
git describe --always --dirty --abbrev=12 > "$packed/commit"
pip_install --no-deps --target "$packed/site" torchao
rm -rf "$packed/site/test" # torchao has tests of this name
find "$packed/site" -name __pycache__ -prune -exec rm -rf {} +
tar -czf runs/gpu_day.tgz -C "$packed" .
ls -l runs/gpu_day.tgz
