"""Values of E2M1: their rounding and packing, for casts, and a kernel that unpacks them."""

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.cuda.triton import launch, tiles
from fp8_dist.kernels.e2m1 import unpack_e2m1


@triton.jit
def rounded_to_e2m1(v: tl.tensor) -> tl.tensor:
    """Round fp32 to nearest, ties to even. NaN becomes 0."""
    v = tl.where(v == v, v, 0.0)
    bits = v.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x40C00000)  # at most 6
    # Adding 2 ** (22 + k) rounds a value in [2 ** k, 2 ** (k + 1)) to a multiple of 2 ** (k - 1).
    # Values below 1 are rounded as if k were 0.
    magic = (tl.maximum(size & 0x7F800000, 0x3F800000) + (22 << 23)).to(tl.float32, bitcast=True)
    nearest = (size.to(tl.float32, bitcast=True) + magic) - magic
    bits = nearest.to(tl.int32, bitcast=True) | (bits & -(2**31))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def pack(byte: tl.tensor) -> tl.tensor:
    """Pack the e4m3 bytes of a tile ``[M, N]`` in pairs: uint8 ``[M, N / 2]``."""
    size = (byte & 0x7F).to(tl.int32)
    code = tl.maximum(size >> 5, (size >> 2) - 12) | (byte >> 7 << 3)
    pairs = tl.reshape(code, [byte.shape[0], byte.shape[1] // 2, 2])
    return tl.sum(pairs << (tl.arange(0, 2) * 4)[None, None, :], 2).to(tl.uint8)


@triton.jit
def _byte_of(code: tl.tensor) -> tl.tensor:
    """Convert codes of four bits to e4m3 bytes, int32."""
    index = code & 7
    return tl.minimum(index * 0x30, (index + 12) << 2) | ((code & 8) << 4)


@launch.kernel(BLOCK=4096)
@triton.jit
def _unpack_e2m1(packed: tl.tensor, pairs: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    # One instance: BLOCK pairs of values. It writes each pair as one int16, so that neighboring
    # threads write adjacent bytes. Moves 3 bytes per pair.
    i = tiles.indices(tl.program_id(0), BLOCK)
    codes = tl.load(packed + i, mask=i < size, other=0).to(tl.int32)
    pair = _byte_of(codes & 0xF) | (_byte_of(codes >> 4) << 8)
    tl.store(pairs + i, pair.to(tl.int16), mask=i < size)


@launch.fused(unpack_e2m1, lambda packed, out: not out.storage_offset() % 2)
def _unpack(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Unpack in one launch; 1.5 bytes per value."""
    pairs = out.view(torch.uint8).view(-1).view(torch.int16)
    if size := pairs.numel():
        data = packed.view(torch.uint8).view(-1)
        _unpack_e2m1((launch.programs(size, _unpack_e2m1.blocks["BLOCK"]),), data, pairs, size)
