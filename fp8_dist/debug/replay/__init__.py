"""A command that replays a recording: ``python -m fp8_dist.debug.replay FOLDER``.

FOLDER is the folder that was passed to ``fp8_dist.debug.record``, one of the recordings in it, or
the folder of a run, as for ``python -m fp8_dist.report``. The command joins the parts of all ranks,
and casts each operand again on one CPU. The float8 copies of each rank, and the operands that
arrived for each GEMM, must have the same bits. It also repeats the GEMMs, and compares the results.
Then it prints the first error, with its element and rank. The exit status is 0 if nothing is wrong
or unusual, 1 if something is, and 2 if the folder can't be replayed.
"""

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv``, by default the process's arguments; return the exit status."""
    parser = argparse.ArgumentParser("python -m fp8_dist.debug.replay", allow_abbrev=False)
    parser.description = "Replays a recording of fp8_dist.debug.record on one CPU."
    kinds = "a recording, or the folder of a run or of recordings: the first one is shown"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=kinds)
    args = parser.parse_args(argv)
    printing = import_module(f"{__name__}.printing")
    try:
        return 1 if printing.show(args.folder) else 0
    except (OSError, ValueError) as error:
        parser.error(str(error))
