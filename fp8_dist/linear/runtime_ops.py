"""Queries: operators whose results depend on the state of an object as well as their arguments.

Whether a weight's scale is known depends on what happened since the last step. A compiled graph
must not decide that when it is traced, and guards on it would recompile. Selective activation
checkpointing must not see it either: if a recomputation found a scale that the forward had to
compute, saved results would be assigned to the wrong operators. In both cases one opaque operator
is called, which queries the object that holds the state.

A handle identifies that object. It is a tensor, and an input of the graph like any other, so layers
can share a graph. Each query is an operator of its own. Those of weights are defined here, others
next to the class that implements them (``amax_history``).
"""

import itertools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch

from fp8_dist.cast import Copies, as_copies, flat_copies
from fp8_dist.kernels import CustomOp, empty_copies
from fp8_dist.linear.weight_cache import Known
from fp8_dist.scaling import (
    CastPlan,
    by_scheme,
    common_start,
    empty_scales,
    empty_statistics,
    scheme_named,
    unshared,
)
from fp8_dist.torch_internals import OpOverload, is_selectively_checkpointed, storage_address

P = ParamSpec("P")
R = TypeVar("R")

# Owners by the number in their handle. An entry is removed when its owner is freed.
_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()

# The implementation of each query, for dispatch modes that have to see the operators inside it.
QUERIES: dict[OpOverload, Callable[..., Any]] = {}


def register_handle(owner: object) -> torch.Tensor:
    """Make a handle for an object that is queried at run time: a 0-dim int64 CPU tensor."""
    number = next(_numbers)
    _owners[number] = owner
    with torch.device("cpu"):
        return torch.tensor(number)


def owner_of(handle: torch.Tensor) -> Any:
    """The object that a handle identifies."""
    return _owners[int(handle.item())]


def must_query() -> bool:
    """Whether a query must run as an operator, and not as a call of the object's method."""
    return torch.compiler.is_compiling() or is_selectively_checkpointed()


def query(schema: str) -> Callable[[Callable[P, R]], CustomOp[P, R]]:
    """Define the operator of a query, which the decorated function implements.

    The function runs without gradients and outside inference mode, because training may save scales
    that an evaluation computed. In the schema, ``Tensor handle`` identifies the object.
    """

    def define(answer: Callable[P, R]) -> CustomOp[P, R]:
        implementation = torch.inference_mode(False)(torch.no_grad()(answer))
        # A CUDA graph would replay the result that it was captured with.
        op = CustomOp(schema, implementation, (torch.Tag.cudagraph_unsafe,))
        QUERIES[op.overload] = implementation
        return op

    return define


def queried_statistics(weight: Any, shard: torch.Tensor, gathers: bool) -> Known:
    """``weight.known_for`` by an operator.

    One call finds the statistics of all schemes. In a graph, a separate call for the casts of the
    backward would move to the backward, where FSDP2 has gathered the weight again and nothing is
    cached.
    """
    schemes = weight.schemes
    keys, start = [scheme.key for scheme in schemes], common_start(schemes, weight.layout())
    query = shard_statistics if gathers else weight_statistics
    flat = query.overload(shard, weight.handle, keys, start)
    return dict(zip(schemes, by_scheme(schemes, flat)[0], strict=True))


def queried_copies(weight: Any, shard: torch.Tensor, plan: CastPlan) -> Copies:
    """Cast the shard of a weight in a compiled graph."""
    (schemes, of, transposed), layout = plan, weight.layout()
    keys, start = [scheme.key for scheme in schemes], common_start(schemes, layout)
    flat = weight_copies.overload(shard, weight.handle, keys, start, of, transposed)
    scales, data = by_scheme(schemes, flat)
    return as_copies(shard, plan, data, scales, layout)


def _is_own(weight: Any, x: torch.Tensor) -> bool:
    """Whether a tensor that a graph reads is the layer's parameter.

    It may be another tensor in ``functional_call``, after an update within the graph, or if a
    parametrization computes it. Nothing is cached for such tensors.
    """
    if weight.name not in weight.module._parameters:
        return False
    own = weight.shard()
    return storage_address(own) == storage_address(x) and (
        own.storage_offset() == x.storage_offset() and own.shape == x.shape
    )


@query("weight_statistics(Tensor x, Tensor handle, str[] schemes, int[] start) -> Tensor[]")
def weight_statistics(
    x: torch.Tensor, handle: torch.Tensor, schemes: list[str], start: list[int]
) -> list[torch.Tensor]:
    """The statistics of a weight for each scheme, in a flat list, for a forward."""
    weight = owner_of(handle)
    weight.compare("the first forward")
    return _copied(weight, x, schemes, False, _is_own(weight, x))


@query(
    "weight_copies(Tensor x, Tensor handle, str[] schemes, int[] start, int[] of, "
    "bool[] transposed) -> Tensor[]"
)
def weight_copies(
    x: torch.Tensor,
    handle: torch.Tensor,
    schemes: list[str],
    start: list[int],
    of: list[int],
    transposed: list[bool],
) -> list[torch.Tensor]:
    """The scales of a weight for each scheme, then its copies, in a flat list, for a forward.

    Args:
        start: the :func:`common_start` of the schemes.
        of, transposed: as in a :class:`CastPlan`.
    """
    weight = owner_of(handle)
    weight.compare("the first forward")
    plan = CastPlan(tuple(map(scheme_named, schemes)), tuple(of), tuple(transposed))
    known, float8 = weight.cast_shard(weight.parameter(), x, plan, is_own=_is_own(weight, x))
    # Scales may share memory with statistics, which are kept, and a graph may write into its
    # results.
    return unshared(flat_copies(plan, float8), [each for own in known.values() for each in own])


# An operator of its own, because selective checkpointing must not save its results: FSDP2 may
# gather in a checkpointed forward and not in its recomputation.
@query("shard_statistics(Tensor x, Tensor handle, str[] schemes, int[] start) -> Tensor[]")
def shard_statistics(
    x: torch.Tensor, handle: torch.Tensor, schemes: list[str], start: list[int]
) -> list[torch.Tensor]:
    """The statistics of a weight for each scheme, in a flat list, for FSDP2's gather."""
    return _copied(owner_of(handle), x, schemes, True, True)


def _copied(
    weight: Any, x: torch.Tensor, keys: list[str], gathers: bool, is_own: bool
) -> list[torch.Tensor]:
    """The known statistics of a weight, copied, because a graph may write into results."""
    schemes = [scheme_named(key) for key in keys]
    known = weight.known_for(x, schemes, gathers, is_own)
    return [each.to(x.device, copy=True) for scheme in schemes for each in known[scheme]]


weight_statistics.register_fake(
    lambda x, handle, schemes, start: empty_statistics(x, schemes, start)
)
shard_statistics.register_fake(
    lambda x, handle, schemes, start: empty_statistics(x, schemes, start)
)
weight_copies.register_fake(
    lambda x, handle, schemes, start, of, transposed: [
        *empty_scales(x, schemes, start),
        *empty_copies(x, scheme_named(schemes[0]).dtype, transposed),
    ]
)
