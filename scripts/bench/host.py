"""Time the host in whole FSDP2 steps, compared with bf16, on a faked CUDA device.

    python -m scripts.bench.host
    python -m scripts.bench.host --candidates tensorwise tensorwise:c --blocks 1 --ranks 8
    python -m scripts.bench.host --experts 8 --candidates rowwise_folded rowwise_folded:c

FSDP2, autograd, the optimizer and Triton's launches run as on a GPU, but kernels and collectives do
nothing (tests/support/fake_cuda). So the CPU time of a step is what the host needs for it, without
the CUDA driver and NCCL. "NAME:c" compiles each block of the candidate.

"x bf16" compares with bf16 that is compiled, or not, like the candidate. The parts are the update
of scales, forward and backward of all micro-batches, and AdamW (foreach). The time per linear layer
is that of the step, divided by the number of linear layers in blocks. "guards" is the number of
conditions that dynamo checks whenever it calls a compiled block.

With `--experts` the feed-forward of each block is a router and experts, of which each token uses
two. Their weights are three grouped linear layers, which bf16 multiplies with `F.grouped_mm`, after
the same routing as in float8. ":c" then compiles attention, router and experts, one by one, because
FSDP2's hooks would break the graph of a block. torchao.float8 does not convert experts, and not
every recipe is for experts; these candidates are refused.

The command needs a C++ compiler and a build of torch for CPUs.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from fp8_dist.recipe_names import ExpertsRecipe
from scripts.common.options import positive
from scripts.common.recipes import BF16, OURS, PACKED, PEERS
from scripts.common.report import make_parser, parse, run

COMPILED = ":c"
ROOT = Path(__file__).resolve().parents[2]
NAMES = (BF16, *OURS, *PACKED, *PEERS)
FOR_EXPERTS = (BF16, *get_args(ExpertsRecipe), *PACKED)
MULTIPLE = 128  # the largest block of a recipe


def both(names: Sequence[str]) -> list[str]:
    """Candidates by name, as they are and compiled."""
    return [name + kind for name in names for kind in ("", COMPILED)]


def dim_type(text: str) -> int:
    """Parse the width of a model that every recipe converts."""
    dim = positive(text)
    if dim % MULTIPLE:
        raise argparse.ArgumentTypeError(f"{dim} is not a multiple of {MULTIPLE}")
    return dim


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = make_parser("scripts.bench.host", __doc__)
    parser.set_defaults(clock="cpu")
    add = parser.add_argument
    names = f"of {', '.join(NAMES)}, or one of them with {COMPILED}; default: all, in both ways"
    add("--candidates", nargs="+", choices=both(NAMES), metavar="NAME", help=names)
    add("--blocks", type=positive, default=3, help="of the model; %(default)s")
    add("--dim", type=dim_type, default=2048, help="of the model; %(default)s")
    few = f"in each block, for {', '.join(FOR_EXPERTS)}; default: dense blocks"
    add("--experts", type=positive, metavar="N", help=few)
    add("--ranks", type=positive, default=1, help="of FSDP2; only one runs; %(default)s")
    add("--micro-batches", type=positive, default=1, help="of each step; %(default)s")
    add("--repeat", type=positive, default=30, help="turns of each candidate; %(default)s")
    args = parse(parser, argv)
    known = both(NAMES if args.experts is None else FOR_EXPERTS)
    args.candidates = args.candidates or known
    if unknown := [name for name in args.candidates if name not in known]:
        parser.error(
            f"--candidates {', '.join(unknown)} is not for experts (torchao.float8 converts none): "
            f"use {', '.join(FOR_EXPERTS)}, or one of them with {COMPILED}"
        )
    return args


def measure() -> int:
    """Time the steps; called in a process with the device."""
    return run("scripts.bench.host_run", parse_args(None))


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parse_args(argv)
    code = "from scripts.bench import host; raise SystemExit(host.measure())"
    command = [sys.executable, "-m", "fake_cuda.rehearsal", "-c", code, *argv]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests/support")))
    return subprocess.call(command, env=os.environ | {"PYTHONPATH": path})


if __name__ == "__main__":
    raise SystemExit(main())
