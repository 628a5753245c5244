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
from typing import TYPE_CHECKING

from fp8_dist.imports import export

if TYPE_CHECKING:
    from fp8_dist.debug.replay.printing import *

export(__name__, "fp8_dist.debug.replay.printing")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv``, by default the process's arguments; return the exit status."""
    parser = argparse.ArgumentParser("python -m fp8_dist.debug.replay", allow_abbrev=False)
    parser.description = "Replays a recording of fp8_dist.debug.record on one CPU."
    kinds = "a recording, or the folder of a run or of recordings: the first one is shown"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=kinds)
    args = parser.parse_args(argv)
    printing = import_module(f"{__name__}.printing")
    recordings = printing.recordings_in(args.folder)
    complete = [path for path in recordings if not path.suffix]  # not .incomplete
    folder, *others = complete or recordings or [args.folder]
    try:
        replay = printing.Replay(folder)
        print(folder, *others, sep="\nnot shown: ")
        text = printing.page(replay)
        print("".join(c if c.isprintable() or c == "\n" else "?" for c in text))  # no control codes
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 1 if replay.findings else 0
