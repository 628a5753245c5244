"""What a conversion reached: the share of a model's parameters and FLOPs that is in float8."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fp8_dist.convert import skip_reason
from fp8_dist.linear.module import Float8Linear

# What transformers' configs call the number of experts that a token visits. (Their ``top_k`` is an
# option of sampling.)
_EXPERTS_IN_CONFIG = ("num_experts_per_tok", "experts_per_token")
# What modules call it.
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
class WeightSummary:
    """A weight that the model multiplies by, or may multiply by.

    Attributes:
        name: the FQN of the linear layer, or of the parameter if no nn.Linear owns it.
        shape: the global shape.
        converted: whether the layer computes in float8.
        reason: why it does not; empty if it does.
        parameters: elements of the weight; 0 if a layer above shares it.
        flops: of its product in the forward, per token: 2 per multiplication. (For experts those
            that a token visits, or all, if their number is not found. 0 for a 2-D parameter that
            may be a table. The reason says it.)
    """

    name: str
    shape: tuple[int, ...]
    converted: bool
    reason: str
    parameters: int
    flops: int


@dataclass(frozen=True)
class ConversionSummary:
    """What :func:`conversion_summary` found; ``str()`` of it is a table.

    Attributes:
        rows: every weight that the model multiplies by, or may multiply by, in its order.
        parameters: of the model, shared ones counted once.
    """

    rows: tuple[WeightSummary, ...]
    parameters: int

    @property
    def converted(self) -> tuple[WeightSummary, ...]:
        """The layers in float8."""
        return tuple(row for row in self.rows if row.converted)

    @property
    def skipped(self) -> tuple[WeightSummary, ...]:
        """The other rows."""
        return tuple(row for row in self.rows if not row.converted)

    @property
    def parameter_share(self) -> float:
        """The part of all parameters that is weights of float8 layers, 0 to 1."""
        return _share(sum(row.parameters for row in self.converted), self.parameters)

    @property
    def flop_share(self) -> float:
        """The part of the FLOPs of all products with weights that is in float8, 0 to 1."""
        total = sum(row.flops for row in self.rows)
        return _share(sum(row.flops for row in self.converted), total)

    def __str__(self) -> str:
        lines = [
            f"conversion_summary: {len(self.converted)} of {len(self.rows)} weights in float8, "
            f"{self.parameter_share:.1%} of {self.parameters:,} parameters, {self.flop_share:.1%} "
            "of FLOPs",
            "FLOPs: of products with weights, without attention's own products and convolutions",
        ]
        table = [("weight", "shape", "", "parameters", "FLOPs", "reason"), *self._cells()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        right = {3, 4}  # numbers
        for cells in table:
            padded = [
                cell.rjust(width) if i in right else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            lines.append(f"  {'  '.join(padded)}".rstrip())
        return "\n".join(lines)

    def _cells(self) -> Iterator[tuple[str, ...]]:
        """Like rows of numbered blocks on one line, then what no row counts."""
        flops = sum(row.flops for row in self.rows)
        for name, rows in alike(self.rows):
            first = rows[0]
            yield (
                name if len(rows) == 1 else f"{name} ({len(rows)})",
                " x ".join(map(str, first.shape)),
                "float8" if first.converted else "skip",
                f"{_share(sum(row.parameters for row in rows), self.parameters):.1%}",
                f"{_share(sum(row.flops for row in rows), flops):.1%}",
                first.reason,
            )
        rest = self.parameters - sum(row.parameters for row in self.rows)
        if rest:
            share = f"{_share(rest, self.parameters):.1%}"
            yield "(embeddings, norms, biases, ...)", "", "", share, "", ""


def conversion_summary(model: nn.Module) -> ConversionSummary:
    """Which weights of a model are in float8, which are not and why, and what share that is.

    Call it after ``convert_to_float8_training``, before or after the model is distributed. Besides
    linear layers it lists parameters that modules multiply by without an nn.Linear, which no
    conversion reaches: 3-D parameters of experts, and matrices such as those of
    nn.MultiheadAttention. A 2-D parameter of another module may be a table, of positions for
    instance, and counts no FLOPs. ::

        print(conversion_summary(model))

    Collectives: none.
    """
    total = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    return ConversionSummary(tuple(_rows(model)), total)


def _rows(model: nn.Module) -> Iterator[WeightSummary]:
    modules = dict(model.named_modules())
    counted: set[int] = set()  # parameters, by id
    inside = {part for m in modules.values() if isinstance(m, nn.Linear) for part in m.modules()}
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            yield _row_of_layer(name, module, counted)
        elif module not in inside and not isinstance(module, _NO_PRODUCTS):
            for own, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 2 or (parameter.ndim == 3 and parameter.shape[0] > 1):
                    path = f"{name}.{own}" if name else own
                    yield _row_of_parameter(path, parameter, modules, counted)


def _row_of_layer(name: str, layer: nn.Linear, counted: set[int]) -> WeightSummary:
    shape = (layer.out_features, layer.in_features)
    converted = isinstance(layer, Float8Linear)
    # (A parametrized weight is made of several.)
    weights = [p for p in layer.parameters() if not is_lazy(p) and p.ndim > 1]
    return WeightSummary(
        name=name or "(the module itself)",
        shape=shape,
        converted=converted,
        reason="" if converted else skip_reason(layer),
        parameters=_count(weights, counted),
        flops=2 * math.prod(shape),
    )


def _row_of_parameter(
    name: str, parameter: torch.Tensor, modules: dict[str, nn.Module], counted: set[int]
) -> WeightSummary:
    owner = modules[name.rpartition(".")[0]]
    reason = f"no nn.Linear, but a parameter of {type(owner).__name__}"
    flops = 2 * parameter.numel()
    if parameter.ndim == 3 and not isinstance(owner, _PRODUCTS):
        experts = parameter.shape[0]
        visited = _experts_per_token(name, modules, experts)
        reason = f"no nn.Linear, but a 3-D parameter of {experts} experts"
        reason += f" ({visited} per token)" if visited else " (FLOPs of all)"
        flops = flops // experts * (visited or experts)
    elif not isinstance(owner, _PRODUCTS):
        reason += " (may be a table or a matrix; not counted in FLOPs)"
        flops = 0
    shape = tuple(parameter.shape)
    return WeightSummary(name, shape, False, reason, _count([parameter], counted), flops)


def _experts_per_token(name: str, modules: dict[str, nn.Module], experts: int) -> int | None:
    """What the owner of a parameter, its neighbours, or the model's config say; None: nothing."""
    owner = name.rpartition(".")[0]
    parent = modules[owner.rpartition(".")[0]]
    config = getattr(modules[""], "config", None)
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


def alike(rows: Iterable[WeightSummary]) -> list[tuple[str, list[WeightSummary]]]:
    """Rows that differ only by the numbers in their names, with the name that has ``*`` there."""
    alike: dict[tuple[object, ...], list[WeightSummary]] = {}
    for row in rows:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.name)
        key = (pattern, row.shape, row.converted, row.reason)
        alike.setdefault(key, []).append(row)
    return [
        (str(key[0]) if len(found) > 1 else found[0].name, found) for key, found in alike.items()
    ]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
