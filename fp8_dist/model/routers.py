"""Routers and gates of mixtures: the layers that decide which experts compute.

A rounding error in their few outputs sends a token to other experts, and their GEMM is too small
for a gain. No class or attribute says what they are, but their names do, or the experts beside
them. The gate of a gated MLP is none of them: it has as many outputs as the MLP is wide, and its
neighbors are not experts.
"""

import re
from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy

# The name of a gate that is a layer, and of a module that consists of gates or of a gate's layers.
_GATE = re.compile("gates?|gating|wg")
_OF_GATE = re.compile(f"(.*_)?({_GATE.pattern})(_(fn|head|layer|linear|mlp|net|network))?s?")
_EXPERTS = re.compile("(?!.*shared).*(expert|moe)", re.IGNORECASE)
# Modules whose weights may have three dims and are no experts.
_NO_EXPERTS = nn.Conv1d | nn.ConvTranspose1d | nn.Bilinear
_LISTS = nn.ModuleList | nn.ModuleDict | nn.ParameterList


def is_called_router(fqn: str, out_features: int, in_features: int) -> bool:
    """Return whether a layer is a router by its name, or a gate by its name and few outputs.

    This is all that can be known of a layer whose neighbors are not known.
    """
    is_gate = bool(_GATE.fullmatch(fqn.rpartition(".")[2]))
    return _is_in_router(fqn) or (is_gate and 4 * out_features <= in_features)


def _is_in_router(fqn: str) -> bool:
    """Return whether a name has a part that says router, and none after it that says expert."""
    parts = fqn.lower().split(".")
    router, expert = (
        max((i for i, part in enumerate(parts) if word in part), default=-1)
        for word in ("router", "expert")
    )
    return router >= max(expert, 0)


def routers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are called routers, and those beside experts that decide.

    A layer decides if it has as many outputs as there are experts, or if it is called a gate and
    has fewer outputs than inputs; if nothing is called experts, at most a quarter as many.
    """
    for fqn, parent in model.named_modules():
        if _is_in_router(fqn):
            yield parent
        places = (fqn.rpartition(".")[2], parent), *parent.named_children()
        beside = {each for name, module in places for each in _experts(name, module)}
        known = any(named for named, _ in beside)
        for name, child in parent.named_children():
            # A wrapper of a layer, such as an adapter's, has these attributes, too.
            out, in_ = (getattr(child, each, None) for each in ("out_features", "in_features"))
            if isinstance(out, int) and isinstance(in_, int):
                is_gate = bool(_GATE.fullmatch(name))
                decides = any(number == out and (named or is_gate) for named, number in beside)
                few = out < in_ if known else beside and 4 * out <= in_
                decides |= is_gate and bool(few)
            else:
                decides = known and bool(_OF_GATE.fullmatch(name))
                decides |= "router" in type(child).__name__.lower()
                decides &= not any(map(_EXPERTS.match, dict(child.named_modules())))
            if decides:
                yield from child.modules()


def _experts(name: str, module: nn.Module) -> Iterator[tuple[bool, int]]:
    """Yield what may be experts in a module: whether a name says so, and their number or 0."""
    if not isinstance(module, _NO_EXPERTS):
        for own, parameter in module.named_parameters(recurse=False):
            if not is_lazy(parameter) and parameter.ndim == 3 and len(parameter) > 1:
                called = f"{name} {type(module).__name__} {own}"
                yield bool(_EXPERTS.match(called)), len(parameter)
    for own, child in module.named_children():
        if isinstance(child, _LISTS):
            yield bool(_EXPERTS.match(own)), len(child)
        elif _EXPERTS.match(own) and not hasattr(child, "out_features"):
            yield True, 0
