"""Queries: operators whose answer depends on what happened before, not on their arguments alone.

Whether a weight's scale is known depends on what happened since the last step. A compiled graph
must not decide that when it is traced, and guards on it would recompile. Selective activation
checkpointing must not see it either: where a recomputation finds a scale known that the forward had
to compute, the saved results of operators would go to the wrong ones. In both cases one opaque
operator is called, which asks the object that knows.

A handle names that object. It is a tensor, an input of a graph like any other, so that layers can
share a graph. Each question has an operator of its own, defined next to the class that answers it
(``weight_queries``, ``amax_history``).
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch

from fp8_dist.kernels import CustomOp, Scaling
from fp8_dist.torch_internals import OpOverload, is_selectively_checkpointed

P = ParamSpec("P")
R = TypeVar("R")

# A graph input is plain data, hence numbers. An entry goes when its owner is freed.
_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()

# The implementation of each query, for modes that want to see the operators inside.
QUERIES: dict[OpOverload, Callable[..., Any]] = {}


def register_handle(owner: object) -> torch.Tensor:
    """A new handle of an object that is queried at run time: a 0-dim int64 CPU tensor."""
    number = next(_numbers)
    _owners[number] = owner
    with torch.device("cpu"):
        return torch.tensor(number)


def owner_of(handle: torch.Tensor) -> Any:
    """The object of a handle."""
    return _owners[int(handle.item())]


def must_query() -> bool:
    """Whether a question must be asked by its operator, not by calling the object that knows."""
    return torch.compiler.is_compiling() or is_selectively_checkpointed()


def query(schema: str) -> Callable[[Callable[P, R]], CustomOp[P, R]]:
    """A decorator: defines the operator of one question, with the function that answers it.

    The answer runs without gradients and outside of inference mode: what an evaluation finds out,
    training may save. In the schema ``Tensor handle`` names who is asked.
    """

    def define(answer: Callable[P, R]) -> CustomOp[P, R]:
        implementation = torch.inference_mode(False)(torch.no_grad()(answer))
        # A CUDA graph would replay the answer that it was captured with.
        op = CustomOp(schema, implementation, (torch.Tag.cudagraph_unsafe,))
        QUERIES[op.overload] = implementation
        return op

    return define


def copies(scalings: Iterable[Scaling], device: torch.device) -> list[torch.Tensor]:
    """Scalings as a query returns them: copies, as a graph may write into them."""
    return [tensor.to(device, copy=True) for scaling in scalings for tensor in scaling]
