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
from fp8_dist.recipe import Operand
from fp8_dist.scaling import Quantized, Scheme, scheme_named, transposed
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


def differing(a: Tensor, b: Tensor) -> Tensor:
    """Mark the elements that differ. NaN is equal to NaN."""
    return ~torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)


def first_index(bad: Tensor) -> Element:
    """Return the index of the first marked element."""
    return tuple(bad.nonzero()[0].tolist())


class Wrong(NamedTuple):
    """A fault of a cast: a text, the global index of an element, and the ranks."""

    text: str
    element: Element
    ranks: tuple[int, ...]


class Difference(NamedTuple):
    """How what arrived for a GEMM differs from what was cast.

    Attributes:
        wrong: the number of wrong elements of an operand, or of wrong rows.
        element: the first of them; empty if there is none.
        text: a description.
    """

    wrong: int = 0
    element: Element = ()
    text: str = ""


def find_not_finite(parts: Sequence[Record]) -> Iterator[Wrong]:
    """Yield parts that have NaN or infinity before their casts."""
    for part in parts:
        bad = ~part["high"].isfinite()
        if bad.any():
            at = first_index(bad)
            copies = [copy for copy in parts if copy["low"]["pieces"] == part["low"]["pieces"]]
            ranks = [copy["rank"] for copy in copies if not copy["high"][at].isfinite()]
            yield Wrong("NaN or infinite", first_element(bad, part["low"]), tuple(sorted(ranks)))


def find_different_copies(copies: Sequence[Sequence[Sequence[Record]]]) -> Iterator[Wrong]:
    """Yield copies of a part that differ in values, or in the scales that are folded into it."""
    for groups in copies:
        if len(groups) > 1:
            yield from _find_different(groups, "high", "values")
            if groups[0][0]["folds"] is not None:
                text = "values of the scales that are folded into it"
                yield from _find_different(groups, "folds", text)


def _find_different(
    groups: Sequence[Sequence[Record]], name: str, description: str
) -> Iterator[Wrong]:
    """Yield an element of a tensor in which the two largest groups of copies differ."""
    tensors = [alike[0][name] for alike in groups]
    a, b = tensors[:2]
    bad = (a != b) | (a.signbit() != b.signbit())
    if bad.any():
        at = first_index(bad)
        by_rank = _values_by_rank(groups, [tensor[at] for tensor in tensors])
        first = groups[0][0]
        element = first_element(bad.expand_as(first["high"]), first["low"])
        yield Wrong(f"ranks have several {description}: {by_rank}", element, _odd_ranks(groups))


def find_different_scales(parts: Sequence[Record]) -> Iterator[Wrong]:
    """Yield the ranks that scale by other amax histories than most ranks."""
    known = [part for part in parts if part["delayed"] and part["high"].numel()]
    groups = _alike(known, lambda part: part["low"]["scales"])
    if len(groups) > 1:
        ranks = _odd_ranks(groups)
        scales = _values_by_rank(groups, [alike[0]["low"]["scales"][0] for alike in groups])
        first = next(part for part in known if part["rank"] in ranks)
        everything = torch.ones_like(first["high"], dtype=torch.bool)
        element = first_element(everything, first["low"])
        yield Wrong(f"not the cast of one device: {scales} as its scale", element, ranks)


def find_different_cast(parts: Sequence[Record], cast: Quantized) -> Iterator[Wrong]:
    """Yield parts whose casts are not those of one device."""
    for part in parts:
        bad, text = compare(part["low"], cast)
        if bad.any():
            element = first_element(bad, part["low"])
            yield Wrong(f"not the cast of one device: {text}", element, (part["rank"],))


def find_wrong_folds(parts: Sequence[Record], others: Sequence[Cast]) -> Iterator[Wrong]:
    """Yield parts of a gradient whose folded scales are not those of the other operand's cast."""
    for part in parts:
        if part["folds"] is None or not part["high"].numel():
            continue
        wrong = []
        for cast in others:
            scales = _folded_scales(part, cast)
            if scales is not None:
                wrong.append(differing(scales, part["folds"]))
        # The cast of the same micro-batch is the nearest one.
        bad = min(wrong, key=torch.count_nonzero, default=None)
        if bad is not None and bad.any():
            element = first_element(bad.expand_as(part["high"]), part["low"])
            text = f"its folded scales are not those of the {part['folded']}"
            yield Wrong(text, element, (part["rank"],))


def _folded_scales(part: Record, cast: Cast) -> Tensor | None:
    """Return the scales of a cast that belong to a part; None if the cast is not of its ranks."""
    pieces = part["low"]["pieces"]
    scales = cast.low.scales[0]
    if part["folded"] == "weight":
        scales = scales.reshape(-1)
        pieces = pieces[-1:]
    else:
        pieces = [*pieces[:-1], [[0, 1]]]
    if part["rank"] not in cast.parts[0]["low"]["ranks"] or len(pieces) != scales.ndim:
        return None
    for dim, size in zip(pieces, scales.shape, strict=True):
        if any(end > size for _, end in dim):
            return None
    return taken(scales, pieces)


def cast_again(records: list[Record], parts: Sequence[Record]) -> Cast | None:
    """Cast an operand again; None if parts are missing, or if a DELAYED one is not finite.

    Args:
        records: the records of all ranks.
        parts: the records of one copy of each part.
    """
    first = parts[0]
    high = _joined(parts, [part["high"] for part in parts])
    if high is None:
        return None
    scheme = scheme_named(first["low"]["scheme"])
    if first["folds"] is not None and high.numel():
        folds = _joined(parts, [part["folds"].expand_as(part["high"]) for part in parts])
        return Cast(records, high * folds, _fold_again(high, folds, scheme, first["folded"]))
    if not first["delayed"]:
        return Cast(records, high, cast_once(high, scheme))
    if not high.isfinite().all():
        return None  # the scale is NaN only on ranks with such values
    scale = torch.stack([part["low"]["scales"][0] for part in records]).nanmedian()
    recorded = _joined(parts, [as_bytes(part["low"]["qdata"]) for part in parts])
    return Cast(records, high, _cast_delayed(high, scale, scheme, recorded))


def _fold_again(high: Tensor, folds: Tensor, scheme: Scheme, folded: Operand) -> Quantized:
    """Cast a gradient into which the scales of another operand are folded."""
    matrix = high.reshape(-1, high.shape[-1])
    factors = folds.reshape(matrix.shape)
    of_columns = factors[0] if folded == "weight" else None
    of_rows = None if folded == "weight" else factors[:, 0]
    qdata, scale = fold_gradient(matrix, scheme.dtype, of_columns, of_rows, False)
    scale = scale.reshape(scheme.scale_shapes(high.shape)[0])
    return Quantized(qdata.reshape(high.shape), (scale,), scheme)


def _cast_delayed(high: Tensor, scale: Tensor, scheme: Scheme, recorded: Tensor) -> Quantized:
    """Cast an operand by a scale.

    A scale is the rounded reciprocal of a multiplier. Three multipliers may give this scale, of
    which the one that comes nearest to the recorded bytes is taken.
    """
    limit = torch.finfo(scheme.dtype).max
    base = scale.reciprocal()
    casts = []
    for multiplier in (base, base.nextafter(base * 0), base.nextafter(base * 2)):
        scaled = high.to(torch.float32) * multiplier
        casts.append(scaled.clamp(-limit, limit).to(scheme.dtype))
    best = min(casts, key=lambda qdata: torch.count_nonzero(as_bytes(qdata) != recorded))
    return Quantized(best, (scale,), scheme)


def compare_taken(record: Record, low: Record, cast: Quantized) -> Difference:
    """Compare an operand of a GEMM with its cast, in the form that the GEMM takes."""
    is_transposed = record["groups"] is not None and record["options"][3]
    if is_transposed:
        cast = transposed(cast, scheme_named(low["scheme"]))
    elif record["groups"] is None and record["gemm"] == "grad_weight":
        cast = cast.scheme.for_rows(cast, None)
    bad, text = compare(low, cast)
    if not bad.any():
        return Difference()
    element = first_element(bad, low)
    if is_transposed:
        element = element[0], element[2], element[1]  # it is stored as [E, K, N]
    return Difference(int(bad.sum()), element, text)


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
    bad |= differing(scales, expected_scales)
    if not bad.any():
        return bad, ""
    at = first_index(bad)

    def shown(data: Tensor, scales: Tensor) -> str:
        value = data[at].view(local.qdata.dtype)
        return f"{value.item():g} (0x{data[at].item():02x}) x {scales[at]:g}"

    return bad, f"{shown(data, scales)}, not {shown(expected, expected_scales)}"


class SentRows(NamedTuple):
    """The rows that were sent to a grouped GEMM in one micro-batch, as they should arrive.

    Attributes:
        data: the bytes of the rows and of their scales.
        origins: int64 ``[R, 3]``: the rank that sent each row, the row there, and its expert.
    """

    data: Tensor
    origins: Tensor


def sent_rows(record: Record, casts: Sequence[Cast]) -> Iterator[SentRows]:
    """Yield the rows of each micro-batch, except for those that lack the cast of a rank."""
    rank = record["rank"]
    calls: dict[int, dict[int, Record]] = defaultdict(dict)
    for cast in casts:
        for part in cast.parts:
            calls[part["call"]][part["rank"]] = part
    for parts in calls.values():
        if rank not in parts:
            continue
        if parts[rank]["dispatch"] is not None:
            sources = parts[rank]["dispatch"][1]
            if parts.keys() >= {*sources}:
                yield _dispatched_rows(record, [parts[source] for source in sources])
        else:
            data = _bytes_of_rows(parts[rank]["low"])
            experts = torch.repeat_interleave(record["groups"])
            if len(data) == len(experts):  # otherwise they are of another micro-batch
                rows = torch.arange(len(data))
                ranks = torch.full_like(rows, rank)
                yield SentRows(data, torch.stack([ranks, rows, experts], 1))


def _dispatched_rows(record: Record, sources: Sequence[Record]) -> SentRows:
    """Return the rows that the ranks of ``sources`` sent to the experts of a rank."""
    data = torch.cat([_bytes_of_rows(source["low"]) for source in sources])
    chosen = torch.cat([source["dispatch"][0] for source in sources])
    counts = torch.tensor([len(source["dispatch"][0]) for source in sources])
    ranks = torch.tensor([source["rank"] for source in sources]).repeat_interleave(counts)
    rows = torch.cat([torch.arange(count) for count in counts.tolist()])

    experts = len(record["groups"])
    first = experts * sources[0]["dispatch"][1].index(record["rank"])
    # By expert, then in the order of the ranks.
    own_experts = torch.arange(first, first + experts)[:, None, None]
    expert, at, _ = (chosen == own_experts).nonzero(as_tuple=True)
    return SentRows(data[at], torch.stack([ranks[at], rows[at], expert], 1))


def compare_rows(record: Record, low: Record, sent: SentRows) -> Difference:
    """Compare rows of experts, of which some may not have arrived, with the rows that were sent."""
    rows = _bytes_of_rows(low)
    experts = torch.repeat_interleave(record["groups"])
    common = min(len(rows), len(sent.data))
    differs = torch.ones(max(len(rows), len(sent.data)), rows.shape[1], dtype=torch.bool)
    differs[:common] = rows[:common] != sent.data[:common]
    is_bad = differs.any(1)
    is_bad[:common] |= experts[:common] != sent.origins[:common, 2]
    if not is_bad.any():
        return Difference()
    (at,) = first_index(is_bad)
    column = min(int(differs[at].int().argmax()), low["qdata"].shape[1] - 1)
    text = _wrong_row(rows, experts, sent, at, column)
    return Difference(int(is_bad.sum()), (at, column), text)


def _wrong_row(rows: Tensor, experts: Tensor, sent: SentRows, at: int, column: int) -> str:
    """Describe a row that differs from the one that was sent."""
    if at >= len(sent.data):
        return "no rank has sent this row"
    rank, row, expert = sent.origins[at].tolist()
    text = f"row {row} of rank {rank} for this rank's expert {expert}"
    if at >= len(rows):
        return f"{text} has not arrived"
    alike = sent.origins[(sent.data == rows[at]).all(1), :2].tolist()
    if [rank, row] in alike:
        return f"{text} is among those of expert {experts[at]}"
    if alike:
        other_rank, other_row = alike[0]
        return f"row {other_row} of rank {other_rank}, not {text}"
    return f"0x{rows[at, column]:02x}, not 0x{sent.data[at, column]:02x}, of {text}"


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
