"""Sources of statistics: what the scales of an operand are computed from.

A source supplies statistics and never casts. There are four: measured at the cast (``FRESH``),
given by the caller (:class:`Given`), the amax history of earlier steps
(:class:`fp8_dist.operand.history.AmaxHistory`), and the cache of a weight
(:class:`fp8_dist.weight.known.Known`).

Note [Look-ups at run time]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
The last two read Python state. Whether a weight's statistics are cached, or a history has values,
depends on what happened since the last step. A compiled graph must not decide that when it is
traced, and guards on it would recompile. Selective activation checkpointing must not see it either:
if a recomputation found statistics that the forward had to compute, saved results would be assigned
to the wrong operators. In both cases the operator :func:`look_up` asks the source at run time.

A handle identifies the object that has the state. It is a tensor, and an input of the graph like
any other, so layers can share a graph.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fp8_dist import scaling
from fp8_dist.kernels.custom_op import CustomOp
from fp8_dist.mesh import Layout
from fp8_dist.scaling import Scheme, Statistics, operators, reduction
from fp8_dist.torch_internals import OpOverload, is_selectively_checkpointed, normal_tensors

P = ParamSpec("P")
R = TypeVar("R")
AmaxFrom = Literal["cast", "statistic"] | None


class Source:
    """Statistics that are measured at the cast; the base class of the other sources.

    Attributes:
        amax_from: where the amax for a history comes from: the cast also measures the tensor, and
            its scale is then NaN if the tensor has a value that is not finite; or it is the
            statistic itself. ``None``: there is no history.
    """

    amax_from: AmaxFrom = None

    def statistics(
        self, x: Tensor, schemes: Sequence[Scheme], layout: Layout | None
    ) -> Sequence[Statistics]:
        """The global statistics of a local tensor for each scheme.

        Collectives: those of :func:`fp8_dist.scaling.reduction.reduced_statistics` for each
        scheme, unless the statistics are known.
        """
        return measured(x, schemes, layout, whole=False)


FRESH = Source()


class Given(Source):
    """Statistics that the caller has."""

    def __init__(self, statistics: Sequence[Statistics], amax_from: AmaxFrom = None) -> None:
        self._statistics, self.amax_from = statistics, amax_from

    def statistics(
        self, x: Tensor, schemes: Sequence[Scheme], layout: Layout | None
    ) -> Sequence[Statistics]:
        return self._statistics


def measured(
    x: Tensor, schemes: Sequence[Scheme], layout: Layout | None, whole: bool
) -> list[Statistics]:
    """Measure a local tensor for each scheme; ``whole``: for all of the global tensor.

    Collectives: those of :func:`fp8_dist.scaling.reduction.reduced_statistics`, for each scheme;
    or of :func:`fp8_dist.scaling.reduction.global_statistics`.
    """
    local = operators.measure(x, schemes, scaling.common_start(schemes, layout))
    pairs = zip(schemes, local, strict=True)
    if whole:
        return reduction.global_statistics([(*pair, layout) for pair in pairs])
    return [reduction.reduced_statistics(*pair, layout) for pair in pairs]


class Request(NamedTuple):
    """The statistics that a look-up asks for.

    Attributes:
        x: the local tensor.
        schemes: the schemes of the statistics.
        groups: the groups over which they are reduced.
        cache, is_gather: see :class:`State`.
    """

    x: Tensor
    schemes: Sequence[Scheme]
    groups: Sequence[str]
    cache: Sequence[Tensor] = ()
    is_gather: bool = False


class State(Source):
    """Base class of sources that read Python state; see Note [Look-ups at run time].

    Attributes:
        handle: identifies the object whose :meth:`read` the operator calls.
        cache: tensors of the state that are inputs of a graph.
        is_gather: whether FSDP2 gathers the operand. Selective checkpointing must not save these
            look-ups: FSDP2 may gather in a checkpointed forward and not in its recomputation.
    """

    handle: Tensor
    cache: tuple[Tensor, ...] = ()
    is_gather = False

    def statistics(
        self, x: Tensor, schemes: Sequence[Scheme], layout: Layout | None
    ) -> Sequence[Statistics]:
        if not needs_op():
            return self.read(x, schemes, layout)
        return operators.by_scheme(schemes, look_up_in_op(self, x, schemes, layout, (), ()))[0]

    def read(
        self, x: Tensor, schemes: Sequence[Scheme], layout: Layout | None
    ) -> Sequence[Statistics]:
        """:meth:`statistics`, in eager code."""
        return self.look_up(Request(x, schemes, reduction.reduction_groups(schemes[0], layout)))

    def look_up(self, request: Request) -> Sequence[Statistics]:
        """:meth:`read` in the operator."""
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
    kinds = [scaling.scheme_named(key) for key in schemes]
    found = owner_of(handle).look_up(Request(x, kinds, groups, cache, is_gather))
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


def look_up_in_op(
    state: State,
    x: Tensor,
    schemes: Sequence[Scheme],
    layout: Layout | None,
    of: Sequence[int],
    transposed: Sequence[bool],
) -> list[Tensor]:
    """Call the operator :func:`look_up`; if there are copies to make, to cast as well.

    ``of``, ``transposed``: see :class:`fp8_dist.scaling.CastPlan`.
    """
    groups = [] if state.cache else [*reduction.reduction_groups(schemes[0], layout)]
    keys, start = [scheme.key for scheme in schemes], scaling.common_start(schemes, layout)
    how = state.handle, keys, start, groups, state.is_gather, of, transposed
    found: list[Tensor] = look_up.overload(x, state.cache, *how)
    return found
