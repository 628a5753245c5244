"""Queries: ops that read Python state at run time.

Whether a weight's statistics are cached depends on what happened since the last step. A compiled
graph must not decide that when it is traced, and guards on it would recompile. Selective activation
checkpointing must not see it either: if a recomputation found statistics that the forward had to
compute, saved results would be assigned to the wrong operators. In both cases a custom op looks the
statistics up or measures them.

A handle identifies the object that has the state. It is a tensor, and an input of the graph like
any other, so layers can share a graph. Each query is defined next to the class that it reads.
"""

import itertools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import torch

from fp8_dist.kernels import CustomOp
from fp8_dist.torch_internals import OpOverload, is_selectively_checkpointed

P = ParamSpec("P")
R = TypeVar("R")

# Objects by the number in their handle. An entry is removed when its object is freed.
_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()

# The implementation of each query, for dispatch modes that must see the operators inside it.
QUERIES: dict[OpOverload, Callable[..., Any]] = {}


def register_handle(owner: object) -> torch.Tensor:
    """Make a handle for an object: a 0-dim int64 CPU tensor."""
    number = next(_numbers)
    _owners[number] = owner
    return torch.tensor(number, device="cpu")


def owner_of(handle: torch.Tensor) -> Any:
    """The object that a handle identifies."""
    return _owners[int(handle.item())]


def needs_op() -> bool:
    """Whether state must be read by a query, and not by a call of the object's method."""
    return torch.compiler.is_compiling() or is_selectively_checkpointed()


def query(schema: str) -> Callable[[Callable[P, R]], CustomOp[P, R]]:
    """Define a query, which the decorated function implements.

    The function runs without gradients and outside inference mode, because training may save scales
    that an evaluation computed. In the schema, ``Tensor handle`` identifies the object.
    """

    def define(function: Callable[P, R]) -> CustomOp[P, R]:
        implementation = torch.inference_mode(False)(torch.no_grad()(function))
        # A CUDA graph would replay the result that it was captured with.
        op = CustomOp(schema, implementation, (torch.Tag.cudagraph_unsafe,))
        QUERIES[op.overload] = implementation
        return op

    return define
