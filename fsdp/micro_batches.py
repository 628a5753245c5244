"""The order of micro-batches in which gradients have the same bits on any number of ranks."""

import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8_dist import fsdp_internals as internals
from fp8_dist.fsdp.gradient_transport import EncodedReduction
from fp8_dist.text import kind_of
from fp8_dist.torch_internals import disabled_in_graphs, in_backward
from fp8_dist.weight.optimizer_steps import held_by

_UNREDUCED = (
    "a backward has left gradients of {} unreduced. They are added to those of another micro-batch "
    "before the reduction, in an order that depends on the number of ranks; leave out "
    "set_requires_gradient_sync(False)"
)


def micro_batches(count: int, mesh: DeviceMesh) -> Iterator[tuple[int, float]]:
    """Yield the micro-batches of a step that this rank runs, as ``(index, weight)``.

    Rank r of W runs micro-batches r, r + W, r + 2W, ... If W does not divide ``count``, there are
    not enough for the last round. The other ranks repeat the last micro-batch with weight 0,
    because FSDP2 needs all ranks. Multiply the loss, and any auxiliary loss, by the weight::

        for index, weight in micro_batches(count, mesh):  # one backward in each
            loss = cross_entropy(model(inputs[index]), targets[index], reduction="sum")
            (loss * (weight / tokens)).backward()  # tokens: of the whole step

    With :func:`set_gradient_transport`, gradients that are sums (``set_gradient_divide_factor``),
    ``clip_grad_norm_(..., exact=True)`` and an elementwise optimizer, the weights after the step
    have the same bits on any number of ranks; where gradients travel in two hops, on any number of
    nodes with the same number of ranks. docs/fsdp2.md shows the whole loop, and says what else the
    bits depend on.

    Args:
        count: the number of micro-batches of the step, over all ranks; the same on all ranks.
        mesh: the 1-D mesh of the data-parallel ranks.

    Yields:
        The micro-batch's number, from 0 to ``count - 1``, and 1.0, or 0.0 for a repetition.

    Collectives: none.

    Raises:
        TypeError, ValueError: an argument is invalid; or gradients are reduced twice in a
            micro-batch, not at all, or to sums that depend on the number of ranks. That error names
            the module, and is raised in the call, or after the micro-batch, by the iterator.

    The loop may be left early. Once the iterator is gone, or an optimizer has stepped, reductions
    are those of a plain loop. (Until then a round that was left before its backward is open.)
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"micro_batches needs a DeviceMesh, got {kind_of(mesh)}")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"micro_batches: count is {count!r}; it must be a positive int")
    if mesh.ndim != 1:
        raise ValueError(
            f"micro_batches: the mesh has {mesh.ndim} dims; pass the 1-D mesh of the data-parallel "
            "ranks. Under HSDP the bits of gradients depend on the number of ranks"
        )
    ranks = mesh.mesh.tolist()
    if _problems_of_all(ranks):
        gc.collect()  # models that nothing refers to any more
    if problem := _problems_of_all(ranks):
        raise ValueError(f"micro_batches: {problem}")
    return _micro_batches_of_rank(count, ranks)


def _micro_batches_of_rank(count: int, ranks: list[int]) -> Iterator[tuple[int, float]]:
    for first in range(0, count, len(ranks)):
        index = first + ranks.index(dist.get_rank())
        batch = _MicroBatch(ranks, runs=index < count)
        EncodedReduction.check = batch.check
        try:
            yield min(index, count - 1), float(batch.runs)
        finally:
            batch.stop_checks()
        if problem := batch.problem or batch.unreduced():
            raise ValueError(f"micro_batches: {problem}")


class _MicroBatch:
    """Check of the reductions while this rank runs a micro-batch.

    The caller may have left the loop and still hold the iterator. What is reduced then is no
    affair of the loop, so a reduction raises no error: the iterator raises it when the caller asks
    for the next micro-batch.

    Attributes:
        runs: whether the gradients of this rank are part of the sum.
        problem: the first problem that a reduction has had.
    """

    def __init__(self, ranks: list[int], runs: bool) -> None:
        self.ranks, self.runs = ranks, runs
        self.problem: str | None = None
        self._waiting = _waiting()
        self._reduced = set[Any]()
        self._updated = set[int]()  # the ids of parameters that an optimizer has updated since
        self._hook = register_optimizer_step_post_hook(self._note_step)

    def check(self, reduction: EncodedReduction) -> bool:
        """Check a reduction; return whether this rank's gradients are part of its sum."""
        parameters = internals.fsdp_parameters([reduction.group])
        if not self._updated.isdisjoint(id(parameter.sharded) for parameter in parameters):
            self.stop_checks()  # the loop was left, because the step is over
            return True
        self.problem = next(_problems(reduction, self.ranks), None)
        if reduction in self._waiting:
            self.problem = _UNREDUCED.format(reduction.module)
        elif not self._reduced.isdisjoint(reduction.used):
            self.problem = (
                f"{reduction.module} is reduced twice within a micro-batch, so the order of its "
                "sum depends on the number of ranks; call backward once for each micro-batch"
            )
        if self.problem is not None:
            self.stop_checks()
            return True
        self._reduced.update(reduction.used)
        return self.runs

    def unreduced(self) -> str | None:
        """Describe gradients that the micro-batch has left unreduced."""
        left = (x for x in _waiting() if x not in self._waiting)
        return next((_UNREDUCED.format(reduction.module) for reduction in left), None)

    def stop_checks(self) -> None:
        """Check no further reductions."""
        self._hook.remove()
        if EncodedReduction.check == self.check:
            EncodedReduction.check = None

    @disabled_in_graphs()
    def _note_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not in_backward():  # in which optimizers may step for one parameter after the other
            self._updated |= held_by(optimizer)


def _waiting() -> list[EncodedReduction]:
    """The reductions that have unreduced gradients."""
    return [
        reduction
        for reduction in _reductions()
        if any(p.has_unreduced() for p in internals.fsdp_parameters([reduction.group]))
    ]


def _reductions() -> list[EncodedReduction]:
    """The reductions of all models that have a transport."""
    reductions = map(internals.fsdp_reduction, internals.fsdp_groups())
    return [x for x in reductions if isinstance(x, EncodedReduction)]


def _problems_of_all(ranks: list[int]) -> str | None:
    """Return a problem if every model has one. The loop checks the reductions that run."""
    reductions = _reductions()
    if not reductions and len(ranks) > 1:
        return (
            "no model has a gradient transport, and torch's sums depend on the number of ranks; "
            'call set_gradient_transport(model, "fp32"), or another transport'
        )
    problems = [next(_problems(reduction, ranks), None) for reduction in reductions]
    return problems[0] if problems and all(problems) else None


def _problems(reduction: EncodedReduction, mesh: list[int]) -> Iterator[str]:
    """Yield the reasons why a reduction can't sum the micro-batches of the ranks in ``mesh``."""
    group, name = reduction.group, reduction.module
    parameters = [p for p in internals.fsdp_parameters([group]) if p.is_trained]
    ranks = dist.get_process_group_ranks(internals.fsdp_reduce_scatter_group(group))
    # Sums follow the order of the mesh. The group may have several ranks for each mesh rank.
    places = [ranks.index(rank) * len(mesh) // len(ranks) for rank in mesh if rank in ranks]
    if internals.fsdp_has_second_reduction(group):
        yield (
            f"{name} is under HSDP (or has set_all_reduce_hook), which sums the sums of shards "
            "over replicas; shard it over one axis of all ranks"
        )
    if places != [*range(len(mesh))]:
        yield f"{name} is reduced over ranks {ranks}, not over those of the mesh, {mesh}"
    if any(parameter.own.fsdp_placement.dim for parameter in parameters):
        yield f"{name} has parameters with Shard(1), which divides rows; shard them on dim 0"
    if any(parameter.own.offload_to_cpu for parameter in parameters):
        yield f"{name} has CPU offload, which adds gradients on the CPU; leave it out"
    if any(parameter.sharded.dtype != torch.float32 for parameter in parameters):
        yield f"{name} trains parameters that are not fp32, in whose dtype sums would be rounded"
    if not internals.fsdp_sums(group):
        yield (
            f"{name} averages gradients; call set_gradient_divide_factor(1.0) and "
            "set_force_sum_reduction_for_comms(True) of each FSDPModule, and divide the loss by "
            "the tokens of the step"
        )
