"""Integrations with the models and training loops of other libraries, in one package for each.

The rest of the library does not depend on them. ``integrations.transformers`` and
``integrations.torchtitan`` are imported when they are first used, and ``integrations.saving`` by
``freeze_to_float8`` for models of transformers.
"""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("torchtitan", "transformers"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
