"""Operators on a local ``Float8Tensor``: the table behind its ``__torch_dispatch__``.

An operator that only moves elements runs on the bytes, and on the scale as if it were expanded to
their shape. A tensorwise scale stays as it is, and rowwise scales move with their rows.
Collectives, ``cat`` and padding move bytes as ``uint8``, because some backends lack float8.
"""

from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch

from fp8_dist import kernels
from fp8_dist.dtypes import is_float8
from fp8_dist.granularity import Blocks, covering
from fp8_dist.tensor.float8_tensor import FLOAT8_OPS, Float8Tensor, dequantized, granularity_of
from fp8_dist.torch_internals import (
    STAND_INS,
    AsyncCollectiveTensor,
    funcol,
    shard_dim_alltoall,
    wrapped_in_flight,
)

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


def as_bytes(qdata: torch.Tensor) -> torch.Tensor:
    """A uint8 view of float8 data."""
    return qdata.view(torch.uint8)


@implements(
    aten.alias.default,
    aten.chunk.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
)
def _move(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, rest = args[0], args[1:]
    moved = func(x.qdata, *rest, **kwargs)
    if isinstance(granularity_of(x), Blocks):
        return _move_blocks(func, x, moved, rest, kwargs)
    scales = func(_expanded(x), *rest, **kwargs) if x.scale.ndim else None
    if isinstance(moved, torch.Tensor):
        return _with_expanded_scale(func, x, moved, scales)
    parts = zip(moved, scales or repeat(None), strict=False)
    return [_with_expanded_scale(func, x, qdata, scale) for qdata, scale in parts]


_PARTS = (
    aten.chunk.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
)


def _move_blocks(
    func: Any, x: Float8Tensor, moved: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Result of :func:`_move` for block scales; ``moved`` is the data."""
    granularity = granularity_of(x)
    assert isinstance(granularity, Blocks)
    if func in (aten.alias.default, aten.detach.default):
        return x.rewrap(qdata=moved, scale=func(x.scale))
    if func in (aten.t.default, aten.transpose.int, aten.permute.default) and x.ndim == 2:
        if moved.shape == x.shape and moved.stride() == x.qdata.stride():
            return x.rewrap(qdata=moved)
        name = granularity.transposed().name
        return x.rewrap(qdata=moved, scale=x.scale.t(), granularity=name)
    if func in _PARTS:
        return _parts_of_blocks(func, x, moved, rest, kwargs)
    if granularity.rows > 1:
        raise _no_scale_for(func, x)
    scales = func(_expanded(x), *rest, **kwargs)
    if isinstance(moved, torch.Tensor):
        return _with_expanded_scale(func, x, moved, scales)
    pairs = zip(moved, scales, strict=True)
    return [_with_expanded_scale(func, x, qdata, scale) for qdata, scale in pairs]


def _parts_of_blocks(
    func: Any, x: Float8Tensor, moved: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Parts along a dim, each with the scales of its blocks, which it may cut."""
    granularity = granularity_of(x)
    assert isinstance(granularity, Blocks)
    at = 0 if func is aten.slice.Tensor else 1
    dim = (rest[at] if len(rest) > at else kwargs.get("dim", 0)) % x.ndim
    parts, start = [moved] if isinstance(moved, torch.Tensor) else moved, 0
    if func is aten.slice.Tensor:
        start, _, step = slice(*[*rest[1:], None, None, None][:3]).indices(x.shape[dim])
        if step != 1:
            raise _no_scale_for(func, x)
    found = []
    for part in parts:
        length = part.shape[dim]
        scale = granularity.part_of_scales(x.scale, dim, start, length)
        offset = [start if d == dim else 0 for d in range(x.ndim)]
        name = granularity.at(offset).name
        found.append(x.rewrap(qdata=part, scale=scale, granularity=name))
        start += length
    return found[0] if isinstance(moved, torch.Tensor) else found


def _expanded(x: Float8Tensor) -> torch.Tensor:
    """The scale as a view of the data's shape: stride 0 along the dims that it covers."""
    fixed = granularity_of(x).fixed_dims(x.ndim)
    stride = [0 if dim in fixed else n for dim, n in enumerate(x.scale.stride())]
    return x.scale.as_strided(x.qdata.shape, stride, x.scale.storage_offset())


def _with_expanded_scale(
    func: Any, x: Float8Tensor, qdata: torch.Tensor, expanded: torch.Tensor | None
) -> Float8Tensor:
    """Rewrap ``x`` with data moved by ``func`` and a scale that was expanded and moved alike."""
    if expanded is None:  # one scale for all
        return x.rewrap(qdata=qdata)
    granularity = granularity_of(x)
    covered = tuple(dim for dim, stride in enumerate(expanded.stride()) if stride == 0)
    size = [1 if dim in covered else n for dim, n in enumerate(expanded.shape)]
    # A stride of 0 would also be correct, but graphs are compiled for given strides.
    strides = [max(stride, 1) for stride in expanded.stride()]
    if granularity.is_grouped:  # several scales for each row, which must stay whole
        if covered != (qdata.ndim - 1,) or qdata.shape[-1] != x.shape[-1]:
            raise _no_scale_for(func, x)
        size[-1], strides[-1] = x.scale.shape[-1], x.scale.stride(-1)
    else:
        granularity = covering(covered, qdata.ndim)
    scale = expanded.as_strided(size, strides, expanded.storage_offset())
    return x.rewrap(qdata=qdata, scale=scale, granularity=granularity.name)


@implements(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x, size = args
    if x.scale.ndim and (not size or size[-1] not in (-1, x.shape[-1])):
        # DTensor joins the parts of a tensor of a single row in this way.
        raise NotImplementedError(
            f"{func} of a Float8Tensor of shape {tuple(x.shape)} with a scale of shape "
            f"{tuple(x.scale.shape)} to {tuple(size)}: its rows would be others; if one row "
            "was sharded, redistribute the high-precision tensor and cast it then, else call "
            ".dequantize() first"
        )
    qdata = func(x.qdata, size, **kwargs)
    if x.scale.ndim == 0 or qdata.shape == x.shape:
        return x.rewrap(qdata=qdata)
    if len(granularity_of(x).fixed_dims(x.ndim)) > 1 and granularity_of(x).blocks is not None:
        raise _no_scale_for(func, x)
    last, fixed = x.ndim - 1, granularity_of(x).fixed_dims(x.ndim)
    if fixed not in ((last,), tuple(range(last))):
        raise _no_scale_for(func, x)
    rows = qdata.shape[:-1] if fixed == (last,) else [1] * (qdata.ndim - 1)
    return x.rewrap(qdata=qdata, scale=x.scale.reshape(*rows, x.scale.shape[-1]))


@implements(aten.as_strided.default, aten._reshape_alias.default)
def _restride(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x = args[0]
    qdata = func(x.qdata, *args[1:], **kwargs)
    # FSDP2 restrides gathered tensors to the strides that they already have.
    same = qdata.shape == x.qdata.shape and qdata.stride() == x.qdata.stride()
    if x.scale.ndim and not (same and qdata.storage_offset() == x.qdata.storage_offset()):
        raise _no_scale_for(func, x)
    return x.rewrap(qdata=qdata)


def _no_scale_for(func: Any, x: Float8Tensor) -> NotImplementedError:
    return NotImplementedError(
        f"{func} of a Float8Tensor of shape {tuple(x.shape)} with a scale of shape "
        f"{tuple(x.scale.shape)} ({granularity_of(x)!r}): its result has no such scales; call "
        ".dequantize() first"
    )


@implements(aten.clone.default)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x = args[0]
    scale = func(x.scale) if x.scale.ndim else x.scale
    return x.rewrap(qdata=func(x.qdata, *args[1:], **kwargs), scale=scale)


@implements(aten.cat.default)
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    tensors = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = tensors[0]
    for x in tensors:
        if not isinstance(x, Float8Tensor):
            raise TypeError(
                f"torch.cat of a Float8Tensor and a {type(x).__name__}: dequantize() the first "
                "or cast_to_float8 the second"
            )
        _check_same_kind("torch.cat", first, x)
    scales = [x.scale for x in tensors]
    fixed = granularity_of(first).fixed_dims(first.ndim)
    along_scales = first.scale.ndim and dim % first.ndim not in fixed
    if first.scale.ndim and not along_scales and isinstance(granularity_of(first), Blocks):
        _check_whole_blocks(func, tensors, dim % first.ndim)
        along_scales = True
    scale = func(scales, dim) if along_scales else _common_scale(scales)
    out = func([as_bytes(x.qdata) for x in tensors], dim)
    of_one_cast = all(x.cast_number is first.cast_number for x in tensors)
    cast_number = first.cast_number if of_one_cast else None
    return first.rewrap(qdata=out.view(first.qdata.dtype), scale=scale, cast_number=cast_number)


def _check_whole_blocks(func: Any, tensors: list[Float8Tensor], dim: int) -> None:
    """Raise NotImplementedError if tensors to be concatenated begin or end inside blocks."""
    for i, x in enumerate(tensors):
        granularity = granularity_of(x)
        assert isinstance(granularity, Blocks)
        of_rows = dim == x.ndim - 2
        block = granularity.rows if of_rows else granularity.columns
        start = granularity.start[0 if of_rows else 1]
        ends_inside = i + 1 < len(tensors) and (start + x.shape[dim]) % block
        if (i and start) or ends_inside:
            raise _no_scale_for(func, x)


def _check_same_kind(name: str, x: Float8Tensor, y: Float8Tensor) -> None:
    if x.qdata.dtype != y.qdata.dtype:
        raise ValueError(
            f"{name} of float8 tensors of {x.qdata.dtype} and {y.qdata.dtype}; .dequantize() them"
        )
    if x.granularity != y.granularity:
        raise ValueError(
            f"{name} of float8 tensors with one scale per {x.granularity} and per {y.granularity}; "
            ".dequantize() them"
        )


def _common_scale(scales: list[torch.Tensor]) -> torch.Tensor:
    first = scales[0]
    # Chunks of one tensor share its 0-dim scale, so no values are compared and there is no sync.
    # Bits are compared, because a NaN is not equal to itself.
    bits = first.view(torch.int32)
    if not all(s is first or torch.equal(s.view(torch.int32), bits) for s in scales):
        raise ValueError(
            "float8 tensors that were cast with different scales can't be put together; "
            "dequantize() them, or cast them together"
        )
    return first


@implements(aten.constant_pad_nd.default)
def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x, pad = args[:2]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    if value != 0:
        raise NotImplementedError(
            f"padding a Float8Tensor with {value}: only 0 has the same float8 code under every "
            "scale; call .dequantize() first"
        )
    _check_not_cut(func, x)  # DTensor pads the parts of some ranks before it gathers them
    scale = x.scale
    if scale.ndim:
        # pad has a pair for each dim, the last dim first. Dims that a scale covers are not padded.
        fixed = granularity_of(x).fixed_dims(x.ndim)
        added = [0 if x.ndim - 1 - i // 2 in fixed else n for i, n in enumerate(pad)]
        scale = func(scale, added, 0)
    qdata = func(as_bytes(x.qdata), pad, 0).view(x.qdata.dtype)
    granularity = granularity_of(x)
    if isinstance(granularity, Blocks):
        # The last blocks may have room for padding at the end.
        fixed = granularity.fixed_dims(x.ndim)
        in_front = any(n for i, n in enumerate(pad[::2]) if x.ndim - 1 - i in fixed)
        if in_front or [*scale.shape] != granularity.scale_shape(qdata.shape):
            raise _no_scale_for(func, x)
    return x.rewrap(qdata=qdata, scale=scale)


@implements(aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x = args[0]
    dtype = kwargs.pop("dtype", None) or x.orig_dtype
    if not dtype.is_floating_point or is_float8(dtype):
        raise NotImplementedError(
            f"a Float8Tensor cannot become {dtype}; call .dequantize() and convert the result"
        )
    scale_kwargs = {k: v for k, v in kwargs.items() if k in ("device", "non_blocking")}
    return x.rewrap(
        qdata=func(x.qdata, **kwargs), scale=func(x.scale, **scale_kwargs), orig_dtype=dtype
    )


@implements(aten.copy_.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    dst, src = args[:2]
    if not isinstance(dst, Float8Tensor) or not isinstance(src, Float8Tensor):
        raise NotImplementedError(
            f"{func} between a {type(dst).__name__} and a {type(src).__name__}: dequantize() or "
            "cast_to_float8 first, so that both are of one kind"
        )
    _check_same_kind("copy_", dst, src)
    func(dst.qdata, src.qdata, *args[2:], **kwargs)
    func(dst.scale, src.scale, *args[2:], **kwargs)
    return dst


@implements(aten.zeros_like.default, aten.empty_like.default)
def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    # High precision, because tensors made like a float8 tensor hold its gradients.
    x = args[0]
    given = {name: value for name, value in kwargs.items() if value is not None}
    return func(x.qdata, *args[1:], **({"dtype": x.orig_dtype} | given))


@implements(aten.new_zeros.default, aten.new_empty.default, aten.new_empty_strided.default)
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    # float8 unless another dtype is requested: DTensor adds such shards, empty or to be filled.
    x = args[0]
    if kwargs.get("dtype") is not None:
        return func(x.qdata, *args[1:], **kwargs)
    scale = x.scale
    if scale.ndim:
        size = args[1]
        if len(size) != scale.ndim:
            raise _no_scale_for(func, x)
        granularity = granularity_of(x)
        fixed = granularity.fixed_dims(x.ndim)
        sizes = zip(size, scale.shape, strict=True)
        shape = [c if d in fixed else n for d, (n, c) in enumerate(sizes)]
        if granularity.blocks is not None:
            shape = granularity.scale_shape(size)
        scale = scale.new_zeros(shape)
    return x.rewrap(qdata=func(x.qdata, *args[1:], **kwargs), scale=scale)


@implements(aten.dequantize.self)
def _dequantize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return dequantized(args[0])


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
    if x.scale.ndim == 0 or x.ndim == 1:
        # Every rank cast with the scale of the global tensor, so only bytes are sent.
        out = func(as_bytes(x.qdata.contiguous()), *rest, **kwargs)
        return x.rewrap(qdata=out.view(x.qdata.dtype))
    dims = [d % x.ndim for d in rest[:2]] if func is shard_dim_alltoall else [0]
    _check_not_cut(func, x)
    if not (granularity_of(x).scales_move and granularity_of(x).can_move(dims, x.ndim)):
        raise NotImplementedError(
            f"{func} of a Float8Tensor of shape {tuple(x.shape)} with {granularity_of(x)!r}: only "
            "whole rows travel, each with its scale; redistribute the high-precision tensor and "
            "cast it then"
        )
    packed = func(as_bytes(pack_rows(x.qdata, x.scale)), *rest, **kwargs)
    traced = _is_traced(x)
    if traced:  # in a graph one wait would not cover the two views
        packed = funcol.wait_tensor(packed)
    qdata, scale = unpack_rows(packed, x.qdata.dtype, x.shape[-1], x.scale.dtype)
    # Inductor (2.13) misreads a view of bytes as fp32 that is restrided.
    return x.rewrap(qdata=qdata, scale=scale.clone() if traced else scale)


@implements(funcol.wait_tensor.default)
def _wait(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Float8Tensor:
    x = args[0]
    if x.scale.ndim and x.ndim > 1 and _is_traced(x):
        return x  # waited for before it was unpacked
    out = func(as_bytes(x.qdata), **kwargs)
    # A scale that travelled came in the same message.
    return x.rewrap(qdata=out.view(x.qdata.dtype))


def _check_not_cut(func: Any, x: Float8Tensor) -> None:
    """Raise NotImplementedError, on all ranks, if the parts of a tensor cut its blocks."""
    granularity = granularity_of(x)
    if isinstance(granularity, Blocks) and granularity.is_cut:
        raise NotImplementedError(
            f"{func} of a part of a float8 tensor, {tuple(x.shape)}, with {granularity!r}: ranks "
            "have unequal parts, or parts of one block, which can't be gathered as float8; "
            "redistribute the high-precision tensor and cast it then"
        )


def _is_traced(x: Float8Tensor) -> bool:
    """Whether ``x`` is traced by torch.compile, where this code runs once, without data."""
    return isinstance(x.qdata, STAND_INS)


@kernels.custom_op("pack_rows(Tensor qdata, Tensor numbers) -> Tensor")
def pack_rows(qdata: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Pack rows of float8 data ``[..., K]`` and of numbers ``[..., C]`` into one message.

    The message is ``[..., K']`` of the dtype of the data. A row has the data, zeros up to a
    multiple of the size of a number (fp32, or uint8 for exponents), and the bytes of each number.
    This is an operator so that ``comm_audit`` knows the parts of a message in a compiled graph.
    """
    data, missing = as_bytes(qdata), -qdata.shape[-1] % numbers.itemsize
    if missing:  # padding by nothing would copy
        data = torch.nn.functional.pad(data, (0, missing))
    # Flat first: a column is contiguous with any stride in its last dim, which view() refuses.
    flat = numbers.reshape(-1).contiguous().view(torch.uint8)
    tail = flat.view(*numbers.shape[:-1], numbers.itemsize * numbers.shape[-1])
    return torch.cat([data, tail], dim=-1).view(qdata.dtype)


@pack_rows.register_fake
def _pack_rows_fake(qdata: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    size = numbers.itemsize
    columns = qdata.shape[-1] + -qdata.shape[-1] % size + size * numbers.shape[-1]
    return qdata.new_empty((*qdata.shape[:-1], columns))


def unpack_rows(
    packed: torch.Tensor, dtype: torch.dtype, columns: int, numbers: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack a message of :func:`pack_rows` into views of the data and the numbers.

    ``packed`` is uint8 and may still be in flight.
    """
    start = columns + -columns % numbers.itemsize
    return packed[..., :columns].view(dtype), packed[..., start:].view(numbers)


# torch >= 2.13 wraps the result of a collective by an operator, older ones by a plain call.
if wrapped_in_flight is not None:

    @implements(wrapped_in_flight)
    def _in_flight(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        return AsyncCollectiveTensor(args[0])


def scaled_mm(
    a: Float8Tensor,
    b: Float8Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
    pad_inner_dim: bool = False,
    emulate: bool = False,
) -> torch.Tensor:
    """Matrix product ``[M, N]`` of two local float8 matrices, with no collectives.

    The scale of ``a`` is 0-dim or ``[M, 1]``, and the scale of ``b`` is 0-dim or ``[1, N]``, or
    both have block scales. Options and errors are those of :func:`fp8_dist.kernels.scaled_mm`. It
    also raises a ValueError if only one of them has block scales.
    """
    options = (out_dtype, use_fast_accum, pad_inner_dim, emulate)
    blocks = [granularity_of(x).blocks for x in (a, b)]
    if blocks[0] is not None and blocks[1] is not None:
        return kernels.block_scaled_mm.overload(
            a.qdata, b.qdata, a.scale, b.scale, blocks[0], blocks[1], out_dtype, emulate
        )
    if blocks != [None, None]:
        raise ValueError(
            f"float8 GEMM of {tuple(a.shape)} by {tuple(b.shape)}: only one of them has scales of "
            "blocks; cast both of them so, or neither"
        )
    # Not the direct call, which may cache data derived from an operand: a collective may write into
    # the data of a Float8Tensor unnoticed by autograd.
    run = kernels.scaled_mm.overload
    return run(a.qdata, b.qdata, a.scale, b.scale, *options)


@implements(aten.mm.default, aten.addmm.default)
def _mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    *bias, a, b = args
    for x in (a, b):
        if not isinstance(x, Float8Tensor):
            raise NotImplementedError(
                f"{func} of a Float8Tensor and a {type(x).__name__} of {x.dtype}: "
                "cast_to_float8 the second, or dequantize() the first. (A weight that FSDP2 "
                "gathers in float8 can be used by Float8Linear layers alone.)"
            )
    product = scaled_mm(a, b, out_dtype=a.orig_dtype)
    if not bias:
        return product
    return kwargs.get("beta", 1) * bias[0] + kwargs.get("alpha", 1) * product
