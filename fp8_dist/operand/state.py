"""Statistics that Python state decides: those of a weight's cache, and of an amax history.

A cast takes statistics as an argument, or measures its tensor. Whoever calls it asks the state for
them: the cache of a weight (:class:`fp8_dist.weight.known.Known`), or the amax history of earlier
steps (:class:`fp8_dist.operand.history.AmaxHistory`).

Note [Look-ups at run time]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Whether a weight's statistics are cached, or a history has values, depends on what happened since
the last step. A compiled graph must not decide that when it is traced, and guards on it would
recompile. Selective activation checkpointing must not see it either: if a recomputation found
statistics that the forward had to compute, saved results would be assigned to the wrong operators.
In both cases the operator :func:`look_up` asks at run time.

A handle identifies the object that has the state. It is a tensor, and an input of the graph like
any other, so layers can share a graph.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fp8_dist.kernels.custom_op import CustomOp
from fp8_dist.scaling import CastPlan, Scheme, Statistics, operators, reduction, scheme_named
from fp8_dist.torch_internals import OpOverload, is_selectively_checkpointed, normal_tensors

P = ParamSpec("P")
R = TypeVar("R")


def measured(x: Tensor, plan: CastPlan, whole: bool = False) -> list[Statistics]:
    """Measure a local tensor for each scheme of a plan; ``whole``: for all of the global tensor.

    Collectives: those of :func:`fp8_dist.scaling.reduction.reduced_statistics`, for each scheme;
    or of :func:`fp8_dist.scaling.reduction.global_statistics`.
    """
    local = operators.measure(x, plan.schemes, plan.start)
    pairs = zip(plan.schemes, local, strict=True)
    if whole:
        return reduction.global_statistics([(*pair, plan.layout) for pair in pairs])
    statistics = []
    for scheme, own in pairs:
        statistics.append(reduction.reduced_statistics(scheme, own, plan.layout))
    return statistics


class State:
    """Base class of state that decides statistics; see Note [Look-ups at run time].

    Attributes:
        handle: identifies the object whose ``look_up`` the operator calls.
        cache: tensors of the state that are inputs of a graph.
        is_gather: whether FSDP2 gathers the operand. Selective checkpointing must not save these
            look-ups: FSDP2 may gather in a checkpointed forward and not in its recomputation.
        amax_from: where the amax for a history comes from. ``"cast"``: the cast also measures the
            tensor, and its scale is then NaN if the tensor has a value that is not finite.
            ``"statistic"``: it is the statistic itself. ``None``: there is no history.
    """

    handle: Tensor
    cache: tuple[Tensor, ...] = ()
    is_gather = False
    amax_from: Literal["cast", "statistic"] | None = None

    def statistics(self, x: Tensor, plan: CastPlan) -> Sequence[Statistics]:
        """The global statistics of a local tensor, for each scheme of a plan.

        Collectives: those of :func:`measured`, unless the statistics are known.
        """
        if needs_op():
            found = look_up_in_op(self, x, plan)
            return operators.by_scheme(plan.schemes, found)[0]
        return self.read(x, plan)

    def read(self, x: Tensor, plan: CastPlan) -> Sequence[Statistics]:
        """:meth:`statistics`, in eager code."""
        groups = reduction.reduction_groups(plan.schemes[0], plan.layout)
        return self.look_up(x, plan.schemes, groups)

    def look_up(
        self,
        x: Tensor,
        schemes: Sequence[Scheme],
        groups: Sequence[str],
        cache: Sequence[Tensor] = (),
        is_gather: bool = False,
    ) -> Sequence[Statistics]:
        """:meth:`read` in the operator; ``groups`` are those over which statistics are reduced."""
        raise NotImplementedError


# Objects by the number in their handle. An entry is removed when its object is freed.
_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()

# The implementation of each query, for dispatch modes that must see the operators inside it.
QUERIES: dict[OpOverload, Callable[..., Any]] = {}


def register_handle(owner: object) -> Tensor:
    """Make a handle for an object: a 0-dim int64 CPU tensor."""
    number = next(_numbers)
    _owners[number] = owner
    with normal_tensors():
        return torch.tensor(number, device="cpu")


def owner_of(handle: Tensor) -> Any:
    """The object that a handle identifies."""
    return _owners[int(handle.item())]


def needs_op() -> bool:
    """Whether state must be read by an operator, and not by a call of the object's method."""
    return torch.compiler.is_compiling() or is_selectively_checkpointed()


def query(schema: str) -> Callable[[Callable[P, R]], CustomOp[P, R]]:
    """Define an operator on Python state, which the decorated function implements.

    The function runs without gradients and outside inference mode, because training may save scales
    that an evaluation computed. In the schema, ``Tensor handle`` identifies the object.
    """

    def define(function: Callable[P, R]) -> CustomOp[P, R]:
        implementation = normal_tensors()(function)
        # A CUDA graph would replay the result that it was captured with.
        op = CustomOp(schema, implementation, (torch.Tag.cudagraph_unsafe,))
        QUERIES[op.overload] = implementation
        return op

    return define


@query(
    "look_up(Tensor x, Tensor[] cache, Tensor handle, str[] schemes, int[] start, str[] groups, "
    "bool is_gather, int[] of, bool[] transposed) -> Tensor[]"
)
def look_up(
    x: Tensor,
    cache: Sequence[Tensor],
    handle: Tensor,
    schemes: list[str],
    start: list[int],
    groups: list[str],
    is_gather: bool,
    of: list[int],
    transposed: list[bool],
) -> list[Tensor]:
    """Operator of :meth:`State.statistics`, with a flat list as its result.

    With copies to make, it also is the operator of the cast, which measures in the same pass.
    """
    kinds = [scheme_named(key) for key in schemes]
    found = owner_of(handle).look_up(x, kinds, groups, cache, is_gather)
    flat = [statistic for statistics in found for statistic in statistics]
    if of:
        return operators.cast_operator(x, flat, schemes, start, of, transposed, True, True, None)
    # Return copies, because a graph may write to an operator's results and reuse their memory.
    return [statistic.clone() for statistic in flat]


@look_up.register_fake
def _empty(*arguments: Any, **_: Any) -> list[Tensor]:
    x, _, _, schemes, start, _, _, of, transposed = arguments
    if of:
        return operators.empty_cast(x, (), schemes, start, of, transposed, True, True, None)
    return operators.empty_statistics(x, schemes, start)


def look_up_in_op(state: State, x: Tensor, plan: CastPlan, casts: bool = False) -> list[Tensor]:
    """Call the operator :func:`look_up`; ``casts``: let it make the copies of the plan as well."""
    groups: list[str] = []
    if not state.cache:
        groups += reduction.reduction_groups(plan.schemes[0], plan.layout)
    found: list[Tensor] = look_up.overload(
        x,
        state.cache,
        state.handle,
        [scheme.key for scheme in plan.schemes],
        plan.start,
        groups,
        state.is_gather,
        plan.of if casts else (),
        plan.transposed if casts else (),
    )
    return found
