"""The scaled GEMM: ``out = (a * scale_a) @ (b * scale_b)`` on float8 ``a`` and ``b``.

Devices with float8 matrix cores run ``torch._scaled_mm``. Elsewhere, and with ``emulate=True``,
the same products are computed in a wider type, exactly: the product of two float8 values fits in
bf16 x bf16 -> fp32, and

* bf16 output on CPU: a bf16 GEMM of the upcast data with the scales as its alpha, which rounds
  once at the end;
  (Rows and columns with scales that are powers of two: scaled after the GEMM, which is as exact);
* fp32 and fp16 output on CPU, and other scales: an fp64 GEMM. Sums of e4m3 products are exact
  there, so that the result does not depend on the order of accumulation, nor on how a weight is
  sharded;
* other devices: an fp32 GEMM.
"""

import math

import torch

from fp8_dist.dtypes import device_has_float8_gemm, e4m3, e5m2, is_float8
from fp8_dist.env import strict_alignment
from fp8_dist.kernels.upcast import upcast
from fp8_dist.torch_internals import native_scaled_mm, no_one_watches

ALIGNMENT = 16  # elements; float8 matrix cores load 16-byte vectors

_LIB = torch.library.Library("fp8_dist", "FRAGMENT")
_LIB.define(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType out_dtype, "
    "bool use_fast_accum, bool pad_inner_dim, bool emulate) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def needs_alignment(device: torch.device, emulate: bool) -> bool:
    """True where the float8 GEMM takes only dims that are multiples of ``ALIGNMENT``."""
    return not emulate and (device_has_float8_gemm(device) or strict_alignment())


def scaled_mm_of_data(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    pad_inner_dim: bool,
    emulate: bool,
) -> torch.Tensor:
    """:func:`scaled_mm` of data and scales; data may be wide (:mod:`fp8_dist.linear.wide`)."""
    if scale_a.ndim or scale_b.ndim:
        _check_scales(a, b, scale_a, scale_b)
    run = _scaled_mm if no_one_watches(a) else torch.ops.fp8_dist.scaled_mm
    return run(a, b, scale_a, scale_b, out_dtype, use_fast_accum, pad_inner_dim, emulate)


def _check_scales(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> None:
    for scale, kept in ((scale_a, 0), (scale_b, 1)):
        if scale.ndim and scale.shape[1 - kept] != 1:
            raise ValueError(
                f"float8 GEMM of {tuple(a.shape)} by {tuple(b.shape)}: a scale of shape "
                f"{tuple(scale.shape)} runs along the dim that is summed over; cast along it "
                f"(dim={1 - kept}) instead"
            )


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    pad_inner_dim: bool,
    emulate: bool,
) -> torch.Tensor:
    (rows, inner), columns = a.shape, b.shape[1]
    if not (rows and inner and columns):
        return torch.zeros(rows, columns, dtype=out_dtype, device=a.device)
    aligned = not (inner % ALIGNMENT or columns % ALIGNMENT)
    if not aligned and needs_alignment(a.device, emulate):
        a, b = _aligned(a, b, pad_inner_dim)
        if scale_b.ndim and b.shape[1] > columns:
            scale_b = torch.nn.functional.pad(scale_b, (0, b.shape[1] - columns))
    if not emulate and device_has_float8_gemm(a.device):
        out = _native(a, b, scale_a, scale_b, out_dtype, use_fast_accum)
    elif torch.is_autocast_enabled("cpu" if a.is_cpu else a.device.type):
        # It would narrow the wide type.
        with torch.autocast(a.device.type, enabled=False):
            out = _emulated(a, b, scale_a, scale_b, out_dtype)
    else:
        out = _emulated(a, b, scale_a, scale_b, out_dtype)
    return out if aligned or out.shape[1] == columns else out[:, :columns].contiguous()


def _native(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    if a.dtype == b.dtype == e5m2():
        raise ValueError(
            f"float8 GEMM of {tuple(a.shape)} by {tuple(b.shape)}, both {a.dtype}: this device "
            f"multiplies none but {e4m3()} by any; set another target_dtype, or emulate=True"
        )
    # cuBLASLt multiplies a row-major by a column-major matrix.
    a = a.contiguous()
    b = b.t().contiguous().t()
    if scale_a.ndim == scale_b.ndim == 0:
        return native_scaled_mm(
            a, b, scale_a, scale_b, out_dtype=out_dtype, use_fast_accum=use_fast_accum
        )
    if out_dtype is torch.bfloat16:
        # The rowwise kernel takes a scale for each row and column.
        return native_scaled_mm(
            a,
            b,
            scale_a.expand(a.shape[0], 1).contiguous(),
            scale_b.expand(1, b.shape[1]).contiguous(),
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )
    # It writes bf16 alone; the tensorwise one writes fp32, which is scaled afterwards.
    one = torch.ones((), device=a.device)
    product = native_scaled_mm(
        a, b, one, one, out_dtype=torch.float32, use_fast_accum=use_fast_accum
    )
    return product.mul_(scale_a).mul_(scale_b).to(out_dtype)


def _emulated(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    on_cpu = a.is_cpu
    to_bf16 = on_cpu and out_dtype is torch.bfloat16
    if scale_a.ndim or scale_b.ndim:
        if to_bf16 and _are_powers_of_2(scale_a) and _are_powers_of_2(scale_b):
            # Rounded by the GEMM; scaling by powers of two rounds no more.
            product = torch.mm(upcast(a, torch.bfloat16), upcast(b, torch.bfloat16)).to(
                torch.float32
            )
            return product.mul_(scale_a).mul_(scale_b).to(torch.bfloat16)
        wide = torch.float64 if on_cpu else torch.float32
        product = torch.mm(upcast(a, wide), upcast(b, wide))
        return product.mul_(scale_a.to(wide)).mul_(scale_b.to(wide)).to(out_dtype)
    alpha = scale_a.item() * scale_b.item() if on_cpu else 1.0
    # The scale of an enormous product may exceed fp32, in which addmm keeps its alpha.
    if to_bf16 and not _LARGEST < alpha < math.inf:
        # The bias term of addmm is ignored at beta=0; alpha scales the fp32 accumulator.
        return torch.addmm(
            _UNUSED, upcast(a, torch.bfloat16), upcast(b, torch.bfloat16), beta=0, alpha=alpha
        )
    wide = torch.float64 if on_cpu else torch.float32
    product = torch.mm(upcast(a, wide), upcast(b, wide))
    return product.mul_(scale_a.to(wide) * scale_b.to(wide)).to(out_dtype)


_LARGEST = torch.finfo(torch.float32).max
_UNUSED = torch.zeros((), dtype=torch.bfloat16, device="cpu")


def _are_powers_of_2(scale: torch.Tensor) -> bool:
    """True if all finite values of a scale are powers of two."""
    bits = torch.nan_to_num(scale, 1.0, 1.0).view(torch.int32)
    return not bits.bitwise_and(0x7FFFFF).any()  # of the mantissa (subnormal ones count as others)


def _aligned(
    a: torch.Tensor, b: torch.Tensor, pad_inner_dim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    inner, columns = b.shape
    pad_inner, pad_columns = -inner % ALIGNMENT, -columns % ALIGNMENT
    if not pad_inner_dim:
        raise ValueError(
            f"float8 GEMM of {tuple(a.shape)} by {tuple(b.shape)} (local shapes): the inner dim "
            f"{inner} and the last dim {columns} must be multiples of {ALIGNMENT} on this "
            "device; set Float8LinearConfig.pad_inner_dim=True or leave the layer unconverted"
        )
    return _zero_pad(a, 0, pad_inner), _zero_pad(b, pad_inner, pad_columns)


def _zero_pad(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    stored = x.view(torch.uint8) if is_float8(x.dtype) else x
    return torch.nn.functional.pad(stored, (0, columns, 0, rows)).view(x.dtype)


_LIB.impl("scaled_mm", _scaled_mm, "CompositeExplicitAutograd")
SCALED_MM_OP = torch.ops.fp8_dist.scaled_mm.default


@torch.library.register_fake("fp8_dist::scaled_mm", lib=_LIB)
def _scaled_mm_fake(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    pad_inner_dim: bool,
    emulate: bool,
) -> torch.Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
