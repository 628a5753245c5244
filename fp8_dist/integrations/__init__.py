"""Integrations with the models and training loops of other libraries, one package for each.

The rest of the library does not depend on them. ``integrations.transformers`` and
``integrations.torchtitan`` are imported when they are first used. This module registers the adapter
for the experts of transformers.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

from fp8_dist.moe.experts import CUSTOM_EXPERTS, EXPERTS_ADAPTERS, ExpertsAdapter


@cache
def _experts_of_transformers() -> ExpertsAdapter:
    try:
        return import_module(f"{__name__}.transformers.experts").ADAPTER
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("transformers."):
            return CUSTOM_EXPERTS  # the installed release does not support them
        raise


EXPERTS_ADAPTERS["transformers"] = _experts_of_transformers


def __getattr__(name: str) -> ModuleType:
    if name in ("torchtitan", "transformers"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
