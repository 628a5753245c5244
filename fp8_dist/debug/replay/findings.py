"""Findings of a replay: what is wrong, or unusual, in a recording."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch

from fp8_dist.debug.recording import VERSION, Record, text_of
from fp8_dist.debug.replay import comparisons
from fp8_dist.debug.replay.comparisons import Cast, Element
from fp8_dist.debug.rows import AnomalyLimits, CastStats, FirstAnomalies
from fp8_dist.recipe import GEMM_OPERANDS


class Finding(NamedTuple):
    """Something that is wrong, or unusual.

    Attributes:
        is_wrong: whether values are non-finite or incorrect. Otherwise they are only unusual.
        step, position: the step, and the position among its casts and GEMMs.
        fqn, operand, gemms: the layer, the operand (or ``"result"``), and the GEMMs that take it.
        text: a description.
        element: the global index of the first wrong element; for a result, and for rows of experts,
            the index in the rank's part. None if tensors were not recorded.
        ranks: the rank that has the element. If copies differ, the ranks whose copies are not those
            of the most ranks; all ranks with copies if there is a tie.
        cast: the cast of the operand; None if parts of it were not recorded.
    """

    is_wrong: bool
    step: int
    position: float
    fqn: str
    operand: str
    gemms: Sequence[str]
    text: str
    element: Element | None = None
    ranks: tuple[int, ...] = ()
    cast: Cast | None = None


class Replay:
    """A replay of a recording.

    Attributes:
        files: the dictionaries that the ranks wrote, without records.
        findings: the findings in the order of the casts and GEMMs, from the first step with a wrong
            one (or else the recorded step) on; then those of earlier steps.
        checked: the number of casts, operands and GEMMs that were compared, by outcome.
        casts: the casts that could be repeated.

    Args:
        folder: the folder of a recording.
        part: ``(i, n)``: replay only each n-th layer by name, from the i-th on. So several
            processes share the work.

    Raises:
        OSError: a file can't be read.
        ValueError: the folder holds no recording, or a damaged one.
    """

    def __init__(self, folder: Path, part: tuple[int, int] = (0, 1)) -> None:
        self.files, self.checked = _load(folder), Counter[str]()
        threads = torch.get_num_threads()
        try:
            # The bits of a GEMM may depend on the number of threads.
            torch.set_num_threads(min(self.files[0]["threads"], os.cpu_count() or 1))
            _keep_part(self.files, *part)
            findings = self._find([r for file in self.files for r in file.pop("records")])
        except Exception as error:  # tensors that do not fit together may raise anything
            raise ValueError(f"{folder}: the records do not fit together: {error!r}") from error
        finally:
            torch.set_num_threads(threads)
        wrong = min((f.step for f in findings if f.is_wrong), default=self.files[0]["step"])
        unique: dict[Any, Finding] = {}
        for f in sorted(findings, key=lambda f: (f.step < wrong, f.step, f.position)):
            unique.setdefault((f.step, f.fqn, f.operand, *f.gemms), f)
        self.findings = [*unique.values()]
        self.casts = [cast for casts in self._casts.values() for cast in casts]

    def _find(self, records: list[Record]) -> list[Finding]:
        self._limits = AnomalyLimits(**self.files[0]["limits"])
        self._casts: dict[Any, list[Cast]] = defaultdict(list)  # by step, layer and operand
        groups: dict[Any, list[Record]] = {}
        for record in records:
            if "high" in record:
                key = *_key(record), *record["gemms"], record["call"], *record["low"]["ranks"]
                groups.setdefault(key, []).append(record)
        gemms = [record for record in records if "result" in record]
        findings = [f for parts in groups.values() for f in self._check_cast(parts)]
        findings += [f for gemm in gemms for f in self._check_operands(gemm)]
        findings += [f for gemm in gemms for f in self._check_result(gemm)]
        return [*findings, *self._check_statistics()]

    def _check_cast(self, parts: list[Record]) -> Iterator[Finding]:
        first = parts[0]
        copies = comparisons.group_copies(parts)
        cast = comparisons.cast_again(parts, [groups[0][0] for groups in copies])
        wrong = [comparisons.find_not_finite(parts), comparisons.find_different_copies(copies)]
        if cast is not None:
            self._casts[_key(first)].append(cast)
            others = self._casts[first["step"], first["fqn"], first["folded"]]
            wrong.append(comparisons.find_different_scales(parts))
            wrong.append(comparisons.find_different_cast(parts, cast.low))
            wrong.append(comparisons.find_wrong_folds(parts, others))
        first_wrong = next(chain(*wrong), None)
        if first_wrong is not None:
            yield _finding(first, first["operand"], first["gemms"], *first_wrong, cast)
        elif cast is None:
            self.checked["casts can't be repeated, because parts are missing or not finite"] += 1
        else:
            self.checked["casts equal those of one device, bit for bit"] += 1
            if text := "; ".join(map(text_of, FirstAnomalies(self._limits).of(cast.stats()))):
                yield _unusual(first, text, cast)

    def _check_operands(self, record: Record) -> Iterator[Finding]:
        gemm = record["gemm"]
        rank = record["rank"]
        for operand, side in zip(GEMM_OPERANDS[gemm], ("left", "right"), strict=True):
            low = record[side]
            casts = self._casts[record["step"], record["fqn"], operand]
            casts = [cast for cast in casts if gemm in cast.parts[0]["gemms"]]
            here = [cast for cast in casts if rank in cast.parts[0]["low"]["ranks"]]
            if record["groups"] is None or operand == "weight":
                differences = [comparisons.compare_taken(record, low, cast.low) for cast in here]
            else:
                sent = comparisons.sent_rows(record, casts)
                differences = [comparisons.compare_rows(record, low, rows) for rows in sent]
            if not differences:
                self.checked["operands lack a cast to compare with"] += 1
                continue
            # Choose the micro-batch with the fewest differences.
            wrong, element, text = min(differences, key=attrgetter("wrong"))
            if wrong:
                text = f"what arrived for the GEMM is not what was cast: {text}"
                cast = here[0] if here else None
                yield _finding(record, operand, [gemm], text, element, (rank,), cast)
            else:
                self.checked["operands equal what was cast, bit for bit"] += 1

    def _check_result(self, record: Record) -> Iterator[Finding]:
        again = comparisons.multiply_again(record)
        sizes = comparisons.multiply_again(record, magnitudes=True)
        if again is None or sizes is None:
            self.checked["GEMMs need parts of other ranks"] += 1
            return
        result = record["result"]
        differs = comparisons.differing(again, result)
        rounding = again.abs().double() * torch.finfo(again.dtype).eps + sizes.double() / 2**10
        bad = differs & ~((again.double() - result.double()).abs() <= rounding)
        if bad.any():
            at = comparisons.first_index(bad)
            text = f"{result[at].item():g} where the GEMM is {again[at].item():g}"
            yield _finding(record, "result", [record["gemm"]], text, at, (record["rank"],))
        else:
            how = "within their rounding" if differs.any() else "bit for bit"
            self.checked[f"GEMMs are equal {how}"] += 1

    def _check_statistics(self) -> Iterator[Finding]:
        anomalies = FirstAnomalies(self._limits)
        # Ranks have the same rows, unless they belong to different pipeline stages.
        all_rows = [row for file in self.files for row in file["rows"]]
        rows = {(r["step"], r["fqn"], r["operand"], r["gemms"]): r for r in all_rows}
        for fields in sorted(rows.values(), key=itemgetter("step", "position")):
            row = CastStats(**fields)
            casts = self._casts[row.step, row.fqn, row.operand]
            casts = [c for c in casts if c.parts[0]["gemms"] == [*row.gemms] and c.high.numel()]
            for anomaly in anomalies.of(row):
                is_wrong = anomaly.what == "non-finite"
                if not casts:
                    found = _finding(fields, row.operand, row.gemms, text_of(anomaly))
                    yield found._replace(is_wrong=is_wrong)
                elif not is_wrong:  # otherwise _check_cast has reported it
                    cast = max(casts, key=lambda cast: cast.stats().amax)
                    yield _unusual(fields, text_of(anomaly), cast)


def _finding(
    record: Record,
    operand: str,
    gemms: Sequence[str],
    text: str,
    element: Element | None = None,
    ranks: tuple[int, ...] = (),
    cast: Cast | None = None,
) -> Finding:
    """Return what is wrong with a recorded cast or GEMM, or with a row of statistics."""
    return Finding(
        is_wrong=True,
        step=record["step"],
        position=record["position"],
        fqn=record["fqn"],
        operand=operand,
        gemms=gemms,
        text=text,
        element=element,
        ranks=ranks,
        cast=cast,
    )


def _unusual(record: Record, text: str, cast: Cast) -> Finding:
    """Return what is unusual about a cast, with the place of its largest magnitude."""
    found = _finding(record, record["operand"], record["gemms"], text, *cast.largest(), cast)
    return found._replace(is_wrong=False)


def _load(folder: Path) -> list[dict[str, Any]]:
    paths, files = sorted(folder.glob("rank*.pt")), list[dict[str, Any]]()
    if not paths:
        raise ValueError(f"{folder} holds no rank*.pt, the files of fp8_dist.debug.record")
    for path in paths:
        try:
            with ZipFile(path) as file:  # because torch.load ignores the checksums
                if damaged := file.testzip():
                    raise ValueError(f"the checksum of a part is wrong: {damaged}")
            files.append(torch.load(path, map_location="cpu", weights_only=True))
            headers = {(file["version"], file["world"], file["step"]) for file in files}
            if len(headers) > 1 or VERSION not in {version for version, *_ in headers}:
                raise ValueError(f"the versions, worlds and steps of the files are {headers}")
        except OSError:
            raise
        except Exception as error:  # reading unknown bytes may raise anything
            raise ValueError(f"{path} is of no recording, or damaged: {error!r}") from error
    return files


def _keep_part(files: list[dict[str, Any]], first: int, every: int) -> None:
    """Drop the records and rows of other layers than each ``every``-th one."""
    names = {record["fqn"] for file in files for record in [*file["records"], *file["rows"]]}
    chosen = {*sorted(names)[first::every]}
    for file in files:
        for kind in ("records", "rows"):
            file[kind] = [record for record in file[kind] if record["fqn"] in chosen]


def _key(record: Record) -> tuple[int, str, str]:
    return record["step"], record["fqn"], record["operand"]
