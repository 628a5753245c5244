"""Sums over ranks whose summands are sent in fewer bytes.

Nothing is summed in the narrow type. Ranks exchange encoded pieces in an all-to-all. The rank that
owns a sum decodes the pieces it receives, and adds them in fp32, in the order of ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from torch.nn.functional import pad

from fp8_dist import mesh
from fp8_dist.kernels import encoding
from fp8_dist.mesh import Layout, Placements
from fp8_dist.torch_internals import funcol

# Encoding of numbers on the wire; None for their own dtype.
Encoding = Literal["float8", "bf16"] | None
ENCODINGS: tuple[Encoding, ...] = ("float8", "bf16", None)


class Part(NamedTuple):
    """Adjacent numbers of a message: a piece of a parameter, or pieces encoded together."""

    size: int
    encoding: Encoding
    row: int = 0  # the length of the rows that no block crosses; 0: the part is one row

    def bytes(self, dtype: torch.dtype) -> int:
        """Number of bytes on the wire, for numbers of ``dtype``."""
        if self.encoding == "float8":
            row = self.row or self.size
            return self.size + self.size // row * encoding.block_count(row)
        return self.size * (2 if self.encoding == "bf16" else dtype.itemsize)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Split ``[..., size]``, or its codes or exponents, into rows if the part has several."""
        return x.unflatten(-1, (self.size // self.row, -1)) if self.row else x

    def flat(self, rows: torch.Tensor) -> torch.Tensor:
        """Invert :meth:`rows`."""
        return rows.flatten(-2) if self.row else rows


def runs_of(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Join the parts of a message into as few runs as possible, with no block across two rows."""
    runs: list[Part] = []
    for part in (part for part in parts if part.size):
        is_float8, row = part.encoding == "float8", part.row
        if not is_float8 or row % encoding.BLOCK == 0 or row == part.size:
            row = 0  # blocks of the whole part do not cross its rows
        last = runs[-1] if runs else None
        splits_block = last is not None and is_float8 and row == 0 and last.size % encoding.BLOCK
        if last and not splits_block and (last.encoding, last.row) == (part.encoding, row):
            runs[-1] = last._replace(size=last.size + part.size)
        else:
            runs.append(part._replace(row=row))
    return tuple(runs)


def encode(
    x: torch.Tensor, runs: Sequence[Part], dtype: torch.dtype, per_node: int | None = None
) -> torch.Tensor:
    """Encode ``[..., S]`` of any floating dtype as bytes ``[..., B]``, exponents included.

    Args:
        dtype: the dtype in which numbers without an encoding are sent.
        per_node: the number of ranks on a node; then ``[W, S]``, with a row for each rank, becomes
            ``[per_node, W / per_node, B]``, with the rows of ranks at one place in their nodes
            together.
    """

    def ordered(piece: torch.Tensor) -> torch.Tensor:
        return piece if per_node is None else piece.unflatten(0, (-1, per_node)).transpose(0, 1)

    pieces: list[torch.Tensor] = []
    for run, part in zip(runs, x.split([run.size for run in runs], -1), strict=True):
        if run.encoding == "float8":
            pieces += [ordered(run.flat(y)) for y in encoding.encode_float8(run.rows(part))]
        else:
            part = ordered(part.to(torch.bfloat16 if run.encoding == "bf16" else dtype))
            pieces.append(part.contiguous().view(torch.uint8))
    return encoding.pack_rows(pieces[0], pieces[1:]) if len(pieces) > 1 else pieces[0]


def decode(wire: torch.Tensor, runs: Sequence[Part], dtype: torch.dtype) -> torch.Tensor:
    """Decode the bytes of :func:`encode` to fp32."""
    return sum_decoded(wire.unsqueeze(0), runs, dtype)


def sum_decoded(
    wire: torch.Tensor,
    runs: Sequence[Part],
    dtype: torch.dtype,
    local: torch.Tensor | None = None,
    rank: int = -1,
) -> torch.Tensor:
    """Sum the bytes ``[W, ..., B]`` from W ranks, in fp32 and in the order of ranks.

    Args:
        dtype: as in :func:`encode`.
        local: ``[..., S]``, a summand that is not on the wire, if any.
        rank: the rank whose bytes ``local`` replaces in the sum; -1 if ``local`` is added first.
    """
    sums, begin = [], 0
    for run, sent in zip(runs, wire.split([run.bytes(dtype) for run in runs], -1), strict=True):
        exponents = None
        if run.encoding == "float8":
            numbers, exponents = run.rows(sent[..., : run.size]), run.rows(sent[..., run.size :])
        else:
            if len(runs) > 1:  # a view might not be aligned for the dtype
                sent = sent.clone(memory_format=torch.contiguous_format)
            numbers = sent.view(torch.bfloat16 if run.encoding == "bf16" else dtype)
        part = None if local is None else run.rows(local.narrow(-1, begin, run.size))
        sums.append(run.flat(encoding.sum_of_rows(numbers, exponents, part, rank)))
        begin += run.size
    return torch.cat(sums, -1) if len(sums) > 1 else sums[0]


def start_all_to_all(
    rows: torch.Tensor, group: dist.ProcessGroup, peers: range | None = None
) -> torch.Tensor:
    """Send ``rows[i]`` to rank i of a group. Row i of the result comes from rank i.

    The result is in flight until ``funcol.wait_tensor``.

    Args:
        peers: the ranks that exchange rows, in place of all ranks: ``rows[i]`` goes to the i-th.
    """
    sizes = [int(peers is None or rank in peers) for rank in range(group.size())]
    return funcol.all_to_all_single(rows.contiguous(), sizes, sizes, str(group.group_name))


def _gathered(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    gathered = funcol.all_gather_into_tensor(rows, group.size(), str(group.group_name))
    return funcol.wait_tensor(gathered)


def exchanged(
    rows: torch.Tensor, group: dist.ProcessGroup, peers: range | None = None
) -> torch.Tensor:
    """Run :func:`start_all_to_all` to its end.

    Collectives: an all-to-all; none if this rank is the only peer.
    """
    is_alone = peers is not None and len(peers) == 1
    return rows if is_alone else funcol.wait_tensor(start_all_to_all(rows, group, peers))


def all_reduce(
    x: torch.Tensor, parts: Sequence[Part], group: dist.ProcessGroup, *, divisor: float = 1
) -> torch.Tensor:
    """Sum over a group and divide by ``divisor``: fp32 ``[S]``, the same bits on all ranks.

    Each rank sums a piece of ``x``. The sums are rounded once and gathered. Sums of float8 parts
    are gathered in bf16, which is more exact than the summands; others, in the dtype of ``x``.

    Args:
        x: ``[S]``, floating point.
        parts: the parts of ``x``.

    Collectives: an all-to-all of the encoded ``x``, and an all-gather of the sums.
    """
    ranks = group.size()
    shares = [part._replace(size=-(-part.size // ranks), row=0) for part in parts]
    pieces = [
        pad(piece, (0, ranks * part.size - len(piece))).view(ranks, part.size)
        for piece, part in zip(x.split([part.size for part in parts]), shares, strict=True)
    ]
    x_of_ranks, rank = torch.cat(pieces, -1), group.rank()
    runs = runs_of(shares)
    received = exchanged(encode(x_of_ranks, runs, x.dtype), group)
    total = sum_decoded(received, runs, x.dtype, x_of_ranks[rank], rank)
    sum_parts = (p._replace(encoding="bf16" if p.encoding == "float8" else None) for p in shares)
    runs = runs_of(sum_parts)
    wire = encode(total.div_(divisor), runs, x.dtype)
    rows = decode(_gathered(wire.unsqueeze(0), group), runs, x.dtype)
    columns = rows.split([part.size for part in shares], -1)
    return torch.cat([c.flatten()[: p.size] for c, p in zip(columns, parts, strict=True)])


def start_reduction(
    tensor: DTensor, placements: Placements, transport: Encoding
) -> Callable[[], DTensor]:
    """Start to redistribute a DTensor to other placements.

    A reduce-scatter, from Partial to Shard, becomes an all-to-all of encoded pieces, one for each
    rank, with blocks along the last dim. The rank that owns a shard sums in fp32, in the order of
    ranks, and rounds once to the dtype of the tensor. Its piece is not encoded. An all-reduce,
    from Partial to Replicate, becomes such a reduce-scatter of rows and an all-gather of the sums,
    which are encoded from fp32, so that all ranks have the same bits. All other redistributions are
    left to torch.

    Args:
        tensor: a DTensor, on a 1-D mesh if ``transport`` is not None.
        transport: the encoding of the pieces and of gathered sums; None for torch's collectives.

    Returns:
        A function that returns the result, which is in flight if torch redistributes it.

    Collectives: an all-to-all of W pieces of the size of the first piece (smaller pieces are
    padded, as in torch's reduce-scatter), then for an all-reduce an all-gather of as many bytes; or
    those of ``DTensor.redistribute``.
    """
    may_encode = transport is not None and tensor.device_mesh.size() > 1 and tensor.numel() > 0
    is_sum = may_encode and tensor.placements[0] == Partial() and not placements[0].is_partial()
    if not is_sum or mesh.has_strided_placements(placements):
        moved = mesh.redistributed(tensor, placements)
        return lambda: moved
    assert tensor.device_mesh.ndim == 1, tensor.device_mesh
    device_mesh, local = tensor.device_mesh, mesh.local_tensor(tensor)
    ranks, rank = device_mesh.size(), device_mesh.get_local_rank()
    layout = Layout(device_mesh, placements, tensor.shape)
    shard_dim = mesh.sharded_dim(placements[0], tensor.ndim)
    if shard_dim is None:
        local = local.reshape(-1, local.shape[-1])
    dim = shard_dim or 0
    size = local.shape[dim]
    chunk = -(-size // ranks)
    if chunk * ranks != size:
        local = pad(local, (0, 0) * (local.ndim - 1 - dim) + (0, chunk * ranks - size))
    pieces = local.unflatten(dim, (ranks, chunk)).movedim(dim, 0).contiguous()
    runs = runs_of([Part(pieces.shape[-1], transport)])
    received = start_all_to_all(encode(pieces, runs, pieces.dtype), device_mesh.get_group())

    def finish() -> DTensor:
        total = sum_decoded(funcol.wait_tensor(received), runs, pieces.dtype, pieces[rank], rank)
        if shard_dim is None:
            wire = _gathered(encode(total, runs, pieces.dtype), device_mesh.get_group())
            rows = decode(wire, runs, pieces.dtype).to(pieces.dtype)
            return layout.wrap(rows[:size].view(layout.shape))
        kept = max(0, min(chunk, size - rank * chunk))
        return layout.wrap(total.narrow(dim, 0, kept).to(pieces.dtype).contiguous())

    return finish


def reduced_to(tensor: DTensor, placements: Placements, transport: Encoding) -> DTensor:
    """Start and finish :func:`start_reduction`."""
    return start_reduction(tensor, placements, transport)()
