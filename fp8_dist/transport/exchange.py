"""Reduce-scatter of encoded pieces: an all-to-all, and an fp32 sum on the rank that owns it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from fp8_dist.kernels.encoding import NEAREST
from fp8_dist.torch_internals import funcol
from fp8_dist.transport.encoding import Part, Run, decode, encode, runs_of, seed_of, sum_of


class Stage(NamedTuple):
    """An exchange within groups of ranks."""

    group: str  # its name
    rank: int  # of this rank in its group
    size: int


class Errors(Protocol):
    """Error feedback: the encoding errors of a stage are added to what it encodes next."""

    def added(self, stage: int, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` ``[L, A, S]`` plus the kept errors, in fp32."""

    def keep(self, stage: int, errors: torch.Tensor) -> None:
        """Keep the errors of rows ``[L, A, S]``: fp32, finite, 0 in the rows of this rank."""


def stages_over(*groups: dist.ProcessGroup) -> tuple[Stage, ...]:
    """One stage for each group, in the given order."""
    return tuple(Stage(str(g.group_name), g.rank(), g.size()) for g in groups)


def start_all_to_all(rows: torch.Tensor, group: str) -> torch.Tensor:
    """Send ``rows[i]`` to rank i of a group; row i of the result comes from that rank.

    The result is in flight until ``funcol.wait_tensor``.
    """
    sizes = [1] * len(rows)
    return funcol.all_to_all_single(rows.contiguous(), sizes, sizes, group)


def all_to_all(rows: torch.Tensor, group: str) -> torch.Tensor:
    """Run :func:`start_all_to_all` and wait for its result."""
    return funcol.wait_tensor(start_all_to_all(rows, group))


def reduce_scatter(
    x: torch.Tensor,
    runs: Sequence[Run],
    stages: Sequence[Stage],
    *,
    seed: int = NEAREST,
    errors: Errors | None = None,
) -> torch.Tensor:
    """Sum the rows that all ranks have for this rank.

    With several stages, ranks first sum within the group of the first stage, and then exchange
    sums. Rank i of all ranks is rank ``i % size`` in its group of the first stage, and rank
    ``i // size`` in its group of the second.

    Args:
        x: ``[W, ..., S]``, floating point; row i is for rank i.
        runs: runs of each row.
        seed: seed of stochastic rounding, different on each of these ranks. Each stage changes it.
        errors: error feedback.

    Returns:
        The sum, fp32 ``[..., S]``. A rank's own summand is not rounded.

    Collectives: an all-to-all for each stage of more than one rank. The first is of W rows of
    bytes, later ones of W / (product of the sizes of the stages before).
    """
    if all(stage.size == 1 for stage in stages):
        return x[0].to(torch.float32, copy=True)
    for number, stage in enumerate(stages):
        if stage.size == 1:
            continue
        rows = x.view(len(x) // stage.size, stage.size, *x.shape[1:]).transpose(0, 1)
        x = _exchange(rows, runs, stage, number, seed_of(seed, number), errors)
    return x.view(x.shape[1:])


def all_reduce(
    x: torch.Tensor,
    parts: Sequence[Part],
    stage: Stage,
    *,
    divisor: float = 1,
    seed: int = NEAREST,
    errors: Errors | None = None,
) -> torch.Tensor:
    """Sum over a group and divide by ``divisor``: fp32 ``[S]``, the same bits on all ranks.

    Each rank sums a part of ``x``. Sums travel in the dtype of ``x``, but sums of float8 summands,
    whose error is larger than that of bf16, travel in bf16.

    Args:
        x: ``[S]``, floating point.
        parts: parts of ``x``.

    Collectives: an all-to-all of x as bytes, and an all-gather of the sums.
    """
    own_parts = split(parts, stage.size)
    pieces = [
        pad(piece, (0, stage.size * own.size - len(piece))).view(stage.size, own.size)
        for piece, own in zip(x.split([part.size for part in parts]), own_parts, strict=True)
    ]
    runs = runs_of(own_parts, seed)
    own = reduce_scatter(torch.cat(pieces, -1), runs, [stage], seed=seed, errors=errors)
    sums = runs_of(
        part._replace(encoding="bf16" if part.encoding == "float8" else None) for part in own_parts
    )
    wire = encode(own.div_(divisor).to(x.dtype), sums, x.dtype)
    gathered = funcol.wait_tensor(funcol.all_gather_into_tensor(wire, stage.size, stage.group))
    rows = decode(gathered.view(stage.size, -1), sums, x.dtype)
    columns = rows.split([part.size for part in own_parts], -1)
    return torch.cat([c.flatten()[: p.size] for c, p in zip(columns, parts, strict=True)])


def split(parts: Sequence[Part], ranks: int) -> list[Part]:
    """Piece of each part that one of the ranks of :func:`all_reduce` sums, with padding."""
    return [part._replace(size=-(-part.size // ranks)) for part in parts]


def _exchange(
    rows: torch.Tensor,
    runs: Sequence[Run],
    stage: Stage,
    number: int,
    seed: int,
    errors: Errors | None,
) -> torch.Tensor:
    """Exchange rows ``[L, A, ..., S]`` for L ranks, and sum those for this one, ``[A, ..., S]``."""
    dtype = rows.dtype
    if errors is not None:
        rows = errors.added(number, rows)
    wire = encode(rows, runs, dtype, seed)
    if errors is not None:
        left = rows - decode(wire, runs, dtype)
        # Infinity and NaN are encoded exactly, and leave no error.
        left.masked_fill_(left.isfinite().logical_not_(), 0.0)
        left[stage.rank] = 0.0
        errors.keep(number, left)
    received = all_to_all(wire, stage.group)
    return sum_of(received, runs, dtype, rows[stage.rank], stage.rank)
