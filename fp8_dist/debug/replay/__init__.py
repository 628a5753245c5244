"""A command that replays a recording: ``python -m fp8_dist.debug.replay FOLDER``.

FOLDER is what ``fp8_dist.debug.record`` was given, one of the recordings in it, or the folder of a
run, as for ``python -m fp8_dist.report``. The command joins the parts of all ranks, casts each
operand again on one CPU, and compares, bit for bit, with what each rank had: the copies that it
cast, and the operands that arrived for each GEMM. It multiplies those again, and compares the
results. Then it prints the first thing that is wrong, with its element and rank. ``--plot FILE``
draws the histogram with matplotlib (the extra ``report``). The exit status is 0 if nothing is wrong
or unusual, 1 if something is, and 2 if the folder can't be replayed.
"""

import argparse
import re
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
    parser = argparse.ArgumentParser(
        prog="python -m fp8_dist.debug.replay",
        description="Replays a recording of fp8_dist.debug.record on one CPU.",
        allow_abbrev=False,
    )
    kinds = "a recording, or the folder of a run or of recordings: the first one is shown"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=kinds)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the histogram of the cast")
    args = parser.parse_args(argv)
    files = [path for depth in ("", "*/") for path in args.folder.glob(f"{depth}step*/rank*.pt")]
    several = {path.parent for path in files}
    several = {path for path in several if not path.suffix} or several  # else .incomplete
    in_order = sorted(several, key=lambda path: [*map(int, re.findall(r"\d+", path.name))])
    folder, *others = in_order or [args.folder]
    printing = import_module(f"{__name__}.printing")
    try:
        replay = printing.Replay(folder)
        print(folder, *others, sep="\nnot shown: ")
        text = printing.page(replay)
        print("".join(c if c.isprintable() or c == "\n" else "?" for c in text))  # no control codes
        casts = [each.cast for each in replay.findings if each.cast is not None] or replay.casts
        if args.plot is not None and casts:
            printing.draw(casts[0], args.plot)
    except ImportError:
        parser.error('--plot needs matplotlib: pip install "fp8-dist[report]"')
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 1 if replay.findings else 0
