"""Routers and gates of mixtures of experts: the layers that decide which experts compute.

A rounding error in their few outputs sends a token to other experts, and their GEMM is too small
for a gain. No class or attribute marks them; they are recognized by their names, or by the experts
beside them. The gate of a gated MLP is not a router: it has as many outputs as the MLP is wide, and
its neighbors are not experts.
"""

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

# A name with "router" in one part, and with "expert" in no later part.
_IN_ROUTER = re.compile(r"router(?!.*\..*expert)", re.I)
# The name of a gate that is a layer, and of a module that consists of gates or of a gate's layers.
_GATE = re.compile("gates?|gating|wg", re.I)
_OF_GATE = re.compile(f"(.*_)?({_GATE.pattern})(_?(fn|head|layer|linear|mlp|net|network))?s?", re.I)
_EXPERTS = re.compile("(?!.*shared).*(expert|moe)", re.I)
_NUMBERED_EXPERT = re.compile(rf"{_EXPERTS.pattern}_?\d+", re.I)
_MOST_LAYERS = 3  # of a router that is not called one; an attention block has four
# Modules whose weights may have three dims and are no experts.
_NO_EXPERTS = nn.Conv1d | nn.ConvTranspose1d | nn.Bilinear


def is_called_router(fqn: str, out_features: int, in_features: int) -> bool:
    """Return whether a layer is called a router, or is called a gate and has few outputs.

    This serves layers whose neighbors are unknown.
    """
    is_gate = bool(_GATE.fullmatch(fqn.rpartition(".")[2]))
    return bool(_IN_ROUTER.search(fqn)) or (is_gate and 4 * out_features <= in_features)


def routers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are called routers, and those beside experts that look like routers.

    A layer beside experts, or a module of up to three layers, is a router if two of these hold: its
    last layer has as many outputs as there are experts; that layer has few outputs; it is called a
    gate. "Few" means fewer than inputs if the experts are called experts, else at most a quarter.
    (Any module list may hold experts. At worst, a head of few outputs stays in high precision.) A
    layer needs no second sign if it has as many outputs as there are modules called experts.
    """
    for fqn, parent in model.named_modules():
        if _IN_ROUTER.search(fqn):
            yield parent
        places = (fqn.rpartition(".")[2], parent), *parent.named_children()
        beside = {facts for name, module in places for facts in _experts(name, module)}
        known = any(named for named, _ in beside)
        numbers = {number for _, number in beside}
        for name, child in parent.named_children():
            layers = [*_layers(child)]
            is_layer = layers == [child]
            decides = not is_layer and known and bool(_OF_GATE.fullmatch(name))
            decides |= "router" in type(child).__name__.lower()
            if beside and 0 < len(layers) <= _MOST_LAYERS and not isinstance(child, nn.ModuleList):
                out, in_ = layers[-1].out_features, layers[0].in_features
                few = out < in_ if known else 4 * out <= in_
                decides |= (out in numbers) + few + bool(_GATE.fullmatch(name)) > 1
                decides |= is_layer and (True, out) in beside
            if decides and (is_layer or not any(map(_EXPERTS.match, dict(child.named_modules())))):
                yield from child.modules()


def _layers(module: nn.Module) -> Iterator[Any]:
    """Yield the linear layers in a module, or their wrappers (an adapter's has their sizes too)."""
    if all(isinstance(getattr(module, n, None), int) for n in ("in_features", "out_features")):
        yield module
    else:
        for child in module.children():
            yield from _layers(child)


def _experts(name: str, module: nn.Module) -> Iterator[tuple[bool, int]]:
    """Yield for possible experts in a module whether they are called so, and their number or 0.

    If matrices are called experts, their first dim may not be the number of experts.
    """
    if not isinstance(module, _NO_EXPERTS) and not hasattr(module, "out_features"):
        for attribute, parameter in module.named_parameters(recurse=False):
            if not is_lazy(parameter) and parameter.ndim in (2, 3) and len(parameter) > 1:
                called = bool(_EXPERTS.match(f"{name} {type(module).__name__} {attribute}"))
                if called or parameter.ndim == 3:
                    yield called and parameter.ndim == 3, len(parameter)
    children = dict(module.named_children())
    numbered = sum(bool(_NUMBERED_EXPERT.fullmatch(child)) for child in children)
    if numbered > 1:
        yield True, numbered
    for child, part in children.items():
        if isinstance(part, nn.ModuleList | nn.ModuleDict | nn.ParameterList):
            yield bool(_EXPERTS.match(child)), len(part)
        elif _EXPERTS.match(child) and not hasattr(part, "out_features"):
            yield True, 0
