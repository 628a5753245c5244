"""A report of a conversion: the shares of a model's parameters and FLOPs that are in float8."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from textwrap import indent
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp8_dist.linear.module import Float8Linear, why_unconvertible
from fp8_dist.linear.weight import weights_of
from fp8_dist.model.filters import LEFT_OUT
from fp8_dist.text import aligned

# Names of the number of experts per token in transformers' configs, where ``top_k`` is an option of
# sampling.
_EXPERTS_IN_CONFIG = ("num_experts_per_tok", "experts_per_token")
# Names of the number of experts per token in modules.
_EXPERTS_IN_MODULE = ("top_k", *_EXPERTS_IN_CONFIG)
# Modules that multiply each token by each of their matrices once.
_PRODUCTS = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase, nn.Bilinear)
# Modules whose 2-D or 3-D parameters are looked up, or multiply each token more than once.
_NO_PRODUCTS = (nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.ConvTranspose1d)

Kind = Literal["linear", "Conv1D", "experts", "other"]


@dataclass(frozen=True)
class WeightSummary:
    """A weight that the model multiplies by, or may multiply by.

    Attributes:
        name: the FQN of the linear layer, or of another module's parameter.
        shape: the global shape; ``[out, in]`` for a linear layer, ``[in, out]`` for a Conv1D.
        converted: whether the layer computes in float8.
        reason: the reason why the layer does not compute in float8; empty if it does.
        parameters: the number of elements of the weight; 0 if an earlier row has the same weight.
        flops: the FLOPs of the product in the forward, per token, 2 per multiplication. For
            experts, of those that a token visits, or of all if their number is not known; 0 for a
            2-D parameter that may be a table.
        kind: the kind of module that has the weight.
        visited: the number of experts that a token visits; None if it is not known.
    """

    name: str
    shape: tuple[int, ...]
    converted: bool
    reason: str
    parameters: int
    flops: int
    kind: Kind = "linear"
    visited: int | None = None


@dataclass(frozen=True)
class ConversionSummary:
    """The result of :func:`conversion_summary`; ``str()`` prints a table.

    Attributes:
        rows: every weight that the model multiplies by, or may multiply by, in the order of the
            model's modules.
        parameters: the number of elements of the model's parameters; shared ones count once.
    """

    rows: tuple[WeightSummary, ...]
    parameters: int

    @property
    def converted(self) -> tuple[WeightSummary, ...]:
        """The rows of weights in float8."""
        return tuple(row for row in self.rows if row.converted)

    @property
    def skipped(self) -> tuple[WeightSummary, ...]:
        """The rows of weights that are not in float8."""
        return tuple(row for row in self.rows if not row.converted)

    @property
    def parameter_share(self) -> float:
        """The share of all parameters that is in weights of float8 layers, from 0 to 1."""
        return self.shares(self.converted)[0]

    @property
    def flop_share(self) -> float:
        """The share of the FLOPs of all products with weights that is in float8, from 0 to 1."""
        return self.shares(self.converted)[1]

    def shares(self, rows: Iterable[WeightSummary]) -> tuple[float, float]:
        """Return the shares of rows in all parameters and in the FLOPs of all rows, from 0 to 1."""
        rows, flops = tuple(rows), sum(row.flops for row in self.rows)
        parameters = sum(row.parameters for row in rows)
        return parameters / (self.parameters or 1), sum(row.flops for row in rows) / (flops or 1)

    def __str__(self) -> str:
        lines = [
            f"conversion_summary: {len(self.converted)} of {len(self.rows)} weights in float8, "
            f"{self.parameter_share:.1%} of {self.parameters:,} parameters, {self.flop_share:.1%} "
            "of FLOPs",
            "FLOPs: of products with weights, without attention's own products and convolutions",
        ]
        table: list[tuple[str, ...]] = [("weight", "shape", "", "parameters", "FLOPs", "reason")]
        for name, rows in alike(self.rows):
            shape = " x ".join(map(str, rows[0].shape))
            shares = [f"{share:.1%}" for share in self.shares(rows)]
            verdict = "float8" if rows[0].converted else "skip"
            table.append((name, shape, verdict, *shares, rows[0].reason))
        rest = self.parameters - sum(row.parameters for row in self.rows)
        if rest:
            share = f"{rest / self.parameters:.1%}"
            table.append(("(embeddings, norms, biases, ...)", "", "", share, "", ""))
        return "\n".join([*lines, indent(aligned(table, right=(3, 4)), "  ")])


def conversion_summary(model: nn.Module) -> ConversionSummary:
    """Summarize which weights of a model are in float8 and which are not, with the reasons.

    Call it after ``convert_to_float8_training``, before or after the model is distributed. The
    summary lists linear layers, and also parameters that modules multiply by without an nn.Linear,
    which the conversion does not replace: 3-D parameters of experts, and matrices such as those of
    nn.MultiheadAttention. A 2-D parameter of an unknown module may be a table (of positions, for
    instance), so its FLOPs are not counted. ::

        print(conversion_summary(model))

    Collectives: none.
    """
    size = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    return ConversionSummary(tuple(_rows(model)), size)


def alike(rows: Iterable[WeightSummary]) -> list[tuple[str, list[WeightSummary]]]:
    """Group rows that differ only in the numbers in their names.

    The name of a group has ``*`` in place of the numbers, and ends with the number of rows.
    """
    groups: dict[tuple[object, ...], list[WeightSummary]] = {}
    for row in rows:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.name)
        groups.setdefault((pattern, row.shape, row.converted, row.reason), []).append(row)
    return [
        (f"{key[0]} ({len(found)})" if len(found) > 1 else found[0].name, found)
        for key, found in groups.items()
    ]


def _rows(model: nn.Module) -> Iterator[WeightSummary]:
    modules = dict(model.named_modules())
    counted: set[int] = set()  # parameters, by id
    whole = (nn.Linear, *_NO_PRODUCTS)  # a parametrization is a module inside one of these
    inside = {part for m in modules.values() if isinstance(m, whole) for part in m.modules()}
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            # A parametrized weight consists of several parameters. A layer may have children.
            children = {name for name, _ in module.named_children()} - {"parametrizations"}
            weights = [
                p
                for own, p in module.named_parameters()
                if not is_lazy(p) and p.ndim > 1 and own.partition(".")[0] not in children
            ]
            shape, reason = (module.out_features, module.in_features), ""
            if not isinstance(module, Float8Linear):
                never = "convert_to_float8_training has not seen it"
                unconvertible = why_unconvertible(module)
                reason = LEFT_OUT.get(module) or unconvertible or never
            name, flops = name or "(the module itself)", 2 * math.prod(shape)
            yield WeightSummary(name, shape, not reason, reason, _count(weights, counted), flops)
        elif module not in inside:
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 2 or (parameter.ndim == 3 and parameter.shape[0] > 1):
                    yield _of_parameter(name, own, parameter, modules, _count([parameter], counted))


def _of_parameter(
    owner: str, own: str, parameter: torch.Tensor, modules: dict[str, nn.Module], size: int
) -> WeightSummary:
    """Return the row of a parameter whose owner is not an nn.Linear."""
    module, shape = modules[owner], tuple(parameter.shape)
    name, converted = f"{owner}.{own}".strip("."), own in weights_of(module)
    reason = f"no nn.Linear, but a parameter of {type(module).__name__}"
    kind: Kind = "Conv1D" if _is_conv1d(module) and own == "weight" else "other"
    flops, visited, is_product = 2 * parameter.numel(), None, isinstance(module, _PRODUCTS)
    if parameter.ndim == 3 and not is_product:
        called = re.search("expert|moe", f"{name} {type(module).__name__}", re.IGNORECASE)
        visited = _experts_per_token(owner, modules, shape[0], bool(called))
        if visited or called:
            kind, flops = "experts", flops // shape[0] * (visited or shape[0])
            found = f"{visited} per token" if visited else "FLOPs of all"
            reason = f"no nn.Linear, but a 3-D parameter of {shape[0]} experts ({found})"
    if kind == "other" and not (is_product or converted):
        flops, reason = 0, f"{reason} (may be a table or a matrix; not counted in FLOPs)"
    reason = "" if converted else reason
    return WeightSummary(name, shape, converted, reason, size, flops, kind, visited)


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D (GPT-2), without an import of it."""
    known = ("transformers.pytorch_utils", "Conv1D")
    return any((cls.__module__, cls.__name__) == known for cls in type(module).__mro__)


def _experts_per_token(
    owner: str, modules: dict[str, nn.Module], experts: int, called: bool
) -> int | None:
    """Return the number of experts per token; None if it is not known.

    The config is asked only for modules that are ``called`` experts.
    """
    parent = modules[owner.rpartition(".")[0]]
    places: list[tuple[object, tuple[str, ...]]] = [
        (module, _EXPERTS_IN_MODULE) for module in (modules[owner], parent, *parent.children())
    ]
    if called:
        places.append((getattr(modules[""], "config", None), _EXPERTS_IN_CONFIG))
    found = (getattr(place, name, None) for place, names in places for name in names)
    return next((n for n in found if isinstance(n, int) and 0 < n <= experts), None)


def _count(parameters: Iterable[torch.Tensor], counted: set[int]) -> int:
    """Return the number of elements of the parameters that were not counted before."""
    new = [p for p in parameters if id(p) not in counted]
    counted.update(map(id, new))
    return sum(p.numel() for p in new)
