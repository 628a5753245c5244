"""Print the results of `scripts.bench.gpu_day` as tables for docs/gpu.md.

    python -m scripts.bench.gpu_report runs/gpu_day/results.jsonl

Needs no GPU. If a case was tried several times, its last result counts. A time is the median of all
readings, with the least and the largest.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from scripts.bench.gpu_results import Result, read
from scripts.common.markdown import table
from scripts.common.options import command_parser
from scripts.common.recipes import BF16

AGAIN = ", again"


@dataclass(frozen=True)
class Rates:
    """Assumed rates of a GPU; the defaults are for an H200."""

    bf16: float = 790.0  # TFLOP/s of GEMMs
    float8: float = 1200.0
    float8_fast: float = 1400.0  # with fast accumulation
    elementwise: float = 4.0  # TB/s of kernels
    reduction: float = 3.5
    transpose: float = 0.27  # of torch's copies that transpose 1-byte elements
    launch: float = 2.5  # microseconds: the least time of a kernel


class Candidate(NamedTuple):
    """A row of a table of times: one of the candidates that took turns on a shape."""

    recipe: str
    compiled: bool
    again: bool  # the baseline, measured after all others

    @property
    def text(self) -> str:
        """The name in a table."""
        return self.recipe + ", compiled" * self.compiled + AGAIN * self.again


def latest(results: Iterable[Result]) -> list[Result]:
    """Keep the last result of each case."""
    return list({(result.stage, result.name): result for result in results}.values())


def in_stages(results: Sequence[Result], *stages: str) -> list[Result]:
    """Return the results of the given stages."""
    return [r for r in results if r.stage in stages]


def spread(readings: Sequence[float]) -> list[str]:
    """Two cells in milliseconds: the median, and the range of the readings."""
    if not readings:
        return ["", ""]
    least, middle, largest = min(readings), statistics.median(readings), max(readings)
    return [f"{1e3 * middle:.3f}", f"{1e3 * least:.3f} to {1e3 * largest:.3f}"]


def where(results: Sequence[Result]) -> str:
    """The cards, the commits and the releases."""
    cards = sorted({r.card for r in results} - {"CPU"})
    commits = sorted({r.commit for r in results})
    notes = {r.note: None for r in results if r.name == "versions" and r.note}
    lines = [f"Card: {', '.join(cards) or 'none'}. Commit: {', '.join(commits)}."]
    return "\n".join([*lines, *(f"- {note}" for note in notes)])


def checks(results: Sequence[Result]) -> str:
    """The number of cases of each stage that went well, and all errors."""
    by_stage: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_stage[result.stage].append(result)
    lines = []
    for stage, group in by_stage.items():
        failed = sum(bool(r.error) for r in group)
        skipped = sum(r.note == "skipped" for r in group)
        lines.append([stage, str(len(group) - failed - skipped), str(skipped or ""), str(failed)])
    text = table(["stage", "went well", "skipped", "errors"], lines, "lr")
    errors = [f"- {r.stage}: {r.name}: {r.error}" for r in results if r.error]
    return "\n".join([text, *([""] if errors else []), *errors])


def rates(results: Sequence[Result]) -> str:
    """A table of the rates of copies and GEMMs, and the assumed rates."""
    assumed = Rates()
    tera = {
        "copy": assumed.elementwise,
        "amax": assumed.reduction,
        "elementwise": assumed.elementwise,
        "transposing copy of bytes": assumed.transpose,
        "bf16": assumed.bf16,
        "float8, fast accumulation": assumed.float8_fast,
        "float8": assumed.float8,
    }
    lines = []
    for r in in_stages(results, "rates"):
        amount = r.bytes or r.flops
        if not amount and not r.error:
            continue
        kind = r.name.split(" x ")[-1].partition(", ")[2] or r.name
        unit = "TB/s" if r.bytes else "TFLOP/s"
        measured = f"{amount / r.median / 1e12:,.2f} {unit}" if r.readings else r.error
        lines.append([r.name, measured, f"{tera[kind]:g} {unit}" if kind in tera else ""])
        lines[-1].append(spread(r.readings)[1])
    return table(["what", "measured", "assumed", "ms, least to largest"], lines, "lr")


def candidates(results: Sequence[Result], ending: str = "") -> dict[str, dict[Candidate, Result]]:
    """Pool the turns of candidates: by shape and candidate, one result with all readings."""
    by_shape: dict[str, dict[Candidate, Result]] = defaultdict(dict)
    for r in results:
        if not (r.readings and r.recipe and r.name.endswith(ending)):
            continue
        who = Candidate(r.recipe, r.compiled, AGAIN in r.name)
        before = by_shape[r.shape].get(who)
        pooled = r.readings if before is None else (*before.readings, *r.readings)
        peak = max(r.peak, before.peak if before else 0)
        by_shape[r.shape][who] = replace(r, readings=pooled, peak=peak)
    return by_shape


def times(of: dict[Candidate, Result]) -> str:
    """A table with a line for each candidate of a shape."""
    bases = [of.get(Candidate(BF16, compiled, False)) for compiled in (False, True)]
    lines = []
    for who, r in of.items():
        ratios = [f"{base.median / r.median:.2f}" if base else "" for base in bases]
        tokens = f"{r.tokens / r.median:,.0f}" if r.tokens else ""
        flops = f"{r.flops / r.median / 1e12:,.0f}" if r.flops else ""
        peak = f"{r.peak / 1e9:.2f}" if r.peak else ""
        lines.append([who.text, *spread(r.readings), *ratios, tokens, flops, peak])
    head = ["candidate", "ms", "least to largest", "x bf16", "x bf16 compiled"]
    return table([*head, "tokens/s", "TFLOP/s", "peak GB"], lines, "lr")


def blocks(results: Sequence[Result]) -> dict[str, str]:
    """By shape, a table of the times of forward and backward and of the optimizer, and tokens/s."""
    tables = {}
    optimizers = candidates(results, "optimizer")
    for shape, of in candidates(results, "step").items():
        lines = []
        for who, step in of.items():
            update = optimizers.get(shape, {}).get(who)
            whole = step.median + update.median if update else None
            rate = f"{step.tokens / whole:,.0f}" if whole else ""
            cells = [who.text, *spread(step.readings), *spread(update.readings if update else ())]
            lines.append([*cells, rate, f"{step.peak / 1e9:.2f}" if step.peak else ""])
        head = ["blocks", "forward and backward, ms", "least to largest", "optimizer, ms"]
        head += ["least to largest", "tokens/s of both", "peak GB"]
        tables[shape] = table(head, lines, "lr")
    return tables


def sections(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """Yield the title and text of each section."""
    yield "The machine", where(results)
    yield "Checks", checks(results)
    yield "Rates", rates(results)
    kernels = [f"- {r.recipe}: {r.note}" for r in in_stages(results, "kernel rates") if r.note]
    yield "Kernels of a layer's step", "\n".join(kernels)
    timed = in_stages(results, "layers")
    walls = [r for r in timed if r.name.endswith(", wall")]
    on_device = [r for r in timed if not r.name.endswith(", wall")]
    for title, timed in (("Layer", on_device), ("Layer on the host's clock", walls)):
        for shape, of in candidates(timed).items():
            yield f"{title}, {shape}", times(of)
    for shape, text in blocks(in_stages(results, "blocks")).items():
        yield f"A step of {shape}", text
    for stage, title in (("experts", "Experts"), ("training", "Training"), ("nccl", "NCCL")):
        timed = in_stages(results, stage)
        for shape, of in candidates(timed).items():
            yield f"{title}, {shape}", times(of)
        notes = [f"- {r.name}: {r.note}" for r in timed if r.note]
        yield f"{title}: notes", "\n".join(notes)


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("scripts.bench.gpu_report", __doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="results.jsonl")
    args = parser.parse_args(argv)
    try:
        results = latest(result for file in args.files for result in read(file))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not results:
        parser.error(f"no results in {', '.join(map(str, args.files))}")
    for title, text in sections(results):
        if text:
            print(f"## {title}\n\n{text}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
