"""Tensors as they travel where ranks sum them: float8 with exponents of blocks, or bf16.

Blocks are 128 values along the last dim; the last block of a row may be shorter. A block's exponent
is a byte, ``scale = 2 ** (byte - 127)``: the smallest power of two by which none of its finite
values exceeds 448, the largest of e4m3fn, but 2 ** -126 at least. So no finite value saturates.
(From 248 * 2 ** 120 = 3.2965e38 on, values round to 2 ** 128, which is infinite in fp32. Rounding
to bf16 has the same limit at 3.396e38.)

e4m3fn has no infinities. In these *codes* its two NaNs, 0x7F and 0xFF, are inf and -inf, and its
negative zero, 0x80, is NaN. A value that is not finite changes no other value of its block.

Rounding is to nearest even; or stochastic, by a hash of the value's bits, its place and a seed,
which is not negative. So there is no generator whose state has to be kept: the same values round
alike when a step is repeated.
"""

from collections.abc import Sequence

import torch

from fp8_dist.kernels.custom_op import custom_op

BLOCK = 128
NEAREST = -1  # in the place of a seed
_DECODED_AT_ONCE = 16  # summands: fewer kernels than one at a time, less memory than all

_FLOAT8 = torch.float8_e4m3fn
_INF_BITS = 0x7F800000
_INF, _MINUS_INF, _NAN = 0x7F, 0xFF, 0x80  # codes


def blocks_of(size: int) -> int:
    """The number of blocks of a row."""
    return -(-size // BLOCK)


@custom_op("encode_float8(Tensor x, int seed) -> (Tensor, Tensor)")
def encode_float8(x: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and exponents of blocks.

    Args:
        x: ``[..., n]``, floating point.
        seed: of stochastic rounding, or ``NEAREST``.

    Returns:
        uint8, ``[..., n]`` and ``[..., ceil(n / 128)]``.
    """
    size, count = x.shape[-1], blocks_of(x.shape[-1])
    values = x.to(torch.float32)
    padded = values
    if count * BLOCK != size:
        padded = torch.nn.functional.pad(values, (0, count * BLOCK - size))
    bits = padded.contiguous().view(torch.int32).bitwise_and(torch.iinfo(torch.int32).max)
    bits.masked_fill_(bits >= _INF_BITS, 0)
    largest = bits.view(*x.shape[:-1], count, BLOCK).amax(-1)
    # 448 is 1.75 * 2 ** 8: a larger mantissa carries into the exponent.
    exponents = ((largest + 0x1FFFFF) >> 23).sub_(8).clamp_(min=1)
    multipliers = ((254 - exponents) << 23).view(torch.float32)
    scaled = padded.view(*x.shape[:-1], count, BLOCK) * multipliers.unsqueeze(-1)
    scaled = scaled.view(padded.shape).narrow(-1, 0, size)
    if seed >= 0:
        scaled = _stochastic_float8(values, scaled, seed)
    codes = scaled.to(_FLOAT8).view(torch.uint8)
    codes = codes.masked_fill(codes == _NAN, 0).masked_fill_(values.isnan(), _NAN)
    inf = float("inf")
    codes.masked_fill_(values == inf, _INF).masked_fill_(values == -inf, _MINUS_INF)
    return codes, exponents.to(torch.uint8)


@custom_op("decode_float8(Tensor codes, Tensor exponents) -> Tensor")
def decode_float8(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The values of codes: fp32, ``[..., n]``. Exact."""
    values = codes.view(_FLOAT8).to(torch.float32)
    inf = float("inf")
    values = values.masked_fill_(codes == _INF, inf).masked_fill_(codes == _MINUS_INF, -inf)
    values.masked_fill_(codes == _NAN, float("nan"))
    scales = (exponents.to(torch.int32) << 23).view(torch.float32)
    size = codes.shape[-1]
    if size % BLOCK == 0:
        blocks = values.view(*exponents.shape, BLOCK).mul_(scales.unsqueeze(-1))
        return blocks.view(codes.shape)
    return values.mul_(scales.repeat_interleave(BLOCK, -1).narrow(-1, 0, size))


@custom_op("sum_of_float8(Tensor codes, Tensor exponents, Tensor own, int rank) -> Tensor")
def sum_of_float8(
    codes: torch.Tensor, exponents: torch.Tensor, own: torch.Tensor, rank: int
) -> torch.Tensor:
    """The sum over the first dim, in its order.

    Args:
        codes, exponents: ``[W, ..., n]`` and ``[W, ..., ceil(n / 128)]``.
        own: ``[..., n]``: what is added in the place of ``codes[rank]``.

    Returns:
        fp32, ``[..., n]``.
    """
    total = codes.new_zeros(codes.shape[1:], dtype=torch.float32)
    for first in range(0, len(codes), _DECODED_AT_ONCE):
        last = first + _DECODED_AT_ONCE
        values = decode_float8.portable(codes[first:last], exponents[first:last])
        for i, summand in enumerate(values, first):
            total.add_(own if i == rank else summand)
    return total


@custom_op("sum_of_rows(Tensor rows, Tensor own, int rank) -> Tensor")
def sum_of_rows(rows: torch.Tensor, own: torch.Tensor, rank: int) -> torch.Tensor:
    """:func:`sum_of_float8` of numbers that are not encoded: ``rows`` is ``[W, ..., n]``."""
    total = rows.new_zeros(rows.shape[1:], dtype=torch.float32)
    for i, row in enumerate(rows):
        total.add_(own if i == rank else row)
    return total


@custom_op("join_bytes(Tensor first, Tensor[] others) -> Tensor")
def join_bytes(first: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """uint8 tensors side by side, along the last dim. (``comm_audit`` sees it in graphs too.)"""
    return torch.cat([first, *others], -1)


@custom_op("stochastic_bfloat16(Tensor x, int seed) -> Tensor")
def stochastic_bfloat16(x: torch.Tensor, seed: int) -> torch.Tensor:
    """``x`` in bf16, rounded stochastically: shape of x."""
    values = x.to(torch.float32)
    bits = values.contiguous().view(torch.int32)
    rounded = ((bits + (_hash(bits, seed) & 0xFFFF)) & ~0xFFFF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _stochastic_float8(values: torch.Tensor, scaled: torch.Tensor, seed: int) -> torch.Tensor:
    """``scaled`` to one of the two values of e4m3fn beside it, fp32."""
    # 20 bits: added to what is below 16, they are exact, so that a code's own value is not changed.
    bits = _hash(values.contiguous().view(torch.int32), seed) & 0xFFFFF
    uniform = bits.to(torch.float32).mul_(2.0**-20)
    # Neighbors are 2 ** (exponent - 3) apart, 2 ** -9 among subnormals.
    bits = scaled.contiguous().view(torch.int32)
    step = (((bits >> 23 & 0xFF) - 3).clamp_(127 - 9, 254) << 23).view(torch.float32)
    return (scaled / step).add_(uniform).floor_().mul_(step)


def _hash(bits: torch.Tensor, seed: int) -> torch.Tensor:
    """int32 numbers that look random (the finalizer of MurmurHash3), by bits, place and seed."""
    place = torch.arange(bits.numel(), dtype=torch.int32, device=bits.device).view(bits.shape)
    # (Products wrap around. Its shifts are logical: the bits that an arithmetic one puts on top are
    # masked.)
    h = bits ^ place.mul_(-1640531535).add_(seed)
    h = (h ^ (h >> 16 & 0xFFFF)).mul_(-2048144789)
    h = (h ^ (h >> 13 & 0x7FFFF)).mul_(-1028477387)
    return h ^ (h >> 16 & 0xFFFF)


@encode_float8.register_fake
def _encode_float8_fake(x: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return codes, codes.new_empty(*x.shape[:-1], blocks_of(x.shape[-1]))


@decode_float8.register_fake
def _decode_float8_fake(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)


@sum_of_float8.register_fake
def _sum_of_float8_fake(
    codes: torch.Tensor, exponents: torch.Tensor, own: torch.Tensor, rank: int
) -> torch.Tensor:
    return torch.empty(codes.shape[1:], dtype=torch.float32, device=codes.device)


@sum_of_rows.register_fake
def _sum_of_rows_fake(rows: torch.Tensor, own: torch.Tensor, rank: int) -> torch.Tensor:
    return torch.empty(rows.shape[1:], dtype=torch.float32, device=rows.device)


@join_bytes.register_fake
def _join_bytes_fake(first: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    size = sum(piece.shape[-1] for piece in (first, *others))
    return first.new_empty(*first.shape[:-1], size)


@stochastic_bfloat16.register_fake
def _stochastic_bfloat16_fake(x: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
