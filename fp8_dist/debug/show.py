"""A command that shows captured casts: ``python -m fp8_dist.debug.show FILE...``.

For each file that ``fp8_dist.debug.capture`` wrote, it prints the layer, the statistics of the
cast, and a histogram of the magnitudes by octave, which marks the range of float8. ``--plot FILE``
draws the casts with matplotlib (the extra ``report``). The exit status is 0, or 2 if a file can't
be shown.
"""

import argparse
import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from fp8_dist.debug.capturing import CapturedCast, load_capture
from fp8_dist.debug.histogram import Histogram, Octave, facts, histogram

_WIDTH = 40  # characters of the longest bar
_BELOW = 6  # octaves shown below the range of float8; one line sums up the smaller ones
_GAP = 3  # a longer run of empty lines is shown as one line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv``, by default the process's arguments; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fp8_dist.debug.show",
        description="Shows files that fp8_dist.debug.capture wrote.",
        allow_abbrev=False,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, one below the other")
    args = parser.parse_args(argv)
    try:
        casts = [load_capture(path) for path in args.files]
        print("\n\n".join(map(describe, casts)))
        if args.plot is not None:
            if find_spec("matplotlib") is None:
                raise ImportError('--plot needs matplotlib: pip install "fp8-dist[report]"')
            importlib.import_module("fp8_dist.debug.plot").draw(casts, args.plot)
            print(f"\n{args.plot}: written")
    except (ImportError, OSError, ValueError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def describe(cast: CapturedCast) -> str:
    """Describe a cast as text."""
    return "\n".join([*facts(cast), "", *_bars(histogram(cast))])


def _bars(counts: Histogram) -> Iterator[str]:
    if not counts.values:
        yield "  no finite value but zeros"
        return
    yield f"  magnitude {counts.unit}: # kept, . becomes zero, ! saturates"
    marks, known = _marks(counts), {octave.exponent: octave for octave in counts.octaves}
    lowest = min(known)
    if counts.range is not None:
        lowest = math.floor(math.log2(counts.range.zero)) - _BELOW
    tail = [(o.kept, o.to_zero, o.saturated) for e, o in known.items() if e < lowest]
    below = [Octave(lowest, *map(sum, zip(*tail, strict=True)))] if tail else []
    exponents = [*marks, *(e for e in known if e >= lowest)]
    rows = [known.get(e, Octave(e)) for e in range(max(exponents), min(exponents) - 1, -1)]
    most = max(octave.values for octave in [*rows, *below])
    is_empty = lambda octave: not octave.values and octave.exponent not in marks  # noqa: E731
    for empty, group in groupby(rows, is_empty):
        lines = list(group)
        if empty and len(lines) > _GAP:
            yield "  ..."
            continue
        for octave in lines:
            label = f"2^{octave.exponent}"
            yield _line(label, octave, counts.values, most, marks.get(octave.exponent, ""))
    for octave in below:
        yield _line(f"below 2^{octave.exponent}", octave, counts.values, most, "")


def _marks(counts: Histogram) -> dict[int, str]:
    """Return labels for the octaves of the bounds of float8's range."""
    if counts.range is None:
        return {}
    limits = counts.range
    texts = {
        limits.largest: "the largest float8 number",
        limits.normal: "the smallest normal one",
        limits.subnormal: "the smallest subnormal one",
        limits.zero: "this and less becomes zero",
    }
    marks: dict[int, str] = {}
    for value, text in texts.items():
        octave = math.floor(math.log2(value))
        marks[octave] = f"{marks.get(octave, '')}  <- {value:.4g}: {text}"
    return marks


def _line(label: str, octave: Octave, values: int, most: int, mark: str) -> str:
    share = f"{100 * octave.values / values:.3f} %" if octave.values else ""
    parts = [(octave.kept, "#"), (octave.to_zero, "."), (octave.saturated, "!")]
    # Each kind that is present gets at least one character.
    bar = "".join(max(1, round(_WIDTH * n / most)) * sign for n, sign in parts if n)
    return f"  {label:>11}  {share:>9}  {bar:{_WIDTH}}{mark}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
