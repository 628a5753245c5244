"""A change of a layer's class in place, and the methods ``forward`` that are bound to the layer.

Whatever refers to a layer goes on working when its class changes. A bound method is the exception:
it keeps the function of the class that the layer had. Those that the layer keeps itself follow. A
layer whose method others keep should not change its class.
"""

import gc
import sys
from collections.abc import Collection
from functools import partial
from types import CellType, FrameType, FunctionType, MethodType
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


# What may pass on a reference that a frame holds: closures, and the variables of a frame.
_PASSING = (CellType, FunctionType, tuple, dict)


def with_forward_held(layers: Collection[nn.Module]) -> set[nn.Module]:
    """The layers whose bound method ``forward`` other objects hold: a list, a closure, a partial.

    It would go on calling the function of the class that the layer has now. Methods that the layer
    keeps itself follow (:func:`change_class`). A WeakMethod makes a method of that function.
    """
    held = {
        layer
        for layer in layers
        for ref in getweakrefs(layer)
        if isinstance(ref, WeakMethod) and _is_forward_of(layer, ref())
    }
    # The search takes long. Without bound methods, the class and this call refer to the function.
    if all(sys.getrefcount(type(layer).forward) == 2 for layer in layers):
        return held
    gc.collect()
    by_id = {id(layer): layer for layer in layers}
    users = gc.get_referrers(*{type(layer).forward for layer in layers})
    while users:
        method = users.pop()
        layer = by_id.get(id(method.__self__)) if type(method) is MethodType else None
        if layer is not None and _is_held(method, [space for space, _ in _bound_forwards(layer)]):
            held.add(layer)
    return held


def _is_held(method: MethodType, by_layer: Collection[object]) -> bool:
    """Whether anything refers to a method besides its layer, and frames that an exception has left.

    Frames that run are not among referrers. They hold an object that has none.
    """
    found: list[object] = [method]
    seen = {id(found), *map(id, by_layer)}
    while found:
        users = gc.get_referrers(found.pop())
        for user in users:
            if id(user) in seen or type(user) is FrameType:
                continue
            if type(user) not in _PASSING:
                return True
            seen.add(id(user))
            found.append(user)
        if not users:
            return True
        del users
    return False
