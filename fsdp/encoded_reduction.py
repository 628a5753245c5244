"""The reductions of FSDP2's parameter groups, with gradients that travel encoded."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.fsdp.gradient_errors import GradientErrors, Part
from fp8_dist.torch_internals import (
    FsdpReduceScatter,
    fsdp_divisor,
    fsdp_padded_sizes,
    fsdp_parameters_of_group,
    fsdp_reduce_scatter_group,
    fsdp_reduction,
    fsdp_replicas,
    set_fsdp_reduction,
    set_fsdp_replicas,
)
from fp8_dist.transport import (
    Encoding,
    all_reduce,
    reduce_scatter,
    runs_of,
    seed_of,
    split_sizes,
    stages_over,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OF_REPLICAS = 2  # in seeds, beside the numbers of the stages before


class EncodedReduction(FsdpReduceScatter):
    """The reduce-scatter of a parameter group. FSDP2 calls it on its own stream."""

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
        self.parts = self.all_parts  # of the reduction that is next, or under way
        self.trained_parts = [
            part
            for part, p in zip(self.all_parts, fsdp_parameters_of_group(group), strict=True)
            if p.requires_grad
        ]
        self.module = module
        self.group = group
        shards, replicas = fsdp_reduce_scatter_group(group), fsdp_replicas(group)
        replica = 0 if replicas is None else replicas.rank()
        # By the rank among those that this one sums with. Its global rank would let tensor-parallel
        # ranks round the gradient of a parameter that they replicate in different ways.
        self.seed = seed_of(seed, replica * shards.size() + shards.rank())
        self.hierarchy = hierarchy
        self.errors: GradientErrors | None = None
        if error_feedback:
            rows = [(shards.size(), 1)]
            if hierarchy is not None:
                outer, inner = hierarchy.shape
                rows = [(inner, outer), (outer, 1)]
            self.errors = GradientErrors(self.trained_parts, rows, group.device)

    def note(self, reduced: Sequence[int]) -> None:
        """Take the numbers of the parameters whose gradients FSDP2 is about to reduce."""
        self.parts = [self.all_parts[i] for i in reduced]
        if self.errors is not None:
            self.errors.parts = self.parts

    def check_dtype(self, gradients: torch.Tensor) -> None:
        """Refuse gradients whose sums fp32 would spoil."""
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
        rows = input_tensor.view(group.size(), -1)
        runs = runs_of((part.size, part.encoding) for part in self.parts)
        assert rows.shape[1] == sum(run.size for run in runs), (rows.shape, self.parts)
        groups = [group]
        if self.hierarchy is not None:
            groups = [self.hierarchy.get_group(axis) for axis in (1, 0)]
        stages = stages_over(*groups)
        total = reduce_scatter(rows, runs, stages, seed=self.seed, errors=self.errors)
        output_tensor.copy_(total.div_(fsdp_divisor(self.group, op, group)))


class EncodedReplicas:
    """The process group of a parameter group's replicas, as far as FSDP2's all-reduce needs it."""

    def __init__(
        self, replicas: dist.ProcessGroup, shards: EncodedReduction, error_feedback: bool
    ) -> None:
        self.replicas = replicas
        self.shards = shards
        (self.stage,) = stages_over(replicas)
        self.errors: GradientErrors | None = None
        if error_feedback:
            parts = self._split(shards.trained_parts)
            self.errors = GradientErrors(parts, [(replicas.size(), 1)], shards.group.device)

    def __eq__(self, other: object) -> bool:
        """Equal to the group in whose place it is, so that torch finds its name and backend.

        (``dist.all_reduce`` looks them up for an error that is raised in it.)
        """
        return other is self or other is self.replicas

    def __hash__(self) -> int:
        return hash(self.replicas)

    def size(self) -> int:
        """The number of replicas."""
        return self.replicas.size()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        """What ``dist.all_reduce`` calls."""
        (x,) = tensors
        self.shards.check_dtype(x)
        if self.errors is not None:
            self.errors.parts = self._split(self.shards.parts)
        divisor = fsdp_divisor(self.shards.group, options.reduceOp, self.replicas)
        parts = [(part.size, part.encoding) for part in self.shards.parts]
        seed, errors = seed_of(self.shards.seed, _OF_REPLICAS), self.errors
        x.copy_(all_reduce(x, parts, self.stage, divisor=divisor, seed=seed, errors=errors))

    def _split(self, parts: Sequence[Part]) -> list[Part]:
        sizes = split_sizes([(part.size, part.encoding) for part in parts], self.replicas.size())
        return [p._replace(size=size) for p, (size, _) in zip(parts, sizes, strict=True)]


def install(reduction: EncodedReduction, error_feedback: bool) -> None:
    """Let FSDP2 call it for its parameter group; and with HSDP, the same for the replicas."""
    group = reduction.group
    set_fsdp_reduction(group, reduction, reduction.note)
    replicas = fsdp_replicas(group)
    if replicas is not None and replicas.size() > 1:
        set_fsdp_replicas(group, EncodedReplicas(replicas, reduction, error_feedback))


def remove(group: Any) -> None:
    """Give a parameter group FSDP2's own reductions; one that was set since then stays."""
    found = fsdp_reduction(group)
    set_fsdp_reduction(group, None if isinstance(found, EncodedReduction) else found, None)
    replicas = fsdp_replicas(group)
    if isinstance(replicas, EncodedReplicas):
        set_fsdp_replicas(group, replicas.replicas)


def errors_of_group(group: Any) -> Iterator[tuple[str, GradientErrors]]:
    """The errors that a parameter group's reductions keep, with a prefix for their names."""
    for owner, prefix in ((fsdp_reduction(group), ""), (fsdp_replicas(group), "replicas.")):
        if isinstance(owner, EncodedReduction | EncodedReplicas) and owner.errors is not None:
            yield prefix, owner.errors
