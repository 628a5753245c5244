"""Configs for torchtitan's command line: ``--module fp8_dist.integrations.torchtitan``.

``--config <name>_<recipe>`` selects the config ``<name>`` of torchtitan's llama3 with that recipe,
such as ``llama3_8b_tensorwise`` or ``llama3_debugmodel_rowwise_folded``.
"""

from collections.abc import Callable
from typing import Any

from torchtitan.models.llama3 import config_registry

from fp8_dist.integrations.torchtitan.parallelize import with_float8
from fp8_dist.recipe_names import Float8LinearRecipeName


def __getattr__(name: str) -> Callable[[], Any]:
    for recipe in Float8LinearRecipeName:
        base = name.removesuffix(f"_{recipe.value}")
        if base != name and hasattr(config_registry, base):
            return lambda: with_float8(getattr(config_registry, base)(), recipe.value)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
