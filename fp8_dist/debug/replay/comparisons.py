"""Comparisons of the records of a step with each other, and with what one device computes again.

A :class:`Cast` joins the parts of all ranks and casts them again. A comparison returns where a
record is wrong, and a text.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from fp8_dist.cast import quantize
from fp8_dist.debug.measures import Measures, measure
from fp8_dist.debug.recording import Record
from fp8_dist.debug.rows import CastStats
from fp8_dist.kernels import Groups
from fp8_dist.kernels.encoding import as_bytes
from fp8_dist.kernels.folding import fold_gradient
from fp8_dist.mesh import narrowed, regions, taken
from fp8_dist.moe.config import Float8ExpertsConfig
from fp8_dist.moe.operators import Operands, grouped_gradients, grouped_mm
from fp8_dist.scaling import Quantized, multiply, scheme_named, transposed

Element = tuple[int, ...]


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


def as_quantized(low: Record) -> Quantized:
    """Return the float8 data and scales of a record."""
    row, column = low["start"]
    return Quantized(low["qdata"], tuple(low["scales"]), scheme_named(low["scheme"]), (row, column))


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


def group_copies(parts: Sequence[Record]) -> list[list[list[Record]]]:
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


def find_not_finite(parts: Sequence[Record]) -> _Wrong | None:
    """Find a part that has NaN or infinity before its cast."""
    for part in parts:
        bad = ~part["high"].isfinite()
        if bad.any():
            at, pieces = tuple(bad.nonzero()[0].tolist()), part["low"]["pieces"]
            copies = [other for other in parts if other["low"]["pieces"] == pieces]
            ranks = [other["rank"] for other in copies if not other["high"][at].isfinite()]
            return "NaN or infinite", first_element(bad, part["low"]), tuple(sorted(ranks))
    return None


def find_different_copies(copies: Sequence[Sequence[Sequence[Record]]]) -> _Wrong | None:
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
                element = first_element(bad.expand_as(first["high"]), first["low"])
                return text, element, _odd_ranks(groups)
    return None


def find_different_scales(parts: Sequence[Record]) -> _Wrong | None:
    """Find ranks that scale by different amax histories."""
    known = [p for p in parts if p["delayed"] and p["high"].numel()]
    groups = _alike(known, lambda part: part["low"]["scales"])
    if len(groups) < 2:
        return None
    ranks, scales = _odd_ranks(groups), [alike[0]["low"]["scales"][0] for alike in groups]
    first = next(part for part in known if part["rank"] in ranks)
    text = f"not the cast of one device: {_several(groups, scales)} as its scale"
    return (
        text,
        first_element(torch.ones_like(first["high"], dtype=torch.bool), first["low"]),
        ranks,
    )


def find_different_cast(parts: Sequence[Record], cast: Quantized) -> _Wrong | None:
    """Find a part whose cast is not that of one device."""
    for part in parts:
        low, (bad, text) = part["low"], compare(part["low"], cast)
        if bad.any():
            text = f"not the cast of one device: {text}"
            return text, first_element(bad, low), (part["rank"],)
    return None


def find_wrong_folds(parts: Sequence[Record], others: Sequence[Cast]) -> _Wrong | None:
    """Find scales that are folded into a gradient and are not those of the other operand's cast."""
    for part in parts if parts[0]["folds"] is not None else ():
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
            return text, first_element(bad.expand_as(part["high"]), low), (part["rank"],)
    return None


def cast_again(every: list[Record], parts: Sequence[Record]) -> Cast | None:
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


def as_taken(cast: Quantized, record: Record, low: Record) -> Quantized:
    """Return a cast as a GEMM takes it."""
    if record["groups"] is None:
        return cast.scheme.for_rows(cast, None) if record["gemm"] == "grad_weight" else cast
    return transposed(cast, scheme_named(low["scheme"])) if record["options"][3] else cast


def compare(low: Record, cast: Quantized) -> tuple[Tensor, str]:
    """Return where a local copy differs from its part of a cast, and the first two values."""
    own, shape = as_quantized(low), cast.qdata.shape
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


def sent_rows(record: Record, casts: Sequence[Cast]) -> Iterator[tuple[Tensor, Tensor]]:
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


def compare_rows(record: Record, low: Record, sent: Tensor, names: Tensor) -> tuple[Tensor, str]:
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


def multiply_again(record: Record, magnitudes: bool = False) -> Tensor | None:
    """Multiply again, or multiply magnitudes; None if parts of other ranks are needed."""
    gemm, dtype, sizes = record["gemm"], record["result"].dtype, record["groups"]
    left, right = as_quantized(record["left"]), as_quantized(record["right"])
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


def first_element(bad: Tensor, low: Record) -> Element:
    """Return the global index of the first element of a part that is marked."""
    shape = low["shape"]
    numbers = taken(torch.arange(math.prod(shape)).view(shape), low["pieces"])
    return tuple(map(int, torch.unravel_index(numbers[: len(bad)][bad][0], shape)))
