"""Encoding of rows of numbers as rows of bytes: float8, bf16 or the numbers' own dtype."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from fp8_dist.kernels.encoding import (
    BLOCK,
    NEAREST,
    blocks_of,
    decode_float8,
    encode_float8,
    join_bytes,
    stochastic_bfloat16,
    sum_of_float8,
    sum_of_rows,
)

# Encoding of numbers on the wire; None for their own dtype.
Encoding = Literal["float8", "bf16"] | None

_LARGEST_SEED = 0x7FFFFFFF


class Part(NamedTuple):
    """A piece of a parameter, as part of a row."""

    number: int  # of the parameter
    size: int
    encoding: Encoding


class Run(NamedTuple):
    """Adjacent numbers of a row that are encoded together."""

    number: int  # of the first parameter
    start: int
    size: int
    encoding: Encoding

    def bytes(self, dtype: torch.dtype) -> int:
        """Number of bytes on the wire, for a row of ``dtype``."""
        if self.encoding == "float8":
            return self.size + blocks_of(self.size)
        return self.size * (2 if self.encoding == "bf16" else dtype.itemsize)


def runs_of(parts: Iterable[Part], seed: int = NEAREST) -> tuple[Run, ...]:
    """Divide a row of parts into as few runs as possible, with no block across two parts.

    Args:
        seed: the seed of :func:`encode`. With stochastic rounding each encoded part is a run of its
            own, so that its rounding does not depend on other parts. Tensor-parallel ranks may have
            different sizes of a sharded parameter, but must round a replicated one alike.
    """
    runs: list[Run] = []
    start = 0
    for number, size, encoding in parts:
        last = runs[-1] if runs else None
        if not size:
            continue
        may_join = encoding is None or (
            seed < 0 and not (encoding == "float8" and last and last.size % BLOCK)
        )
        if last and last.encoding == encoding and may_join:
            runs[-1] = last._replace(size=last.size + size)
        else:
            runs.append(Run(number, start, size, encoding))
        start += size
    return tuple(runs)


def seed_of(seed: int, *numbers: int) -> int:
    """Derive a seed from the given numbers. ``NEAREST`` is returned unchanged."""
    if seed < 0:
        return seed
    for number in numbers:
        seed = (seed * 2654435761 + number * 65599 + 1) & _LARGEST_SEED
    return seed


def encode(
    x: torch.Tensor, runs: Sequence[Run], dtype: torch.dtype, seed: int = NEAREST
) -> torch.Tensor:
    """Encode rows ``[..., S]`` of any floating dtype as bytes ``[..., B]``, exponents included.

    Args:
        dtype: the dtype in which numbers without an encoding are sent.
        seed: the seed of stochastic rounding (see :mod:`fp8_dist.kernels.encoding`).
    """
    pieces: list[torch.Tensor] = []
    for number, start, size, encoding in runs:
        part = x.narrow(-1, start, size)
        own_seed = seed_of(seed, number)
        if encoding == "float8":
            pieces += encode_float8(part, own_seed)
            continue
        if encoding == "bf16":
            part = part.to(torch.bfloat16) if seed < 0 else stochastic_bfloat16(part, own_seed)
        else:
            part = part.to(dtype)
        pieces.append(part.contiguous().view(torch.uint8))
    return join_bytes(pieces[0], pieces[1:]) if len(pieces) > 1 else pieces[0]


def decode(wire: torch.Tensor, runs: Sequence[Run], dtype: torch.dtype) -> torch.Tensor:
    """Decode the bytes of :func:`encode` to fp32."""
    found = [
        decode_float8(numbers, exponents) if encoding == "float8" else numbers.to(torch.float32)
        for encoding, numbers, exponents in _parts(wire, runs, dtype)
    ]
    return torch.cat(found, -1) if len(found) > 1 else found[0]


def sum_of(
    wire: torch.Tensor, runs: Sequence[Run], dtype: torch.dtype, own: torch.Tensor, rank: int
) -> torch.Tensor:
    """Sum the rows of bytes ``[W, ..., B]`` from W ranks, in fp32 and in the order of ranks.

    Args:
        dtype: as in :func:`encode`.
        own: ``[..., S]``, the summand of this rank, which is added instead of its encoded bytes.
        rank: index of this rank along the first dim.
    """
    sums = []
    for run, part in zip(runs, _parts(wire, runs, dtype), strict=True):
        mine = own.narrow(-1, run.start, run.size)
        encoding, numbers, exponents = part
        if encoding == "float8":
            sums.append(sum_of_float8(numbers, exponents, mine, rank))
        else:
            sums.append(sum_of_rows(numbers, mine, rank))
    return torch.cat(sums, -1) if len(sums) > 1 else sums[0]


def _parts(
    wire: torch.Tensor, runs: Sequence[Run], dtype: torch.dtype
) -> Iterable[tuple[Encoding, torch.Tensor, torch.Tensor]]:
    """Yield each run's encoding with its codes and exponents, or its numbers and nothing."""
    start = 0
    for run in runs:
        length = run.bytes(dtype)
        part = wire.narrow(-1, start, length)
        start += length
        if run.encoding == "float8":
            yield run.encoding, part[..., : run.size], part[..., run.size :]
        else:
            number = torch.bfloat16 if run.encoding == "bf16" else dtype
            if len(runs) > 1:  # a view might not be aligned for the dtype
                part = part.clone(memory_format=torch.contiguous_format)
            yield run.encoding, part.view(number), part[..., :0]
