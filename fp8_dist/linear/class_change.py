"""Change the class of a layer in place, and rebind the ``forward`` methods that the layer holds.

References to a layer stay valid when its class changes. But a bound method that was obtained before
the change still calls the function of the old class. Those in the layer's attributes are rebound.
"""

import sys
from functools import partial
from types import MethodType

from torch import nn

from fp8_dist.text import is_torchaos


def change_class(layer: nn.Module, new: type) -> None:
    """Change the class of a layer, and rebind the ``forward`` methods that its attributes hold.

    This includes ``__wrapped__`` of accelerate's wrapper of ``forward``, which has its signature.
    """
    attributes = vars(layer)
    for namespace in (attributes, getattr(attributes.get("forward"), "__dict__", {})):
        for name, value in namespace.items():
            if _is_forward_of(layer, value):
                namespace[name] = MethodType(new.forward, layer)  # type: ignore[attr-defined]
    layer.__class__ = new


def _is_forward_of(layer: nn.Module, value: object) -> bool:
    """Whether a value is the method ``forward`` of the layer's class, bound to the layer."""
    return isinstance(value, MethodType) and value == MethodType(type(layer).forward, layer)


def why_class_is_kept(kind: type[nn.Linear]) -> str:
    """Return why a change of class would lose what layers of this class compute, or ``""``."""
    forward = nn.Linear.forward
    if kind.forward is not forward:
        if is_torchaos(kind):
            return "torchao has converted it: convert the plain model"
        return f"its class {kind.__name__} has a forward of its own"
    # A replacement may have the name and the __module__ of torch's function (functools.wraps).
    if getattr(forward, "__globals__", None) is not vars(sys.modules[nn.Linear.__module__]):
        replacement = getattr(forward, "__qualname__", type(forward).__name__)
        return (
            f"nn.Linear.forward was replaced by {replacement}, which float8 layers would not call; "
            "undo that before the conversion, or use hooks"
        )
    return ""


def why_forward_is_kept(layer: nn.Module) -> str:
    """Return why a layer would still call ``forward`` of its old class after a change, or ``""``.

    accelerate's hooks call the attribute ``_old_forward``, which :func:`change_class` rebinds.
    """
    forward = vars(layer).get("forward")
    function = forward.func if isinstance(forward, partial) else None
    if getattr(function, "__module__", None) == "accelerate.hooks":
        forward = vars(layer).get("_old_forward", forward)
    if forward is None or _is_forward_of(layer, forward):
        return ""
    replacement = getattr(forward, "__qualname__", type(forward).__name__)
    return f"its forward was replaced by {replacement}, which may call that of its class"
