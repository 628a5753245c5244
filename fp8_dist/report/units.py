"""Names and numbers as a reader of a report sees them: words, units and a few digits."""

import dataclasses
import math
from collections.abc import Sequence

from fp8_dist.report.data import Run

# Prefixes of units by the powers of 1,000, the largest first.
_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
_OF_BYTES = "_bytes"  # the end of the name of a metric in bytes


@dataclasses.dataclass(frozen=True)
class Shown:
    """How a metric is shown.

    Attributes:
        label: its name in words, with the unit if it is known.
        divisor: what its values are divided by to be in that unit.
    """

    label: str
    divisor: float = 1.0


def shown(metric: str, runs: Sequence[Run]) -> Shown:
    """Return the label of a metric of some runs, and its scale.

    A metric whose name ends in ``_bytes``, and for which no run has a unit, gets that of its
    largest value, such as MB.
    """
    unit = next(filter(None, (run.config.get("units", {}).get(metric) for run in runs)), "")
    if unit or not metric.endswith(_OF_BYTES):
        words = metric.replace("_", " ")
        return Shown(f"{words}, {unit}" if unit else words)
    values = [abs(row[metric]) for run in runs for row in run.metrics if metric in row]
    prefix = _prefix(max(filter(math.isfinite, values), default=0.0))
    words = metric.removesuffix(_OF_BYTES).replace("_", " ")
    return Shown(f"{words}, {prefix}B", _PREFIXES[prefix])


def figure(value: float) -> str:
    """Format a number with four digits, or with all of its digits before the point."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def tick(value: float) -> str:
    """Format a number of an axis: 1,500 or 0.25; 2.5M for a large one."""
    prefix = _prefix(abs(value)) if abs(value) >= 1e6 else ""
    return f"{value / _PREFIXES[prefix]:,.6g}{prefix}"


def size(count: int) -> str:
    """Format a number of bytes with three digits and a unit."""
    rounded = float(f"{count:.3g}")  # 999,999 is 1 MB, not 1,000 kB
    prefix = _prefix(rounded)
    return f"{rounded / _PREFIXES[prefix]:.3g} {prefix}B"


def _prefix(value: float) -> str:
    """Return the prefix of the largest unit in which a value is at least 1."""
    return next((prefix for prefix, least in _PREFIXES.items() if value >= least), "")
