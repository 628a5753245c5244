"""The stages of a scheme as operators for graphs: measure, cast, multiply and dequantize.

Each operator serves all schemes: a graph passes it the key of a scheme. So dynamo does not trace
the methods of schemes, and every backend runs the same methods as eager code, with the same bits.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8_dist import torch_internals
from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.gemm import GemmOptions
from fp8_dist.kernels.quantization import empty_copies
from fp8_dist.scaling.blocks import matrix_operand, transposed
from fp8_dist.scaling.dense import Dense, cast_in_one_pass, measure_together
from fp8_dist.scaling.level import Level, Start
from fp8_dist.scaling.scheme import CastPlan, Quantized, Scales, Scheme, Statistics, scheme_named
from fp8_dist.text import warn_once


def measure(x: Tensor, schemes: Sequence[Scheme], start: Start = (0, 0)) -> list[Statistics]:
    """Measure the statistics of a local tensor for each scheme.

    In a graph this is one operator, or operators that Inductor fuses with those that make ``x``.
    ``start`` is the :func:`common_start` of the schemes.
    """
    if not torch.compiler.is_compiling():
        return measure_together(x, schemes, start)
    if len(schemes) == 1 and (fusible := schemes[0].fusible_statistics(x)) is not None:
        return [fusible]
    flat = measure_operator.overload(x, [scheme.key for scheme in schemes], start)
    return by_scheme(schemes, flat)[0]


def cast_in_graph(
    x: Tensor,
    plan: CastPlan,
    statistics: Sequence[Statistics] | None,
    saturate: bool,
    measures: bool,
    depends_on: Tensor | None,
) -> tuple[list[Scales], list[Tensor], Tensor | None]:
    """:func:`cast` by one operator, or operators that Inductor fuses with those that make ``x``.

    ``depends_on``: a tensor that the graph must compute before this cast, and that keeps the graph
    from merging this cast with an earlier one.
    """
    schemes, start, count = plan.schemes, plan.start, len(plan.of)
    if statistics is None and not (len(schemes) == 1 and schemes[0].fuses(x)):
        # An operator of its own, because selective checkpointing saves statistics.
        statistics, saturate = measure(x, schemes, start), False
    if statistics is not None and len(schemes) == 1 and depends_on is None and not measures:
        fused = schemes[0].fusible_cast(x, statistics[0], plan.transposed, saturate)
        if fused is not None:
            return [fused[0]], fused[1], None
    known, keys = [s for part in statistics or () for s in part], [s.key for s in schemes]
    how = plan.of, plan.transposed, saturate, measures, depends_on
    flat = cast_operator.overload(x, known, keys, start, *how)
    scales, data = by_scheme(schemes, flat)
    return scales, data[:count], data[count] if measures else None


def cast(
    x: Tensor,
    plan: CastPlan,
    statistics: Sequence[Statistics] | None,
    saturate: bool = True,
    measures: bool = False,
) -> tuple[list[Scales], list[Tensor], Tensor | None]:
    """Cast a local tensor to copies; not in graphs.

    Args:
        statistics: the statistics for each scheme of the plan.
        saturate: as in :meth:`Scheme.cast`.
        measures: also return the amax of ``x``; see :meth:`Dense.cast_and_measure`.

    Returns:
        The scales of each scheme, the data of the copies, and the amax.
    """
    schemes, transposed, start = plan.schemes, plan.transposed, plan.start
    first = schemes[0]
    if plan.packed and statistics is not None:
        scales, packed = first.cast_packed(x, statistics[0], start)
        return [scales], [packed], None
    if measures and statistics is not None:
        assert isinstance(first, Dense)
        return first.cast_and_measure(x, statistics[0], transposed)
    if len(schemes) == 1:
        known = None if statistics is None else statistics[0]
        _, scales, data = first.cast(x, known, start, transposed, saturate)
        return [scales], data, None
    if statistics is None:
        statistics, saturate = measure_together(x, schemes, start), False
    if (copies_at_once := cast_in_one_pass(x, plan, statistics, saturate)) is not None:
        return *copies_at_once, None
    scales_by_scheme: list[Scales] = []
    copies: dict[int, Tensor] = {}
    for i, (scheme, known) in enumerate(zip(schemes, statistics, strict=True)):
        part, places = plan.part(i)
        _, scales, data = scheme.cast(x, known, start, part.transposed, saturate)
        scales_by_scheme.append(scales)
        copies.update(zip(places, data, strict=True))
    return scales_by_scheme, [copies[n] for n in range(len(plan.of))], None


def by_scheme(
    schemes: Sequence[Scheme], flat: Sequence[Tensor]
) -> tuple[list[tuple[Tensor, ...]], list[Tensor]]:
    """Group the first tensors of a flat list by scheme, one for each level of the scheme.

    Returns the groups, and the rest of the list.
    """
    rest = iter(flat)
    groups = [tuple([next(rest) for _ in scheme.levels]) for scheme in schemes]
    return groups, list(rest)


def multiply(
    left: Quantized,
    right: Quantized,
    transpose: tuple[bool, bool],
    out_dtype: torch.dtype,
    options: GemmOptions,
) -> Tensor:
    """Multiply two local operands ``[..., K]`` as matrices; in a graph, by one operator.

    ``transpose``: whether to transpose each of them. See :meth:`Scheme.multiply`.
    """
    if not torch.compiler.is_compiling():
        a, b = matrices(left, right, transpose)
        return a.scheme.multiply(a, b, out_dtype, options)
    run = multiply_operator.overload if torch_internals.is_exporting() else _multiply_in_graph
    return run(*flat(left), *flat(right), transpose, out_dtype, options)


@torch_internals.allowed_in_graphs
def _multiply_in_graph(*arguments: Any) -> Tensor:
    """Multiply by torch's operator where it gives the same bits, and otherwise by the library's.

    In compiled code torch's operator has less overhead, and async tensor parallelism fuses it.
    """
    a, b = matrices(operand_of(*arguments[:4]), operand_of(*arguments[4:8]), arguments[8])
    fuses_collectives, product = torch_internals.graphs_fuse_collectives(), None
    is_fused = fuses_collectives and not any(scale.ndim for scale in (*a.scales, *b.scales))
    if is_fused or not (fuses_collectives or torch_internals.graphs_choose_gemms()):
        product = a.scheme.fusible_product(a, b, *arguments[9:])
    if product is not None:
        return product
    if fuses_collectives:
        warn_once(
            f"async tensor parallelism {a.scheme.covers}",
            "async tensor parallelism (torch._inductor.config._micro_pipeline_tp): no collective "
            f"is fused with a float8 GEMM on {a.qdata.device.type} with one scale per "
            f"{a.scheme.covers} of {list(a.qdata.shape)} by {list(b.qdata.shape)}; torch fuses "
            "those of the recipes tensorwise and delayed, on GPUs, whose dims are multiples of 16",
        )
    return multiply_operator.overload(*arguments)


def flat(operand: Quantized) -> tuple[Tensor, list[Tensor], str, Start]:
    """Return the arguments of an operator for one operand; :func:`operand_of` is the inverse."""
    return operand.qdata, list(operand.scales), operand.scheme.key, operand.start


def operand_of(
    qdata: Tensor, scales: Sequence[Tensor], scheme: str, start: Sequence[int]
) -> Quantized:
    """Return the operand that was passed to an operator by :func:`flat`."""
    return Quantized(qdata, tuple(scales), scheme_named(scheme), (start[0], start[1]))


def matrices(
    left: Quantized, right: Quantized, transpose: tuple[bool, bool]
) -> tuple[Quantized, Quantized]:
    """The operands of :func:`multiply` as the matrices ``[M, K]`` and ``[K, N]``."""
    a, b = matrix_operand(left), matrix_operand(right)
    return transposed(a) if transpose[0] else a, transposed(b) if transpose[1] else b


def empty_statistics(x: Tensor, schemes: Sequence[str], start: Sequence[int]) -> list[Tensor]:
    """Uninitialized statistics of a local tensor for each scheme, by key."""
    return [
        x.new_empty(shape, dtype=level.statistic) for level, shape in _levels(x, schemes, start)
    ]


def _levels(
    x: Tensor, schemes: Sequence[str], start: Sequence[int]
) -> Iterator[tuple[Level, list[int]]]:
    """Yield each level of each scheme, with the shape of its statistics and scales."""
    for scheme in map(scheme_named, schemes):
        shapes = scheme.scale_shapes(x.shape, (start[0], start[1]))
        yield from zip(scheme.levels, shapes, strict=True)


@custom_op("measure(Tensor x, str[] schemes, int[] start) -> Tensor[]", fake=empty_statistics)
def measure_operator(x: Tensor, schemes: Sequence[str], start: Sequence[int]) -> list[Tensor]:
    """Operator of :func:`measure`."""
    measured = measure_together(x, [*map(scheme_named, schemes)], (start[0], start[1]))
    return [statistic for statistics in measured for statistic in statistics]


def empty_cast(x: Tensor, statistics: Any, schemes: Sequence[str], *how: Any) -> list[Tensor]:
    """Uninitialized results of :func:`cast_operator`."""
    start, _, transposed, _, measures, _ = how
    return [
        *(x.new_empty(shape, dtype=level.scale) for level, shape in _levels(x, schemes, start)),
        *empty_copies(x, scheme_named(schemes[0]).dtype, transposed),
        *([x.new_empty((), dtype=torch.float32)] if measures else []),
    ]


@custom_op(
    "cast(Tensor x, Tensor[] statistics, str[] schemes, int[] start, int[] of, bool[] transposed, "
    "bool saturate, bool measures, Tensor? depends_on) -> Tensor[]",
    fake=empty_cast,
)
def cast_operator(
    x: Tensor,
    statistics: Sequence[Tensor],
    schemes: Sequence[str],
    start: Sequence[int],
    of: Sequence[int],
    transposed: Sequence[bool],
    saturate: bool,
    measures: bool,
    depends_on: Tensor | None,
) -> list[Tensor]:
    """Operator of :func:`cast`. Returns the scales of each scheme, each copy, and the amax."""
    plan = CastPlan(
        tuple(map(scheme_named, schemes)),
        tuple(of),
        tuple(transposed),
        start=(start[0], start[1]),
    )
    known = by_scheme(plan.schemes, statistics)[0] if statistics else None
    scales, data, amax = cast(x, plan, known, saturate, measures)
    # An operator must not return its arguments. Scales may be statistics or views of them, and data
    # in high precision may be that of x.
    flat = unshared([*(s for levels in scales for s in levels), *data], [x, *statistics])
    return [*flat, *([] if amax is None else [amax])]


def unshared(tensors: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, and copies of those that share memory with tensors that are kept."""
    addresses = {torch_internals.storage_address(tensor) for tensor in kept}
    return [t.clone() if torch_internals.storage_address(t) in addresses else t for t in tensors]


def _empty_product(*arguments: Any) -> Tensor:
    a, b, transpose, out_dtype = arguments[0], arguments[4], *arguments[8:10]
    rows = a.shape[-1] if transpose[0] else math.prod(a.shape[:-1])
    columns = math.prod(b.shape[:-1]) if transpose[1] else b.shape[-1]
    return a.new_empty((rows, columns), dtype=out_dtype)


@custom_op(
    "multiply(Tensor a, Tensor[] scales_a, str scheme_a, int[] start_a, Tensor b, "
    "Tensor[] scales_b, str scheme_b, int[] start_b, bool[] transpose, ScalarType out_dtype, "
    "bool[] options) -> Tensor",
    fake=_empty_product,
)
def multiply_operator(*arguments: Any) -> Tensor:
    """Operator of :func:`multiply`."""
    a, b = matrices(operand_of(*arguments[:4]), operand_of(*arguments[4:8]), arguments[8])
    return a.scheme.multiply(a, b, arguments[9], tuple(arguments[10]))


def dequantize(operand: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Multiply the data of a local operand by its scales, and round the product to ``dtype``.

    In a graph this is one operator.
    """
    if not torch.compiler.is_compiling():
        return operand.scheme.dequantize_to(operand, dtype)
    return dequantize_operator.overload(*flat(operand), dtype)


@custom_op(
    "dequantize(Tensor x, Tensor[] scales, str scheme, int[] start, ScalarType dtype) -> Tensor",
    fake=lambda x, *how: x.new_empty(x.shape, dtype=how[-1]),
)
def dequantize_operator(
    x: Tensor, scales: Sequence[Tensor], scheme: str, start: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Operator of :func:`dequantize`."""
    # Do not call dequantize(): while another thread compiles, is_compiling() is true here, too.
    operand = operand_of(x, scales, scheme, start)
    return operand.scheme.dequantize_to(operand, dtype)


def unpack(packed: Tensor, scheme: Scheme, depends_on: Tensor | None = None) -> Tensor:
    """Unpack data ``[..., K / 2]`` (uint8) to ``[..., K]``; in a graph, by one operator.

    ``depends_on``: as in :func:`cast`.
    """
    run = unpack_operator.overload if torch.compiler.is_compiling() else unpack_operator
    return run(packed, scheme.key, depends_on)


def _empty_unpacked(packed: Tensor, scheme: str, depends_on: Tensor | None) -> Tensor:
    size = (*packed.shape[:-1], 2 * packed.shape[-1])
    return packed.new_empty(size, dtype=scheme_named(scheme).dtype)


@custom_op("unpack(Tensor packed, str scheme, Tensor? depends_on) -> Tensor", fake=_empty_unpacked)
def unpack_operator(packed: Tensor, scheme: str, depends_on: Tensor | None) -> Tensor:
    """Operator of :func:`unpack`."""
    data = _empty_unpacked(packed, scheme, depends_on)
    scheme_named(scheme).unpack(packed.contiguous(), data)
    return data
