"""A command that replays a recording: ``python -m fp8_dist.debug.replay FOLDER``.

FOLDER is what ``fp8_dist.debug.record`` was given, or one of the recordings in it. The command
joins the parts of all ranks, casts each operand again on one CPU, and compares, bit for bit, with
what each rank had: the copies that it cast, and the operands that arrived for each GEMM. It
multiplies those again, and compares the results. Then it prints the first thing that is wrong, with
its element and rank. ``--plot FILE`` draws the histogram with matplotlib (the extra ``report``).
The exit status is 0 if nothing is wrong or unusual, 1 if something is, and 2 if the folder can't be
replayed.
"""

import argparse
import importlib
import math
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from fp8_dist.cast import quantize
from fp8_dist.debug.measures import Measures, measure
from fp8_dist.debug.recording import VERSION, Record, text_of
from fp8_dist.debug.rows import AnomalyLimits, CastStats, FirstAnomalies, table
from fp8_dist.kernels import Groups
from fp8_dist.kernels.encoding import as_bytes
from fp8_dist.kernels.folding import fold_gradient
from fp8_dist.mesh import narrowed, regions, taken
from fp8_dist.moe.config import Float8ExpertsConfig
from fp8_dist.moe.operators import Operands, grouped_gradients, grouped_mm
from fp8_dist.recipe import GEMM_OPERANDS
from fp8_dist.scaling import Quantized, multiply, scheme_named, transposed

Element = tuple[int, ...]
_HEADER: dict[str, type] = {"reason": str, "limits": dict, "rows": list, "records": list}
_HEADER |= dict.fromkeys(("version", "rank", "world", "step", "threads"), int)
_FURTHER = 9  # findings after the first one that are printed


class Cast(NamedTuple):
    """A cast of one operand, of which the parts of all ranks are joined.

    Attributes:
        parts: the records of the ranks.
        high: the tensor before the cast, times the scales that are folded into it.
        low: the cast of one device.
    """

    parts: list[Record]
    high: Tensor
    low: Quantized

    def stats(self) -> CastStats:
        """Return the statistics of the cast."""
        names = ("step", "fqn", "operand", "gemms", "delayed", "folded")
        measures = Measures(*measure(self.high, self.low, 0).tolist())
        return CastStats.of(measures, self.low.scheme, **{n: self.parts[0][n] for n in names})

    def largest(self) -> tuple[Element, tuple[int]]:
        """Return the index of the largest magnitude, and the first rank that has it."""
        index = torch.unravel_index(self.high.abs().argmax(), self.high.shape)
        parts = self.parts[::-1]
        ranks = _joined(parts, [torch.full(part["high"].shape, part["rank"]) for part in parts])
        return tuple(map(int, index)), (int(ranks[index]),)

    def largest_loss(self) -> float:
        """Return the largest percentage of the values of one scale that become zero."""
        level, ndim = self.low.scheme.levels[-1], self.high.ndim
        rows, columns = self.high.shape[-2:]
        rows = rows if level.leading else math.prod(self.high.shape[:-1])
        values = (self.high != 0).to(torch.float32).reshape(-1, 1, rows, columns)
        lost = values * _are_zero(self.low.qdata).reshape(values.shape)
        size = level.block(ndim - 2, ndim) or rows, level.block(ndim - 1, ndim) or columns
        lost, values = (avg_pool2d(each, size, ceil_mode=True) for each in (lost, values))
        return 100 * float((lost / values).nan_to_num().max())

    def octaves(self) -> dict[int, list[int]]:
        """Count magnitudes, in units of their scales, by octave: kept, made zero, saturated."""
        wide = self.low.scheme.element_scales(self.low.scales, self.high.shape)
        units = (self.high.double() / wide).abs()
        effects = _are_zero(self.low.qdata) + 2 * (units > self.low.scheme.saturates_above)
        is_known = units.isfinite() & (units > 0)
        exponents = torch.frexp(units[is_known]).exponent - 1
        pairs = Counter(zip(exponents.tolist(), effects[is_known].tolist(), strict=True))
        return {e: [pairs[e, k] for k in range(3)] for e in sorted({e for e, _ in pairs})}


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
        copies = _copies(parts)
        first, cast = parts[0], _cast(parts, [alike[0][0] for alike in copies])
        of = first["step"], first["position"], first["fqn"], first["operand"], first["gemms"]
        if cast is not None:
            self._casts[_key(first)].append(cast)
        found = _not_finite(parts) or _different_copies(copies)
        if cast is not None and found is None:
            found = _different_scales(parts) or _not_of_one_device(parts, cast.low)
            others = self._casts[first["step"], first["fqn"], first["folded"]]
            found = found or _wrong_folds(parts, others)
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
                found = [_compared(low, _arriving(cast.low, record, low)) for cast in own]
                for part in (part for cast in own for part in cast.parts if part["own_scale"]):
                    cast = _quantized(part["low"])
                    if part["rank"] == rank and cast.qdata.shape == low["qdata"].shape:
                        found.append(_compared(_alone(low), _arriving(cast, record, low)))
            else:
                found = [_compared_rows(record, low, *rows) for rows in _rows_for(record, casts)]
            # Micro-batches have an operand each.
            bad, text = min(found, key=lambda each: int(each[0].sum()), default=(None, ""))
            if bad is None:
                self.checked["operands lack a cast to compare with"] += 1
            elif bad.any():
                text = f"what arrived for the GEMM is not what was cast: {text}"
                of = record["step"], record["position"], record["fqn"], operand, [gemm]
                if record["groups"] is None or operand == "weight":
                    element = _element(bad, low)
                    if record["groups"] is not None and record["options"][3]:
                        element = element[0], element[2], element[1]  # it is stored as [E, K, N]
                else:  # some may not have arrived
                    element = tuple(bad.nonzero()[0].tolist())
                yield Finding(True, *of, text, element, (rank,), own[0] if own else None)
            else:
                self.checked["operands equal what was cast, bit for bit"] += 1

    def _of_result(self, record: Record) -> Iterator[Finding]:
        again, sizes = _multiplied(record), _multiplied(record, magnitudes=True)
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


def _quantized(low: Record) -> Quantized:
    row, column = low["start"]
    return Quantized(low["qdata"], tuple(low["scales"]), scheme_named(low["scheme"]), (row, column))


def _alone(low: Record) -> Record:
    return low | {"pieces": [[[0, n]] for n in low["qdata"].shape]}


def _are_zero(qdata: Tensor) -> Tensor:
    return as_bytes(qdata) & 0x7F == 0


def _joined(parts: Sequence[Record], tensors: Sequence[Tensor]) -> Any:
    """Join the parts of a tensor; None if some are missing."""
    whole = tensors[0].new_empty(parts[0]["low"]["shape"])
    is_known = torch.zeros(whole.shape, dtype=torch.bool)
    for part, tensor in zip(parts, tensors, strict=True):
        for begin, first, size in regions(part["low"]["pieces"]):
            narrowed(whole, begin, size).copy_(narrowed(tensor, first, size))
            narrowed(is_known, begin, size).fill_(True)
    return whole if is_known.all() else None


def _copies(parts: Sequence[Record]) -> list[list[list[Record]]]:
    """Group the copies of each part of a tensor by what was cast."""
    places: dict[str, list[Record]] = {}
    for part in parts:
        places.setdefault(str(part["low"]["pieces"]), []).append(part)
    return [_alike(part, lambda p: [p["high"], p["folds"]]) for part in places.values()]


def _alike(
    parts: Sequence[Record], tensors_of: Callable[[Record], list[Tensor | None]]
) -> list[list[Record]]:
    """Group records by the bits of some tensors, the largest group first."""
    groups: list[tuple[list[Tensor], list[Record]]] = []
    for part in parts:
        tensors = [each.contiguous().view(-1) for each in tensors_of(part) if each is not None]
        bits = [each.view(torch.uint8) for each in tensors]
        for others, alike in groups:
            if all(map(torch.equal, bits, others)):
                alike.append(part)
                break
        else:
            groups.append((bits, [part]))
    return sorted((alike for _, alike in groups), key=len, reverse=True)


def _odd_ranks(groups: Sequence[Sequence[Record]]) -> tuple[int, ...]:
    """Return the ranks that are not like most others; all if there is no largest group."""
    is_known = len(groups[0]) > len(groups[1])
    return tuple(sorted(part["rank"] for alike in groups[is_known:] for part in alike))


def _several(groups: Sequence[Sequence[Record]], values: Sequence[Tensor]) -> str:
    """Say which ranks have which value."""
    names = [rank_names([part["rank"] for part in alike]) for alike in groups]
    verbs = ["has" if len(alike) == 1 else "have" for alike in groups]
    each = zip(names, verbs, values, strict=True)
    return ", ".join(f"{name} {verb} {value.item():.4g}" for name, verb, value in each)


def rank_names(ranks: Sequence[int], conjunction: str = "and") -> str:
    """Name ranks: ``rank 1``, or ``ranks 1, 2 and 3``."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} {conjunction} {last}" if most else f"rank {last}"


_Wrong = tuple[str, Element, tuple[int, ...]]  # the text, the element and the ranks of a finding


def _not_finite(parts: Sequence[Record]) -> _Wrong | None:
    for part in parts:
        bad = ~part["high"].isfinite()
        if bad.any():
            at, pieces = tuple(bad.nonzero()[0].tolist()), part["low"]["pieces"]
            copies = [other for other in parts if other["low"]["pieces"] == pieces]
            ranks = [other["rank"] for other in copies if not other["high"][at].isfinite()]
            return "NaN or infinite", _element(bad, part["low"]), tuple(sorted(ranks))
    return None


def _different_copies(copies: Sequence[Sequence[Sequence[Record]]]) -> _Wrong | None:
    """Find copies of a part that differ in the values, or in the scales that are folded into it."""
    for groups in copies:
        for name in ("high", "folds") if len(groups) > 1 else ():
            a, b, *_ = tensors = [alike[0][name] for alike in groups]
            if a is None:
                continue
            bad = (a != b) | (a.signbit() != b.signbit())
            if bad.any():
                at = tuple(bad.nonzero()[0].tolist())
                text = "ranks have several values"
                if name == "folds":
                    text += " of the scales that are folded into it"
                text += f": {_several(groups, [tensor[at] for tensor in tensors])}"
                first = groups[0][0]
                element = _element(bad.expand_as(first["high"]), first["low"])
                return text, element, _odd_ranks(groups)
    return None


def _different_scales(parts: Sequence[Record]) -> _Wrong | None:
    """Find ranks that scale by different amax histories."""
    known = [p for p in parts if p["delayed"] and not p["own_scale"] and p["high"].numel()]
    groups = _alike(known, lambda part: part["low"]["scales"])
    if len(groups) < 2:
        return None
    ranks, scales = _odd_ranks(groups), [alike[0]["low"]["scales"][0] for alike in groups]
    first = next(part for part in known if part["rank"] in ranks)
    text = f"not the cast of one device: {_several(groups, scales)} as its scale"
    return text, _element(torch.ones_like(first["high"], dtype=torch.bool), first["low"]), ranks


def _not_of_one_device(parts: Sequence[Record], cast: Quantized) -> _Wrong | None:
    for part in parts:
        low, (bad, text) = part["low"], _compared(part["low"], cast)
        if part["own_scale"] and bad.any():  # amax_scope="rank"
            bad, text = _compared(_alone(low), quantize(part["high"], cast.scheme))
        if bad.any():
            text = f"not the cast of one device: {text}"
            return text, _element(bad, low), (part["rank"],)
    return None


def _wrong_folds(parts: Sequence[Record], others: Sequence[Cast]) -> _Wrong | None:
    """Find scales that are folded into a gradient and are not those of the other operand's cast."""
    for part in parts if parts[0]["folds"] is not None and not parts[0]["own_scale"] else ():
        low, folds, wrong = part["low"], part["folds"], list[Tensor]()
        for cast in others:
            scales, pieces = cast.low.scales[0], [*low["pieces"][:-1], [[0, 1]]]
            if part["folded"] == "weight":
                scales, pieces = scales.reshape(-1), low["pieces"][-1:]
            ends = [max((end for _, end in dim), default=0) for dim in pieces]
            fits = len(ends) == scales.ndim and all(map(int.__le__, ends, scales.shape))
            if fits and part["rank"] in cast.parts[0]["low"]["ranks"]:
                scales = taken(scales, pieces)
                wrong.append((scales != folds) & ~(scales.isnan() & folds.isnan()))
        bad = min(wrong, key=lambda each: int(each.sum()), default=None)  # of micro-batches
        if bad is not None and bad.any() and part["high"].numel():
            text = f"its folded scales are not those of the {part['folded']}"
            return text, _element(bad.expand_as(part["high"]), low), (part["rank"],)
    return None


def _cast(every: list[Record], parts: Sequence[Record]) -> Cast | None:
    """Cast an operand again; None if parts are missing, or those of a DELAYED one not finite.

    Args:
        every: the records of all ranks.
        parts: those of one copy of each part.
    """
    first, high = parts[0], _joined(parts, [part["high"] for part in parts])
    if high is None:
        return None
    scheme = scheme_named(first["low"]["scheme"])
    if first["folds"] is not None and high.numel():
        folds = _joined(parts, [part["folds"].expand_as(part["high"]) for part in parts])
        matrix, factors = (each.reshape(-1, high.shape[-1]) for each in (high, folds))
        s, t = (factors[0], None) if first["folded"] == "weight" else (None, factors[:, 0])
        qdata, scale = fold_gradient(matrix, scheme.dtype, s, t, False)
        scales = (scale.reshape(scheme.scale_shapes(high.shape)[0]),)
        return Cast(every, high * folds, Quantized(qdata.reshape(high.shape), scales, scheme))
    if first["delayed"] and not high.isfinite().all():
        return None  # a part whose amax is finite has another scale
    if not first["delayed"]:
        return Cast(every, high, quantize(high, scheme))
    # The scale of most ranks is the rounded reciprocal of one of three multipliers.
    scale = torch.stack([part["low"]["scales"][0] for part in every]).nanmedian()
    known = _joined(parts, [as_bytes(part["low"]["qdata"]) for part in parts])
    base, limit = scale.reciprocal(), torch.finfo(scheme.dtype).max
    around = base, base.nextafter(base * 0), base.nextafter(base * 2)
    casts = [(high.to(torch.float32) * m).clamp(-limit, limit).to(scheme.dtype) for m in around]
    best = min(casts, key=lambda qdata: int((as_bytes(qdata) != known).sum()))
    return Cast(every, high, Quantized(best, (scale,), scheme))


def _arriving(cast: Quantized, record: Record, low: Record) -> Quantized:
    """Return a cast as a GEMM takes it."""
    if record["groups"] is None:
        return cast.scheme.for_rows(cast, None) if record["gemm"] == "grad_weight" else cast
    return transposed(cast, scheme_named(low["scheme"])) if record["options"][3] else cast


def _compared(low: Record, cast: Quantized) -> tuple[Tensor, str]:
    """Return where a local copy differs from its part of a cast, and the first two values."""
    own, shape = _quantized(low), cast.qdata.shape
    # A transposed copy may have more rows than the cast, of zeros.
    dims = zip(low["pieces"], shape, strict=True)
    pieces = [tuple((a, min(b, n)) for a, b in part) for part, n in dims]
    wide = cast.scheme.element_scales(cast.scales, shape, cast.start)
    expected = taken(as_bytes(cast.qdata), pieces)
    scales = taken(wide.expand_as(cast.qdata), pieces)
    factors = own.scheme.element_scales(own.scales, own.qdata.shape, own.start)
    found, factors = (
        each[: len(expected)].reshape(expected.shape)
        for each in (as_bytes(own.qdata), factors.expand_as(own.qdata))
    )
    if own.scheme != cast.scheme:
        scales = torch.ones_like(scales)  # its own were folded into the other operand
    bad = found != expected
    bad |= (factors != scales) & ~(factors.isnan() & scales.isnan())
    if not bad.any():
        return bad, ""
    at = tuple(bad.nonzero()[0].tolist())
    a, b = (
        f"{data[at].view(own.qdata.dtype).item():g} (0x{data[at].item():02x}) x {scale[at]:g}"
        for data, scale in ((found, factors), (expected, scales))
    )
    return bad, f"{a}, not {b}"


def _rows_for(record: Record, casts: Sequence[Cast]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of a grouped GEMM as ranks have cast them, for each micro-batch.

    These are their bytes, and the (rank, row, expert) of each. A micro-batch of which a rank's cast
    is missing is left out.
    """
    rank, experts = record["rank"], len(record["groups"])
    calls: dict[int, dict[int, Record]] = defaultdict(dict)
    for part in (part for cast in casts for part in cast.parts):
        calls[part["call"]][part["rank"]] = part
    for parts in calls.values():
        dispatch = parts[rank]["dispatch"] if rank in parts else None
        if dispatch is not None and parts.keys() >= {*dispatch[1]}:
            first = experts * dispatch[1].index(rank)
            each = [(e, parts[source]) for e in range(experts) for source in dispatch[1]]
            rows = [(p["dispatch"][0] == first + e).nonzero()[:, 0] for e, p in each]
            data = [_bytes_of_rows(p["low"])[i] for (_, p), i in zip(each, rows, strict=True)]
            names = [
                torch.stack([torch.full_like(i, p["rank"]), i, torch.full_like(i, e)], 1)
                for (e, p), i in zip(each, rows, strict=True)
            ]
            yield torch.cat(data), torch.cat(names)
        elif dispatch is None and rank in parts:
            cast, of = _bytes_of_rows(parts[rank]["low"]), torch.repeat_interleave(record["groups"])
            if len(cast) == len(of):  # else they are of another micro-batch
                yield cast, torch.stack([torch.full_like(of, rank), torch.arange(len(of)), of], 1)


def _compared_rows(record: Record, low: Record, sent: Tensor, names: Tensor) -> tuple[Tensor, str]:
    """Return one element of each row of experts that is not the row that was sent, and a text."""
    own, of = _bytes_of_rows(low), torch.repeat_interleave(record["groups"])
    size, count = min(len(own), len(sent)), max(len(own), len(sent))
    differs = torch.ones(count, own.shape[1], dtype=torch.bool)
    differs[:size] = own[:size] != sent[:size]
    is_bad = differs.any(1)
    is_bad[:size] |= of[:size] != names[:size, 2]
    bad = torch.zeros(count, low["qdata"].shape[1], dtype=torch.bool)
    columns = differs.to(torch.uint8).argmax(1).clamp(max=bad.shape[1] - 1)
    bad[is_bad.nonzero()[:, 0], columns[is_bad]] = True
    if not bad.any():
        return bad, ""
    at, column = bad.nonzero()[0].tolist()
    if at >= len(sent):
        return bad, "no rank has sent this row"
    source, row, expert = names[at].tolist()
    text = f"row {row} of rank {source} for this rank's expert {expert}"
    if at >= len(own):
        return bad, f"{text} has not arrived"
    alike = names[(sent == own[at]).all(1), :2].tolist()
    if [source, row] in alike:
        return bad, f"{text} is among those of expert {of[at]}"
    if alike:
        return bad, f"row {alike[0][1]} of rank {alike[0][0]}, not {text}"
    return bad, f"0x{own[at, column]:02x}, not 0x{sent[at, column]:02x}, of {text}"


def _bytes_of_rows(low: Record) -> Tensor:
    scales = [s.flatten(1).contiguous().view(torch.uint8) for s in low["scales"]]
    return torch.cat([as_bytes(low["qdata"]), *scales], dim=1)


def _multiplied(record: Record, magnitudes: bool = False) -> Tensor | None:
    """Multiply again, or multiply magnitudes; None if parts of other ranks are needed."""
    gemm, dtype, sizes = record["gemm"], record["result"].dtype, record["groups"]
    left, right = _quantized(record["left"]), _quantized(record["right"])
    if magnitudes:
        dtype = torch.float32
        left, right = (
            each._replace(qdata=(as_bytes(each.qdata) & 0x7F).view(each.qdata.dtype))
            for each in (left, right)
        )
    if sizes is None:
        turns = gemm == "grad_weight", gemm == "output"
        return multiply(left, right, turns, dtype, tuple(record["options"]))
    recipe, pads, emulate, is_turned = record["options"]
    config = Float8ExpertsConfig(recipe, pad_token_groups_for_grouped_mm=pads, emulate=emulate)
    groups = Groups.of(sizes, sizes, len(left.qdata))
    if gemm == "output":
        return grouped_mm(left, right, True, groups, dtype, config)
    is_whole = [*right.qdata.shape[1:]] == record["right"]["shape"][1:]
    if gemm == "grad_input" and config.folds and not is_whole:
        return None  # the folded scales are those of whole rows
    weight = right
    if gemm == "grad_weight":
        shape = left.qdata.shape[1], right.qdata.shape[1]
        empty = right.qdata.new_empty((len(sizes), *shape[:: -1 if is_turned else 1]))
        weight = right._replace(qdata=empty.mT if is_turned else empty)
    needs = gemm == "grad_input", gemm == "grad_weight"
    of = Operands(left, right, weight), groups, needs, (dtype, dtype), config
    return grouped_gradients(*of)[needs[1]]


def _element(bad: Tensor, low: Record) -> Element:
    """Return the global index of the first element of a part that is marked."""
    shape = low["shape"]
    numbers = taken(torch.arange(math.prod(shape)).view(shape), low["pieces"])
    return tuple(map(int, torch.unravel_index(numbers[: len(bad)][bad][0], shape)))


def page(replay: Replay) -> str:
    """Return what a replay found, as text."""
    file, ranks = replay.files[0], [each["rank"] for each in replay.files]
    lines = [f"step {file['step']} of {file['world']} ranks, recorded because: {file['reason']}"]
    if missing := sorted({*range(file["world"])} - {*ranks}):
        lines.append(f"ranks that did not write: {missing}")
    lines += [f"  {count} {what}" for what, count in replay.checked.items()]
    if not replay.findings:
        return "\n".join([*lines, "nothing is wrong", table(cast.stats() for cast in replay.casts)])
    first, *others = replay.findings
    lines += ["", f"first {'wrong' if first.is_wrong else 'unusual'}:", _line(first)]
    if first.element is None:
        lines.append("  its tensors were not kept, so that no element or rank can be named;")
        lines.append(f"  record(model, folder, layers={first.fqn!r}) keeps those of each step")
    if first.cast is not None:
        lines += _described(first.cast)
    if others:
        lines += ["", "then:", *map(_line, others[:_FURTHER])]
        lines += [f"  ... {len(others) - _FURTHER} more"] if len(others) > _FURTHER else []
    return "\n".join(lines)


def _line(found: Finding) -> str:
    where = ""
    if found.element is not None:
        where = f", element {[*found.element]} on {rank_names(found.ranks, 'or')}"
    what = f"{found.operand} for {', '.join(found.gemms)}"
    return f"  step {found.step}: {found.fqn}: {what}{where}: {found.text}"


def _described(cast: Cast) -> Iterator[str]:
    row, counts, element = cast.stats(), cast.octaves(), [*cast.largest()[0]]
    yield f"  {[*cast.high.shape]} to {row.dtype}, one scale per {row.granularity}"
    yield f"  amax {row.amax:.5g} at {element}, scale {row.scale:.5g}, smallest {row.scale_min:.5g}"
    shares = {
        "saturate": row.saturation,
        "become zero": row.underflow,
        "aren't finite": row.nonfinite,
    }
    yield "  " + ", ".join(f"{share:.4g} % {what}" for what, share in shares.items())
    most = max(map(sum, counts.values()), default=0)
    for exponent in reversed(counts):
        signs = zip(counts[exponent], "#.!", strict=True)
        bar = "".join(sign * math.ceil(40 * count / most) for count, sign in signs)
        yield f"  {f'2^{exponent}':>6} {sum(counts[exponent]):>10,} {bar}"
    if counts:
        yield "  (magnitudes in units of their scales: # kept, . becomes zero, ! saturates)"


def _draw(cast: Cast, path: Path) -> None:
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 4), layout="tight")
    counts, axes = cast.octaves(), figure.subplots()
    for kind, label in reversed([*enumerate(("kept", "becomes zero", "saturates"), 1)]):
        heights = [sum(count[:kind]) for count in counts.values()]  # the next kinds hide a part
        axes.bar([*counts], heights, 1.0, align="edge", label=label)
    axes.set(title=f"{cast.parts[0]['fqn']}: {cast.parts[0]['operand']}", ylabel="values")
    axes.set(xlabel="octave of the magnitude, in units of its scale", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv``, by default the process's arguments; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fp8_dist.debug.replay",
        description="Replays a recording of fp8_dist.debug.record on one CPU.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the histogram of the cast")
    args = parser.parse_args(argv)
    several = [*args.folder.glob("step*[0-9]")] or [*args.folder.glob("step*.incomplete")]
    several.sort(key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])
    folder, *others = several or [args.folder]
    try:
        replay = Replay(folder)
        print(folder, *others, sep="\nnot shown: ")
        text = page(replay)
        print("".join(c if c.isprintable() or c == "\n" else "?" for c in text))  # no control codes
        casts = [each.cast for each in replay.findings if each.cast is not None] or replay.casts
        if args.plot is not None and casts:
            _draw(casts[0], args.plot)
    except ImportError:
        parser.error('--plot needs matplotlib: pip install "fp8-dist[report]"')
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 1 if replay.findings else 0


if __name__ == "__main__":
    sys.exit(main())
