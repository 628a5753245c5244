"""GEMMs of devices: one table of the kernels that releases of torch have.

torch itself lets a call through to some devices for which it has no kernel, and the call then
crashes. So the library calls a GEMM only where this table has it. Elsewhere it takes the nearest
one, and says what is lost. The devices of CUTLASS's kernels were read from the wheels of torch
2.11.0, 2.12.1 and 2.14.1 for CUDA 13.0, with cuobjdump.
"""

from fnmatch import fnmatchcase
from functools import cache
from typing import Literal, NamedTuple

import torch

from fp8_dist.device import architecture
from fp8_dist.torch_internals import constant_in_graphs

GemmKind = Literal["scaled", "by rows", "blocks of 128", "blocks of 32", "groups", "groups in bf16"]


class GemmRow(NamedTuple):
    """Devices for which torch has a GEMM.

    Attributes:
        gemm: the GEMM.
        architectures: patterns of compute capabilities (NVIDIA) and of names (AMD).
        torch: the first release that has it; ``None`` if none of those that were looked at.
        cuda: the first release of CUDA that has it, if torch is built for older ones, too.
        source: where this is known from.
        without: a release of CUDA whose GEMM fails.
    """

    gemm: GemmKind
    architectures: str
    torch: str | None
    cuda: str
    source: str
    without: str = ""


GEMMS: dict[GemmKind, str] = {
    "scaled": "float8 with one scale per tensor (torch._scaled_mm)",
    "by rows": "float8 with scales of rows and columns (torch._scaled_mm)",
    "blocks of 128": "float8 with scales of 1 x 128 and 128 x 128 (scaled_mm)",
    "blocks of 32": "float8 with scales of 1 x 32, MX (scaled_mm)",
    "groups": "experts in float8, with scales of rows (torch._scaled_grouped_mm)",
    "groups in bf16": "experts in bf16 (grouped_mm)",
}
TABLE = (
    GemmRow("scaled", "8.9 9.* 10.* 11.* 12.*", "2.11", "", "cuBLASLt; ATen's ScaledBlas.cpp"),
    GemmRow("scaled", "gfx94* gfx95* gfx12*", "2.11", "", "hipBLASLt; ATen's ScaledBlas.cpp"),
    # That of torch 2.11 zeroes its workspace on another stream than the caller's.
    GemmRow("by rows", "8.9", "2.12", "", "CUTLASS; pytorch#177651"),
    # From CUDA 12.9 on cuBLASLt; that of 12.9 itself refuses some shapes.
    GemmRow("by rows", "9.*", "2.11", "", "ATen's ScaledBlas.cpp; pytorch/ao#4582", without="12.9"),
    GemmRow("by rows", "10.0 12.0", "2.11", "", "CUTLASS; ATen's RowwiseScaledMM.cu"),
    GemmRow("by rows", "10.3 12.1", "2.11", "12.9", "CUTLASS; torch's Codegen.cmake"),
    GemmRow("by rows", "gfx94* gfx95* gfx12*", "2.11", "", "hipBLASLt; ATen's ScaledBlas.cpp"),
    GemmRow("blocks of 128", "9.*", "2.11", "12.9", "cuBLASLt; ATen's ScaledBlas.cpp"),
    GemmRow("blocks of 32", "10.*", "2.11", "12.8", "cuBLASLt; ATen's ScaledBlas.cpp"),
    # Only row-major by column-major, as the library calls it.
    GemmRow("blocks of 32", "12.*", "2.14", "13.0", "cuBLASLt; pytorch#198126"),
    GemmRow("groups", "9.*", "2.11", "", "CUTLASS; ATen's ScaledGroupMM.cu"),
    # torch's check lets them through to the kernel of Hopper, which traps.
    GemmRow("groups", "10.*", None, "", "not up to torch 2.14.1; pytorch#187095, pytorch#188063"),
    GemmRow("groups", "gfx942 gfx950", "2.11", "", "FBGEMM; ATen's GroupedBlas.cpp"),
    GemmRow("groups in bf16", "9.* 10.0", "2.11", "", "CUTLASS; ATen's GroupMM.cu"),
    GemmRow("groups in bf16", "10.3", "2.11", "12.9", "CUTLASS; torch's Codegen.cmake"),
    GemmRow("groups in bf16", "gfx942 gfx950", "2.11", "", "CK; ATen's GroupedBlas.cpp"),
)

# The block of the GEMM with block scales, and the recipe whose operands it takes.
BLOCK_RECIPES = {128: "blockwise", 32: "mxfp8"}


@cache
def release(version: str | None) -> tuple[int, ...]:
    """The first two numbers of a version: (2, 11) for "2.11.0a0+nv26.1"; ``()`` for none."""
    numbers = (version or "").split(".")[:2]
    return tuple(int(number) for number in numbers if number)


def cuda_release() -> tuple[int, ...]:
    """The release of CUDA that torch is built for; ``()`` for other builds."""
    return release(torch.version.cuda)


@constant_in_graphs
def has_gemm(gemm: GemmKind, device: torch.device) -> bool:
    """Return whether this build of torch has a GEMM for a device. It has none for CPUs."""
    return _has_gemm(gemm, device)


@cache
def _has_gemm(gemm: GemmKind, device: torch.device) -> bool:
    return any(row.gemm == gemm and _serves(row, architecture(device)) for row in TABLE)


def _serves(row: GemmRow, architecture: str) -> bool:
    if row.torch is None or release(torch.__version__) < release(row.torch):
        return False
    cuda = cuda_release()
    if cuda < release(row.cuda) or (row.without and cuda == release(row.without)):
        return False
    return any(fnmatchcase(architecture, each) for each in row.architectures.split())


def block_of_gemm(device: torch.device) -> int | None:
    """Return the block size of a device's GEMM with block scales; ``None`` if it has none."""
    if has_gemm("blocks of 128", device):
        return 128
    return 32 if has_gemm("blocks of 32", device) else None
