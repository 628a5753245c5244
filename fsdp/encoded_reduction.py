"""Reductions of FSDP2's parameter groups with encoded gradients."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.torch_internals import (
    fsdp_divisor,
    fsdp_padded_sizes,
    fsdp_parameters,
    fsdp_reduce_scatter_group,
    fsdp_reduction,
    fsdp_replicas,
    set_fsdp_reduction,
    set_fsdp_replicas,
)
from fp8_dist.transport import (
    Encoding,
    GradientErrors,
    Part,
    all_reduce,
    reduce_scatter,
    runs_of,
    seed_of,
    split,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OF_REPLICAS = 2  # number of the replicas' stage in seeds; the stages of the shards are 0 and 1


class EncodedReduction:
    """Reduce-scatter of a parameter group with encoded gradients.

    FSDP2 calls it on a stream of its own.
    """

    def __init__(
        self,
        module: str,
        group: Any,
        encodings: Sequence[Encoding],
        seed: int,
        error_feedback: bool,
        hierarchy: DeviceMesh | None,
    ) -> None:
        sizes_and_encodings = zip(fsdp_padded_sizes(group), encodings, strict=True)
        self.all_parts = [Part(i, *each) for i, each in enumerate(sizes_and_encodings)]
        self.parts = self.all_parts  # the parts that the current or next reduction has
        self.is_noted = False  # ``parts`` are set for the next reduction
        self.module = module
        self.group = group
        shards, replicas = fsdp_reduce_scatter_group(group), fsdp_replicas(group)
        replica = 0 if replicas is None else replicas.rank()
        # The seed contains the rank within the reduction. With the global rank instead,
        # tensor-parallel ranks would round the gradient of a replicated parameter differently.
        self.seed = seed_of(seed, replica * shards.size() + shards.rank())
        self.hierarchy = hierarchy
        self.errors: GradientErrors | None = None
        if error_feedback:
            rows = [(shards.size(), 1)]
            if hierarchy is not None:
                outer, inner = hierarchy.shape
                rows = [(inner, outer), (outer, 1)]
            self.errors = GradientErrors(rows, group.device)

    def note(self, reduced: Sequence[int]) -> None:
        """Note, by their numbers, the parameters whose gradients FSDP2 is about to reduce."""
        self.is_noted = True
        self.parts = [self.all_parts[i] for i in reduced]
        if self.errors is not None:
            self.errors.parts = self.parts
            self.errors.keep_for(self.parts_with_errors(self.parts))

    def parts_with_errors(self, reduced: Sequence[Part] = ()) -> list[Part]:
        """Return the parts of the parameters that require gradients, and those in ``reduced``."""
        parameters = enumerate(fsdp_parameters([self.group]))
        trained = {i for i, each in parameters if each.parameter.requires_grad}
        trained.update(part.number for part in reduced)
        return [part for part in self.all_parts if part.number in trained]

    def check_dtype(self, gradients: torch.Tensor) -> None:
        """Raise for gradients whose sums would lose precision in fp32."""
        dtype = gradients.dtype
        if dtype not in _DTYPES:
            raise NotImplementedError(
                f"set_gradient_transport: {self.module} has gradients of {dtype}; sums are taken "
                "in fp32. Set reduce_dtype, or give this module transport=None"
            )

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.check_dtype(input_tensor)
        if not self.is_noted:
            raise RuntimeError(
                f"set_gradient_transport: {self.module} reduces gradients, and FSDP2 has not told "
                "of which parameters, because something has put back the post_backward of its "
                "parameter group (FSDPMemTracker does). Call set_gradient_transport again"
            )
        self.is_noted = False
        rows = input_tensor.view(group.size(), -1)
        runs = runs_of(self.parts, self.seed)
        assert rows.shape[1] == sum(run.size for run in runs), (rows.shape, self.parts)
        groups = [group]
        if self.hierarchy is not None:
            groups = [self.hierarchy.get_group(axis) for axis in (1, 0)]
        total = reduce_scatter(rows, runs, groups, seed=self.seed, errors=self.errors)
        output_tensor.copy_(total.div_(fsdp_divisor(self.group, op, group)))


class EncodedReplicas:
    """Process group of a parameter group's replicas, with the interface that FSDP2 needs."""

    def __init__(
        self, replicas: dist.ProcessGroup, shards: EncodedReduction, error_feedback: bool
    ) -> None:
        self.replicas = replicas
        self.shards = shards
        self.errors: GradientErrors | None = None
        if error_feedback:
            self.errors = GradientErrors([(replicas.size(), 1)], shards.group.device)

    def __eq__(self, other: object) -> bool:
        """Equal the group that this object replaces, so that torch finds its name and backend.

        ``dist.all_reduce`` looks them up if an error is raised in it.
        """
        return other is self or other is self.replicas

    def __hash__(self) -> int:
        return hash(self.replicas)

    def size(self) -> int:
        """Return the number of replicas."""
        return self.replicas.size()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        """All-reduce the only tensor of a list in place; ``dist.all_reduce`` calls this."""
        (x,) = tensors
        self.shards.check_dtype(x)
        parts, ranks = self.shards.parts, self.replicas.size()
        if self.errors is not None:
            self.errors.parts = split(parts, ranks)
            self.errors.keep_for(split(self.shards.parts_with_errors(parts), ranks))
        divisor = fsdp_divisor(self.shards.group, options.reduceOp, self.replicas)
        seed, errors = seed_of(self.shards.seed, _OF_REPLICAS), self.errors
        x.copy_(all_reduce(x, parts, self.replicas, divisor=divisor, seed=seed, errors=errors))


def install(reduction: EncodedReduction, error_feedback: bool) -> None:
    """Install a reduction in its parameter group and, with HSDP, the reduction over replicas."""
    group = reduction.group
    set_fsdp_reduction(group, reduction, reduction.note)
    replicas = fsdp_replicas(group)
    if replicas is not None and replicas.size() > 1:
        set_fsdp_replicas(group, EncodedReplicas(replicas, reduction, error_feedback))


def remove(group: Any) -> None:
    """Restore FSDP2's own reductions in a parameter group, except where other code set another."""
    found = fsdp_reduction(group)
    set_fsdp_reduction(group, None if isinstance(found, EncodedReduction) else found)
    replicas = fsdp_replicas(group)
    if isinstance(replicas, EncodedReplicas):
        set_fsdp_replicas(group, replicas.replicas)


def errors_of_group(group: Any) -> Iterator[tuple[str, GradientErrors]]:
    """Yield the errors that a parameter group's reductions keep, with a prefix for their names."""
    shards = fsdp_reduction(group)
    if not isinstance(shards, EncodedReduction) or shards.errors is None:
        return
    parts, replicas = shards.parts_with_errors(), fsdp_replicas(group)
    shards.errors.keep_for(parts)
    yield "", shards.errors
    if isinstance(replicas, EncodedReplicas) and replicas.errors is not None:
        replicas.errors.keep_for(split(parts, replicas.size()))
        yield "replicas.", replicas.errors
