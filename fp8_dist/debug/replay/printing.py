"""The text of a replay's findings."""

import math
from collections.abc import Iterator
from pathlib import Path

from fp8_dist.debug.recording import recordings_in
from fp8_dist.debug.replay.comparisons import Cast, rank_names
from fp8_dist.debug.replay.findings import Finding, Replay
from fp8_dist.debug.rows import table
from fp8_dist.text import progress

_FURTHER = 9  # findings after the first one that are printed


def show(folder: Path) -> list[Finding]:
    """Print and return the findings in a recording, or in the first recording of a folder."""
    recordings = recordings_in(folder)
    complete = [path for path in recordings if not path.suffix]  # not .incomplete
    first, *others = complete or recordings or [folder]
    progress(f"replaying {first}")
    replay = Replay(first)
    print(first, *others, sep="\nnot shown: ")
    text = page(replay)
    print("".join(c if c.isprintable() or c == "\n" else "?" for c in text))  # no control codes
    return replay.findings


def page(replay: Replay) -> str:
    """Return the findings of a replay as text."""
    file, ranks = replay.files[0], {file["rank"] for file in replay.files}
    lines = [f"step {file['step']} of {file['world']} ranks, recorded because: {file['reason']}"]
    if missing := sorted({*range(file["world"])} - ranks):
        lines.append(f"ranks that did not write: {missing}")
    lines += [f"  {count} {what}" for what, count in replay.checked.items()]
    if not replay.findings:
        return "\n".join([*lines, "nothing is wrong", table(cast.stats() for cast in replay.casts)])
    first, *others = replay.findings
    lines += ["", f"first {'wrong' if first.is_wrong else 'unusual'}:", line_of(first)]
    if first.element is None:
        lines.append("  its tensors were not kept, so that no element or rank can be named;")
        lines.append(f"  record(model, folder, layers={first.fqn!r}) keeps those of each step")
    if first.cast is not None:
        lines += _described(first.cast)
    if others:
        lines += ["", "then:", *map(line_of, others[:_FURTHER])]
        lines += [f"  ... {len(others) - _FURTHER} more"] if len(others) > _FURTHER else []
    return "\n".join(lines)


def line_of(finding: Finding) -> str:
    """Return a finding as a line of text."""
    where = ""
    if finding.element is not None:
        where = f", element {[*finding.element]} on {rank_names(finding.ranks, 'or')}"
    what = f"{finding.operand} for {', '.join(finding.gemms)}"
    return f"  step {finding.step}: {finding.fqn}: {what}{where}: {finding.text}"


def _described(cast: Cast) -> Iterator[str]:
    row, counts, element = cast.stats(), cast.octaves(), [*cast.largest()[0]]
    yield f"  {[*cast.high.shape]} to {row.dtype}, one scale per {row.granularity}"
    yield f"  amax {row.amax:.5g} at {element}, scale {row.scale:.5g}, smallest {row.scale_min:.5g}"
    shares = f"{row.saturation:.4g} % saturate, {row.underflow:.4g} % become zero"
    yield f"  {shares}, {row.nonfinite:.4g} % aren't finite"
    most = max(map(sum, counts.values()), default=0)
    for exponent in reversed(counts):
        signs = zip(counts[exponent], "#.!", strict=True)
        bar = "".join(sign * math.ceil(40 * count / most) for count, sign in signs)
        yield f"  {f'2^{exponent}':>6} {sum(counts[exponent]):>10,} {bar}"
    if counts:
        yield "  (magnitudes in units of their scales: # kept, . becomes zero, ! saturates)"
