"""The page of a proof: a verdict, tables and a figure. Needs no GPU.

If a case was tried several times, its last result counts. A time is the median of all readings of
rank 0, with the least and the largest.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from scripts.common.markdown import table
from scripts.common.recipes import BF16
from scripts.prove.results import START, Result, read, shown_number
from scripts.prove.stages import CHECKS

HOWS = "graph", "wall", "again", "seed 1"  # endings of names
PEER = "torchao tensorwise"
TITLES = {"time": "A step", "layers": "A layer", "experts": "Experts", "rates": "Rates"}
TITLES |= {"kernels": "Kernels of a layer's step", "loss": "Loss", "curve": "The curve"}


class Candidate(NamedTuple):
    """A row of a table of times."""

    recipe: str
    compiled: bool
    how: str  # such as "graph", "wall" or "again"

    @property
    def text(self) -> str:
        """The name in a table."""
        return ", ".join([self.recipe, *["compiled"] * self.compiled, *[self.how] * bool(self.how)])


def latest(paths: Iterable[Path]) -> list[Result]:
    """Read files; keep the last result of each case on each rank.

    Raises:
        OSError: a file can't be read.
        ValueError: a file has no results, or something else.
    """
    last: dict[Any, Result] = {}
    for path in paths:
        with path.open():
            last |= {(r.stage, r.name, r.rank): r for r in read(path)}
    if not last:
        raise ValueError(f"no results in {', '.join(map(str, paths))}")
    return [*last.values()]


def of_cases(results: Iterable[Result]) -> list[Result]:
    """One result per case: of the first rank that is wrong, else of rank 0, with all errors."""
    by_case: dict[Any, list[Result]] = defaultdict(list)
    for r in sorted(results, key=lambda r: (not r.wrong, r.rank)):
        by_case[r.stage, r.name].append(r)
    found = []
    for each in by_case.values():
        errors: dict[str, list[int]] = defaultdict(list)
        for r in each:
            errors[r.error].append(r.rank)
        texts = [f"{text} (ranks {ranks})" for text, ranks in errors.items() if text]
        only = len(each) == 1 or errors.keys() == {each[0].error}
        found.append(replace(each[0], error=each[0].error if only else "; ".join(texts)))
    return found


def missing(results: Sequence[Result]) -> int:
    """The number of a stage's cases that did not begin."""
    begun = {r.name for r in results} - {START}
    return max(0, max((r.cases for r in results), default=0) - len(begun))


def tally(results: Sequence[Result]) -> list[int]:
    """The numbers of a stage's cases that went well, are wrong, have no result, did not begin."""
    cases = of_cases(results)
    wrong = sum(bool(r.wrong) for r in cases)
    failed = sum(bool(r.error and not r.wrong) for r in cases)
    return [len(cases) - wrong - failed, wrong, failed, missing(results)]


def counts(results: Sequence[Result]) -> str:
    """How many cases of a stage went well, in words."""
    kinds = "went well", "WRONG", "without a result", "not begun"
    pairs = zip(kinds, tally(results), strict=True)
    return ", ".join(f"{kind}: {n}" for kind, n in pairs if n or kind == kinds[0])


def fails(results: Sequence[Result], stages: Iterable[str]) -> bool:
    """Whether something is wrong, or a case of a check among the stages has no result."""
    for stage in {*CHECKS}.intersection(stages):
        found = [r for r in results if r.stage == stage]
        if not found or missing(found) or any(r.error for r in found):
            return True
    return any(r.wrong for r in results)


def verdict(results: Sequence[Result]) -> str:
    """Three sentences: whether bits and bytes are right, and where float8 is faster."""
    kinds = {"bits": "have the bits of one device", "bytes": "send what scripts.plan predicts"}
    kinds |= {"tests": "of tests/gpu pass"} if any(r.stage == "tests" for r in results) else {}
    sentences = []
    for stage, promise in kinds.items():
        found = [r for r in results if r.stage == stage]
        cases = of_cases(found)
        wrong, ended = [r for r in cases if r.wrong], sum(not r.error for r in cases)
        count = len(cases) + missing(found)
        if wrong:
            text = f"{len(wrong)} of {count} cases are WRONG; {wrong[0].name}: {wrong[0].wrong}"
        elif not cases:
            text = "not checked"
        else:
            text = f"{ended} of {count} cases {promise}"
            text += f"; {count - ended} did not end" * (count > ended)
        sentences.append(f"{stage.capitalize()}: {text}.")
    return "\n".join([*sentences, f"Speed: {speeds(results)}."])


def speeds(results: Sequence[Result]) -> str:
    """Where float8 steps are faster than compiled bf16, and than torchao's."""
    texts = []
    for shape, of in candidates(r for r in results if r.stage == "time").items():
        base = of.get(Candidate(BF16, True, ""))
        ours = {who: r for who, r in of.items() if who.recipe not in (BF16, PEER) and not who.how}
        if base is None or not ours:
            continue
        who, best = min(ours.items(), key=lambda pair: pair[1].median)
        peer = of.get(Candidate(PEER, True, ""))
        beside = f" (torchao {base.median / peer.median:.2f})" if peer else ""
        texts.append(f"{base.median / best.median:.2f} x bf16 in {shape} with {who.text}{beside}")
    return "; ".join(texts) or "not measured"


def candidates(results: Iterable[Result]) -> dict[str, dict[Candidate, Result]]:
    """Pool the readings of rank 0 by shape and candidate."""
    by_shape: dict[str, dict[Candidate, Result]] = defaultdict(dict)
    for r in results:
        if r.rank or not is_measured(r):
            continue
        hows = [how for how in HOWS if r.name.endswith(f", {how}")]
        who = Candidate(r.recipe, r.compiled, "".join(hows))
        before = by_shape[r.shape].get(who)
        pooled = r.readings if before is None else (*before.readings, *r.readings)
        peak = max(r.peak, before.peak if before else 0)
        by_shape[r.shape][who] = replace(r, readings=pooled, peak=peak)
    return by_shape


def is_measured(r: Result) -> bool:
    """Whether a result has numbers of a candidate."""
    return bool(r.recipe and (r.readings or r.values))


def times(of: dict[Candidate, Result]) -> str:
    """A table with a line for each candidate of a shape."""
    bases = [of.get(Candidate(BF16, compiled, "")) for compiled in (False, True)]
    numbers = (pair for r in of.values() for pair in r.values.items())
    names = dict.fromkeys(name for name, value in numbers if isinstance(value, int | float))
    lines = []
    for who, r in of.items():
        compared = [base if r.readings and base and base.readings else None for base in bases]
        ratios = [f"{base.median / r.median:.2f}" if base else "" for base in compared]
        tokens = f"{r.tokens / r.median:,.0f}" if r.tokens and r.readings else ""
        flops = f"{r.flops / r.median / 1e12:,.0f}" if r.flops else ""
        peak = f"{r.peak / 1e9:.2f}" if r.peak else ""
        cells = [who.text, *spread(r.readings), *ratios, tokens, flops, peak]
        lines.append([*cells, *(shown_number(r.values.get(name, "")) for name in names)])
    head = ["candidate", "ms", "least to largest", "x bf16", "x bf16 compiled"]
    return table([*head, "tokens/s", "TFLOP/s", "peak GB", *names], lines, "lr")


def spread(readings: Sequence[float]) -> list[str]:
    """Two cells in milliseconds: the median, and the range of the readings."""
    if not readings:
        return ["", ""]
    least, middle, largest = min(readings), statistics.median(readings), max(readings)
    return [f"{1e3 * middle:.3f}", f"{1e3 * least:.3f} to {1e3 * largest:.3f}"]


def others(results: Sequence[Result]) -> str:
    """A line for each case that is not one of several candidates."""
    return "\n".join(f"- {r.text().partition(': ')[2]}" for r in results if r.rank == 0)


def checks(results: Sequence[Result]) -> str:
    """A line for each stage, and for each case that is wrong or has no result."""
    lines = []
    for stage in dict.fromkeys(r.stage for r in results):
        found = [r for r in results if r.stage == stage]
        skipped = sum(r.note == "skipped" for r in found)
        right, *others = tally(found)
        lines.append([stage, *map(str, (right - skipped, *others, skipped))])
    head = ["stage", "went well", "wrong", "without a result", "not begun", "skipped"]
    return "\n".join([table(head, lines, "lr"), "", *bad(results)]).rstrip()


def bad(results: Sequence[Result]) -> list[str]:
    """A line for each case that is wrong or has no result."""
    return [f"- {r.text()}" for r in of_cases(results) if r.wrong or r.error]


def machines(results: Sequence[Result]) -> str:
    """The cards, the commits, and what the ranks say of their machines."""
    cards = ", ".join(sorted({r.card for r in results} - {"", "CPU"})) or "none"
    commits = ", ".join(sorted({r.commit for r in results}))
    notes: dict[str, list[int]] = defaultdict(list)
    for r in results:
        if r.note and (r.stage == "facts" or r.name == "versions"):
            notes[f"{r.values.get('host', '')} {r.note}".strip()].append(r.rank)
    lines = [f"Cards: {cards}. Commit: {commits}.", ""]
    lines += [f"- ranks {', '.join(map(str, ranks))}: {note}" for note, ranks in notes.items()]
    texts = [r.values.get(name) for r in results for name in ("environment", "topology")]
    return "\n".join([*lines, *(f"\n```text\n{text}\n```" for text in texts if text)])


def sections(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """Yield the title and text of each section."""
    yield "Verdict", verdict(results).replace("\n", "\n\n")
    yield "Cases", checks(results)
    yield "Machine", machines(results)
    for stage, title in TITLES.items():
        found = [r for r in results if r.stage == stage and not r.error]
        tables = candidates(found)
        for shape, of in tables.items():
            yield f"{title}, {shape}", times(of)
        yield title, others([r for r in found if not is_measured(r)])


def text(results: Sequence[Result], figure: str = "") -> str:
    """The whole page, in Markdown. figure: the name of the picture's file, if there is one."""
    parts = [f"## {title}\n\n{part}\n" for title, part in sections(results) if part]
    return "\n".join(["# Proof\n", *parts[:1], *([f"![]({figure})\n"] * bool(figure)), *parts[1:]])


def draw(results: Sequence[Result], path: Path) -> bool:
    """Draw the curves of losses, and steps' times; return whether there are any, and matplotlib."""
    curves = [r for r in results if r.values.get("losses") and not r.rank]
    steps = candidates(r for r in results if r.stage == "time")
    count = len(steps) + bool(curves)
    with suppress(ImportError):
        figure = import_module("matplotlib.figure").Figure((8, 3 * max(count, 1)), layout="tight")
        axes = iter([*figure.subplots(max(count, 1), squeeze=False).flat])
        for shape, of in steps.items():
            plot = next(axes)
            plot.barh([who.text for who in of], [1e3 * r.median for r in of.values()])
            plot.set(title=shape, xlabel="ms per step")
            plot.invert_yaxis()
        if curves:
            plot = next(axes)
            for r in curves:
                ends = [r.values["every"] * (n + 1) for n in range(len(r.values["losses"]))]
                plot.plot(ends, r.values["losses"], label=r.recipe)
            plot.set(title=curves[0].shape, xlabel="step", ylabel="loss, nats per byte")
            plot.legend()
        if count:
            figure.savefig(path)
            return True
    return False
