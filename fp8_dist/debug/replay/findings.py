"""Findings of a replay: what is wrong, or unusual, in a recording."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch

from fp8_dist.debug.recording import VERSION, Record, text_of
from fp8_dist.debug.replay.comparisons import (
    Cast,
    Element,
    as_taken,
    cast_again,
    compare,
    compare_rows,
    find_different_cast,
    find_different_copies,
    find_different_scales,
    find_not_finite,
    find_wrong_folds,
    first_element,
    group_copies,
    multiply_again,
    sent_rows,
)
from fp8_dist.debug.rows import AnomalyLimits, CastStats, FirstAnomalies
from fp8_dist.recipe import GEMM_OPERANDS

_HEADER: dict[str, type] = {"reason": str, "limits": dict, "rows": list, "records": list}
_HEADER |= dict.fromkeys(("version", "rank", "world", "step", "threads"), int)


class Finding(NamedTuple):
    """Something that is wrong, or unusual.

    Attributes:
        is_wrong: whether values are not finite, or not those that they should be.
        step, position: when, in the order of the casts and GEMMs.
        fqn, operand, gemms: the layer, the operand (or ``"result"``), and the GEMMs that take it.
        text: what is wrong.
        element: the global index of the first element that is wrong (of a result, and of rows of
            experts, the index in the rank's part); None if tensors were not recorded.
        ranks: the rank that has it. If copies differ, those whose copies are not like most, or all
            of them if it can't be told which copies are right.
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

    @property
    def rank(self) -> int | None:
        """The rank that has the element; None if it may be one of several."""
        return self.ranks[0] if len(self.ranks) == 1 else None


class Replay:
    """A replay of a recording.

    Attributes:
        files: what the ranks wrote, without records.
        findings: what is wrong or unusual, in the order of the casts and GEMMs; at the end what was
            unusual before the first step with something wrong, or else before the recorded step.
        checked: how many casts, operands and GEMMs were compared, by what came out.
        casts: the casts that could be repeated.

    Args:
        folder: a recording.

    Raises:
        OSError: a file can't be read.
        ValueError: the folder holds no recording, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self.files, self.checked = _load(folder), Counter[str]()
        threads = torch.get_num_threads()
        try:
            # The bits of a GEMM may depend on it.
            torch.set_num_threads(min(self.files[0]["threads"], os.cpu_count() or 1))
            found = self._findings([r for file in self.files for r in file.pop("records")])
        except Exception as error:  # tensors that do not fit together may raise anything
            raise ValueError(f"{folder}: the records do not fit together: {error!r}") from error
        finally:
            torch.set_num_threads(threads)
        wrong = min((each.step for each in found if each.is_wrong), default=self.files[0]["step"])
        once: dict[Any, Finding] = {}
        for each in sorted(found, key=lambda f: (f.step < wrong, f.step, f.position)):
            once.setdefault((each.step, each.fqn, each.operand, *each.gemms), each)
        self.findings = [*once.values()]
        self.casts = [cast for casts in self._casts.values() for cast in casts]

    def _findings(self, records: list[Record]) -> list[Finding]:
        self._limits = AnomalyLimits(**self.files[0]["limits"])
        self._casts: dict[Any, list[Cast]] = defaultdict(list)  # by step, layer and operand
        groups: dict[Any, list[Record]] = {}
        for record in records:
            if "high" in record:
                key = *_key(record), *record["gemms"], record["call"], *record["low"]["ranks"]
                groups.setdefault(key, []).append(record)
        found = [each for parts in groups.values() for each in self._of_cast(parts)]
        gemms = [record for record in records if "result" in record]
        found += [each for gemm in gemms for each in self._of_operands(gemm)]
        found += [each for gemm in gemms for each in self._of_result(gemm)]
        return [*found, *self._of_statistics()]

    def _of_cast(self, parts: list[Record]) -> Iterator[Finding]:
        copies = group_copies(parts)
        first, cast = parts[0], cast_again(parts, [alike[0][0] for alike in copies])
        of = first["step"], first["position"], first["fqn"], first["operand"], first["gemms"]
        if cast is not None:
            self._casts[_key(first)].append(cast)
        found = find_not_finite(parts) or find_different_copies(copies)
        if cast is not None and found is None:
            found = find_different_scales(parts) or find_different_cast(parts, cast.low)
            others = self._casts[first["step"], first["fqn"], first["folded"]]
            found = found or find_wrong_folds(parts, others)
        if found is not None:
            yield Finding(True, *of, *found, cast)
            return
        if cast is None:
            self.checked["casts can't be repeated, because parts are missing or not finite"] += 1
            return
        self.checked["casts equal those of one device, bit for bit"] += 1
        texts = [text_of(anomaly) for anomaly in FirstAnomalies(self._limits).of(cast.stats())]
        lost = cast.largest_loss() if first["operand"] == "weight" and cast.high.numel() else 0.0
        if self._limits.underflow is not None and lost > self._limits.underflow:
            texts.append(f"{lost:.4g} % of the values of one scale become zero: an outlier")
        if texts:
            yield Finding(False, *of, "; ".join(texts), *cast.largest(), cast)

    def _of_operands(self, record: Record) -> Iterator[Finding]:
        gemm, rank = record["gemm"], record["rank"]
        for operand, side in zip(GEMM_OPERANDS[gemm], ("left", "right"), strict=True):
            low, key = record[side], (record["step"], record["fqn"], operand)
            casts = [cast for cast in self._casts[key] if gemm in cast.parts[0]["gemms"]]
            own = [cast for cast in casts if rank in cast.parts[0]["low"]["ranks"]]
            if record["groups"] is None or operand == "weight":
                found = [compare(low, as_taken(cast.low, record, low)) for cast in own]
            else:
                found = [compare_rows(record, low, *rows) for rows in sent_rows(record, casts)]
            # Micro-batches have an operand each.
            bad, text = min(found, key=lambda each: int(each[0].sum()), default=(None, ""))
            if bad is None:
                self.checked["operands lack a cast to compare with"] += 1
            elif bad.any():
                text = f"what arrived for the GEMM is not what was cast: {text}"
                of = record["step"], record["position"], record["fqn"], operand, [gemm]
                if record["groups"] is None or operand == "weight":
                    element = first_element(bad, low)
                    if record["groups"] is not None and record["options"][3]:
                        element = element[0], element[2], element[1]  # it is stored as [E, K, N]
                else:  # some may not have arrived
                    element = tuple(bad.nonzero()[0].tolist())
                yield Finding(True, *of, text, element, (rank,), own[0] if own else None)
            else:
                self.checked["operands equal what was cast, bit for bit"] += 1

    def _of_result(self, record: Record) -> Iterator[Finding]:
        again, sizes = multiply_again(record), multiply_again(record, magnitudes=True)
        if again is None or sizes is None:
            self.checked["GEMMs need parts of other ranks"] += 1
            return
        result = record["result"]
        differs = (again != result) & ~(again.isnan() & result.isnan())
        rounding = again.abs().double() * torch.finfo(again.dtype).eps + sizes.double() / 2**10
        bad = differs & ~((again.double() - result.double()).abs() <= rounding)
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            text = f"{result[at].item():g} where the GEMM is {again[at].item():g}"
            of = record["step"], record["position"], record["fqn"], "result", [record["gemm"]]
            yield Finding(True, *of, text, at, (record["rank"],))
        else:
            how = "within their rounding" if differs.any() else "bit for bit"
            self.checked[f"GEMMs are equal {how}"] += 1

    def _of_statistics(self) -> Iterator[Finding]:
        anomalies, every = FirstAnomalies(self._limits), [r for f in self.files for r in f["rows"]]
        # Ranks have the same rows, but for those of pipeline stages.
        rows = {(r["step"], r["fqn"], r["operand"], r["gemms"]): CastStats(**r) for r in every}
        for row in sorted(rows.values(), key=attrgetter("step", "position")):
            of_operand = self._casts[row.step, row.fqn, row.operand]
            casts = [
                c for c in of_operand if c.parts[0]["gemms"] == [*row.gemms] and c.high.numel()
            ]
            for anomaly in anomalies.of(row):
                is_wrong = anomaly.what == "non-finite"
                of = is_wrong, row.step, row.position, row.fqn, row.operand, row.gemms
                if not casts:
                    yield Finding(*of, text_of(anomaly))
                elif not is_wrong:  # else it is a finding of the cast, too
                    cast = max(casts, key=lambda cast: cast.stats().amax)
                    yield Finding(*of, text_of(anomaly), *cast.largest(), cast)


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
            for name, kind in _HEADER.items():
                if not isinstance(files[-1][name], kind):
                    raise ValueError(f"{name} is {files[-1][name]!r}")
            alike = {(each["version"], each["world"], each["step"]) for each in files}
            if len(alike) > 1 or VERSION not in {version for version, *_ in alike}:
                raise ValueError(f"the versions, worlds and steps of the files are {alike}")
        except OSError:
            raise
        except Exception as error:  # reading unknown bytes may raise anything
            raise ValueError(f"{path} is of no recording, or damaged: {error!r}") from error
    return files


def _key(record: Record) -> tuple[int, str, str]:
    return record["step"], record["fqn"], record["operand"]
