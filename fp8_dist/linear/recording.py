"""Recording of the operands that the GEMMs of ``Float8Linear`` layers multiply."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fp8_dist.config import Gemm
from fp8_dist.scaling import GemmOptions, Quantized, matrices
from fp8_dist.tensor.float8_tensor import Float8Tensor


class GemmRecord(NamedTuple):
    """One float8 GEMM of a layer: ``a @ b``.

    Attributes:
        fqn: the layer's name; empty in a compiled graph.
        gemm: one of the layer's three GEMMs.
        a: a copy of the left operand, ``[M, K]``, local.
        b: a copy of the right operand, ``[K, N]``, local.
        options: the (use_fast_accum, pad_inner_dim, emulate) of the GEMM.
    """

    fqn: str
    gemm: Gemm
    a: Float8Tensor
    b: Float8Tensor
    options: GemmOptions


# The lists of active recordings. A recording removes its list when it ends.
_recordings: list[list[GemmRecord]] = []


@contextmanager
def record_gemms() -> Iterator[list[GemmRecord]]:
    """Record the operands of every float8 GEMM that a layer runs inside the block.

    Yields:
        A list that grows by one :class:`GemmRecord` per GEMM, in the order in which they run. GEMMs
        of compiled graphs and those left in high precision are not recorded.

    Collectives: none.
    """
    records: list[GemmRecord] = []
    _recordings.append(records)
    try:
        yield records
    finally:
        # By identity: two recordings of the same GEMMs are equal.
        _recordings[:] = [kept for kept in _recordings if kept is not records]


def note_gemm(
    fqn: str,
    gemm: Gemm,
    left: Quantized,
    right: Quantized,
    turn: tuple[bool, bool],
    out_dtype: torch.dtype,
    options: GemmOptions,
) -> None:
    """Add a GEMM to the active recordings; arguments as of :func:`fp8_dist.scaling.multiply`."""
    if not _recordings:
        return
    a, b = (Float8Tensor.of(each, out_dtype).clone() for each in matrices(left, right, turn))
    for records in _recordings:
        records.append(GemmRecord(fqn, gemm, a, b, options))  # type: ignore[arg-type]
