"""Operators on a local ``Float8Tensor``: the table behind its ``__torch_dispatch__``.

An operator that only moves elements runs on the data, and on a view of each scale that is expanded
to the shape of the data. A scale of the whole tensor stays as it is, and scales of rows move with
their rows. Collectives, ``cat`` and padding run on the bytes as ``uint8``, because some backends do
not support float8.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8_dist import torch_internals
from fp8_dist.device import is_float8
from fp8_dist.kernels.encoding import as_bytes, pack_rows, unpack_rows
from fp8_dist.scaling import Level, Scales, Scheme, covering
from fp8_dist.tensor.float8_tensor import FLOAT8_OPS, Float8Tensor, dequantize_detached
from fp8_dist.text import kind_of
from fp8_dist.torch_internals import funcol, shard_dim_alltoall

aten = torch.ops.aten

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def implements(*overloads: Any) -> Callable[[Handler], Handler]:
    """Register a handler for the given operator overloads."""

    def register(handler: Handler) -> Handler:
        for overload in overloads:
            assert overload not in FLOAT8_OPS, f"{overload} has two handlers"
            FLOAT8_OPS[overload] = handler
        return handler

    return register


_PARTS = (aten.chunk.default, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default)


@implements(
    *_PARTS,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
)
def _move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, rest = args[0], args[1:]
    moved = func(x.qdata, *rest, **kwargs)
    if func in (aten.alias.default, aten.clone.default, aten.detach.default):
        return x.rewrap(qdata=moved, scale=tuple([func(scale) for scale in x.scales]))
    if x.scheme.is_scalar:
        if isinstance(moved, torch.Tensor):
            return x.rewrap(qdata=moved)
        return [x.rewrap(qdata=part) for part in moved]
    if func in _PARTS and any(level.has_blocks for level in x.scheme.levels):
        return _parts_in_blocks(func, x, moved, rest, kwargs)
    if (transposed := _transposed_scheme(func, x, rest)) is not None:
        if moved.shape == x.shape and moved.stride() == x.qdata.stride():
            return x.rewrap(qdata=moved)  # permuted without effect
        scales = tuple([scale.transpose(-2, -1) if scale.ndim else scale for scale in x.scales])
        return x.rewrap(qdata=moved, scale=scales, scheme=transposed, start=x.start[::-1])
    expanded = [_expanded(x, level, scale) for level, scale in _moving_levels(x)]
    views = [func(view, *rest, **kwargs) for view in expanded]
    if isinstance(moved, torch.Tensor):
        return _with_moved_scales(func, x, moved, views)
    parts = zip(moved, *views, strict=True)
    return [_with_moved_scales(func, x, part, part_views) for part, *part_views in parts]


def _transposed_scheme(func: Any, x: Float8Tensor, rest: tuple[Any, ...]) -> Scheme | None:
    """The scheme of the result if ``func`` transposes matrices; else None."""
    transposed = x.scheme.transposed()
    if transposed is None or func not in (aten.t.default, aten.transpose.int, aten.permute.default):
        return None
    if x.ndim > 2:
        last_two = {x.ndim - 2, x.ndim - 1}
        swaps_them = func is aten.transpose.int and {dim % x.ndim for dim in rest} == last_two
        if not swaps_them or any(level.leading != 1 for level in transposed.levels):
            return None
    return transposed


def _parts_in_blocks(
    func: Any, x: Float8Tensor, moved: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Rewrap parts along a dim, each with the scales of its blocks. Parts may cut blocks."""
    at = 0 if func is aten.slice.Tensor else 1
    dim = (rest[at] if len(rest) > at else kwargs.get("dim", 0)) % x.ndim
    parts, begin = [moved] if isinstance(moved, torch.Tensor) else moved, 0
    if func is aten.slice.Tensor:
        begin, _, step = slice(*[*rest[1:], None, None, None][:3]).indices(x.shape[dim])
        if step != 1:
            raise _refusal(func, x)
    wrapped = []
    for part in parts:
        length = part.shape[dim]
        scales = x.scheme.part_of_scales(x.scales, x.start, dim, begin, length, x.ndim)
        start = x.scheme.moved(x.start, dim, begin, x.ndim)
        wrapped.append(x.rewrap(qdata=part, scale=scales, start=start))
        begin += length
    return wrapped[0] if isinstance(moved, torch.Tensor) else wrapped


def _fixed_dims(level: Level, ndim: int) -> tuple[int, ...]:
    """The dims along which the scales of a level can't be sliced like the data."""
    return tuple(dim for dim in range(ndim) if level.block(dim, ndim) != 1)


def _moving_levels(x: Float8Tensor) -> list[tuple[Level, torch.Tensor]]:
    """The levels whose scales cover parts of the tensor, with these scales."""
    scheme = x.scheme
    if scheme.is_scalar:
        return []
    pairs = zip(scheme.levels, x.scales, strict=True)
    return [(level, scale) for level, scale in pairs if not level.is_scalar]


def _changed(x: Float8Tensor, change: Callable[[Level, torch.Tensor], torch.Tensor]) -> Scales:
    """The scales of all levels, with ``change`` applied to those that cover parts."""
    pairs = zip(x.scheme.levels, x.scales, strict=True)
    return tuple([scale if level.is_scalar else change(level, scale) for level, scale in pairs])


def _expanded(x: Float8Tensor, level: Level, scale: torch.Tensor) -> torch.Tensor:
    """A view of scales in the shape of the data, with stride 0 along the dims that they cover."""
    fixed = _fixed_dims(level, x.ndim)
    strides = [0 if dim in fixed else n for dim, n in enumerate(scale.stride())]
    return scale.as_strided(x.qdata.shape, strides, scale.storage_offset())


def _with_moved_scales(
    func: Any, x: Float8Tensor, qdata: torch.Tensor, expanded: Sequence[torch.Tensor]
) -> Float8Tensor:
    """Rewrap ``x`` with data moved by ``func``, and with expanded scales that it moved as well."""
    scheme, scales, moved = x.scheme, list(x.scales), iter(expanded)
    for i, level in enumerate(scheme.levels):
        if level.is_scalar:
            continue
        view, scale = next(moved), scales[i]
        covered = tuple(dim for dim, stride in enumerate(view.stride()) if stride == 0)
        size = [1 if dim in covered else n for dim, n in enumerate(view.shape)]
        # A stride of 0 would be correct too, but compiled graphs expect the strides of a new scale.
        strides = [max(stride, 1) for stride in view.stride()]
        if level.has_blocks or len(scales) > 1:  # rows must stay whole
            rows_stay = level.follows_rows and covered == (qdata.ndim - 1,)
            if not rows_stay or qdata.shape[-1] != x.shape[-1]:
                raise _refusal(func, x)
            size[-1], strides[-1] = scale.shape[-1], scale.stride(-1)
        elif covered != level.covered_dims(qdata.ndim):
            scheme = covering(covered, scheme, qdata.ndim)
        scales[i] = view.as_strided(size, strides, view.storage_offset())
    return x.rewrap(qdata=qdata, scale=tuple(scales), scheme=scheme)


@implements(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x, size = args
    moving = _moving_levels(x)
    if moving and (not size or size[-1] not in (-1, x.shape[-1])):
        # DTensor does this to join the parts of a tensor with a single row.
        raise _refusal(func, x, "its rows would be others")
    qdata = func(x.qdata, size, **kwargs)
    if not moving or qdata.shape == x.shape:
        return x.rewrap(qdata=qdata)
    last = x.ndim - 1

    def viewed(level: Level, scale: torch.Tensor) -> torch.Tensor:
        fixed = _fixed_dims(level, x.ndim)
        if fixed not in ((last,), tuple(range(last))) or (level.rows or 1) > 1:
            raise _refusal(func, x)
        rows = qdata.shape[:-1] if fixed == (last,) else [1] * (qdata.ndim - 1)
        return scale.reshape(*rows, scale.shape[-1])

    return x.rewrap(qdata=qdata, scale=_changed(x, viewed))


@implements(aten.as_strided.default, aten._reshape_alias.default)
def _restride(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x = args[0]
    qdata = func(x.qdata, *args[1:], **kwargs)
    # FSDP2 calls as_strided on gathered tensors with the strides that they already have.
    before, after = ((t.shape, t.stride(), t.storage_offset()) for t in (x.qdata, qdata))
    if before != after and _moving_levels(x):
        raise _refusal(func, x)
    return x.rewrap(qdata=qdata)


def _refusal(
    func: Any, x: Float8Tensor, why: str = "its result has no such scales"
) -> NotImplementedError:
    return NotImplementedError(
        f"{func} of a Float8Tensor of shape {tuple(x.shape)} with one scale per {x.scheme.covers}: "
        f"{why}; call .dequantize() first (of a DTensor: redistribute it before the cast)"
    )


def _check_are_float8(func: Any, tensors: Sequence[torch.Tensor]) -> None:
    for x in tensors:
        if not isinstance(x, Float8Tensor):
            raise NotImplementedError(
                f"{func} of a Float8Tensor and {kind_of(x)} of {x.dtype}: cast_to_float8 "
                "the second, or dequantize() the first"
            )


@implements(aten.cat.default)
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    tensors = args[0]
    first = tensors[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % first.ndim
    _check_are_float8(func, tensors)
    origin = first.origin
    amaxes = {first.local_amax}  # of parts of one tensor: one
    for x in tensors[1:]:
        _check_same_kind("torch.cat", first, x)
        starts_alike = [x.start[d] == first.start[d] for d in (-2, -1) if d != dim - x.ndim]
        if False in starts_alike:
            raise _refusal(func, x)
        if x.origin is not origin:
            origin = None
        amaxes.add(x.local_amax)
    scales: Scales = ()
    for i, level in enumerate(first.scheme.levels):
        parts = [x.scales[i] for x in tensors]
        block = level.block(dim, first.ndim)
        if block is None:
            scales += (_common_scale(parts),)
        else:
            if block > 1:
                _check_whole_blocks(func, tensors, dim, block)
            scales += (func(parts, dim),)
    qdata = func([_as_sent(x, x.qdata) for x in tensors], dim).view(first.qdata.dtype)
    known = [amax for amax in amaxes if amax is not None]
    amax = torch.stack(known).amax() if len(known) > 1 else first.local_amax
    return first.rewrap(qdata=qdata, scale=scales, origin=origin, local_amax=amax)


def _check_whole_blocks(func: Any, tensors: list[Float8Tensor], dim: int, block: int) -> None:
    """Raise NotImplementedError if tensors would be joined inside a block."""
    for i, x in enumerate(tensors):
        start = x.start[dim - x.ndim] % block
        ends_inside = i + 1 < len(tensors) and (start + x.shape[dim]) % block
        if (i and start) or ends_inside:
            raise _refusal(func, x)


def _check_same_kind(name: str, x: Float8Tensor, y: Float8Tensor) -> None:
    if x.key == y.key:  # a key has the dtype
        return
    if (x.qdata.dtype, x.scheme.levels) != (y.qdata.dtype, y.scheme.levels):
        kinds = [f"{z.qdata.dtype} with one scale per {z.scheme.covers}" for z in (x, y)]
        raise ValueError(f"{name} of {' and '.join(kinds)}; .dequantize() them")


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by size in bytes


def _common_scale(scales: list[torch.Tensor]) -> torch.Tensor:
    first = scales[0]
    # Chunks of one tensor share its scale object, so no values are compared and there is no sync.
    # Otherwise bits are compared, because a NaN is not equal to itself.
    for scale in scales:
        dtype = _BITS[first.itemsize]
        if scale is not first and not torch.equal(scale.view(dtype), first.view(dtype)):
            raise ValueError(
                "float8 tensors that were cast with different scales can't be put together; "
                "dequantize() them, or cast them together"
            )
    return first


@implements(aten.constant_pad_nd.default)
def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x, pad = args[:2]
    if (args[2] if len(args) > 2 else kwargs.get("value", 0)) != 0:
        raise _refusal(func, x, "only 0 has the same float8 code under every scale")
    _check_not_cut(func, x)  # DTensor pads the parts of some ranks before it gathers them
    qdata = func(as_bytes(x.qdata), pad, 0).view(x.qdata.dtype)

    def padded(level: Level, scale: torch.Tensor) -> torch.Tensor:
        fixed = _fixed_dims(level, x.ndim)
        # pad has a pair for each dim, the last dim first.
        sides = [0 if x.ndim - 1 - i // 2 in fixed else n for i, n in enumerate(pad)]
        # As integers, because torch can't pad all dtypes of scales.
        return func(scale.view(_BITS[scale.itemsize]), sides, 0).view(scale.dtype)

    scales = _changed(x, padded)
    blocked = {d for level in x.scheme.levels for d in _fixed_dims(level, x.ndim)}
    in_front = any(n for i, n in enumerate(pad[::2]) if x.ndim - 1 - i in blocked)
    has_blocks = any(level.has_blocks for level in x.scheme.levels)
    # Padding at the end is possible if the last blocks have room for it.
    shapes = x.scheme.scale_shapes(qdata.shape, x.start)
    if has_blocks and (in_front or [[*scale.shape] for scale in scales] != shapes):
        raise _refusal(func, x)
    return x.rewrap(qdata=qdata, scale=scales)


@implements(aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x = args[0]
    dtype = kwargs.pop("dtype", None) or x.orig_dtype
    if not dtype.is_floating_point or is_float8(dtype):
        raise NotImplementedError(
            f"a Float8Tensor cannot become {dtype}; call .dequantize() and convert the result"
        )
    scale_kwargs = {k: v for k, v in kwargs.items() if k in ("device", "non_blocking")}
    scales = tuple([func(scale, **scale_kwargs) for scale in x.scales])
    return x.rewrap(qdata=func(x.qdata, **kwargs), scale=scales, orig_dtype=dtype)


@implements(aten.copy_.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    dst, src = args[:2]
    _check_are_float8(func, (dst, src))
    _check_same_kind("copy_", dst, src)
    if dst.start != src.start:
        raise _refusal(func, dst)
    func(dst.qdata, src.qdata, *args[2:], **kwargs)
    for mine, other in zip(dst.scales, src.scales, strict=True):
        func(mine, other, *args[2:], **kwargs)
    return dst


@implements(aten.zeros_like.default, aten.empty_like.default)
def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    # High precision, because tensors made like a float8 tensor hold its gradients.
    x = args[0]
    given = {name: value for name, value in kwargs.items() if value is not None}
    return func(x.qdata, *args[1:], **({"dtype": x.orig_dtype} | given))


@implements(aten.new_zeros.default, aten.new_empty.default, aten.new_empty_strided.default)
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    # DTensor creates shards in this way, empty or to be filled. They are float8, unless another
    # dtype is requested.
    x = args[0]
    if kwargs.get("dtype") is not None:
        return func(x.qdata, *args[1:], **kwargs)
    size = args[1]
    if len(size) != x.ndim and _moving_levels(x):
        raise _refusal(func, x)
    scales = _changed(x, lambda level, scale: scale.new_zeros(level.shape(size, x.start)))
    return x.rewrap(qdata=func(x.qdata, *args[1:], **kwargs), scale=scales)


@implements(aten.dequantize.self)
def _dequantize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return dequantize_detached(args[0])


@implements(aten.is_same_size.default)
def _is_same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return args[0].shape == args[1].shape


@implements(
    funcol.all_gather_into_tensor.default,
    funcol.all_to_all_single.default,
    funcol.broadcast.default,
    shard_dim_alltoall,
)
def _collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x, rest = args[0], args[1:]
    moving = _moving_levels(x)
    if not moving or x.ndim == 1:
        # Every rank has cast with the scale of the global tensor, so only the data is sent.
        out = func(_as_sent(x, x.qdata.contiguous()), *rest, **kwargs)
        return x.rewrap(qdata=out.view(x.qdata.dtype))
    dims = [d % x.ndim for d in rest[:2]] if func is shard_dim_alltoall else [0]
    _check_not_cut(func, x)
    if not x.scheme.can_move(dims, x.ndim):
        raise _refusal(func, x, "only whole rows travel, each with its scale")
    scales = [scale for _, scale in moving]
    packed = func(as_bytes(pack_rows(x.qdata, scales)), *rest, **kwargs)
    traced = _is_traced(x)
    if traced:  # in a graph, a wait for one view would not cover the others
        packed = funcol.wait_tensor(packed)
    qdata, arrived = unpack_rows(packed, x.qdata, scales)
    # Inductor (2.13) misreads an fp32 view of bytes if it is restrided.
    numbers = iter([scale.clone() if traced else scale for scale in arrived])
    return x.rewrap(qdata=qdata, scale=_changed(x, lambda level, scale: next(numbers)))


@implements(funcol.wait_tensor.default)
def _wait(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x = args[0]
    if x.ndim > 1 and _moving_levels(x) and _is_traced(x):
        return x  # waited for before it was unpacked
    # Scales that were sent have arrived in the same message.
    return x.rewrap(qdata=func(_as_sent(x, x.qdata), **kwargs).view(x.qdata.dtype))


def _check_not_cut(func: Any, x: Float8Tensor) -> None:
    """Raise NotImplementedError, on all ranks, if parts of a tensor can't be joined as float8."""
    if x.splits_blocks:
        raise _refusal(func, x, "ranks have unequal parts, or parts of one block")


def _as_sent(x: Float8Tensor, qdata: torch.Tensor) -> torch.Tensor:
    """The data as it is sent: bytes, or float8 where a graph fuses the gather with a GEMM."""
    typed = _is_traced(x) and torch_internals.graphs_fuse_collectives() and not _moving_levels(x)
    return qdata if typed else as_bytes(qdata)


def _is_traced(x: Float8Tensor) -> bool:
    """Whether ``x`` is a stand-in without data, while torch.compile traces."""
    return isinstance(x.qdata, torch_internals.STAND_INS)


# torch >= 2.13 wraps the result of a collective with an operator, older releases with a plain call.
if torch_internals.wrapped_in_flight is not None:

    @implements(torch_internals.wrapped_in_flight)
    def _in_flight(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        return torch_internals.AsyncCollectiveTensor(args[0])


@implements(aten.mm.default, aten.addmm.default)
def _mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    *bias, a, b = args
    _check_are_float8(func, (a, b))
    left, right = a.quantized, b.quantized
    if why := left.scheme.unfit_beside(right.scheme):
        raise ValueError(
            f"float8 GEMM of {tuple(a.shape)} by {tuple(b.shape)}: one scale per "
            f"{left.scheme.covers} and per {right.scheme.covers}: {why}; cast both of them alike"
        )
    product = left.scheme.multiply(left, right, a.orig_dtype, (False,) * 4)
    if not bias:
        return product
    return kwargs.get("beta", 1) * bias[0] + kwargs.get("alpha", 1) * product
