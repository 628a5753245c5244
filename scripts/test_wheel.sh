#!/usr/bin/env bash
# Builds the sdist and the wheel with `python -m build`. With each release of torch, installs both,
# one after the other, in a fresh environment outside of the checkout, and runs the README's first
# example there on two ranks:
#   bash scripts/test_wheel.sh                  the oldest release that is supported, and the newest
#   bash scripts/test_wheel.sh 2.13.0           this one
# Releases may come with their GPU libraries: 6 GB each. The environments are removed.
set -eu
unset CDPATH
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

oldest="$(sed -n 's/^dependencies = .*torch>=\([0-9.]*\).*/\1.0/p' "$REPO_ROOT/pyproject.toml")"
[ "$#" -eq 0 ] && set -- "$oldest" newest

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
export PIP_QUIET=1 PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1

"$PYTHON" -m venv "$folder/build"
"$folder/build/bin/python" -m pip install build
"$folder/build/bin/python" -m build --outdir "$folder/dist" "$REPO_ROOT" > "$folder/build.log" ||
    { cat "$folder/build.log" >&2; exit 1; }
ls "$folder/dist"

cat > "$folder/program.py" << 'STAND_INS'
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


torch.manual_seed(0)
model, losses = Model(), []
batches = [(torch.randn(32, 64), torch.zeros(32, 64))] * 10


def loss_of(output, target):
    losses.append(nn.functional.mse_loss(output, target))
    return losses[-1]


STAND_INS
sed -n '/^```python$/,/^```$/{/^```/d;p;/^```$/q}' "$REPO_ROOT/README.md" |
    sed '/^from torch.distributed.device_mesh/,$d' >> "$folder/program.py"
cat >> "$folder/program.py" << 'CHECKS'
import os
import sys

import fp8_dist

assert losses[-1] < 0.9 * losses[0], losses
assert len(fp8_dist.float8_layers(model)) == 2
if torch.distributed.get_rank() == 0:
    print(f"torch {torch.__version__}: loss {losses[0]:.3f} to {losses[-1]:.3f}", fp8_dist.__file__)
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo may abort at the end of a program (docs/support.md)
CHECKS

cd "$folder"
for release in "$@"; do
    "$PYTHON" -m venv --clear env
    torch="torch==$release"
    [ "$release" = newest ] && torch=torch
    env/bin/python -m pip install "$torch"
    for archive in dist/*; do
        env/bin/python -m pip install --force-reinstall --no-deps "$archive"
        echo "== $archive"
        env/bin/python -P -m torch.distributed.run --nproc-per-node 2 program.py
        env/bin/python -P -m fp8_dist.doctor > doctor.log || { cat doctor.log >&2; exit 1; }
    done
    env/bin/python -m pip check
done
