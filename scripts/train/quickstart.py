"""Trains a small Llama in bf16 and in float8, from the same seed, and compares the two runs.

Takes the options of scripts.train.train, for both runs, with defaults of its own: four ranks on
this machine, FSDP2 (--dp 2) x tensor parallelism with sequence parallelism (--tp 2). --recipe is
the float8 recipe that is compared with bf16. --out (runs/quickstart in the repository) is the
folder of the comparison; each run has its own folder in it.
"""

import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from scripts.common.candidates import BF16
from scripts.common.ranks import LOOPBACK
from scripts.train.options import make_parser, parse_options

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = {"dp": 2, "tp": 2, "recipe": "tensorwise", "out": ROOT / "runs/quickstart"}


def parse_args(argv: list[str]) -> Namespace:
    """Checks the options once, before any rank starts; errors end the process with status 2."""
    parser = make_parser("quickstart.sh", __doc__)
    parser.set_defaults(**DEFAULTS)
    asked = parser.parse_args(argv)
    if asked.recipe == BF16:
        parser.error(
            f"--recipe {BF16} is what the float8 recipe is compared with: name a float8 one"
        )
    return parse_options(parser, argv, world_size=asked.dp * asked.tp)


def environment() -> dict[str, str]:
    """The environment of the ranks; what the user has set stays."""
    defaults = {
        # The ranks share the machine: more threads each would only get in each other's way.
        "OMP_NUM_THREADS": "1",
        # Otherwise gloo takes the address of the host's name, which may not be one it can reach.
        "GLOO_SOCKET_IFNAME": LOOPBACK,
    }
    return defaults | os.environ


def train_command(args: Namespace, argv: list[str], recipe: str) -> list[str]:
    """The command line that trains with `recipe` into its own folder."""
    # -P: what lies in the current folder must not hide a module of the library.
    launch = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    launch += ["--local-addr", "localhost", "--nproc-per-node", str(args.dp * args.tp)]
    mesh = ["--dp", str(args.dp), "--tp", str(args.tp)]
    # The last one of an option given twice counts.
    own = ["--recipe", recipe, "--out", str(args.out / recipe)]
    return [*launch, "-m", "scripts.train.train", *mesh, *argv, *own]


def run(command: list[str]) -> int:
    """Runs a command to its end, also when Ctrl-C ends it; returns its exit status."""
    with subprocess.Popen(command, env=environment()) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The command was told too: it needs a moment to end its ranks.
            process.wait()
            return 128 + signal.SIGINT


def main(argv: list[str]) -> int:
    """Entry point; returns the exit status."""
    args = parse_args(argv)
    for recipe in (BF16, args.recipe):
        print(f"== training: {recipe}, dp {args.dp} x tp {args.tp}", flush=True)
        status = run(train_command(args, argv, recipe))
        if status:
            print(f"quickstart.sh: training with {recipe} did not end well", file=sys.stderr)
            return status
    print("== comparing", flush=True)
    folders = [str(args.out / recipe) for recipe in (BF16, args.recipe)]
    command = [sys.executable, "-P", "-m", "scripts.train.compare", *folders]
    command += ["--out", str(args.out)]
    # The verdict decides the exit status only for the run it is made for: other options may train
    # too shortly to learn anything.
    if not argv:
        command.append("--assert")
    return run(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
