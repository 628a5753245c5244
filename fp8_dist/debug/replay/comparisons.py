"""Comparisons of the records of a step with each other, and with casts and GEMMs of one device.

A :class:`Cast` joins the parts of all ranks and casts them again. A comparison returns the place of
an error in a record, and a text.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_dist.debug.measures import Measures, measure_casts
from fp8_dist.debug.recording import Record
from fp8_dist.debug.rows import CastStats
from fp8_dist.kernels.encoding import as_bytes
from fp8_dist.kernels.folding import fold_gradient
from fp8_dist.kernels.grouped import Groups
from fp8_dist.mesh import narrowed, regions, taken
from fp8_dist.moe import operators
from fp8_dist.operand.prepare import cast_once
from fp8_dist.scaling import Quantized, scheme_named, transposed
from fp8_dist.scaling.operators import multiply

Element = tuple[int, ...]


class Cast(NamedTuple):
    """A cast of one operand, joined from the parts of all ranks.

    Attributes:
        parts: the records of the ranks.
        high: the tensor before the cast, times the scales that are folded into it.
        low: the result when one device casts ``high``.
    """

    parts: list[Record]
    high: Tensor
    low: Quantized

    def stats(self) -> CastStats:
        """Return the statistics of the cast."""
        names = ("step", "fqn", "operand", "gemms", "delayed", "folded")
        (numbers,) = measure_casts(self.high, [self.low], 0)
        measures = Measures(*numbers.tolist())
        return CastStats.of(measures, self.low.scheme, **{n: self.parts[0][n] for n in names})

    def largest(self) -> tuple[Element, tuple[int]]:
        """Return the index of the largest magnitude, and the first rank that has it."""
        index = torch.unravel_index(self.high.abs().argmax(), self.high.shape)
        parts = self.parts[::-1]
        ranks = _joined(parts, [torch.full(part["high"].shape, part["rank"]) for part in parts])
        return tuple(map(int, index)), (int(ranks[index]),)

    def octaves(self) -> dict[int, list[int]]:
        """Count, by octave in units of the scale, magnitudes that are kept, zeroed, saturated."""
        wide = self.low.scheme.element_scales(self.low.scales, self.high.shape)
        units = (self.high.double() / wide).abs()
        is_zero = as_bytes(self.low.qdata) & 0x7F == 0
        effects = is_zero + 2 * (units > self.low.scheme.saturates_above)
        is_known = units.isfinite() & (units > 0)
        exponents = torch.frexp(units[is_known]).exponent - 1
        pairs = Counter(zip(exponents.tolist(), effects[is_known].tolist(), strict=True))
        return {e: [pairs[e, k] for k in range(3)] for e in sorted({e for e, _ in pairs})}


def as_quantized(low: Record) -> Quantized:
    """Return the float8 data and scales of a record."""
    row, column = low["start"]
    return Quantized(low["qdata"], tuple(low["scales"]), scheme_named(low["scheme"]), (row, column))


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
    """Group the copies of each part of a tensor by the values before the cast."""
    by_pieces: dict[str, list[Record]] = {}
    for part in parts:
        by_pieces.setdefault(str(part["low"]["pieces"]), []).append(part)
    return [_alike(copies, lambda p: [p["high"], p["folds"]]) for copies in by_pieces.values()]


def _alike(
    parts: Sequence[Record], tensors_of: Callable[[Record], list[Tensor | None]]
) -> list[list[Record]]:
    """Group records by the bits of some tensors, the largest group first."""
    groups: list[tuple[list[Tensor], list[Record]]] = []
    for part in parts:
        flat = [t.contiguous().view(-1) for t in tensors_of(part) if t is not None]
        bits = [t.view(torch.uint8) for t in flat]
        for group_bits, group in groups:
            if all(map(torch.equal, bits, group_bits)):
                group.append(part)
                break
        else:
            groups.append((bits, [part]))
    return sorted((group for _, group in groups), key=len, reverse=True)


def _odd_ranks(groups: Sequence[Sequence[Record]]) -> tuple[int, ...]:
    """Return the ranks outside of the largest group; all ranks if two groups are the largest."""
    first = 1 if len(groups[0]) > len(groups[1]) else 0
    return tuple(sorted(part["rank"] for group in groups[first:] for part in group))


def _values_by_rank(groups: Sequence[Sequence[Record]], values: Sequence[Tensor]) -> str:
    """Describe which ranks have which value."""
    texts = []
    for group, value in zip(groups, values, strict=True):
        verb = "has" if len(group) == 1 else "have"
        texts.append(f"{rank_names([part['rank'] for part in group])} {verb} {value.item():.4g}")
    return ", ".join(texts)


def rank_names(ranks: Sequence[int], conjunction: str = "and") -> str:
    """Name ranks: ``rank 1``, or ``ranks 1, 2 and 3``."""
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} {conjunction} {last}" if most else f"rank {last}"


# The number of wrong elements of an operand, or of wrong rows, the first of them, and a text.
Difference = tuple[int, Element, str]
_Wrong = tuple[str, Element, tuple[int, ...]]  # the text, the element and the ranks of a finding


def find_not_finite(parts: Sequence[Record]) -> Iterator[_Wrong]:
    """Yield parts that have NaN or infinity before their casts."""
    for part in parts:
        bad = ~part["high"].isfinite()
        if bad.any():
            at, pieces = tuple(bad.nonzero()[0].tolist()), part["low"]["pieces"]
            copies = [copy for copy in parts if copy["low"]["pieces"] == pieces]
            ranks = [copy["rank"] for copy in copies if not copy["high"][at].isfinite()]
            yield "NaN or infinite", first_element(bad, part["low"]), tuple(sorted(ranks))


def find_different_copies(copies: Sequence[Sequence[Sequence[Record]]]) -> Iterator[_Wrong]:
    """Yield copies of a part that differ in values, or in the scales that are folded into it."""
    values = {"high": "values", "folds": "values of the scales that are folded into it"}
    for groups in copies:
        for name in values if len(groups) > 1 else ():
            a, b, *_ = tensors = [alike[0][name] for alike in groups]
            if a is None:
                continue
            bad = (a != b) | (a.signbit() != b.signbit())
            if bad.any():
                at = tuple(bad.nonzero()[0].tolist())
                by_rank = _values_by_rank(groups, [tensor[at] for tensor in tensors])
                text, first = f"ranks have several {values[name]}: {by_rank}", groups[0][0]
                element = first_element(bad.expand_as(first["high"]), first["low"])
                yield text, element, _odd_ranks(groups)


def find_different_scales(parts: Sequence[Record]) -> Iterator[_Wrong]:
    """Yield the ranks that scale by other amax histories than most ranks."""
    known = [p for p in parts if p["delayed"] and p["high"].numel()]
    groups = _alike(known, lambda part: part["low"]["scales"])
    if len(groups) < 2:
        return
    ranks, scales = _odd_ranks(groups), [alike[0]["low"]["scales"][0] for alike in groups]
    first = next(part for part in known if part["rank"] in ranks)
    text = f"not the cast of one device: {_values_by_rank(groups, scales)} as its scale"
    yield text, first_element(torch.ones(first["high"].shape).bool(), first["low"]), ranks


def find_different_cast(parts: Sequence[Record], cast: Quantized) -> Iterator[_Wrong]:
    """Yield parts whose casts are not those of one device."""
    for part in parts:
        low, (bad, text) = part["low"], compare(part["low"], cast)
        if bad.any():
            yield f"not the cast of one device: {text}", first_element(bad, low), (part["rank"],)


def find_wrong_folds(parts: Sequence[Record], others: Sequence[Cast]) -> Iterator[_Wrong]:
    """Yield parts of a gradient whose folded scales are not those of the other operand's cast."""
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
        bad = min(wrong, key=lambda mask: int(mask.sum()), default=None)  # the nearest micro-batch
        if bad is not None and bad.any() and part["high"].numel():
            text = f"its folded scales are not those of the {part['folded']}"
            yield text, first_element(bad.expand_as(part["high"]), low), (part["rank"],)


def cast_again(records: list[Record], parts: Sequence[Record]) -> Cast | None:
    """Cast an operand again; None if parts are missing, or if a DELAYED one is not finite.

    Args:
        records: the records of all ranks.
        parts: the records of one copy of each part.
    """
    first, high = parts[0], _joined(parts, [part["high"] for part in parts])
    if high is None:
        return None
    scheme = scheme_named(first["low"]["scheme"])
    if first["folds"] is not None and high.numel():
        folds = _joined(parts, [part["folds"].expand_as(part["high"]) for part in parts])
        matrix, factors = (tensor.reshape(-1, high.shape[-1]) for tensor in (high, folds))
        s, t = (factors[0], None) if first["folded"] == "weight" else (None, factors[:, 0])
        qdata, scale = fold_gradient(matrix, scheme.dtype, s, t, False)
        scales = (scale.reshape(scheme.scale_shapes(high.shape)[0]),)
        return Cast(records, high * folds, Quantized(qdata.reshape(high.shape), scales, scheme))
    if first["delayed"] and not high.isfinite().all():
        return None  # the scale is NaN only on ranks with such values
    if not first["delayed"]:
        return Cast(records, high, cast_once(high, scheme))
    # A scale is the rounded reciprocal of a multiplier. Three multipliers may give this scale.
    scale = torch.stack([part["low"]["scales"][0] for part in records]).nanmedian()
    recorded = _joined(parts, [as_bytes(part["low"]["qdata"]) for part in parts])
    base, limit = scale.reciprocal(), torch.finfo(scheme.dtype).max
    around = base, base.nextafter(base * 0), base.nextafter(base * 2)
    casts = [(high.to(torch.float32) * m).clamp(-limit, limit).to(scheme.dtype) for m in around]
    best = min(casts, key=lambda qdata: int((as_bytes(qdata) != recorded).sum()))
    return Cast(records, high, Quantized(best, (scale,), scheme))


def compare_taken(record: Record, low: Record, cast: Quantized) -> Difference:
    """Compare an operand of a GEMM with its cast, in the form that the GEMM takes."""
    is_transposed = record["groups"] is not None and record["options"][3]
    if is_transposed:
        cast = transposed(cast, scheme_named(low["scheme"]))
    elif record["groups"] is None and record["gemm"] == "grad_weight":
        cast = cast.scheme.for_rows(cast, None)
    bad, text = compare(low, cast)
    element = first_element(bad, low) if bad.any() else ()
    if element and is_transposed:
        element = element[0], element[2], element[1]  # it is stored as [E, K, N]
    return int(bad.sum()), element, text


def _bytes_and_scales(low: Quantized) -> tuple[Tensor, Tensor]:
    """Return the bytes of the float8 data, and the scale of each element."""
    wide = low.scheme.element_scales(low.scales, low.qdata.shape, low.start)
    return as_bytes(low.qdata), wide.expand_as(low.qdata)


def compare(low: Record, cast: Quantized) -> tuple[Tensor, str]:
    """Return where a local copy differs from its part of a cast, and both values in a text."""
    local = as_quantized(low)
    # A transposed copy may be padded with rows of zeros.
    dims = zip(low["pieces"], cast.qdata.shape, strict=True)
    pieces = [tuple((a, min(b, n)) for a, b in part) for part, n in dims]
    expected, expected_scales = (taken(tensor, pieces) for tensor in _bytes_and_scales(cast))
    data, scales = (t[: len(expected)].reshape(expected.shape) for t in _bytes_and_scales(local))
    if local.scheme != cast.scheme:  # scales were folded into the other operand
        expected_scales = torch.ones_like(expected_scales)
    bad = data != expected
    bad |= (scales != expected_scales) & ~(scales.isnan() & expected_scales.isnan())
    if not bad.any():
        return bad, ""
    at = tuple(bad.nonzero()[0].tolist())
    a, b = (
        f"{data[at].view(local.qdata.dtype).item():g} (0x{data[at].item():02x}) x {scale[at]:g}"
        for data, scale in ((data, scales), (expected, expected_scales))
    )
    return bad, f"{a}, not {b}"


def sent_rows(record: Record, casts: Sequence[Cast]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows that were sent to a grouped GEMM: bytes, and (rank, row, expert) of each row.

    Yield one pair for each micro-batch, except those that lack the cast of a rank.
    """
    rank, experts = record["rank"], len(record["groups"])
    calls: dict[int, dict[int, Record]] = defaultdict(dict)
    for part in (part for cast in casts for part in cast.parts):
        calls[part["call"]][part["rank"]] = part
    for parts in calls.values():
        dispatch = parts[rank]["dispatch"] if rank in parts else None
        if dispatch is not None and parts.keys() >= {*dispatch[1]}:
            first = experts * dispatch[1].index(rank)
            data, names = list[Tensor](), list[Tensor]()
            for expert in range(experts):
                for part in (parts[source] for source in dispatch[1]):
                    i = (part["dispatch"][0] == first + expert).nonzero()[:, 0]
                    data.append(_bytes_of_rows(part["low"])[i])
                    name = torch.full_like(i, part["rank"]), i, torch.full_like(i, expert)
                    names.append(torch.stack(name, 1))
            yield torch.cat(data), torch.cat(names)
        elif dispatch is None and rank in parts:
            cast = _bytes_of_rows(parts[rank]["low"])
            expert_ids = torch.repeat_interleave(record["groups"])
            if len(cast) == len(expert_ids):  # otherwise they are of another micro-batch
                i = torch.arange(len(cast))
                yield cast, torch.stack([torch.full_like(i, rank), i, expert_ids], 1)


def compare_rows(record: Record, low: Record, sent: Tensor, names: Tensor) -> Difference:
    """Compare rows of experts, of which some may not have arrived, with the rows that were sent."""
    rows, experts = _bytes_of_rows(low), torch.repeat_interleave(record["groups"])
    size, count = min(len(rows), len(sent)), max(len(rows), len(sent))
    differs = torch.ones(count, rows.shape[1], dtype=torch.bool)
    differs[:size] = rows[:size] != sent[:size]
    is_bad = differs.any(1)
    is_bad[:size] |= experts[:size] != names[:size, 2]
    if not is_bad.any():
        return 0, (), ""
    at = int(is_bad.nonzero()[0])
    column = min(int(differs[at].to(torch.uint8).argmax()), low["qdata"].shape[1] - 1)
    wrong = int(is_bad.sum()), (at, column)
    if at >= len(sent):
        return *wrong, "no rank has sent this row"
    source, row, expert = names[at].tolist()
    text = f"row {row} of rank {source} for this rank's expert {expert}"
    if at >= len(rows):
        return *wrong, f"{text} has not arrived"
    alike = names[(sent == rows[at]).all(1), :2].tolist()
    if [source, row] in alike:
        return *wrong, f"{text} is among those of expert {experts[at]}"
    if alike:
        return *wrong, f"row {alike[0][1]} of rank {alike[0][0]}, not {text}"
    return *wrong, f"0x{rows[at, column]:02x}, not 0x{sent[at, column]:02x}, of {text}"


def _bytes_of_rows(low: Record) -> Tensor:
    scales = [s.flatten(1).contiguous().view(torch.uint8) for s in low["scales"]]
    return torch.cat([as_bytes(low["qdata"]), *scales], dim=1)


def multiply_again(record: Record, magnitudes: bool = False) -> Tensor | None:
    """Repeat a GEMM, or multiply magnitudes; None if this needs parts of other ranks."""
    gemm, dtype, sizes = record["gemm"], record["result"].dtype, record["groups"]
    left, right = as_quantized(record["left"]), as_quantized(record["right"])
    if magnitudes:
        dtype = torch.float32
        left, right = (
            operand._replace(qdata=(as_bytes(operand.qdata) & 0x7F).view(operand.qdata.dtype))
            for operand in (left, right)
        )
    if sizes is None:
        are_transposed = gemm == "grad_weight", gemm == "output"
        return multiply(left, right, are_transposed, dtype, tuple(record["options"]))
    _, pads, emulate, is_transposed = record["options"]
    groups = Groups.of(sizes, sizes, len(left.qdata))
    if gemm == "output":
        rows_gemm = operators.GroupedGemm(left, right, True, groups, dtype, emulate)
        return operators.grouped_mm(rows_gemm)
    is_whole = [*right.qdata.shape[1:]] == record["right"]["shape"][1:]
    if gemm == "grad_input" and operators.has_scales_to_fold(right) and not is_whole:
        return None  # the folded scales are those of whole rows
    weight = right
    if gemm == "grad_weight":
        shape = left.qdata.shape[1], right.qdata.shape[1]
        empty = right.qdata.new_empty((len(sizes), *shape[:: -1 if is_transposed else 1]))
        weight = right._replace(qdata=empty.mT if is_transposed else empty)
    dtypes = (dtype, None) if gemm == "grad_input" else (None, dtype)
    gemms = operators.GradientGemms(left, right, weight, groups, dtypes, pads, emulate)
    return operators.grouped_gradients(gemms)[gemm == "grad_weight"]


def first_element(bad: Tensor, low: Record) -> Element:
    """Return the global index of the first marked element of a part."""
    shape = low["shape"]
    numbers = taken(torch.arange(math.prod(shape)).view(shape), low["pieces"])
    return tuple(map(int, torch.unravel_index(numbers[: len(bad)][bad][0], shape)))
