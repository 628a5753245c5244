"""Moving tokens to their experts and back.

A *slot* is a token and one of the ``top_k`` experts that it was routed to. Ranks of expert
parallelism have equal numbers of experts. The float8 row of a slot is sent to the rank of its
expert, in one message with its scales, and is multiplied there without another cast. Rows are
sorted by expert, then by rank, then by slot: as if one device sorted the slots of all ranks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.encoding import as_bytes, pack_rows, unpack_rows
from fp8_dist.kernels.grouped import Groups, places_of_groups
from fp8_dist.scaling import Quantized
from fp8_dist.torch_internals import funcol


class Routing(NamedTuple):
    """The routes of slots to their experts and back, for one batch of tokens.

    Attributes:
        slots: int64 ``[S]``, the slots (``token * top_k + k``), sorted by expert. Slots with the
            expert id ``num_experts`` are left out.
        tokens, top_k: the number of tokens, and of slots per token.
        expert_ids: int64 ``[tokens, top_k]``, the expert of each slot.
        groups: the rows of this rank's experts.
        arrivals: int64 ``[R]``, for each row of the experts its index among the received rows;
            ``None`` if no row moves.
        sent, received: the number of rows to and from each rank.
        group: the ranks of expert parallelism; ``None`` if this rank has all experts.
    """

    slots: Tensor
    tokens: int
    top_k: int
    expert_ids: Tensor
    groups: Groups
    arrivals: Tensor | None
    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup | None

    def to_experts(self, rows: Tensor) -> Tensor:
        """Move rows ``[S, C]``, in the order of ``slots``, to the rows of experts ``[R, C]``.

        Collectives: an all-to-all of the bytes of ``rows``.
        """
        if self.arrivals is None:
            return rows
        return _exchange(rows, self.received, self.sent, self.group).index_select(0, self.arrivals)

    def to_slots(self, rows: Tensor) -> Tensor:
        """Move rows ``[R, C]`` back to their slots ``[tokens * top_k, C]``; other slots become 0.

        Collectives: an all-to-all of the bytes of ``rows``.
        """
        return self.returned(self.as_received(rows))

    def as_received(self, rows: Tensor) -> Tensor:
        """The rows of experts in the order in which they were received."""
        if self.arrivals is None:
            return rows
        return _placed(torch.empty_like(rows), self.arrivals, rows)

    def returned(self, rows: Tensor) -> Tensor:
        """Send rows, in the order in which they were received, back to their slots."""
        rows = _exchange(rows, self.sent, self.received, self.group)
        total = self.tokens * self.top_k
        # A graph does not know how many slots are left out.
        is_complete = not torch.compiler.is_compiling() and len(self.slots) == total
        to = (rows.new_empty if is_complete else rows.new_zeros)((total, rows.shape[1]))
        return _placed(to, self.slots, rows)


def _placed(to: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Write rows to their places in ``to``."""
    if torch.compiler.is_compiling():  # in torch 2.11 the result of index_copy_ has no gradient
        return to.index_copy(0, places, rows)
    return to.index_copy_(0, places, rows)


def route(expert_ids: Tensor, num_experts: int, group: dist.ProcessGroup | None = None) -> Routing:
    """Compute the routes of slots to their experts.

    Args:
        expert_ids: int64 ``[T, top_k]``, from 0 to ``num_experts - 1``. A slot with the id
            ``num_experts`` is left out: its output is 0.
        num_experts: the number of experts of all ranks.
        group: the ranks of expert parallelism. The experts, in order, are divided equally between
            the ranks, in order. ``None`` if this rank has all experts.

    Collectives: with a group, an all-to-all of 8 bytes per expert. The host waits once, for the
    number of rows to and from each rank.

    Raises:
        ValueError: ``num_experts`` is not a multiple of the number of ranks, or an id is out of
            range on any rank. All ranks raise.
    """
    if expert_ids.ndim != 2 or expert_ids.dtype != torch.int64:
        raise ValueError(
            "route: expert_ids must be int64 [tokens, top_k], got "
            f"{expert_ids.dtype} {tuple(expert_ids.shape)}"
        )
    ranks = 1 if group is None else dist.get_world_size(group)
    if num_experts % ranks:
        raise ValueError(
            f"route: {num_experts} experts can't be divided equally between {ranks} ranks of "
            "expert parallelism; choose a number of ranks that divides it"
        )
    flat = expert_ids.reshape(-1)
    slots, sent = slots_by_expert(flat, num_experts)
    sent = sent.view(ranks, num_experts // ranks)
    received = _exchange(sent, [1] * ranks, [1] * ranks, group)
    numbers = numbers_of_rows(sent, received, flat)
    to = numbers[:ranks].tolist()
    # A graph would not know that the numbers of rows to and from the same rank are equal.
    back = to if group is None else numbers[ranks : 2 * ranks].tolist()
    groups = Groups.of(received.sum(0), numbers[2 * ranks :], sum(back))
    arrivals = None if group is None else _arrivals(received, sum(back))
    tokens, top_k = expert_ids.shape
    slots = slots.narrow(0, 0, sum(to))
    return Routing(slots, tokens, top_k, expert_ids, groups, arrivals, to, back, group)


def _exchange(
    rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    if group is None:
        return rows
    # A functional collective, because graphs and selective checkpointing support these.
    result = funcol.all_to_all_single(rows.contiguous(), receive, send, str(group.group_name))
    return funcol.wait_tensor(result)


@custom_op(fake=lambda ids, num_experts: (torch.empty_like(ids), ids.new_empty(num_experts)))
def slots_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort the slots ``[S]`` by expert, slots without an expert last, and count them.

    Returns:
        The slots, and the number of slots of each expert; -1 if an id is out of range.
    """
    in_order, slots = ids.sort(stable=True)
    # (torch.bincount would make the host wait.)
    known = torch.arange(-1, num_experts + 1, device=ids.device)
    ends = torch.searchsorted(in_order, known, right=True)
    # Negative numbers tell the other ranks that an id is out of range.
    return slots, ends.diff()[:-1].masked_fill(ends[-1] - ends[0] != len(ids), -1)


@custom_op(fake=lambda sent, *_: sent.new_empty(2 * sent.shape[0] + sent.shape[1], device="cpu"))
def numbers_of_rows(sent: Tensor, received: Tensor, ids: Tensor) -> Tensor:
    """Return the numbers of rows on the host: to and from each rank, then of each local expert.

    ``sent``, ``received``: ``[ranks, E]``, the numbers of rows to and from each rank, by expert.

    Raises:
        ValueError: a number is negative, because an id is out of range.
    """
    # The only place in a layer where the host waits. As an operator it waits once in graphs, too.
    sent, received = torch.stack([sent, received]).to("cpu", copy=True)
    counts = torch.cat([sent.sum(1), received.sum(1), received.sum(0)])
    ranks, experts = len(sent), sent.numel()
    back = counts[ranks : 2 * ranks].tolist()
    if min(counts[: 2 * ranks].tolist()) < 0:
        wrong = [f"rank {rank} of {ranks}" for rank, count in enumerate(back) if count < 0]
        others = ids[(ids < 0) | (ids > experts)].tolist()[:5]
        raise ValueError(
            f"route: expert ids must be from 0 to {experts}; {' and '.join(wrong)} has others"
            + (f", such as {others}" if others else "")
        )
    return counts


def _arrivals(received: Tensor, rows: int) -> Tensor:
    """Map rows in order of expert, then rank, to their indices in order of rank, then expert.

    ``received``: the number of rows from each rank for each expert, ``[ranks, E]``.
    """
    begins = (received.flatten().cumsum(0) - received.flatten()).view_as(received)
    lengths = received.t().reshape(-1)
    block, places, ends = places_of_groups(lengths, rows, 1)
    return places + (begins.t().reshape(-1) - (ends - lengths))[block]


def send_rows(rows: Quantized, places: Tensor, routing: Routing) -> Quantized:
    """Send float8 rows with their scales to the experts, in one message.

    ``places``: for each of ``routing.slots``, the index of its row.
    """
    return _sent(rows, lambda x: x.index_select(0, places), routing.to_experts, routing.group)


def return_rows(rows: Quantized, routing: Routing) -> Quantized:
    """Send float8 rows with their scales back to their slots, in one message."""
    return _sent(rows, routing.as_received, routing.returned, routing.group)


_Move = Callable[[Tensor], Tensor]


def _moved(rows: Quantized, move: _Move) -> Quantized:
    """Move the bytes and each of the scales of float8 rows."""
    qdata = move(as_bytes(rows.qdata)).view(rows.qdata.dtype)
    return rows._replace(qdata=qdata, scales=tuple([move(scale) for scale in rows.scales]))


def _sent(rows: Quantized, order: _Move, send: _Move, group: dist.ProcessGroup | None) -> Quantized:
    """Reorder float8 rows with their scales, and send them in one message."""
    rows = _moved(rows, order)
    if group is None or not rows.scales:
        return _moved(rows, send)
    message = send(as_bytes(pack_rows(rows.qdata, rows.scales)))
    qdata, scales = unpack_rows(message, rows.qdata, rows.scales)
    return _moved(rows._replace(qdata=qdata, scales=tuple(scales)), lambda x: x.contiguous())
