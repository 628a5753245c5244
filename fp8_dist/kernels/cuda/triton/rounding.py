"""Arithmetic of kernels: amaxes as bits, the formula of scales, and conversions of float8.

A format is identified by the bias of its exponent: 7 is e4m3fn, 8 e4m3fnuz, 15 e5m2, 16 e5m2fnuz.
"""

import triton
import triton.language as tl

# Note [Four bytes at a time]
# Before release 13, ptxas has a bug (Triton uses 12.8 for Hopper; 12.9 in Triton 3.8; 13.4 from 3.9
# on). If a kernel stores two converted bytes together and also separately, as for a tile and its
# transpose, ptxas confuses their registers: an H100 wrote bytes of other registers, and for fp32
# tensors ptxas crashed (triton-lang/triton issue 11111). So four bytes are converted into one
# register, and other instructions read only that: tests/unit/kernels/test_triton_compiles.py fails
# if they read a part. Inductor's kernels have no such guard, so graphs leave these casts to
# operators (stores_transposed in fp8_dist/device.py).
_FOUR_OF_E4M3 = tl.constexpr(
    "{ .reg .b16 low, high;"
    " cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
    " mov.b32 $0, {low, high}; }"
)
_FOUR_OF_E5M2 = tl.constexpr(_FOUR_OF_E4M3.value.replace("e4m3", "e5m2"))


@triton.jit
def as_fp32(x: tl.tensor) -> tl.tensor:
    """Convert ``x`` to fp32; bf16 by its bits, since the interpreter's cast changes subnormals."""
    if x.dtype == tl.bfloat16:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def magnitude(x: tl.tensor) -> tl.tensor:
    """Return the bits of ``|x|`` in fp32.

    As integers they are ordered like the values, with NaN above all others.
    """
    return as_fp32(x).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def multiplier_of(amax: tl.tensor, POWER_OF_2: tl.constexpr, BIAS: tl.constexpr) -> tl.tensor:
    """Compute the multiplier by the formula of fp8_dist.kernels.scale, fp32.

    The formula rounds an fp64 quotient to fp32. This equals the fp32 quotient: the exact quotient
    of two 24-bit numbers is at least 2^-49 of itself away from any midpoint between 24-bit numbers,
    farther than from the fp64 quotient.
    """
    FP8_MAX: tl.constexpr = 448.0 if BIAS == 7 else (240.0 if BIAS == 8 else 57344.0)
    # The fp32 number nearest to 1e-12 is below 1e-12, so it is clamped too.
    m = tl.where(amax <= 1e-12, FP8_MAX * 1e12, tl.math.div_rn(FP8_MAX, amax))
    if POWER_OF_2:
        m = _power_of_2(m)
    return m


@triton.jit
def reciprocal(m: tl.tensor) -> tl.tensor:
    """Compute ``1 / m``, rounded to nearest; on a GPU the operator ``/`` is less exact."""
    return tl.math.div_rn(1.0, m)


@triton.jit
def exponents_above(amax: tl.tensor, BIAS: tl.constexpr) -> tl.tensor:
    """Compute ``ceil(log2(amax / fp8_max)) + 127`` in integer arithmetic: int32, at least 0.

    The result is the same as with an fp32 log2.
    """
    FP8_MAX: tl.constexpr = 448.0 if BIAS == 7 else (240.0 if BIAS == 8 else 57344.0)
    bits = tl.math.div_rn(amax, FP8_MAX).to(tl.int32, bitcast=True)
    # The steps of fp32 above 2^k are twice as long as those below. 2^-127 (0x400000) is subnormal.
    normal = (bits & 0x7FFFFF) > (_steps_to_power_of_2(bits) >> 1)
    return (bits >> 23) + tl.where(bits < 0x800000, bits > 0x400000 + 11, normal).to(tl.int32)


@triton.jit
def _steps_to_power_of_2(bits: tl.tensor) -> tl.tensor:
    """Return how many fp32 steps below 2^k a number may be for its fp32 log2 to be rounded to k.

    The number is given by its bits. The result grows with ``|log2|``: it is 44 if the integral part
    is in [64, 128), half as much in [32, 64), and so on.
    """
    exponent = (bits >> 23) - 127
    integral = exponent ^ (exponent >> 31)  # of |log2|
    steps = tl.where(integral >= 8, 5, tl.where(integral >= 4, 2, tl.where(integral >= 2, 1, 0)))
    steps = tl.where(integral >= 16, 11, steps)
    steps = tl.where(integral >= 32, 22, steps)
    return tl.where(integral >= 64, 44, steps)


@triton.jit
def _power_of_2(m: tl.tensor) -> tl.tensor:
    """Compute ``exp2(floor(log2(m)))``, with the bits of fp32, in integer arithmetic.

    m is positive and normal, or 0, inf or NaN.
    """
    bits = m.to(tl.int32, bitcast=True)
    up = (bits & 0x7FFFFF) + _steps_to_power_of_2(bits) >= 0x800000
    power = (bits & 0x7F800000) + tl.where(up, 0x800000, 0)
    normal = (bits >= 0x800000) & (bits < 0x7F800000)
    return tl.where(normal, power.to(tl.float32, bitcast=True), m)


@triton.jit
def saturated(v: tl.tensor, BIAS: tl.constexpr) -> tl.tensor:
    """Clamp ``v`` to the finite values of the format; a NaN stays NaN."""
    FP8_MAX: tl.constexpr = 448.0 if BIAS == 7 else (240.0 if BIAS == 8 else 57344.0)
    v = tl.where(v > FP8_MAX, FP8_MAX, v)
    return tl.where(v < -FP8_MAX, -FP8_MAX, v)


@triton.jit
def to_float8(v: tl.tensor, BIAS: tl.constexpr, SOFT: tl.constexpr) -> tl.tensor:
    """Round fp32 to nearest, ties to even, and return the bytes of the format.

    Call :func:`saturated` first if values may be too large for the format. Such values become NaN
    or inf with SOFT, and the largest finite value otherwise.

    Args:
        SOFT: round in integer arithmetic, with the same bits as torch, instead of by Hopper's
            instruction, which may clear the sign of a NaN.
    """
    if SOFT:
        code = _to_float8_soft(v, BIAS)
    else:
        four: tl.constexpr = _FOUR_OF_E4M3 if BIAS == 7 else _FOUR_OF_E5M2
        code = tl.inline_asm_elementwise(four, "=r,r,r,r,r", [v], tl.uint8, True, 4)
    return code


@triton.jit
def _to_float8_soft(v: tl.tensor, BIAS: tl.constexpr) -> tl.tensor:
    SHIFT: tl.constexpr = 20 if BIAS < 10 else 21  # bits of an fp32 mantissa that are dropped
    # Adding the number with these bits rounds off the bits below the format's smallest subnormal.
    MAGIC: tl.constexpr = (128 - BIAS + SHIFT) << 23
    FNUZ: tl.constexpr = BIAS == 8 or BIAS == 16  # one NaN, 0x80, and no negative zero
    bits = v.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    a = bits & 0x7FFFFFFF
    magic = tl.full([], MAGIC, tl.int32)
    shifted = a.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    subnormal = shifted.to(tl.int32, bitcast=True) - magic
    odd = (a >> SHIFT) & 1
    normal = (a + ((BIAS - 127) * 0x800000 + (1 << (SHIFT - 1)) - 1) + odd) >> SHIFT
    code = tl.where(a < (128 - BIAS) * 0x800000, subnormal, normal)
    if FNUZ:
        code = tl.where(code == 0, 0, code | sign)
        code = tl.where((normal > 0x7F) | (a > 0x7F800000), 0x80, code)
    else:
        code = tl.minimum(code, 0x7F if BIAS == 7 else 0x7C)  # NaN or inf
        code = tl.where(a > 0x7F800000, 0x7F, code) | sign
    return code.to(tl.uint8)


@triton.jit
def from_float8(code: tl.tensor, BIAS: tl.constexpr, SOFT: tl.constexpr) -> tl.tensor:
    """Convert bytes of the format to fp32."""
    if SOFT:
        v = _from_float8_soft(code, BIAS)
    elif BIAS == 7:
        v = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        v = code.to(tl.float8e5, bitcast=True).to(tl.float32)
    return v


@triton.jit
def _from_float8_soft(code: tl.tensor, BIAS: tl.constexpr) -> tl.tensor:
    SHIFT: tl.constexpr = 20 if BIAS < 10 else 21
    MANTISSA: tl.constexpr = 23 - SHIFT
    STEP: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)  # the smallest subnormal
    a = code.to(tl.int32) & 0x7F
    sign = (code.to(tl.int32) & 0x80) << 24
    normal = (a << SHIFT) + (127 - BIAS) * 0x800000
    bits = tl.where(a < (1 << MANTISSA), (a * STEP).to(tl.int32, bitcast=True), normal) | sign
    if BIAS == 7:
        bits = tl.where(a == 0x7F, 0x7FC00000 | sign, bits)
    elif BIAS == 15:
        bits = tl.where(a >= 0x7C, 0x7F800000 | ((a & 3) << 21) | sign, bits)
    else:
        bits = tl.where(code == 0x80, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)
