"""Casts to float8, differentiable and DTensor-aware."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from fp8_dist.config import CastConfig, CastSpec, CopySpec, ScalingGranularity, ScalingType
from fp8_dist.cut_blocks import (
    are_cut,
    granularity_at,
    part_of_exponents,
    reduced_exponents,
    whole_exponents,
)
from fp8_dist.granularity import COLUMN, ROW, TENSOR, Blocks, Granularity, covering
from fp8_dist.kernels import (
    Scaling,
    amax,
    amaxes,
    block_exponents,
    block_exponents_of_each,
    cast_blocks,
    cast_copies,
    cast_rows,
    fuses_blocks,
    fuses_rows,
    quantize,
    quantize_block_copies,
    quantize_blocks,
    quantize_copies,
    scaling_from_amax,
    transposed_copy,
)
from fp8_dist.mesh import (
    GroupNames,
    Layout,
    Placements,
    all_reduce_max,
    groups_over,
    local_tensor,
    reduced,
    with_local,
)
from fp8_dist.tensor import Float8Tensor, Quantized
from fp8_dist.torch_internals import has_functorch_transforms

# For each cast: (quantization multiplier, scale). For each copy: the copy.
Scalings = dict[CastSpec, Scaling]
Copies = dict[CopySpec, Quantized]


def cast_to_float8(
    tensor: torch.Tensor,
    cast_config: CastConfig,
    *,
    dim: int | None = None,
    round_scales_to_power_of_2: bool = False,
) -> torch.Tensor:
    """Cast a tensor to float8 with the scale of the global tensor.

    Args:
        tensor: floating point, any shape. A DTensor may have any placements: amax is reduced over
            exactly the axes on which it is sharded; Partial ones are reduced first.
        cast_config: ``target_dtype=None`` means e4m3. ``DISABLED`` returns ``tensor`` itself.
        dim: the reduced dim of an axiswise cast (one scale for each index of the other dims);
            ``None`` for a tensorwise or blockwise one.
        round_scales_to_power_of_2: round the quantization multiplier down to a power of two. The
            scales of blocks are powers of two in any case.

    Returns:
        Float8Tensor of the input's shape, or DTensor(Float8Tensor) with the placements of the input
        (Replicate instead of Partial). Its scale is fp32, 0-dim or of size 1 along ``dim``, by the
        formula of :mod:`fp8_dist.kernels.scale`; blocks have exponents instead. Its
        ``redistribute`` moves 1 byte per element, and scales along the last dim with their rows.
        Tensors with scales along other dims, in square blocks or in blocks that shards cut can't be
        redistributed. The gradient passes unchanged. On a rank outside of a DTensor's mesh the
        local tensor is empty.

    Collectives: an all-reduce of 4 bytes per scale (1 for blocks that shards cut, none for other
    blocks) over the axes that shard the values that a scale covers, if there are any. It is one
    all-reduce per axis where these have no group in common, see :mod:`fp8_dist.mesh.groups`.
    Partial axes are all-reduced in high precision.

    Raises:
        TypeError: ``tensor`` is not a tensor, not floating point, or float8 already.
        ValueError: ``dim`` does not fit the granularity or the tensor, or the scale is DELAYED,
            which needs the history of a Float8Linear.
        NotImplementedError: a transform of ``torch.func`` is active, or the tensor has a tangent
            of forward-mode differentiation; or ranks have several pieces of a DTensor
            (``_StridedShard``), some of which begin inside of a block.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"cast_to_float8: expected a tensor, got a {type(tensor).__name__}")
    if not isinstance(cast_config, CastConfig):
        raise TypeError(f"cast_to_float8: cast_config must be a CastConfig, got {cast_config!r}")
    if isinstance(local_tensor(tensor), Float8Tensor):
        raise TypeError("cast_to_float8: the tensor is float8 already; use it as it is")
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"cast_to_float8: expected a floating-point tensor, got {tensor.dtype}")
    if not cast_config.enabled:
        return tensor
    check_transforms("cast_to_float8", tensor)
    _check_dim(tensor, cast_config, dim)
    if cast_config.scaling_type is ScalingType.DELAYED:
        raise ValueError(
            "cast_to_float8: a DELAYED scale comes from the history that a Float8Linear keeps; use "
            "ScalingType.DYNAMIC"
        )
    granularity = cast_config.granularity
    if dim is not None:
        granularity = covering((dim % tensor.ndim,), tensor.ndim)
    cast = CastSpec(cast_config.dtype_for("input"), granularity)
    return _CastToFloat8.apply(reduced(tensor), cast, round_scales_to_power_of_2)


def check_transforms(name: str, *tensors: torch.Tensor | None) -> None:
    """Raise NotImplementedError under torch.func's transforms, or if a tensor has a tangent."""
    if torch.compiler.is_compiling():
        return
    if has_functorch_transforms() or any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    ):
        raise NotImplementedError(
            f"{name}: float8 has no forward-mode derivatives, and can't run under the transforms "
            "of torch.func (vmap, grad, jvp, jacrev, hessian); leave the layer unconverted, or use "
            "reverse-mode torch.autograd"
        )


def _check_dim(tensor: torch.Tensor, cast_config: CastConfig, dim: int | None) -> None:
    if isinstance(cast_config.scaling_granularity, Granularity):
        raise ValueError(
            f"cast_to_float8: {cast_config.scaling_granularity!r} is for layers; use "
            "ScalingGranularity.TENSORWISE or AXISWISE"
        )
    if cast_config.scaling_granularity is not ScalingGranularity.AXISWISE:
        if dim is not None:
            raise ValueError(
                f"cast_to_float8: dim={dim} is the reduced dim of an axiswise cast, but the "
                f"granularity is {cast_config.scaling_granularity.name}; drop dim"
            )
        needed = 0 if cast_config.block_size is None else 1 + (cast_config.block_size[0] > 1)
        if tensor.ndim < needed:
            raise ValueError(
                f"cast_to_float8: blocks of {cast_config.block_size} need a tensor of {needed} "
                f"dims or more, got {tensor.ndim}"
            )
    elif dim is None:
        raise ValueError(
            "cast_to_float8: an AXISWISE cast needs dim, the reduced dim (-1: a scale per row)"
        )
    elif not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"cast_to_float8: dim={dim}, but the tensor has {tensor.ndim} dims")


def scaling_over(
    tensor: torch.Tensor,
    cast: CastSpec,
    round_scales_to_power_of_2: bool,
    axes: tuple[int, ...] | None = None,
    *,
    local: torch.Tensor | None = None,
) -> Scaling:
    """The quantization multiplier and the scale of a tensor for a cast, in the shape of its scales.

    Args:
        tensor: a tensor or DTensor without Partial placements.
        axes: the mesh axes over which the amax may be reduced; ``None`` means all.
        local: its local tensor, if ``tensor`` stores it in another form.

    Collectives: at most one all-reduce of 4 bytes per scale (1 for blocks that shards cut) for each
    of :func:`amax_groups`.
    """
    x = local_tensor(tensor) if local is None else local
    if isinstance(cast.granularity, Blocks):
        exponents = _exponents_over(tensor, cast, axes, x)
        return exponents, exponents
    value = local_amax(x, cast.granularity)
    value = global_amax(value, tensor, cast.granularity, axes)
    return scaling_from_amax(value, cast.dtype, round_scales_to_power_of_2)


def _exponents_over(
    tensor: torch.Tensor, cast: CastSpec, axes: tuple[int, ...] | None, x: torch.Tensor
) -> torch.Tensor:
    """The exponents of the blocks of ``x``, this rank's part of a tensor."""
    granularity, layout = cast.granularity, Layout.of(tensor)
    assert isinstance(granularity, Blocks)
    if granularity.rows > 1:
        return exponents_of_matrix(tensor, cast, x, axes)[0]
    exponents = local_exponents(x, cast, layout)
    if layout is None:
        return exponents
    return reduced_exponents(exponents, layout, granularity, amax_groups(tensor, granularity, axes))


def exponents_of_matrix(
    tensor: torch.Tensor,
    cast: CastSpec,
    local: torch.Tensor,
    axes: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The exponents of the blocks of ``local``, this rank's part of a matrix.

    Returns:
        The exponents of the part, and those of the whole matrix if shards cut blocks, else None.

    Collectives: if shards cut blocks, an all-reduce of 1 byte per block for each of the groups of
    the axes that shard the matrix.
    """
    granularity, layout = cast.granularity, Layout.of(tensor)
    exponents = local_exponents(local, cast, layout)
    if layout is None or not are_cut(layout, granularity):
        return exponents, None
    groups = amax_groups(tensor, granularity, axes)
    every = whole_exponents(exponents, layout, granularity, groups)
    return part_of_exponents(every, local.shape, layout, granularity), every


def local_exponents(x: torch.Tensor, cast: CastSpec, layout: Layout | None) -> torch.Tensor:
    """The exponents of a local tensor's part of each block."""
    granularity = granularity_at(cast.granularity, layout)
    assert isinstance(granularity, Blocks)
    return block_exponents(x, cast.dtype, granularity.blocks, granularity.rule)


def exponents_of_each(
    tensors: Sequence[torch.Tensor], cast: CastSpec, parts: Sequence[Granularity]
) -> torch.Tensor:
    """:func:`local_exponents` of many matrices on one device, flat, one after the other.

    ``parts``: the block granularity of each matrix.
    """
    assert isinstance(cast.granularity, Blocks)
    blocks = flat_blocks(parts)
    first, *others = tensors
    return block_exponents_of_each(first, others, cast.dtype, blocks, cast.granularity.rule)


def flat_blocks(parts: Sequence[Granularity]) -> list[int]:
    """The four numbers of each of these block granularities, flat."""
    return [number for part in parts for number in part.blocks or ()]


def local_amax(x: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """The local amax of the values that each scale covers: fp32, in the shape of the scales."""
    x = granularity.grouped(x)
    return amax(x, granularity.covered_dims(x.ndim))


def global_amax(
    value: torch.Tensor,
    tensor: torch.Tensor,
    granularity: Granularity,
    axes: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Reduce the :func:`local_amax` of a tensor over the axes that shard what a scale covers.

    ``axes`` as in :func:`scaling_over`.

    Collectives: an all-reduce of 4 bytes per element of ``value`` for each of :func:`amax_groups`.
    """
    return all_reduce_max(value, amax_groups(tensor, granularity, axes))


def amax_groups(
    tensor: torch.Tensor, granularity: Granularity = TENSOR, axes: tuple[int, ...] | None = None
) -> GroupNames:
    """The groups over which amaxes of a tensor are reduced; arguments as in :func:`global_amax`."""
    if not isinstance(tensor, DTensor):
        return ()
    # Dynamo warns about functions with a cache.
    find = _amax_axes.__wrapped__ if torch.compiler.is_compiling() else _amax_axes
    over, same = find(tuple(tensor.placements), tensor.ndim, granularity, axes)
    return groups_over(tensor.device_mesh, over, same)


@lru_cache(maxsize=1024)
def _amax_axes(
    placements: Placements, ndim: int, granularity: Granularity, axes: tuple[int, ...] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes to reduce over, and those along which the tensor is replicated."""
    over = granularity.amax_axes(placements, ndim)
    if axes is not None:
        over = tuple(axis for axis in over if axis in axes)
    return over, tuple(i for i, p in enumerate(placements) if p.is_replicate())


def quantize_local(
    x: torch.Tensor,
    scaling: Scaling,
    cast: CastSpec,
    *,
    fits: bool = False,
    layout: Layout | None = None,
) -> Quantized:
    """:func:`fp8_dist.kernels.quantize` a local tensor with the scaling of a cast.

    ``layout``: the layout of the tensor that it is part of.
    """
    multiplier, scale = scaling
    part = granularity_at(cast.granularity, layout)
    if part.blocks is not None:
        return Quantized(quantize_blocks(x, scale, cast.dtype, part.blocks), scale, part)
    qdata = quantize(cast.granularity.grouped(x), multiplier, cast.dtype, fits=fits)
    qdata = qdata if qdata.shape == x.shape else qdata.view(x.shape)
    return Quantized(qdata, scale, cast.granularity)


def quantize_over(
    tensor: torch.Tensor,
    cast: CastSpec,
    round_scales_to_power_of_2: bool,
    axes: tuple[int, ...] | None = None,
) -> Quantized:
    """Cast the local part of a tensor to float8 by :func:`scaling_over`, outside of autograd."""
    copy = CopySpec(cast)
    return copies_over(tensor, (copy,), round_scales_to_power_of_2, axes)[1][copy]


def copies_over(
    tensor: torch.Tensor,
    copies: Sequence[CopySpec],
    round_scales_to_power_of_2: bool,
    axes: tuple[int, ...] | None = None,
    *,
    local: torch.Tensor | None = None,
) -> tuple[Scalings, Copies]:
    """Float8 copies of the local part of a tensor, and the scaling for each cast among them.

    Arguments and collectives are those of :func:`scaling_over`, for each cast.
    """
    x = local_tensor(tensor) if local is None else local
    casts, in_one_pass, of, transposed = plan = _planned(copies)
    reduces = isinstance(tensor, DTensor) and any(
        amax_groups(tensor, cast.granularity, axes) for cast in casts
    )
    if len(casts) > 1 and (reduces or not in_one_pass):
        # One cast at a time: a graph that needs one copy must not repeat the reduction for another.
        scalings: Scalings = {}
        made: Copies = {}
        for cast in casts:
            same = [copy for copy in copies if copy.cast == cast]
            found = copies_over(tensor, same, round_scales_to_power_of_2, axes, local=local)
            scalings, made = scalings | found[0], made | found[1]
        return scalings, made
    first = casts[0]
    if not in_one_pass:
        layout = Layout.of(tensor)
        part = granularity_at(first.granularity, layout)
        if isinstance(part, Blocks) and fuses_blocks(x) and not _is_cut(layout, first):
            flat = cast_blocks(x, first.dtype, part.blocks, part.rule, transposed)
            made = _as_copies(x, copies, plan, flat[1:], flat[:1], layout)
            return {first: (flat[0], flat[0])}, made
        scaling = scaling_over(tensor, first, round_scales_to_power_of_2, axes, local=x)
        return {first: scaling}, copies_by(x, copies, {first: scaling}, fits=True, layout=layout)
    if len(casts) == 1 and first.granularity is ROW and not reduces and fuses_rows(x):
        flat = cast_rows(x, first.dtype, round_scales_to_power_of_2, transposed)
    else:
        if len(casts) > 1:
            values = amaxes(x, [cast.granularity.name for cast in casts])
        else:
            values = [local_amax(x, first.granularity)]
            if reduces:
                values = [global_amax(values[0], tensor, first.granularity, axes)]
        flat = cast_copies(x, values, first.dtype, round_scales_to_power_of_2, of, transposed)
    n = 2 * len(casts)
    scalings = {cast: (flat[2 * i], flat[2 * i + 1]) for i, cast in enumerate(casts)}
    return scalings, _as_copies(x, copies, plan, flat[n:], flat[1:n:2])


def _is_cut(layout: Layout | None, cast: CastSpec) -> bool:
    """Whether shards cut blocks, so that exponents must be reduced."""
    return layout is not None and are_cut(layout, cast.granularity)


def copies_by(
    x: torch.Tensor,
    copies: Sequence[CopySpec],
    scalings: Scalings,
    *,
    fits: bool = False,
    layout: Layout | None = None,
) -> Copies:
    """Float8 copies of a local tensor with known scalings.

    Args:
        fits: the scalings follow from the tensor's own amaxes.
        layout: the layout of the tensor that it is part of.
    """
    casts, in_one_pass, of, transposed = plan = _planned(copies)
    dtype, several = casts[0].dtype, len(copies) > 1 or transposed[0]
    if in_one_pass and several:
        multipliers = [scalings[cast][0] for cast in casts]
        data = quantize_copies(x, multipliers, dtype, of, transposed, fits=fits)
    elif len(casts) == 1 and casts[0].granularity.blocks is not None and several:
        blocks = granularity_at(casts[0].granularity, layout).blocks
        assert blocks is not None
        data = quantize_block_copies(x, scalings[casts[0]][1], dtype, blocks, transposed)
    else:
        data = []
        for cast, transposed_ in copies:
            qdata = quantize_local(x, scalings[cast], cast, fits=fits, layout=layout).qdata
            if transposed_:
                qdata = transposed_copy(qdata.view(math.prod(x.shape[:-1]), x.shape[-1]))
            data.append(qdata)
    return _as_copies(x, copies, plan, data, [scalings[cast][1] for cast in casts], layout)


class _Plan(NamedTuple):
    """Plan of how copies are made.

    Attributes:
        casts: the different casts of the copies.
        in_one_pass: whether one kernel can make copies in all of these casts.
        of: the index of each copy's cast.
        transposed: whether each copy is transposed in memory.
    """

    casts: list[CastSpec]
    in_one_pass: bool
    of: list[int]
    transposed: list[bool]


@lru_cache(maxsize=1024)
def _plan_copies(copies: tuple[CopySpec, ...]) -> _Plan:
    casts = list(dict.fromkeys(copy.cast for copy in copies))
    same_dtype = len({cast.dtype for cast in casts}) == 1
    in_one_pass = same_dtype and all(c.granularity in (TENSOR, ROW, COLUMN) for c in casts)
    of = [casts.index(copy.cast) for copy in copies]
    return _Plan(casts, in_one_pass, of, [copy.transposed for copy in copies])


def _planned(copies: Sequence[CopySpec]) -> _Plan:
    # Dynamo warns about functions with a cache.
    plan = _plan_copies.__wrapped__ if torch.compiler.is_compiling() else _plan_copies
    return plan(tuple(copies))


def as_copies(
    x: torch.Tensor,
    copies: Sequence[CopySpec],
    data: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    layout: Layout | None = None,
) -> Copies:
    """Assemble the copies of a local tensor from data that a kernel wrote and a scale per cast.

    ``layout``: the layout of the tensor that it is part of.
    """
    return _as_copies(x, copies, _planned(copies), data, scales, layout)


def _as_copies(
    x: torch.Tensor,
    copies: Sequence[CopySpec],
    plan: _Plan,
    data: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    layout: Layout | None = None,
) -> Copies:
    found, of_matrix = {}, x.ndim == 2
    for copy, i, qdata in zip(copies, plan.of, data, strict=True):
        cast, transposed = copy
        if transposed:
            qdata = qdata.t() if of_matrix else qdata.t().view(x.shape)
        found[copy] = Quantized(qdata, scales[i], granularity_at(cast.granularity, layout))
    return found


def flat_copies(copies: Copies) -> list[torch.Tensor]:
    """The scale of each cast, and then the data as kernels write it; see :func:`as_copies`."""
    scales = {copy.cast: quantized.scale for copy, quantized in copies.items()}
    data = []
    for copy, (qdata, *_) in copies.items():
        if copy.transposed:
            qdata = qdata.view(math.prod(qdata.shape[:-1]), qdata.shape[-1]).t()
        data.append(qdata)
    return [*scales.values(), *data]


def as_float8_of(tensor: torch.Tensor, quantized: Quantized) -> torch.Tensor:
    """Wrap the cast of a tensor's local part as a Float8Tensor, or a DTensor of one."""
    return with_local(tensor, quantized.as_tensor(tensor.dtype))


class _CastToFloat8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, cast: CastSpec, round_scales_to_power_of_2: bool
    ) -> torch.Tensor:
        layout = Layout.of(tensor)
        if layout is not None and layout.mesh.get_coordinate() is None:
            # As with DTensor's operators, a rank outside of the mesh has an empty local tensor.
            local = local_tensor(tensor)
            scale = local.new_ones((), dtype=torch.float32)
            return as_float8_of(tensor, Quantized(local.to(cast.dtype), scale, TENSOR))
        return as_float8_of(tensor, quantize_over(tensor, cast, round_scales_to_power_of_2))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return grad, None, None
