"""A command that shows captured casts: ``python -m fp8_dist.debug.show FILE...``.

For each file that ``fp8_dist.debug.capture`` wrote, it prints the layer, the statistics of the
cast, and a histogram of the magnitudes by octave, which marks the range of float8. ``--plot FILE``
draws the casts with matplotlib (the extra ``train``). The exit status is 0, or 2 if a file can't be
shown.
"""

import argparse
import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import torch

from fp8_dist.debug.capturing import CapturedCast, load_capture
from fp8_dist.debug.measures import saturation_limit
from fp8_dist.dtypes import short_name
from fp8_dist.scaling import as_matrix
from fp8_dist.tensor.ops import as_bytes

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
            plot(casts, args.plot)
            print(f"\n{args.plot}: written")
    except (ImportError, OSError, ValueError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def plot(casts: Sequence[CapturedCast], path: Path) -> None:
    """Draw the histograms of casts into one figure, one below the other.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib doesn't support the file's format.
    """
    if find_spec("matplotlib") is None:
        raise ImportError('--plot needs matplotlib: pip install "fp8-dist[train]"')
    importlib.import_module("fp8_dist.debug.plot").draw(casts, path)


@dataclass(frozen=True)
class Float8Range:
    """The bounds of the magnitudes that a float8 format represents, for a given scale."""

    largest: float
    normal: float  # the smallest one
    subnormal: float  # the smallest nonzero one
    zero: float  # half of it; magnitudes up to this one are rounded to zero
    saturation: float  # half a step above ``largest``; magnitudes above this one saturate

    @staticmethod
    def of(dtype: torch.dtype, scale: float = 1.0) -> "Float8Range":
        """Return the range of a format whose numbers are multiplied by ``scale``."""
        info = torch.finfo(dtype)
        subnormal = info.smallest_normal * info.eps
        numbers = info.max, info.smallest_normal, subnormal, subnormal / 2, saturation_limit(dtype)
        return Float8Range(*(number * scale for number in numbers))


@dataclass(frozen=True)
class Octave:
    """The counts of the values in ``[2^exponent, 2^(exponent + 1))``, by the effect of the cast."""

    exponent: int
    kept: int = 0
    to_zero: int = 0
    saturated: int = 0

    @property
    def values(self) -> int:
        """The total number of values."""
        return self.kept + self.to_zero + self.saturated


@dataclass(frozen=True)
class Histogram:
    """The counts of a tensor's magnitudes, by octave.

    Attributes:
        octaves: all octaves from the smallest magnitude to the largest, including empty ones.
        values: the number of values in the octaves. Zeros, NaN and infinities are not counted. If
            ``relative``, values whose scale is not finite are not counted either.
        zeros: the number of zeros.
        relative: whether each value is divided by its own scale, because there are several scales.
        range: the range of float8 in the same unit; None if the only scale is not finite.
    """

    octaves: tuple[Octave, ...]
    values: int
    zeros: int
    relative: bool
    range: Float8Range | None


def histogram(cast: CapturedCast) -> Histogram:
    """Return the histogram of the values before a cast.

    With one scale, the histogram counts the magnitudes of the values themselves. With several
    scales, no single range of float8 applies to all values. Then each value is divided by its own
    scale, and the range is that of the format.
    """
    dtype, relative = cast.qdata.dtype, any(scale.ndim for scale in cast.scales)
    columns = cast.high.shape[-1] if cast.high.ndim else 1
    shape = math.prod(cast.high.shape[:-1]), columns
    matrix = as_matrix(cast.low)
    scale = matrix.scheme.element_scales(matrix.scales, shape, matrix.start).double()
    high = cast.high.reshape(shape).double()
    units = high / scale
    counted = units.isfinite() & (units != 0)
    if not relative and not scale.isfinite():
        counted = high.isfinite() & (high != 0)
    magnitudes = (units if relative else high)[counted].abs()
    low = as_bytes(cast.qdata.reshape(high.shape))[counted]
    to_zero = (low & 0x7F) == 0
    saturated = units[counted].abs() > Float8Range.of(dtype).saturation
    exponents = torch.frexp(magnitudes).exponent - 1  # its mantissa is in [1/2, 1)
    first, last = (int(exponents.min()), int(exponents.max())) if len(exponents) else (0, -1)
    effects = to_zero + 2 * saturated  # indices of kept, to_zero and saturated
    cells = torch.bincount(3 * (exponents - first) + effects, minlength=3 * (last - first + 1))
    octaves = [Octave(first + i, *counts) for i, counts in enumerate(cells.view(-1, 3).tolist())]
    known = relative or bool(scale.isfinite())
    return Histogram(
        tuple(octaves),
        len(magnitudes),
        int((high == 0).sum()),
        relative,
        Float8Range.of(dtype, 1.0 if relative else scale.item()) if known else None,
    )


def describe(cast: CapturedCast) -> str:
    """Describe a cast as text."""
    return "\n".join([*facts(cast), "", *_bars(cast, histogram(cast))])


def facts(cast: CapturedCast) -> Iterator[str]:
    """Yield lines about a cast: its layer and operand, its scale, and its statistics."""
    stats = cast.stats()
    shape, dtype = list(cast.high.shape), short_name(cast.qdata.dtype)
    kind = "delayed" if cast.delayed else "dynamic"
    several = "" if stats.scale == stats.scale_min else f" ({stats.scale_min:.4g} the smallest)"
    fqn = "".join(c if c.isprintable() else "?" for c in cast.fqn)  # no terminal control codes
    yield f"{fqn}: {cast.operand}, for {', '.join(cast.gemms)}"
    yield f"  step {cast.step}, rank {cast.rank}, call {cast.call}"
    yield f"  shape       {shape}, {cast.high.dtype} to {dtype}"
    yield f"  amax        {stats.amax:.4g}"
    yield f"  scale       {stats.scale:.4g}{several}, {kind}, one per {cast.granularity}"
    yield f"  underflow   {stats.underflow:.4g} % of the non-zero values become zero"
    yield f"  saturation  {stats.saturation:.4g} % are beyond the largest float8 number"
    yield f"  non-finite  {stats.nonfinite:.4g} % are NaN or infinite"
    yield f"  SQNR        {stats.sqnr:.2f} dB"


def of_values(cast: CapturedCast, counts: Histogram) -> str:
    """Say whose magnitudes a histogram counts."""
    return f"divided by the scale of its {cast.granularity}" if counts.relative else "of a value"


def _bars(cast: CapturedCast, counts: Histogram) -> Iterator[str]:
    if not counts.values:
        yield "  no finite value but zeros"
        return
    yield f"  magnitude {of_values(cast, counts)}: # kept, . becomes zero, ! saturates"
    marks, octaves, below = _marks(counts), list(counts.octaves), None
    if counts.range is not None:
        lowest = math.floor(math.log2(counts.range.zero)) - _BELOW
        tail = [octave for octave in octaves if octave.exponent < lowest]
        octaves = [octave for octave in octaves if octave.exponent >= lowest]
        if tail:
            numbers = zip(*((o.kept, o.to_zero, o.saturated) for o in tail), strict=True)
            below = Octave(lowest, *map(sum, numbers))
    exponents = [*marks, *(octave.exponent for octave in octaves)]
    known = {octave.exponent: octave for octave in octaves}
    rows = [known.get(e, Octave(e)) for e in range(max(exponents), min(exponents) - 1, -1)]
    most = max(octave.values for octave in [*rows, *([below] if below else [])])
    is_empty = lambda octave: not octave.values and octave.exponent not in marks  # noqa: E731
    for empty, group in groupby(rows, is_empty):
        lines = list(group)
        if empty and len(lines) > _GAP:
            yield "  ..."
            continue
        for octave in lines:
            label = f"2^{octave.exponent}"
            yield _line(label, octave, counts.values, most, marks.get(octave.exponent, ""))
    if below is not None:
        yield _line(f"below 2^{below.exponent}", below, counts.values, most, "")


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
