"""Scaled GEMMs: ``out = (a * scale_a) @ (b * scale_b)`` for float8 ``a`` and ``b``.

Scales are dense (per tensor, row or column) or per block (:mod:`fp8_dist.kernels.blocks`).

Devices with float8 matrix cores run ``torch._scaled_mm``. Elsewhere, and with ``emulate=True``,
the product is computed in a wider type: in fp32 here, and on CPUs by
:mod:`fp8_dist.kernels.cpu`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from fp8_dist.device import e4m3
from fp8_dist.env import strict_alignment
from fp8_dist.gemm_table import cuda_release, has_gemm
from fp8_dist.kernels.blocks import dequantize_blocks
from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.quantization import ALIGNMENT, padded, rounded_up, transposed_copy
from fp8_dist.text import warn_once
from fp8_dist.torch_internals import constant_in_graphs, native_scaled_mm, statically_known_true

# Options of a GEMM: (use_fast_accum, pad_inner_dim, emulate, any_order).
GemmOptions = tuple[bool, bool, bool, bool]


def needs_alignment(device: torch.device, emulate: bool) -> bool:
    """Return whether the float8 GEMM requires dims that are multiples of ``ALIGNMENT``."""
    return not emulate and (has_gemm("scaled", device) or strict_alignment())


@constant_in_graphs
def takes_transposed(device: torch.device) -> bool:
    """Return whether the float8 GEMM requires a row-major left and a column-major right operand.

    A GEMM that contracts the rows of an operand then needs a transposed copy of it.
    """
    return has_gemm("scaled", device)


def apply_scales(product: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Multiply the product of the float8 data by both scales, in place and in its dtype."""
    scale_a, scale_b = scale_a.to(product.dtype), scale_b.to(product.dtype)
    if scale_a.ndim or scale_b.ndim:
        return product.mul_(scale_a).mul_(scale_b)
    return product.mul_(scale_a * scale_b)


def emulated_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, _: bool
) -> Tensor:
    product = torch.mm(a.to(torch.float32), b.to(torch.float32))
    return apply_scales(product, scale_a, scale_b).to(out_dtype)


def _empty_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, _: GemmOptions
) -> Tensor:
    _check_scales(a, b, scale_a, scale_b)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


@custom_op(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType out_dtype, "
    "bool[] options) -> Tensor",
    fake=_empty_product,
)
def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    options: GemmOptions,
    emulated: Callable[..., Tensor] = emulated_mm,
) -> Tensor:
    """Compute ``(a * scale_a) @ (b * scale_b)`` for local float8 data.

    Args:
        a: ``[M, K]``, any strides, a float8 dtype.
        b: ``[K, N]``, any strides, a float8 dtype. In either operand, K may be padded with zeros
            to a multiple of ``ALIGNMENT``.
        scale_a: fp32, 0-dim or ``[M, 1]``.
        scale_b: fp32, 0-dim or ``[1, N]``.
        out_dtype: dtype of the result.
        options: ``use_fast_accum``, see ``torch._scaled_mm``; ``pad_inner_dim``, whether to pad K
            and N with zeros if :func:`needs_alignment` is true; ``emulate``, whether to compute in
            a wider type even on devices with a float8 GEMM; ``any_order``, whether an emulation may
            round sums in an order that depends on M and N.
        emulated: computes the product in a wider type from the arguments ``a`` to ``out_dtype``,
            and ``any_order``. It is no argument of the operator.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: a scale varies along K, or the device does not support the dims or the dtypes.
    """
    use_fast_accum, pad_inner_dim, emulate, any_order = options
    if scale_a.ndim or scale_b.ndim:
        _check_scales(a, b, scale_a, scale_b)
    rows, columns = a.shape[0], b.shape[1]
    if not min(*a.shape, *b.shape):
        return torch.zeros(rows, columns, dtype=out_dtype, device=a.device)
    misaligned = a.shape[1] % ALIGNMENT or b.shape[0] % ALIGNMENT or columns % ALIGNMENT
    if misaligned and needs_alignment(a.device, emulate):
        a, b = _aligned(a, b, pad_inner_dim)
        if scale_b.numel() > 1:
            scale_b = padded(scale_b, (0, b.shape[1] - columns))
    if not emulate and has_gemm("scaled", a.device):
        out = _native(a, b, scale_a, scale_b, out_dtype, use_fast_accum)
    else:
        # Autocast would narrow the wider type. If it is off, disabling it again would cost time.
        if a.shape[1] != b.shape[0]:
            a, b = trimmed_to_same_depth(a, b)
        autocast = torch.is_autocast_enabled(a.device.type)
        with torch.autocast(a.device.type, enabled=False) if autocast else nullcontext():
            out = emulated(a, b, scale_a, scale_b, out_dtype, any_order)
    return out if out.shape[1] == columns else out[:, :columns].contiguous()


def fusible_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    options: GemmOptions,
) -> Tensor | None:
    """Compute :func:`scaled_mm` in a graph by ``aten._scaled_mm``.

    The bits are those of :func:`scaled_mm`. The result is ``None`` if the device has no such GEMM,
    or if the operands may need padding or a special case that only :func:`scaled_mm` handles.
    """
    use_fast_accum, _, emulate, _ = options
    _check_scales(a, b, scale_a, scale_b)
    if emulate or not has_gemm("scaled", a.device):
        return None
    has_rowwise_gemm = _fits_rowwise_gemm(b, out_dtype) and has_gemm("by rows", b.device)
    if (scale_a.ndim or scale_b.ndim) and not has_rowwise_gemm:
        return None
    (rows, inner), (depth, columns) = a.shape, b.shape
    facts = [size > 0 for size in (rows, inner, columns)]
    facts += [inner == depth, inner % ALIGNMENT == 0, columns % ALIGNMENT == 0]
    if not all(statically_known_true(fact) for fact in facts):
        return None
    return _native(a, b, scale_a, scale_b, out_dtype, use_fast_accum)


def _check_scales(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    """Raise ValueError if a scale varies along the contracted dim."""
    for scale, contracted in ((scale_a, 1), (scale_b, 0)):
        if scale.ndim and scale.shape[contracted] != 1:
            raise ValueError(
                f"float8 GEMM of {tuple(a.shape)} by {tuple(b.shape)}: a scale of shape "
                f"{tuple(scale.shape)} runs along the dim that is summed over; cast along it "
                f"(dim={contracted}) instead"
            )


def _native(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    if a.dtype is b.dtype is torch.float8_e5m2 and torch.version.hip is None:
        raise ValueError(
            f"float8 GEMM of {tuple(a.shape)} by {tuple(b.shape)}, both {a.dtype}: this device "
            f"multiplies none but {e4m3()} by any; set another target_dtype, or emulate=True"
        )
    # cuBLASLt multiplies a row-major by a column-major matrix.
    a = row_major(a)
    if b.stride() != (1, b.shape[0]):
        b = row_major(b.t()).t()

    if not (scale_a.ndim or scale_b.ndim):
        return native_scaled_mm(
            a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum
        )

    fits = _fits_rowwise_gemm(b, out_dtype)
    if fits and has_gemm("by rows", b.device):
        # The rowwise kernel takes one scale for each row and one for each column.
        if not use_fast_accum and _has_slow_rowwise_gemm():
            warn_once(
                "slow rowwise GEMM",
                f"torch built for CUDA {torch.version.cuda} runs GEMMs with scales of rows in a "
                "slow kernel if they accumulate in full precision: use a build for CUDA 13.0 or "
                "later, or Float8GemmConfig(use_fast_accum=True)",
            )
        rows = _one_for_each(scale_a, (a.shape[0], 1))
        columns = _one_for_each(scale_b, (1, b.shape[1]))
        return native_scaled_mm(
            a, b, rows, columns, out_dtype=out_dtype, use_fast_accum=use_fast_accum
        )

    if fits:
        warn_once(
            "no rowwise GEMM",
            "this device has no GEMM with scales of rows in this build of torch (python -m "
            "fp8_dist.doctor lists them), so products are scaled in passes of their own; use a "
            "newer release of torch, built for CUDA 13.0 or later",
        )
    # The tensorwise kernel writes fp32, which is scaled afterwards.
    one = torch.ones((), dtype=torch.float32, device=a.device)
    product = native_scaled_mm(
        a, b, one, one, out_dtype=torch.float32, use_fast_accum=use_fast_accum
    )
    return apply_scales(product, scale_a, scale_b).to(out_dtype)


def _one_for_each(scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return one scale for each row or for each column, with the strides of a new tensor.

    torch may require stride 1 even along a dim of size 1.
    """
    if scale.shape == shape and scale.stride() == (shape[1], 1):
        return scale
    return scale.expand(shape).contiguous().view(-1).view(shape)


def _fits_rowwise_gemm(b: Tensor, out_dtype: torch.dtype) -> bool:
    """Return whether torch's kernel for scales of rows and columns supports the right operand.

    It writes only bf16, and on some devices takes only e4m3.
    """
    return out_dtype is torch.bfloat16 and b.dtype == e4m3()


def row_major(x: Tensor) -> Tensor:
    """Return ``x`` with contiguous rows."""
    if x.is_contiguous():
        return x
    return transposed_copy(x.mT) if x.mT.is_contiguous() else x.contiguous()


def _has_slow_rowwise_gemm() -> bool:
    """Return whether torch has only CUTLASS's rowwise kernel; CUDA 12.9 adds cuBLASLt's."""
    return () < cuda_release() < (12, 9)


def _aligned(a: Tensor, b: Tensor, pad_inner_dim: bool) -> tuple[Tensor, Tensor]:
    inner, columns = min(a.shape[1], b.shape[0]), b.shape[1]
    if not pad_inner_dim:
        raise ValueError(
            f"float8 GEMM of {tuple(a.shape)} by {tuple(b.shape)} (local shapes): the inner dim "
            f"{inner} and the last dim {columns} must be multiples of {ALIGNMENT} on this "
            "device; set Float8LinearConfig.pad_inner_dim=True or leave the layer unconverted"
        )
    # A transposed copy is padded as it is written.
    a, b = row_major(a), row_major(b.t())
    inner = rounded_up(inner)
    b = padded(b, (0, inner - b.shape[1], 0, -columns % ALIGNMENT))
    return padded(a, (0, inner - a.shape[1])), b.t()


def trimmed_to_same_depth(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the zeros with which only one of two operands is padded along the contracted dim."""
    depth = min(a.shape[1], b.shape[0])
    return (a if a.shape[1] == depth else a[:, :depth], b if b.shape[0] == depth else b[:depth])


@custom_op(
    fake=lambda a, b, scales_a, scales_b, blocks_a, blocks_b, out_dtype, emulate: a.new_empty(
        (a.shape[0], b.shape[1]), dtype=out_dtype
    )
)
def block_scaled_mm(
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    blocks_a: Sequence[int],
    blocks_b: Sequence[int],
    out_dtype: torch.dtype,
    emulate: bool,
) -> Tensor:
    """Multiply local float8 matrices with block scales.

    If the device has no GEMM for them, the matrices are converted to a wider type: to bf16, with
    sums in fp32, if scales are exponents and the result is bf16; otherwise to fp32. With exponents
    the product of two values is exact.

    Args:
        a: float8, ``[M, K]``, any strides.
        b: float8, ``[K, N]``, any strides. In either operand, K may be padded with zeros.
        scales_a, scales_b: the scales of the blocks of ``a`` and of ``b``, both uint8 exponents
            or both fp32.
        blocks_a, blocks_b: the blocks of ``a`` and of ``b``, see :mod:`fp8_dist.kernels.blocks`.
        out_dtype: dtype of the result.
        emulate: compute in a wider type even on devices with such a GEMM.

    Returns:
        ``[M, N]``, contiguous.
    """
    narrow = out_dtype is torch.bfloat16 and scales_a.dtype is torch.uint8
    wide = torch.bfloat16 if narrow else torch.float32
    a, b = trimmed_to_same_depth(a, b)
    left = dequantize_blocks(a, scales_a, blocks_a, wide)
    right = dequantize_blocks(b, scales_b, blocks_b, wide)
    with torch.autocast(a.device.type, enabled=False):
        return torch.mm(left, right).to(out_dtype)


def in_tiles(exponents: Tensor) -> Tensor:
    """Copy exponents ``[R, C]``, any strides, to the layout that Blackwell's GEMM reads.

    The result is flat. It consists of tiles of 128 x 4 exponents, padded with zeros. A tile is
    stored as 32 rows of 16 bytes. Row i has the 4 exponents of row i of the tile, then those of
    rows i + 32, i + 64 and i + 96.
    """
    rows, columns = exponents.shape
    whole = padded(exponents, (0, -columns % 4, 0, -rows % 128))
    tiles = whole.reshape(-1, 4, 32, whole.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
