"""Routers that are nn.Linear stay in high precision in all mixtures of transformers."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fp8_dist import auto_filter, skip_head

EXPERTS = 112  # per mixture; a multiple of 16 that is not used as another size
NUMBER = re.compile(r"(\w+_)?num(_local|_routed)?_experts|n_routed_experts")
# Matches classes of routers, or of gates that may be routers: the name and the body.
CLASSES = re.compile(r"\nclass (\w+(?:Router|Gating|Gate))\(nn\.Module\):(.*?)(?=\n\S)", re.DOTALL)
# Gates that multiply features, and a router with a single output for the whole model.
NO_ROUTERS = re.compile(r"\w+ForgetGate|DFineGate|Deimv2Gate|GraniteDoclingDensityRouter")
# Settings that the default configs of models lack.
SETTINGS: dict[str, Any] = {
    "enable_moe_block": True,
    "head_dim": 64,
    "moe_intermediate_size": 64,
    "num_experts": EXPERTS,
    "rope_theta": 1e4,
    "top_k_experts": 2,
}


def classes() -> dict[str, set[str]]:
    """The classes of routers that have an nn.Linear, by the module that defines the model."""
    found: dict[str, set[str]] = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        names = {name for name, body in CLASSES.findall(path.read_text()) if "nn.Linear(" in body}
        if names := {name for name in names if not NO_ROUTERS.fullmatch(name)}:
            found[f"transformers.models.{path.parent.name}.{path.stem}"] = names
    return found


ROUTERS = classes()


def configured(config: PreTrainedConfig) -> PreTrainedConfig:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            configured(value)
        elif NUMBER.fullmatch(name):
            setattr(config, name, EXPERTS)
        elif name in ("encoder_layers", "num_layers"):
            setattr(config, name, 4)
    for name, value in SETTINGS.items():
        if vars(config).get(name) in (None, False):
            setattr(config, name, value)
    return config


def built(module: str) -> Iterator[nn.Module]:
    """Yield the models of a module that can be built from a default config."""
    for cls in vars(import_module(module)).values():
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.__module__ == module:
            try:
                with torch.device("meta"):
                    yield cls(configured(cls.config_class()))
            except (AttributeError, ImportError, TypeError, ValueError):
                continue


def layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {fqn: m for fqn, m in model.named_modules() if isinstance(m, nn.Linear)}


def test_classes_are_found() -> None:
    assert len(ROUTERS) > 5


@pytest.mark.parametrize("module", ROUTERS)
def test_routers_and_nothing_else_are_called_so(module: str) -> None:
    for model in built(module):
        parts = [m for m in model.modules() if type(m).__name__ in ROUTERS[module]]
        routers = {layer for part in parts for layer in layers(part).values()}
        if not routers:
            continue
        admits, by_size = skip_head(model), auto_filter("tensorwise", model=model)
        for fqn, layer in layers(model).items():
            reasons = [each.reasons[fqn] for each in (admits, by_size) if not each(layer, fqn)]
            called = ["it is a router" in reason for reason in reasons]
            assert called == [True, True] if layer in routers else not any(called), fqn
        return
    pytest.fail(f"no model of {module} with a router could be built")
