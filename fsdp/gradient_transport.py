"""Reductions of FSDP2's gradients that travel in float8 or bf16 and are summed in fp32."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8_dist.kernels.encoding import NEAREST
from fp8_dist.linear.agreement import Facts, has_stand_ins
from fp8_dist.text import without_wrappers
from fp8_dist.torch_internals import (
    announce_fsdp_reductions,
    fsdp_divisor,
    fsdp_groups_of_module,
    fsdp_padded_sizes,
    fsdp_parameters,
    fsdp_reduce_scatter_group,
    fsdp_reduction,
    set_fsdp_reduction,
)
from fp8_dist.transport import (
    ENCODINGS,
    Encoding,
    Part,
    all_reduce,
    reduce_scatter,
    runs_of,
    seed_of,
)

Transport = Literal["float8", "bf16"]
Filter = Callable[[str, nn.Parameter], bool]

SUMMED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_CALLER = "set_gradient_transport"
_OF_REPLICAS = 2  # the number of the exchange between replicas in seeds


class EncodedReduction:
    """Reduce-scatter of a parameter group with encoded gradients.

    FSDP2 calls it on a stream of its own.
    """

    def __init__(self, module: str, group: Any, encodings: Sequence[Encoding], seed: int) -> None:
        sizes = fsdp_padded_sizes(group).items()
        self.parts_of = {
            parameter: Part(i, size, encoding)
            for i, ((parameter, size), encoding) in enumerate(zip(sizes, encodings, strict=True))
        }
        self.parts: list[Part] = []  # of the current reduction
        self.module = module
        self.group = group
        self.seed_of_group = self.seed = seed

    def prepare(self, parameters: Sequence[Any], replicas: Any) -> Any:
        """Note what FSDP2 is about to reduce, and return what all-reduces over the replicas."""
        self.parts = [self.parts_of[each] for each in parameters]
        shards, replica = fsdp_reduce_scatter_group(self.group), replicas.rank() if replicas else 0
        # The seed contains the rank within the reduction. With the global rank instead,
        # tensor-parallel ranks would round the gradient of a replicated parameter differently.
        self.seed = seed_of(self.seed_of_group, replica * shards.size() + shards.rank())
        return EncodedReplicas(replicas, self) if replicas and replicas.size() > 1 else replicas

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate a buffer for gradients, or for their sums.

        Raises:
            NotImplementedError: sums of such gradients would lose precision in fp32.
        """
        if dtype not in SUMMED_DTYPES:
            raise NotImplementedError(
                f"set_gradient_transport: {self.module} has gradients of {dtype}; sums are taken "
                "in fp32. Set reduce_dtype, or give this module transport=None"
            )
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        rows = input_tensor.view(group.size(), -1)
        runs = runs_of(self.parts, self.seed)
        assert rows.shape[1] == sum(run.size for run in runs), (rows.shape, self.parts)
        total = reduce_scatter(rows, runs, group, self.seed)
        output_tensor.copy_(total.div_(fsdp_divisor(self.group, op, group)))


class EncodedReplicas:
    """Stand-in, in FSDP2, for the process group of a parameter group's replicas."""

    def __init__(self, replicas: dist.ProcessGroup, shards: EncodedReduction) -> None:
        self.replicas = replicas
        self.shards = shards

    def size(self) -> int:
        """Return the number of replicas."""
        return self.replicas.size()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        """All-reduce the only tensor of a list in place; ``dist.all_reduce`` calls this."""
        (x,) = tensors
        divisor = fsdp_divisor(self.shards.group, options.reduceOp, self.replicas)
        seed = seed_of(self.shards.seed, _OF_REPLICAS)
        # The error of bf16 is smaller than that of summands in float8.
        x.copy_(
            all_reduce(x, self.shards.parts, self.replicas, sums="bf16", divisor=divisor, seed=seed)
        )


def set_gradient_transport(
    model: nn.Module,
    transport: Transport | None,
    *,
    stochastic_rounding: bool | int = False,
    high_precision: Filter | None = None,
) -> None:
    """Encode the gradients of FSDP2's parameters in fewer bytes for their reduction.

    FSDP2's reduce-scatter becomes an all-to-all of encoded pieces. The rank that owns a shard
    decodes the pieces and sums them in fp32, in the order of ranks. Its own piece is not rounded.
    With HSDP, the all-reduce over replicas becomes the same exchange, of parts of the shard. An
    all-gather of the sums follows, in bf16 with ``"float8"`` and in ``reduce_dtype`` with
    ``"bf16"``.

    **The result depends on the number of ranks**, so the rule that training on a mesh gives the
    same bits as on one device does not hold. Repeated runs on one mesh are equal bit by bit.

    Args:
        model: a module that ``fully_shard`` was called on, or that contains such modules. The
            function may be called again between two steps, with other arguments.
        transport: ``"bf16"``; ``"float8"`` (e4m3 in blocks of 128 with power-of-two scales, 1.008
            bytes per element); or None for FSDP2's own reduce-scatter.
        stochastic_rounding: round up or down at random instead of to nearest, so that the
            expectation is the value. The choice is a hash of the value, its position, the rank and
            a seed, so a repeated step repeats it. An int, including 0, is the seed; True is 1.
        high_precision: a function ``f(name, parameter)`` that returns true for parameters whose
            gradients are not encoded. These travel in the same message. Gradients of parameters
            with fewer than 2 dims are never encoded. Names are those of ``named_parameters()``,
            without the segments that wrappers add (``_orig_mod``).

    A gradient that is NaN or infinite stays so, and does not change other gradients. Zeros stay
    zeros. FSDP2's settings (``reduce_dtype``, ``set_gradient_divide_factor``, ...) apply as before:
    the encoded numbers are those that it would reduce.

    Collectives: in a step, only those above. In this call, the comparison of ``apply_tp_plan`` for
    each mesh.

    Raises:
        TypeError, ValueError: for invalid arguments, a model without FSDP2, modules with several
            parameter groups or with another custom reduce-scatter, a model none of whose gradients
            would be encoded, or ranks that differ.
        NotImplementedError: in a backward, for gradients of dtypes other than fp32, bf16 and fp16.
    """
    seed = _checked_seed(model, transport, stochastic_rounding, high_precision)
    groups = _groups_of(model, transport)
    encodings = _encodings(model, groups, transport, high_precision)
    if not has_stand_ins(model.parameters()):
        _check_agreement(groups, encodings, f"stochastic_rounding={stochastic_rounding}")
    announce_fsdp_reductions(EncodedReduction)
    for number, (module, group) in enumerate(groups.items()):
        if transport is not None:
            each, shown = list(encodings[module].values()), module or "the root module"
            set_fsdp_reduction(group, EncodedReduction(shown, group, each, seed_of(seed, number)))
        elif isinstance(fsdp_reduction(group), EncodedReduction):  # not one of other code
            set_fsdp_reduction(group, None)


def _encodings(
    model: nn.Module,
    groups: Mapping[str, Any],
    transport: Transport | None,
    high_precision: Filter | None,
) -> dict[str, dict[str, Encoding]]:
    """Return the encodings of gradients: by module, then by parameter, in the group's order."""
    # The keys of model.state_dict().
    names = {id(p): without_wrappers(name) for name, p in model.named_parameters()}
    encodings: dict[str, dict[str, Encoding]] = {}
    for module, group in groups.items():
        of_group = encodings[module] = {}
        for p in (getattr(*each.users[0]) for each in fsdp_parameters([group])):
            if (name := names.get(id(p))) is None:
                raise ValueError(
                    f"{_CALLER}: a parameter group of FSDP2 (fully_shard of a list) has parameters "
                    "outside of the module that was passed; pass one that holds all of them"
                )
            is_kept = p.ndim < 2 or (high_precision is not None and high_precision(name, p))
            of_group[name] = None if is_kept else transport
    if transport is not None and not any(any(how.values()) for how in encodings.values()):
        raise ValueError(
            f"{_CALLER}: transport={transport!r} would encode no gradient: all parameters have "
            "fewer than 2 dims, or high_precision is true for them"
        )
    return encodings


def _check_agreement(
    groups: Mapping[str, Any], encodings: Mapping[str, Mapping[str, Encoding]], options: str
) -> None:
    """Raise if arguments differ between ranks that share a parameter, tensor-parallel ones too."""
    facts = Facts()
    for module, group in groups.items():
        # Under tensor parallelism, the mesh of a parameter also has the tensor-parallel axis.
        parameters = [getattr(*each.users[0]) for each in fsdp_parameters([group])]
        of_parameters = (p.device_mesh for p in parameters if isinstance(p, DTensor))
        for mesh in {group.mesh_info.mesh, *of_parameters}:
            of_mesh = facts.of(mesh)
            of_mesh["options"] = options
            for name, how in encodings[module].items():
                of_mesh[f"the transport of the gradient of {name}"] = str(how)
    facts.check(_CALLER, fix="Give it the same arguments on all ranks")


def _checked_seed(model: Any, transport: Any, stochastic_rounding: Any, high_precision: Any) -> int:
    """Check the arguments, and return the seed of their rounding."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{_CALLER} needs a module that fully_shard was called on, got a {type(model).__name__}"
        )
    if transport not in ENCODINGS:
        raise ValueError(f"{_CALLER}: transport is {transport!r}; it must be one of {ENCODINGS}")
    seed = seed_of_rounding(_CALLER, stochastic_rounding)
    if high_precision is not None and not callable(high_precision):
        raise TypeError(
            f"{_CALLER}: high_precision is {high_precision!r}; it must be a function of a "
            "parameter's name and the parameter, such as lambda name, p: 'embed' in name"
        )
    if transport is None and (seed != NEAREST or high_precision is not None):
        raise ValueError(
            f"{_CALLER}: the other arguments are about how gradients are encoded, and "
            "transport=None encodes none; drop them"
        )
    return seed


def seed_of_rounding(caller: str, stochastic_rounding: Any) -> int:
    """Return the seed that the argument ``stochastic_rounding`` stands for.

    Raises:
        ValueError: it stands for none.
    """
    if not isinstance(stochastic_rounding, int) or stochastic_rounding < 0:
        raise ValueError(
            f"{caller}: stochastic_rounding is {stochastic_rounding!r}; it must be a bool, or a "
            "seed: an int that is not negative"
        )
    return NEAREST if stochastic_rounding is False else int(stochastic_rounding)


def _groups_of(model: nn.Module, transport: Transport | None) -> dict[str, Any]:
    """Return the model's parameter groups that reduce gradients, by the name of their module."""
    groups: dict[str, Any] = {}
    for name, module in model.named_modules():
        of_module = fsdp_groups_of_module(module) if isinstance(module, FSDPModule) else []
        if transport is not None:
            _check_takes_transport(of_module, name or "the root module")
        for group in of_module:
            is_known = group in groups.values()  # several modules may share it
            if not is_known and fsdp_reduce_scatter_group(group) is not None:
                groups[name] = group
    if not groups:
        raise ValueError(
            f"{_CALLER}: the {type(model).__name__} has no module that fully_shard was called on; "
            "call it after fully_shard"
        )
    return groups


def _check_takes_transport(groups: Sequence[Any], module: str) -> None:
    """Raise ValueError if the reduce-scatter of a module's parameter groups can't be replaced."""
    if len(groups) > 1:
        raise ValueError(
            f"{_CALLER}: {module} has {len(groups)} parameter groups (a shard_placement_fn that "
            "gives parameters meshes of their own); torch takes no custom reduce-scatter for such "
            "a module. Shard its parts apart, with one mesh each"
        )
    for group in groups:
        if fsdp_reduce_scatter_group(group) is None:
            raise ValueError(
                f"{_CALLER}: {module} is replicated (replicate, not fully_shard): its gradients "
                "are all-reduced, and there is no reduce-scatter"
            )
        own = fsdp_reduction(group)
        if not isinstance(own, EncodedReduction | None):
            raise ValueError(
                f"{_CALLER}: {module} has a reduce-scatter of its own ({type(own).__name__}, of "
                "set_custom_reduce_scatter or of memory from the process group), which would be "
                "replaced"
            )
