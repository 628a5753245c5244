"""A change of a layer's class in place, and the methods ``forward`` that are bound to the layer.

Whatever refers to a layer goes on working when its class changes. A bound method is the exception:
it keeps the function of the class that the layer had. Those that the layer keeps itself follow. A
layer whose method others keep should not change its class.
"""

import gc
import sys
from collections import Counter
from collections.abc import Collection
from functools import partial
from inspect import currentframe
from types import CellType, FrameType, MethodType, TracebackType
from typing import Any
from weakref import WeakMethod, getweakrefs

from torch import nn


def change_class(layer: nn.Module, new: type) -> None:
    """Change the class of a layer; bound ``forward`` methods that it keeps itself follow."""
    bound = _bound_forwards(layer)
    layer.__class__ = new
    forward = MethodType(new.forward, layer)  # type: ignore[attr-defined]
    for namespace, name in bound:
        namespace[name] = forward


def _bound_forwards(layer: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where a layer keeps the ``forward`` of its class, bound to it: namespaces, and names there.

    They are its attributes and, for its signature, those of accelerate's wrapper.
    """
    own = vars(layer)
    return [
        (namespace, name)
        for namespace in (own, getattr(own.get("forward"), "__dict__", {}))
        for name, value in namespace.items()
        if _is_forward_of(layer, value)
    ]


def _is_forward_of(layer: nn.Module, value: object) -> bool:
    """Whether a value is the method ``forward`` of the layer's class, bound to the layer."""
    return isinstance(value, MethodType) and value == MethodType(type(layer).forward, layer)


def why_forward_is_kept(layer: nn.Module) -> str:
    """Return why the ``forward`` of a layer would not follow a change of its class, or ``""``.

    accelerate's hooks call the attribute ``_old_forward``, which follows (:func:`change_class`).
    """
    own = vars(layer)
    forward = own.get("forward")
    if forward is None or _is_forward_of(layer, forward):
        return ""
    function = forward.func if isinstance(forward, partial) else None
    if getattr(function, "__module__", None) == "accelerate.hooks":
        forward = own.get("_old_forward")
        if _is_forward_of(layer, forward):
            return ""
    shown = getattr(forward, "__qualname__", type(forward).__name__)
    return f"its forward was replaced by {shown}, which may call that of its class"


class _Example:
    def forward(self) -> None:
        """A method that nothing holds."""


_REFERENCES = sys.getrefcount(_Example.forward)


def with_forward_held(layers: Collection[nn.Module]) -> set[nn.Module]:
    """The layers whose bound method ``forward`` other objects hold: a list, a closure, a partial.

    It would go on calling the function of the class that the layer has now. A method is held if it
    has more references than those that follow (:func:`change_class`), and those of frames that an
    exception has left, which call nothing any more. A WeakMethod makes a method of a function.
    """
    held = {
        layer
        for layer in layers
        for ref in getweakrefs(layer)
        if isinstance(ref, WeakMethod) and _is_forward_of(layer, ref())
    }
    if all(sys.getrefcount(type(layer).forward) == _REFERENCES for layer in layers):
        return held
    gc.collect()
    known = _references_of_left_frames()
    known.update(id(space[name]) for layer in layers for space, name in _bound_forwards(layer))
    users = gc.get_referrers(*{type(layer).forward for layer in layers})
    methods: list[Any] = [_Example().forward, *(each for each in users if type(each) is MethodType)]
    del users
    unheld, *counts = [sys.getrefcount(method) for method in methods]
    found = zip(methods[1:], counts, strict=True)
    owners = {id(each.__self__) for each, count in found if count > unheld + known[id(each)]}
    return held | {layer for layer in layers if id(layer) in owners}


def _references_of_left_frames() -> "Counter[int]":
    """The number of references to each object, by id, of frames that were left by an exception."""
    frames = {each.tb_frame for each in gc.get_objects() if type(each) is TracebackType}
    running: FrameType | None = currentframe()
    while running is not None:
        frames.discard(running)
        running = running.f_back
    # Before Python 3.13, f_locals of a function is a dict that the frame keeps.
    names = [frame.f_locals for frame in frames if frame.f_locals is not frame.f_globals]
    variables = gc.get_referents(*frames)
    cells = {id(each): each for each in variables if type(each) is CellType}
    return Counter(map(id, variables + gc.get_referents(*cells.values(), *names)))
