"""Plug-ins for other people's models and loops: one package each, with an extra of its own.

The library imports none of them; they import its public names. ``integrations.transformers`` and
``integrations.torchtitan`` are imported when they are first used.
"""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("torchtitan", "transformers"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
