"""Messages between ranks: summands in bf16, or float8 with block exponents; and packed rows.

In float8, a block is 128 values along the last dim; the last block of a row may be shorter. Its
exponent is a byte, ``scale = 2 ** (byte - 127)``. The scale is the smallest power of two, at least
2 ** -126, such that no finite value of the block exceeds 448 times the scale (448 is the largest
value of e4m3fn). So no finite value saturates. Magnitudes of at least 248 * 2 ** 120 = 3.2965e38
round to 2 ** 128, which is infinite in fp32. (With bf16, this begins at 3.396e38.)

e4m3fn has no infinities. In these *codes* its two NaNs, 0x7F and 0xFF, stand for inf and -inf, and
its negative zero, 0x80, stands for NaN. A non-finite value does not change the other values of its
block.

Rounding is to nearest even.
"""

from collections.abc import Sequence
from math import inf, nan

import torch

from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.quantization import padded

BLOCK = 128
_DECODED_AT_ONCE = 16  # summands: fewer kernels than one at a time, less memory than all at once

_FLOAT8 = torch.float8_e4m3fn
_INF_BITS = 0x7F800000
_INF, _MINUS_INF, _NAN = 0x7F, 0xFF, 0x80  # codes


def block_count(size: int) -> int:
    """Return the number of blocks in a row of ``size`` values."""
    return -(-size // BLOCK)


def empty_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the results of :func:`encode_float8`, uninitialized."""
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    return codes, codes.new_empty(*x.shape[:-1], block_count(x.shape[-1]))


@custom_op(fake=empty_codes)
def encode_float8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a tensor as codes and block exponents.

    Args:
        x: ``[..., n]``, floating point.

    Returns:
        The codes ``[..., n]`` and the exponents ``[..., ceil(n / 128)]``, both uint8.
    """
    size, count = x.shape[-1], block_count(x.shape[-1])
    values = x.to(torch.float32)
    whole = padded(values, (0, -size % BLOCK))
    bits = whole.contiguous().view(torch.int32).bitwise_and(torch.iinfo(torch.int32).max)
    bits.masked_fill_(bits >= _INF_BITS, 0)
    largest = bits.view(*x.shape[:-1], count, BLOCK).amax(-1)
    # 448 is 1.75 * 2 ** 8: a larger mantissa carries into the exponent. (The rule "ceil" in
    # kernels/blocks.py rounds a logarithm as torchao does; its exponent may be smaller by one.)
    exponents = ((largest + 0x1FFFFF) >> 23).sub_(8).clamp_(min=1)
    multipliers = ((254 - exponents) << 23).view(torch.float32)
    scaled = whole.view(*x.shape[:-1], count, BLOCK) * multipliers.unsqueeze(-1)
    scaled = scaled.view(whole.shape).narrow(-1, 0, size)
    codes = scaled.to(_FLOAT8).view(torch.uint8)
    codes = codes.masked_fill(codes == _NAN, 0).masked_fill_(values.isnan(), _NAN)
    codes.masked_fill_(values == inf, _INF).masked_fill_(values == -inf, _MINUS_INF)
    return codes, exponents.to(torch.uint8)


def decode_float8(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Decode codes to fp32, ``[..., n]``; exact, by torch's operators."""
    values = codes.view(_FLOAT8).to(torch.float32)
    values = values.masked_fill_(codes == _INF, inf).masked_fill_(codes == _MINUS_INF, -inf)
    values.masked_fill_(codes == _NAN, nan)
    scales = (exponents.to(torch.int32) << 23).view(torch.float32)
    size = codes.shape[-1]
    if size % BLOCK == 0:
        blocks = values.view(*exponents.shape, BLOCK).mul_(scales.unsqueeze(-1))
        return blocks.view(codes.shape)
    return values.mul_(scales.repeat_interleave(BLOCK, -1).narrow(-1, 0, size))


@custom_op(fake=lambda rows, *_: rows.new_empty(rows.shape[1:], dtype=torch.float32))
def sum_of_rows(
    rows: torch.Tensor, exponents: torch.Tensor | None, local: torch.Tensor | None, rank: int
) -> torch.Tensor:
    """Sum rows over the first dim in fp32, in order of its index.

    Args:
        rows: numbers ``[W, ..., n]``, or codes.
        exponents: ``[W, ..., ceil(n / 128)]``, the exponents of codes; None for numbers.
        local: ``[..., n]``, added in place of ``rows[rank]``, or before all rows; or None.
        rank: index of the summand that ``local`` replaces; -1 if it comes first.

    Returns:
        The sum, fp32 ``[..., n]``. It is -0 where all summands are -0.
    """
    total = rows.new_full(rows.shape[1:], -0.0, dtype=torch.float32)
    if local is not None and rank < 0:
        total.copy_(local)
    for first in range(0, len(rows), _DECODED_AT_ONCE):
        chunk = slice(first, first + _DECODED_AT_ONCE)
        values = rows[chunk]
        if exponents is not None:
            values = decode_float8(values, exponents[chunk])
        for i, summand in enumerate(values, first):
            total.add_(local if local is not None and i == rank else summand)
    return total


def as_bytes(qdata: torch.Tensor) -> torch.Tensor:
    """A uint8 view of float8 data."""
    return qdata.view(torch.uint8)


def _empty_message(qdata: torch.Tensor, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    size, columns = max(tensor.itemsize for tensor in numbers), qdata.shape[-1]
    columns += -columns % size + sum(tensor.itemsize * tensor.shape[-1] for tensor in numbers)
    return qdata.new_empty((*qdata.shape[:-1], columns + -columns % size))


@custom_op(fake=_empty_message)
def pack_rows(qdata: torch.Tensor, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack rows of float8 data ``[..., K]`` and of numbers, ``[..., C]`` each, into one message.

    The message is ``[..., K']`` in the dtype of the data. A row consists of the data and the bytes
    of its numbers, the widest dtype first. Both are padded with zeros to a multiple of the size of
    the widest dtype. This is an operator so that ``comm_audit`` can distinguish the parts of a
    message in a compiled graph.
    """
    size = max(tensor.itemsize for tensor in numbers)
    parts = [padded(as_bytes(qdata), (0, -qdata.shape[-1] % size))]
    for tensor in sorted(numbers, key=lambda tensor: -tensor.itemsize):
        # Flatten first: torch calls a column contiguous whatever the stride of its last dim, but
        # view(dtype) refuses strides other than 1.
        flat = tensor.reshape(-1).contiguous().view(torch.uint8)
        parts.append(flat.view(*tensor.shape[:-1], tensor.itemsize * tensor.shape[-1]))
    row = torch.cat(parts, dim=-1)
    return padded(row, (0, -row.shape[-1] % size)).view(qdata.dtype)


def unpack_rows(
    packed: torch.Tensor, qdata: torch.Tensor, numbers: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Unpack a message of :func:`pack_rows` into views of the data and the numbers.

    Args:
        packed: the message as uint8, which may still be in flight.
        qdata, numbers: what was packed, or tensors of the same dtypes and last sizes.
    """
    size, columns = max(tensor.itemsize for tensor in numbers), qdata.shape[-1]
    begin, unpacked = columns + -columns % size, [*numbers]
    for i, tensor in sorted(enumerate(numbers), key=lambda item: -item[1].itemsize):
        end = begin + tensor.shape[-1] * tensor.itemsize
        unpacked[i] = packed[..., begin:end].view(tensor.dtype)
        begin = end
    return packed[..., :columns].view(qdata.dtype), unpacked
