"""Time a benchmark of this checkout and of another commit in turn, each with its own scripts.

    python -m scripts.bench.against --assert 1.03 HEAD~20 scripts.bench.linear --shapes 16x16x16

The processes of both alternate, so that other load on the machine affects both. A ratio above 1
means that this checkout is slower.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from scripts.common.markdown import table
from scripts.common.options import command_parser, positive

ROOT = Path(__file__).resolve().parents[2]


def readings(output: str) -> Iterator[tuple[str, float]]:
    """Yield "title: candidate" and its milliseconds from the output of a benchmark."""
    title = ""
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            title = line or title
        elif cells[1].replace(",", "").replace(".", "").isdigit():
            yield f"{title}: {cells[0]}", float(cells[1].replace(",", ""))


def measure(commit: str, command: Sequence[str], rounds: int) -> dict[str, list[list[float]]]:
    """By line, the milliseconds of all rounds: those of the other commit, and of this checkout."""
    by_line: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.check_output(["git", "-C", str(ROOT), "archive", commit])
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        for _ in tqdm(range(rounds), unit="round"):
            for side, checkout in enumerate((folder, ROOT)):
                run = [sys.executable, "-m", *command]
                printed = subprocess.check_output(run, cwd=checkout, text=True)
                for line, value in readings(printed):
                    by_line.setdefault(line, [[], []])[side].append(value)
    return by_line


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("scripts.bench.against", __doc__)
    parser.add_argument("commit", help="what git calls it")
    parser.add_argument("--rounds", type=positive, default=5, help="default: %(default)s")
    limit = "fail if a median of the ratios is above this"
    parser.add_argument("--assert", dest="asserted", type=float, metavar="RATIO", help=limit)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the benchmark and its options")
    args = parser.parse_args(argv)
    lines, worst = [], 0.0
    by_line = measure(args.commit, args.command, args.rounds)
    for name, (before, now) in by_line.items():
        if not (before and now):  # a line that one of the commits does not print
            continue
        ratio = statistics.median(b / a for a, b in zip(before, now, strict=True))
        worst = max(worst, ratio)
        medians = (f"{statistics.median(values):,.3g}" for values in (before, now))
        lines.append([name, *medians, f"{ratio:.3f}"])
    print(table(["benchmark", f"{args.commit}, ms", "this checkout, ms", "ratio"], lines, "lrrr"))
    return int(args.asserted is not None and worst > args.asserted)


if __name__ == "__main__":
    sys.exit(main())
