"""Integrations with the models and training loops of other libraries, in one package for each.

The rest of the library does not depend on them. ``integrations.transformers`` and
``integrations.torchtitan`` are imported when they are first used. This module registers the kind of
experts that models of transformers have.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

from fp8_dist.moe.experts import KINDS, OWN, Kind


@cache
def _experts_of_transformers() -> Kind:
    try:
        return import_module(f"{__name__}.transformers.experts").KIND
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("transformers."):
            return OWN  # they are not known in the installed release
        raise


KINDS["transformers"] = _experts_of_transformers


def __getattr__(name: str) -> ModuleType:
    if name in ("torchtitan", "transformers"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
