"""Weights that a model multiplies by, of any module, with their sizes and FLOPs."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

# Names of the number of experts per token in transformers' configs. Their ``top_k`` is an option of
# sampling.
_EXPERTS_IN_CONFIG = ("num_experts_per_tok", "experts_per_token")
# Its names in modules.
_EXPERTS_IN_MODULE = ("top_k", *_EXPERTS_IN_CONFIG)
# Modules that multiply by each of their matrices, once per token.
_PRODUCTS = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase, nn.Bilinear)
# Modules whose parameters are looked up, or multiplied more than once per token.
_NO_PRODUCTS = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@dataclass(frozen=True)
class Product:
    """A weight that a model multiplies by, or may multiply by.

    Attributes:
        kind: the kind of its owner: an nn.Linear, transformers' Conv1D, experts, or another module.
        name: the FQN of the linear layer or Conv1D, or of another module's parameter.
        owner: the module that has the parameter.
        shape: the global shape; [in, out] for a Conv1D.
        parameters: elements of the weight; 0 if an earlier product shares it.
        flops: FLOPs of the forward per token, 2 per multiplication. For experts, only those that a
            token visits count, or all if ``visited`` is None; 0 for a parameter that may be a
            table.
        visited: the number of experts that a token visits; None if it is not known.
    """

    kind: Literal["linear", "Conv1D", "experts", "other"]
    name: str
    owner: nn.Module
    shape: tuple[int, ...]
    parameters: int
    flops: int
    visited: int | None = None

    @property
    def reason(self) -> str:
        """The reason why no conversion reaches it; empty for an nn.Linear."""
        if self.kind == "linear":
            return ""
        if self.kind == "experts":
            found = f"{self.visited} per token" if self.visited else "FLOPs of all"
            return f"no nn.Linear, but a 3-D parameter of {self.shape[0]} experts ({found})"
        reason = f"no nn.Linear, but a parameter of {type(self.owner).__name__}"
        table = " (may be a table or a matrix; not counted in FLOPs)"
        return reason if self.flops else reason + table


def products_of(model: nn.Module) -> list[Product]:
    """List the products of a model, in its order; parameters may be on the meta device."""
    return list(_products(model))


def size_of(model: nn.Module) -> int:
    """Count the parameters of a model, shared ones once."""
    return sum(p.numel() for p in model.parameters() if not is_lazy(p))


def share_of(part: int, whole: int) -> float:
    """Return ``part / whole``, or 0 if ``whole`` is 0."""
    return part / whole if whole else 0.0


def _products(model: nn.Module) -> Iterator[Product]:
    modules = dict(model.named_modules())
    counted: set[int] = set()  # parameters, by id
    whole = (nn.Linear, *_NO_PRODUCTS)  # a parametrization is a module inside of these
    inside = {part for m in modules.values() if isinstance(m, whole) for part in m.modules()}
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            shape = (module.out_features, module.in_features)
            # A parametrized weight consists of several parameters.
            weights = [p for p in module.parameters() if not is_lazy(p) and p.ndim > 1]
            size = _count(weights, counted)
            yield Product("linear", name, module, shape, size, 2 * math.prod(shape))
        elif module not in inside:
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 2 or (parameter.ndim == 3 and parameter.shape[0] > 1):
                    path = f"{name}.{own}" if name else own
                    yield _of_parameter(path, parameter, modules, _count([parameter], counted))


def _of_parameter(
    name: str, parameter: torch.Tensor, modules: dict[str, nn.Module], size: int
) -> Product:
    owner, shape = modules[name.rpartition(".")[0]], tuple(parameter.shape)
    flops = 2 * parameter.numel()
    if is_conv1d(owner):
        return Product("Conv1D", name.rpartition(".")[0], owner, shape, size, flops)
    if parameter.ndim == 3 and not isinstance(owner, _PRODUCTS):
        called = re.search("expert|moe", f"{name} {type(owner).__name__}", re.IGNORECASE)
        config = getattr(modules[""], "config", None) if called else None
        visited = _experts_per_token(name, modules, config, shape[0])
        if visited or called:
            flops = flops // shape[0] * (visited or shape[0])
            return Product("experts", name, owner, shape, size, flops, visited)
    return Product("other", name, owner, shape, size, flops if isinstance(owner, _PRODUCTS) else 0)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, a linear layer whose weight is [in, out]."""
    classes = ((cls.__module__, cls.__name__) for cls in type(module).__mro__)
    return ("transformers.pytorch_utils", "Conv1D") in classes


def _experts_per_token(
    name: str, modules: dict[str, nn.Module], config: object, experts: int
) -> int | None:
    """Number of experts per token in a parameter's owner, its neighbours, or the model's config.

    Returns None if none of them has it.
    """
    owner = name.rpartition(".")[0]
    parent = modules[owner.rpartition(".")[0]]
    places = [
        (module, _EXPERTS_IN_MODULE) for module in (modules[owner], parent, *parent.children())
    ]
    for place, attributes in (*places, (config, _EXPERTS_IN_CONFIG)):
        for attribute in attributes:
            found = getattr(place, attribute, None)
            if isinstance(found, int) and 0 < found <= experts:
                return found
    return None


def _count(parameters: Iterable[torch.Tensor], counted: set[int]) -> int:
    """The elements of the parameters that were not counted before."""
    new = [p for p in parameters if id(p) not in counted]
    counted.update(map(id, new))
    return sum(p.numel() for p in new)
