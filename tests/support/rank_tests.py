"""A decorator for tests that run on every rank."""

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

from ranks import RankPools

Function = Callable[..., Any]


def on_ranks(
    *sizes: int | str, returns: object = None, timeout: float | None = None
) -> Callable[[Function], Function]:
    """Turn a function that is called on every rank into a test.

    The test has the parameters of the function. Values from ``pytest.mark.parametrize`` are passed
    by value.

    Args:
        sizes: the factors of the number of ranks. A string names a parameter, which is a number or
            the axes of a mesh.
        returns: the value that the function must return on every rank.
        timeout: seconds, instead of the pool's timeout.
    """

    def decorate(function: Function) -> Function:
        def test(ranks: RankPools, **arguments: Any) -> None:
            given = [arguments[n] if isinstance(n, str) else n for n in sizes]
            size = math.prod(math.prod(n.values()) if isinstance(n, dict) else n for n in given)
            task = (function.__module__, function.__name__, arguments)
            found = ranks(size).run(_call, *task, timeout=timeout)
            assert found == [returns] * size

        own = inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [own, *inspect.signature(function).parameters.values()]
        )
        test.__name__, test.__doc__ = function.__name__, function.__doc__
        test.__module__, test.__qualname__ = function.__module__, function.__qualname__
        test.on_rank = function  # type: ignore[attr-defined]
        return test

    return decorate


def _call(module: str, name: str, arguments: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(module), name).on_rank(**arguments)
