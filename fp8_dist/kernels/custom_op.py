"""The library's operators: ``torch.ops.fp8_dist.NAME``, opaque to compilers.

A compiled graph calls the operator, so that eager code and every backend run the same
implementation and produce the same bits. Eager code that nothing observes calls the implementation
directly, because the dispatcher costs more than the implementation on small tensors.
"""

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.library import infer_schema

from fp8_dist.torch_internals import OpOverload, can_skip_dispatch

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LIB = torch.library.Library("fp8_dist", "FRAGMENT")


class CustomOp(Generic[_P, _R]):
    """Operator with a portable implementation, and with others for some device types.

    The first argument is a tensor, passed by position. Its device selects the implementation. A
    call skips the dispatcher where :func:`can_skip_dispatch` allows it. The operator has no
    gradient.

    Attributes:
        portable: the implementation for all devices.
        implementations: the implementation for each device type.
        packet: the operator with all of its overloads, as registered with torch.
        overload: its ``default`` overload, as graphs and dispatch modes see it.
    """

    def __init__(
        self,
        schema: str,
        portable: Callable[_P, _R],
        tags: tuple[torch.Tag, ...] = (),
        fake: Callable[..., Any] | None = None,
    ) -> None:
        self.portable = portable
        self._name = schema.partition("(")[0]
        self.implementations: dict[str, Callable[_P, _R]] = {}
        _LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _LIB.impl(self._name, portable, "CompositeExplicitAutograd")
        self.packet: Any = getattr(torch.ops.fp8_dist, self._name)
        self.overload: OpOverload = self.packet.default
        update_wrapper(self, portable)
        if fake is not None:
            self.register_fake(fake)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        x: Any = args[0]
        if not can_skip_dispatch(x):
            return self.overload(*args, **kwargs)
        # (Reading x.device takes 0.3 us.)
        kind = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type
        run = self.implementations.get(kind, self.portable)
        if x.requires_grad and torch.is_grad_enabled():
            return run(x.detach(), *args[1:], **kwargs)  # type: ignore[arg-type]
        return run(*args, **kwargs)

    def register(self, device_type: str, run: Callable[_P, _R]) -> None:
        """Register an implementation for one device type ("cpu", "cuda")."""
        _LIB.impl(self._name, run, device_type.upper())
        self.implementations[device_type] = run

    def register_fake(self, fake: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorate a function as the implementation for tensors without data.

        It returns empty tensors with the shapes and dtypes of the results.
        """
        return torch.library.register_fake(f"fp8_dist::{self._name}", fake, lib=_LIB)


def composite_op(schema: str) -> Callable[[Callable[..., Any]], OpOverload]:
    """Decorate a function as a new operator that consists of other operators.

    In a graph of dynamo it is one node. AOTAutograd calls the function, and so replaces the node by
    the operators inside, with their gradients.
    """

    def define(function: Callable[..., Any]) -> OpOverload:
        name = schema.partition("(")[0]
        _LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIB.impl(name, function, "CompositeImplicitAutograd")
        overload: OpOverload = getattr(torch.ops.fp8_dist, name).default
        return overload

    return define


def custom_op(
    schema: str | None = None, fake: Callable[..., Any] | None = None
) -> Callable[[Callable[_P, _R]], CustomOp[_P, _R]]:
    """Decorate a function as the portable implementation of a new operator.

    Args:
        schema: the operator's name and types, such as ``"NAME(Tensor x, ...) -> Tensor"``. By
            default they follow from the function. Types that torch can't infer (such as a sequence
            of strings), and arguments that the operator writes, need a schema.
        fake: see :meth:`CustomOp.register_fake`; it may be registered later. Without it, tensors
            without data go through ``portable``, which must then work for symbolic sizes.
    """
    return lambda portable: CustomOp(schema or _schema_of(portable), portable, fake=fake)


def _schema_of(portable: Callable[..., Any]) -> str:
    """Return the schema of a function. Numbers are int, as graphs specialize them, not SymInt."""
    types = infer_schema(portable, mutates_args=()).replace("SymInt", "int")
    return f"{portable.__name__}{types}"
