"""Reductions of encoded pieces: an all-to-all, then an fp32 sum on the rank that owns it."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from fp8_dist.kernels.encoding import NEAREST, blocks_of, decode_float8, encode_float8
from fp8_dist.torch_internals import funcol
from fp8_dist.transport.encoding import Part, Run, decode, encode, runs_of, seed_of, sum_of


class GradientErrors:
    """Error feedback: the encoding errors of a stage are added to the values that it encodes next.

    An object holds the errors of each stage of the exchange of some parameters' gradients. They are
    kept in float8 with block exponents: 1.008 bytes for each value of the unsharded gradient, all
    of which this rank encodes.

    Args:
        rows: the leading dims of the rows of each stage. A stage of one rank encodes nothing.
        device: the device on which gradients are reduced.
    """

    def __init__(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self.parts: Sequence[Part] = ()  # the parts of the next rows to be encoded
        self.rows = {stage: shape for stage, shape in enumerate(rows) if shape[0] > 1}
        self.device = device
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def keep_for(self, parts: Sequence[Part]) -> None:
        """Keep the errors of these parts only. New ones start at zero.

        Parameters may be frozen, or trained again, from one step to the next.
        """
        sizes = {part.number: part.size for part in parts if part.encoding is not None}
        self._kept = {
            (number, stage): self._kept.get((number, stage)) or self._none_yet(stage, size)
            for number, size in sizes.items()
            for stage in self.rows
        }

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Yield the number of a parameter, the name of one of its tensors, and the uint8 tensor."""
        for (number, stage), (codes, exponents) in self._kept.items():
            yield number, f"{stage}.codes", codes
            yield number, f"{stage}.exponents", exponents

    def added(self, stage: int, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` ``[..., S]`` plus the kept errors, in fp32."""
        rows = rows.to(torch.float32, copy=True)
        for part, start in self._encoded():
            errors = self._kept[part.number, stage]
            rows.narrow(-1, start, part.size).add_(decode_float8(*errors))
        return rows

    def keep(self, stage: int, errors: torch.Tensor) -> None:
        """Replace the kept errors with ``errors`` ``[..., S]``, fp32 and finite."""
        for part, start in self._encoded():
            found = encode_float8(errors.narrow(-1, start, part.size), NEAREST)
            for old, new in zip(self._kept[part.number, stage], found, strict=True):
                old.copy_(new)

    def _encoded(self) -> Iterator[tuple[Part, int]]:
        """Yield the encoded parts, and their offsets in a row."""
        start = 0
        for part in self.parts:
            if part.encoding is not None:
                yield part, start
            start += part.size

    def _none_yet(self, stage: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = *self.rows[stage], size
        codes = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        return codes, codes.new_ones(*self.rows[stage], blocks_of(size))


def start_all_to_all(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send ``rows[i]`` to rank i of a group. Row i of the result comes from rank i.

    The result is in flight until ``funcol.wait_tensor``.
    """
    sizes = [1] * len(rows)
    return funcol.all_to_all_single(rows.contiguous(), sizes, sizes, str(group.group_name))


def reduce_scatter(
    x: torch.Tensor,
    runs: Sequence[Run],
    groups: Sequence[dist.ProcessGroup],
    *,
    seed: int = NEAREST,
    errors: GradientErrors | None = None,
) -> torch.Tensor:
    """Sum the rows that all ranks hold for this rank.

    There is one stage for each group. If there are two, ranks first sum within the first group, and
    then exchange these sums within the second one. Rank i of all ranks is rank ``i % size`` in its
    first group and rank ``i // size`` in its second one, where ``size`` is that of the first.

    Args:
        x: ``[W, ..., S]``, floating point; row i is for rank i.
        runs: the runs of each row.
        seed: the seed of stochastic rounding, which must differ between these ranks. Each stage
            derives its own from it.
        errors: error feedback.

    Returns:
        The sum, fp32 ``[..., S]``. A rank's own summand is not rounded.

    Collectives: an all-to-all for each stage of more than one rank. The first sends W encoded rows.
    A later one sends W divided by the product of the sizes of the stages before.
    """
    if len(x) == 1:
        return x[0].to(torch.float32, copy=True)
    for stage, group in enumerate(groups):
        if group.size() == 1:
            continue
        rows = x.view(len(x) // group.size(), group.size(), *x.shape[1:]).transpose(0, 1)
        x = _exchange(rows, runs, group, stage, seed_of(seed, stage), errors)
    return x.view(x.shape[1:])


def all_reduce(
    x: torch.Tensor,
    parts: Sequence[Part],
    group: dist.ProcessGroup,
    *,
    divisor: float = 1,
    seed: int = NEAREST,
    errors: GradientErrors | None = None,
) -> torch.Tensor:
    """Sum over a group and divide by ``divisor``: fp32 ``[S]``, the same bits on all ranks.

    Each rank sums a piece of ``x``. The sums are gathered in the dtype of ``x``, but in bf16 if the
    summands were float8, whose error is larger than that of bf16.

    Args:
        x: ``[S]``, floating point.
        parts: the parts of ``x``.

    Collectives: an all-to-all of the encoded ``x``, and an all-gather of the sums.
    """
    ranks = group.size()
    own_parts = split(parts, ranks)
    pieces = [
        pad(piece, (0, ranks * own.size - len(piece))).view(ranks, own.size)
        for piece, own in zip(x.split([part.size for part in parts]), own_parts, strict=True)
    ]
    runs = runs_of(own_parts, seed)
    own = reduce_scatter(torch.cat(pieces, -1), runs, [group], seed=seed, errors=errors)
    sums = runs_of(
        part._replace(encoding="bf16" if part.encoding == "float8" else None) for part in own_parts
    )
    wire = encode(own.div_(divisor).to(x.dtype), sums, x.dtype)
    gathered = funcol.all_gather_into_tensor(wire, ranks, str(group.group_name))
    rows = decode(funcol.wait_tensor(gathered).view(ranks, -1), sums, x.dtype)
    columns = rows.split([part.size for part in own_parts], -1)
    return torch.cat([c.flatten()[: p.size] for c, p in zip(columns, parts, strict=True)])


def split(parts: Sequence[Part], ranks: int) -> list[Part]:
    """The piece of each part that one rank sums in :func:`all_reduce`, including padding."""
    return [part._replace(size=-(-part.size // ranks)) for part in parts]


def _exchange(
    rows: torch.Tensor,
    runs: Sequence[Run],
    group: dist.ProcessGroup,
    stage: int,
    seed: int,
    errors: GradientErrors | None,
) -> torch.Tensor:
    """Exchange rows ``[L, A, ..., S]`` between L ranks; sum this rank's rows, ``[A, ..., S]``."""
    dtype = rows.dtype
    if errors is not None:
        rows = errors.added(stage, rows)
    wire = encode(rows, runs, dtype, seed)
    if errors is not None:
        left = rows - decode(wire, runs, dtype)
        # Infinity and NaN are encoded exactly, and leave no error.
        left.masked_fill_(left.isfinite().logical_not_(), 0.0)
        left[group.rank()] = 0.0
        errors.keep(stage, left)
    received = funcol.wait_tensor(start_all_to_all(wire, group))
    return sum_of(received, runs, dtype, rows[group.rank()], group.rank())
