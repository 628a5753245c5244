"""Scaling schemes: what scales cover, and how they are computed, stored, moved and applied.

A *statistic* is measured on data and reduced over ranks by MAX. It is an amax (fp32) or an exponent
(uint8). A *scale* is the factor that float8 data is multiplied by. Caches, precompute and
collectives hold statistics, because these determine every bit of a cast, on every rank. (An fp32
scale does not: ``1 / (1 / m) != m``.) Scales are stored with the data, and move with it.

An operand ``[..., K]`` is treated as a matrix ``[M, K]``, whose rows lie along the last dim.
CONTRIBUTING.md explains how to write a scheme.
"""

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp8_dist import mesh
from fp8_dist.kernels.blocks import blocks_along, expanded, fp32_scales
from fp8_dist.kernels.gemm import GemmOptions
from fp8_dist.kernels.quantization import transposed_copy
from fp8_dist.mesh import Layout
from fp8_dist.scaling.level import Level, Start, axes_of_level
from fp8_dist.torch_internals import cached_but_in_graphs

Statistics = tuple[Tensor, ...]  # one per level, fp32 or uint8
Scales = tuple[Tensor, ...]  # one per level, in the dtype of that level


class Quantized(NamedTuple):
    """A local tensor in float8. A tuple has less overhead than a Float8Tensor.

    Attributes:
        qdata: the float8 data, any shape and strides.
        scales: one tensor per level of the scheme, in the shapes of :meth:`Scheme.scale_shapes`.
        scheme: the scheme of the whole tensor.
        start: the offset (row, column) of this part of the tensor within its first blocks, parts
            of which may be on other ranks.
        splits_blocks: whether the parts of the ranks can't be joined as float8, because a
            block is divided between ranks or because parts have unequal sizes along a dim in
            blocks. It is the same on all ranks.
    """

    qdata: Tensor
    scales: Scales
    scheme: "Scheme"
    start: Start = (0, 0)
    splits_blocks: bool = False


class CastPlan(NamedTuple):
    """The float8 copies of an operand that one cast makes; by default one copy of one scheme.

    :meth:`on` adds the facts that follow from the layout of the operand. Without them the plan is
    one of a whole tensor.

    Attributes:
        schemes: the distinct schemes of the copies.
        of: for each copy, the index of its scheme.
        transposed: for each copy, whether it is ``[K, M]`` in memory.
        packed: whether the copy, the only one, is packed (:meth:`Scheme.pack`).
        places: for each GEMM that takes the operand, the index of its copy; ``None`` for high
            precision.
        layout: the layout of the operand, without Partial placements.
        start: the :func:`common_start` of the schemes.
        starts: for each copy, the :attr:`Quantized.start`.
        splits_blocks: for each copy, the :attr:`Quantized.splits_blocks`.
        needs_ranks: whether a scale covers values of several ranks.
    """

    schemes: tuple["Scheme", ...]
    of: tuple[int, ...] = (0,)
    transposed: tuple[bool, ...] = (False,)
    packed: bool = False
    places: tuple[int | None, ...] = ()
    layout: Layout | None = None
    start: Start = (0, 0)
    starts: tuple[Start, ...] = ()
    splits_blocks: tuple[bool, ...] = ()
    needs_ranks: bool = False

    def on(self, layout: Layout | None) -> "CastPlan":
        """The plan of a tensor with this layout."""
        return self if layout is None else _on_layout(self, layout)

    def part(self, index: int) -> tuple["CastPlan", list[int]]:
        """The plan of the copies of one scheme, and their indices in this plan."""
        indices = [n for n, of in enumerate(self.of) if of == index]
        transposed = tuple([self.transposed[n] for n in indices])
        plan = CastPlan((self.schemes[index],), (0,) * len(indices), transposed, self.packed)
        return plan.on(self.layout), indices


@cached_but_in_graphs
def _on_layout(plan: CastPlan, layout: Layout) -> CastPlan:
    schemes = [plan.schemes[i] for i in plan.of]
    return plan._replace(
        layout=layout,
        start=common_start(plan.schemes, layout),
        starts=tuple([scheme.start(layout) for scheme in schemes]),
        splits_blocks=tuple([scheme.splits_blocks(layout) for scheme in schemes]),
        needs_ranks=bool(shared_schemes(plan.schemes, layout)),
    )


@dataclass(frozen=True, eq=False)
class Scheme:
    """Base class of scaling schemes.

    A subclass is a frozen dataclass of plain values, with a unique ``family`` and the methods
    :meth:`make_levels`, :meth:`measure` and :meth:`scales_from`. All other methods have a portable
    implementation in terms of these; a subclass overrides those for which it has kernels. Methods
    are local and issue no collectives, except for :meth:`for_rows`.

    Attributes:
        dtype: the float8 dtype of the data.
        family: the name of the class in keys.
        can_gather: whether one copy serves both GEMMs of an operand. If so, FSDP2 may gather a
            weight as float8. Activations are redistributed as float8 if, in addition, each level
            has one scale for the tensor or scales of single rows (:meth:`can_move`).
        needs_alignment: whether :meth:`multiply` on a GPU takes only sizes that are multiples of
            16. Layers of other sizes are then refused, and the GEMM that contracts rows is given a
            transposed copy, with zeros up to a multiple of 16 rows.
        packed_dtype: the dtype of packed data (:meth:`pack`); ``None`` if data can't be packed.
        key: the name of the scheme in operators, flattened tensors and files (see
            :func:`scheme_named`).
        levels: the levels of scales, the coarsest first.
        is_scalar: whether all scales cover the whole tensor, so that none belongs to a part of it.
    """

    dtype: torch.dtype = torch.float8_e4m3fn

    family: ClassVar[str]
    can_gather: ClassVar[bool] = False
    needs_alignment: ClassVar[bool] = False
    packed_dtype: ClassVar[torch.dtype | None] = None
    key: ClassVar[str]
    levels: ClassVar[tuple[Level, ...]]
    is_scalar: ClassVar[bool]

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling() and "family" not in type(self).__dict__:
            raise TypeError(
                f"the scaling scheme {type(self).__name__} has no family; give the class an "
                "attribute `family`, by which it differs from all others and from its base class"
            )
        values = [f"{field.name}={_text(getattr(self, field.name))}" for field in fields(self)]
        # Attributes, because dynamo does not trace a cached_property.
        object.__setattr__(self, "key", f"{self.family}({', '.join(values)})")
        levels = self.make_levels()
        object.__setattr__(self, "levels", levels)
        object.__setattr__(self, "is_scalar", all(level.is_scalar for level in levels))
        if not torch.compiler.is_compiling() and _FAMILIES[self.family] is type(self):
            _BY_KEY.setdefault(self.key, self)

    def __eq__(self, other: object) -> bool:
        # Equal keys are not enough: schemes of a redefined class have the keys of the old class.
        return type(self) is type(other) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)  # a string caches its hash

    def __init_subclass__(cls) -> None:
        family = cls.__dict__.get("family")
        if family is not None:
            if not family.isidentifier():
                raise ValueError(f"the family {family!r} of {cls.__name__} must be an identifier")
            other = _FAMILIES.setdefault(family, cls)
            if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"two scaling schemes have the family {family!r}; rename one")
            _FAMILIES[family] = cls
            # A notebook may redefine a class, whose schemes must then be created again.
            for key in [key for key in _BY_KEY if key.startswith(f"{family}(")]:
                del _BY_KEY[key]

    def __reduce__(self) -> Any:
        return scheme_named, (self.key,)

    # Methods that a subclass must define

    def make_levels(self) -> tuple[Level, ...]:
        """The levels of scales, the coarsest first."""
        raise NotImplementedError

    def measure(self, x: Tensor, start: Start = (0, 0)) -> Statistics:
        """The statistics of a local tensor, in the shapes of :meth:`scale_shapes`.

        A NaN in ``x`` must give NaN, and an infinity must give infinity or NaN. The statistics of
        blocks without elements are 0.
        """
        raise NotImplementedError

    def scales_from(self, statistics: Statistics) -> Scales:
        """Compute the scales from the statistics of a tensor or of a part of it, elementwise.

        For statistics of 0 the product of all levels' scales must be a normal number whose
        reciprocal is finite. Infinity and NaN must give infinity or NaN. The bits must not depend
        on shape or strides: use operations that are rounded exactly, not ``exp2``, ``log2`` or
        ``pow``.
        """
        raise NotImplementedError

    @property
    def has_exponents(self) -> bool:
        """Whether each scale is a power of two or NaN, so that one byte can store it."""
        return all(level.scale is torch.uint8 for level in self.levels)

    # Relations to other schemes

    @property
    def is_storage(self) -> bool:
        """Whether no one copy of this scheme serves both GEMMs of a weight.

        GEMMs of a stored weight then take the values, cast by the scheme of the layer.
        """
        return False

    @property
    def is_recast_for_rows(self) -> bool:
        """Whether :meth:`for_rows` makes new data, so that its GEMM needs no transposed copy."""
        return False

    @property
    def for_row_contraction(self) -> "Scheme":
        """The scheme in the GEMM that contracts rows; ``self`` if one copy serves both GEMMs."""
        return self

    def transposed(self) -> "Scheme | None":
        """The scheme of the transposed matrix, or ``None`` if there is none."""
        return None

    @cached_property
    def transposed_scheme(self) -> "Scheme":
        """:meth:`transposed`, made once, for a scheme that can be transposed."""
        scheme = self.transposed()
        assert scheme is not None, f"{self} can't be transposed"
        return scheme

    def unfit_for(self, operand: str, contracts_rows: bool) -> str | None:
        """The reason why a layer's operand can't have this scheme in a GEMM, or ``None``.

        The rows of inputs and gradients are tokens. Which tokens share a scale must not depend on
        how many of them a rank has, or on where a sequence ends.

        ``contracts_rows``: whether the GEMM contracts the operand's rows.
        """
        if self.transposed() is None:
            return (
                f"{operand} has one scale per {self.covers}, a scheme that layers can't transpose; "
                f"define {type(self).__name__}.transposed, or use another scaling_granularity"
            )
        token_blocks = [(level.leading, level.rows) for level in self.levels]
        if operand == "weight" or all(block in ((1, 1), (None, None)) for block in token_blocks):
            return None
        return (
            f"{operand} has one scale per {self.covers}, but blocks of tokens must be one row, or "
            "all of them (leading=None, rows=None)"
        )

    def unfit_beside(self, other: "Scheme") -> str | None:
        """The reason why ``self`` can't be multiplied by ``other`` in one GEMM, or ``None``."""
        return None if self.family == other.family else "their scaling schemes are not of one kind"

    @property
    def covers(self) -> str:
        """The text after "one scale per" in messages and statistics."""
        return self.key

    @property
    def described(self) -> str:
        """The dtype, what a scale covers, and the key, for messages."""
        return f"{self.dtype} with one scale per {self.covers}, {self}"

    @property
    def largest(self) -> float:
        """The largest number that data can have."""
        return torch.finfo(self.dtype).max

    @property
    def saturates_above(self) -> float:
        """The magnitude, in units of the scale, from which values saturate.

        It is half a step above the largest number.
        """
        info = torch.finfo(self.dtype)
        return float(info.max + info.eps * 2.0 ** math.floor(math.log2(info.max)) / 2)

    # Geometry: the same on all ranks, except for offsets

    def scale_shapes(self, shape: Sequence[int], start: Start = (0, 0)) -> list[list[int]]:
        """The shapes of the statistics and of the scales of a tensor, or of a part of one."""
        return [level.shape(shape, start) for level in self.levels]

    def start(self, layout: Layout | None) -> Start:
        """The offset of this rank's part of a tensor within its first blocks.

        Raises:
            NotImplementedError: the parts have several pieces, which cut blocks. All ranks raise.
        """
        return common_start((self,), layout)

    def splits_blocks(self, layout: Layout | None) -> bool:
        """See :attr:`Quantized.splits_blocks`."""
        return layout is not None and _is_cut(self, layout)

    def axes(self, layout: Layout | None) -> tuple[tuple[int, ...], ...]:
        """For each level, the mesh axes along which ranks share blocks and reduce statistics."""
        return ((),) * len(self.levels) if layout is None else _axes(self, layout)

    def moving_levels(self, layout: Layout | None, gathered: Layout | None) -> tuple[int, ...]:
        """Indices of the levels whose scales differ between the shards that FSDP2 gathers.

        ``gathered``: the layout of the weight after the gather; ``None``: no axis shards it then.
        """
        if layout is None or self.is_scalar:
            return ()
        dims, ndim = _gathered_dims(layout, gathered), len(layout.shape)
        divided = [[lv.block(dim, ndim) is not None for dim in dims] for lv in self.levels]
        return tuple([i for i, by_dim in enumerate(divided) if any(by_dim)])

    @cached_but_in_graphs
    def scales_fit_gather(self, layout: Layout, gathered: Layout | None) -> bool:
        """Whether FSDP2's gather can carry scales: equal shards of dim 0 that cut no block."""
        even = len(layout.local_sizes(0)) == 1
        return _gathered_dims(layout, gathered) == {0} and even and not _cuts_blocks(self, layout)

    @cached_but_in_graphs
    def packs(self, layout: Layout, gathered: Layout | None = None) -> bool:
        """Whether FSDP2 can gather packed data: equal shards of dim 0 with even columns."""
        if self.packed_dtype is None or not _gathered_dims(layout, gathered) <= {0}:
            return False
        columns = layout.local_sizes(-1)
        return len(layout.local_sizes(0)) == 1 and not any(size % 2 for size in columns)

    def can_move(self, dims: Sequence[int], ndim: int) -> bool:
        """Whether float8 data that is sharded along these dims can be redistributed.

        Whole rows can, each with its scales. A scale of the whole tensor is already on every rank.
        """
        levels = [level for level in self.levels if not level.is_scalar]
        whole = self.can_gather and all(level.follows_rows for level in levels)
        return not dims or (whole and not (levels and ndim - 1 in dims))

    # Casts

    def measure_each(self, xs: Sequence[Tensor], starts: Sequence[Start]) -> list[Statistics]:
        """:meth:`measure` of many tensors of one dtype and device."""
        return [self.measure(x, start) for x, start in zip(xs, starts, strict=True)]

    def parts_of(self, flat: Tensor, xs: Sequence[Tensor]) -> list[Statistics]:
        """Split the statistics or scales of one level of many tensors, which begin at a block."""
        shapes = [self.levels[0].shape(x.shape) for x in xs]
        parts = flat.split([math.prod(shape) for shape in shapes])
        return [(part.view(shape),) for part, shape in zip(parts, shapes, strict=True)]

    @property
    def casts_each(self) -> bool:
        """Whether there are the next two methods, for schemes of one level."""
        return False

    def measure_flat(self, xs: Sequence[Tensor]) -> Tensor:
        """:meth:`measure_each` of tensors that begin at a block; the statistics are flat."""
        raise NotImplementedError

    def cast_each(
        self, xs: Sequence[Tensor], known: Tensor, sizes: Sequence[int], packed: bool
    ) -> tuple[Tensor, Tensor]:
        """Cast many tensors of one dtype and device, which begin at a block; values may saturate.

        Args:
            known: the statistics of all tensors, flat.
            sizes: how many bytes of the data each tensor takes. With one scale per tensor or row
                they may be more than those of its elements; the rest is not initialized.
            packed: pack the data (:meth:`pack`).

        Returns:
            The data of all tensors, uint8, and their scales; both flat.
        """
        raise NotImplementedError

    def cast(
        self,
        x: Tensor,
        statistics: Statistics | None,
        start: Start,
        transposed: Sequence[bool],
        saturate: bool = True,
    ) -> tuple[Statistics, Scales, list[Tensor]]:
        """Cast a local tensor to copies in the given memory layouts.

        Args:
            statistics: the global statistics of the blocks of ``x``. If ``None``, ``x`` must have
                all values of these blocks, and is measured.
            start: the offset of ``x`` within its first blocks.
            transposed: for each copy, whether it is written as the matrix ``[K, P]``, see
                :mod:`fp8_dist.kernels.quantization`.
            saturate: whether values may exceed the statistics. Otherwise none can saturate.

        Returns:
            The statistics, the scales, and the data of each copy.
        """
        if statistics is None:
            statistics = self.measure(x, start)
        scales = self.scales_from(statistics)
        qdata = self.quantize(x, scales, start)
        matrix = qdata.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if any(transposed) else qdata
        return statistics, scales, [transposed_copy(matrix) if t else qdata for t in transposed]

    def quantize(self, x: Tensor, scales: Scales, start: Start) -> Tensor:
        """The float8 data of a local tensor, given its scales."""
        multiplier = self.element_scales(scales, x.shape, start).reciprocal()
        limit = torch.finfo(self.dtype).max
        return (x.to(torch.float32) * multiplier).clamp_(-limit, limit).to(self.dtype)

    def fuses(self, x: Tensor) -> bool:
        """Whether :meth:`cast` without statistics reads ``x`` only once on its device."""
        return False

    def fusible_statistics(self, x: Tensor) -> Statistics | None:
        """:meth:`measure` as operators of a graph that Inductor fuses with those that made ``x``.

        ``None`` if there are none.
        """
        return None

    def fusible_cast(
        self, x: Tensor, statistics: Statistics, transposed: Sequence[bool], saturate: bool
    ) -> tuple[Scales, list[Tensor]] | None:
        """:meth:`cast` as operators of a graph that Inductor fuses with those that made ``x``.

        Returns the scales and the data of each copy, or ``None`` if there are no such operators.
        """
        return None

    # Packed data: fewer bytes for weights that FSDP2 gathers, and for stored weights

    def pack(self, qdata: Tensor) -> Tensor:
        """Pack data ``[..., K]`` of even K: ``[..., K / 2]`` of the ``packed_dtype``."""
        raise NotImplementedError

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Unpack data, in the ``packed_dtype`` or viewed as uint8, to a contiguous ``out``."""
        raise NotImplementedError

    def cast_packed(self, x: Tensor, statistics: Statistics, start: Start) -> tuple[Scales, Tensor]:
        """:meth:`cast` to packed data with given statistics; return the scales and the data."""
        _, scales, (qdata,) = self.cast(x, statistics, start, (False,))
        return scales, self.pack(qdata)

    # Reading and multiplying

    def element_scales(self, scales: Scales, shape: Sequence[int], start: Start = (0, 0)) -> Tensor:
        """The product of all levels' scales, fp32, in a shape that broadcasts to ``shape``."""
        total: Tensor | None = None
        for level, scale in zip(self.levels, scales, strict=True):
            wide = fp32_scales(scale)
            if level.has_blocks:
                rows, columns = level.rows or 1, level.columns or 1
                wide = expanded(wide, shape, (rows, columns, start[0] % rows, start[1] % columns))
            total = wide if total is None else total * wide
        assert total is not None, f"{self} has no levels"
        return total

    def dequantize(self, qdata: Tensor, scales: Scales, start: Start = (0, 0)) -> Tensor:
        """``qdata`` times its scales, fp32."""
        return qdata.to(torch.float32) * self.element_scales(scales, qdata.shape, start)

    def dequantize_to(self, operand: Quantized, dtype: torch.dtype) -> Tensor:
        """:meth:`dequantize`, rounded to ``dtype``."""
        return self.dequantize(operand.qdata, operand.scales, operand.start).to(dtype)

    def for_rows(self, operand: Quantized, layout: Layout | None) -> Quantized:
        """Return the copy of an operand for the GEMM of grad_weight, which contracts its rows.

        ``layout`` is the layout of the operand.

        Collectives: none by default; a scheme may reduce over the axes that shard the operand's
        rows.
        """
        return operand

    def multiply(
        self, left: Quantized, right: Quantized, out_dtype: torch.dtype, options: GemmOptions
    ) -> Tensor:
        """The product ``[M, N]`` of two local matrices ``[M, K]`` and ``[K, N]``.

        ``self`` is the scheme of ``left``. The default multiplies in fp32.
        """
        a, b = (x.scheme.dequantize(x.qdata, x.scales, x.start) for x in (left, right))
        with torch.autocast(a.device.type, enabled=False):
            return torch.mm(a, b).to(out_dtype)

    def fusible_product(
        self, left: Quantized, right: Quantized, out_dtype: torch.dtype, options: GemmOptions
    ) -> Tensor | None:
        """The product as operators of torch, for a graph, if these have the same bits."""
        return None

    # Parts

    def part_of_scales(
        self, scales: Scales, start: Start, dim: int, begin: int, length: int, ndim: int
    ) -> Scales:
        """Slice the scales for a part of a tensor along ``dim``, which may cut blocks."""
        parts = []
        for level, scale in zip(self.levels, scales, strict=True):
            block = level.block(dim, ndim)
            if not level.is_scalar and block is not None:
                first = begin + (start[dim - ndim] % block if dim >= ndim - 2 else 0)
                count = blocks_along(length, block, first % block)
                scale = scale.narrow(dim, first // block if count else 0, count)
            parts.append(scale)
        return tuple(parts)

    def local_part(self, whole: Statistics, layout: Layout) -> Statistics:
        """Slice the statistics or scales of a whole tensor for this rank's part."""
        levels = zip(self.levels, whole, strict=True)
        return tuple([mesh.taken(statistic, level.pieces(layout)) for level, statistic in levels])

    def moved(self, start: Start, dim: int, by: int, ndim: int) -> Start:
        """The ``start`` of a part that begins ``by`` indices further along ``dim``."""
        offset = [start[0], start[1]]
        if dim >= ndim - 2:
            offset[dim - ndim] += by
        return _start_at(offset, (self,))


_FAMILIES: dict[str, type[Scheme]] = {}
_BY_KEY: dict[str, Scheme] = {}


def common_start(schemes: Sequence[Scheme], layout: Layout | None) -> Start:
    """:meth:`Scheme.start` for several schemes, each of which reduces it modulo its blocks."""
    if layout is None or not [s for s in schemes if _shards_blocked_dims(s, layout)]:
        return (0, 0)
    return _start_at(layout.offset(), schemes)


def _start_at(offset: Sequence[int], schemes: Sequence[Scheme]) -> Start:
    row = offset[-2] % _period(schemes, -2) if len(offset) > 1 else 0
    return row, offset[-1] % _period(schemes, -1)


@cached_but_in_graphs
def shared_schemes(schemes: tuple[Scheme, ...], layout: Layout | None) -> tuple[Scheme, ...]:
    """The schemes whose scales cover values of several ranks."""
    return tuple([scheme for scheme in schemes if any(scheme.axes(layout))])


def scheme_classes() -> list[type[Scheme]]:
    """The classes of schemes that are defined."""
    return [*_FAMILIES.values()]


def scheme_named(key: str) -> Scheme:
    """Return the scheme with this key, which may come from another process.

    Raises:
        ValueError: no scheme of that family is defined here.
    """
    if key not in _BY_KEY:
        family, _, arguments = key.partition("(")
        if family not in _FAMILIES or not arguments:
            raise ValueError(
                f"the scaling scheme {key} is not defined here; import the module that defines it"
            )
        call: Any = ast.parse(key, mode="eval").body
        values = {keyword.arg: _value(ast.literal_eval(keyword.value)) for keyword in call.keywords}
        _BY_KEY[key] = _FAMILIES[family](**values)
    return _BY_KEY[key]


def _text(value: object) -> str:
    """A value of a field as a Python literal; a dtype as its name in quotes."""
    return f"'{value}'" if isinstance(value, torch.dtype) else repr(value)


def _value(literal: Any) -> Any:
    """The inverse of :func:`_text`."""
    is_dtype = isinstance(literal, str) and literal.startswith("torch.")
    return getattr(torch, literal.removeprefix("torch.")) if is_dtype else literal


def _gathered_dims(layout: Layout, gathered: Layout | None) -> set[int]:
    """The dims along which a gather to the layout ``gathered`` joins shards."""
    kept, ndim = () if gathered is None else gathered.sharded_axes(), len(layout.shape)
    joined = [layout.placements[axis] for axis in layout.sharded_axes() if axis not in kept]
    return {dim for placement in joined if (dim := mesh.sharded_dim(placement, ndim)) is not None}


def _period(schemes: Sequence[Scheme], dim: int) -> int:
    """The distance along dim -1 or -2 after which blocks of all levels begin at the same index."""
    levels = [level for scheme in schemes for level in scheme.levels]
    return math.lcm(*[(level.columns if dim == -1 else level.rows) or 1 for level in levels])


def _blocked_dims(scheme: Scheme, layout: Layout) -> tuple[int, ...]:
    """The dims, of -1 and -2, along which a block has several, but not all, indices."""
    dims = (-1, -2)[: len(layout.shape)]
    return tuple([dim for dim in dims if _period((scheme,), dim) > 1])


@cached_but_in_graphs
def _cuts_blocks(scheme: Scheme, layout: Layout) -> bool:
    """Whether shards cut blocks. The result is the same on all ranks."""
    dims = _blocked_dims(scheme, layout)
    return any(layout.cuts_blocks(dim, _period((scheme,), dim)) for dim in dims)


@cached_but_in_graphs
def _is_cut(scheme: Scheme, layout: Layout) -> bool:
    return _cuts_blocks(scheme, layout) or any(
        layout.has_strided_shards(dim) or len(layout.local_sizes(dim)) > 1
        for dim in _blocked_dims(scheme, layout)
    )


@cached_but_in_graphs
def _shards_blocked_dims(scheme: Scheme, layout: Layout) -> bool:
    """Whether a part may begin inside of a block. Raises if it has several such pieces."""
    ndim, dims = len(layout.shape), _blocked_dims(scheme, layout)
    strided = any(layout.has_strided_shards(dim) for dim in dims)
    if strided and _cuts_blocks(scheme, layout):
        raise NotImplementedError(
            f"a tensor of shape {tuple(layout.shape)} placed as {list(layout.placements)} can't be "
            f"cast with one scale per {scheme.covers}: ranks have several pieces of it "
            "(_StridedShard), and some begin inside of a block; redistribute it to Shard or "
            "Replicate first, or choose sizes of which all pieces have whole blocks"
        )
    sharded = {mesh.sharded_dim(p, ndim) for p in layout.placements}
    return any(dim % ndim in sharded for dim in dims)


# Not the method itself: dynamo does not trace a cache that is an attribute of a class.
@cached_but_in_graphs
def _axes(scheme: Scheme, layout: Layout) -> tuple[tuple[int, ...], ...]:
    return tuple([axes_of_level(level, layout) for level in scheme.levels])
