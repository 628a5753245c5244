"""Tests that run on every rank."""

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

    The parameters of the test are those of the function. What ``pytest.mark.parametrize`` gives to
    them travels by value.

    Args:
        sizes: their product is the number of ranks; a string stands for the parameter of this name,
            a number or the axes of a mesh.
        returns: what the function must return on every rank.
        timeout: seconds, instead of the pool's.
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
