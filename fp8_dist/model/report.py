"""A report of a conversion: the shares of a model's parameters that are in float8."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from textwrap import indent
from typing import Literal

from torch import nn
from torch.nn.parameter import is_lazy

from fp8_dist.linear.module import Float8Linear, why_unconvertible
from fp8_dist.model.filters import LEFT_OUT
from fp8_dist.text import aligned, alike, without_wrappers
from fp8_dist.weight.weights import weights_of

# Modules whose 2-D or 3-D parameters are looked up, or multiply each token more than once.
_NO_PRODUCTS = (nn.Embedding, nn.EmbeddingBag, nn.Conv1d, nn.ConvTranspose1d)
# The class of GPT-2's layers, which is not imported.
_CONV1D = ("transformers.pytorch_utils", "Conv1D")
_NOT_SEEN = "convert_to_float8_training has not seen it"

_Kind = Literal["linear", "Conv1D", "experts", "other"]


@dataclass(frozen=True)
class WeightSummary:
    """A weight that the model multiplies by, or may multiply by.

    Attributes:
        name: the FQN of the linear layer, or of another module's parameter.
        shape: the global shape; ``[out, in]`` for a linear layer, ``[in, out]`` for a Conv1D.
        reason: the reason why the layer does not compute in float8; empty if it does.
        parameters: the number of elements of the weight; 0 if an earlier row has the same weight.
        kind: the kind of module that has the weight.
        format: the format of a converted weight: "float8", or "mxfp4" for values of four bits.
    """

    name: str
    shape: tuple[int, ...]
    reason: str
    parameters: int
    kind: _Kind = "linear"
    format: str = "float8"

    @property
    def converted(self) -> bool:
        """Whether the layer computes in float8."""
        return not self.reason


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
        return self.share(self.converted)

    def share(self, rows: Iterable[WeightSummary]) -> float:
        """Return the share of all parameters that is in ``rows``, from 0 to 1."""
        return sum(row.parameters for row in rows) / (self.parameters or 1)

    def __str__(self) -> str:
        first = (
            f"conversion_summary: {len(self.converted)} of {len(self.rows)} weights in float8, "
            f"{self.parameter_share:.1%} of {self.parameters:,} parameters"
        )
        table: list[tuple[str, ...]] = [("weight", "shape", "", "parameters", "reason")]
        for name, rows in alike_rows(self.rows):
            shape = " x ".join(map(str, rows[0].shape))
            verdict = rows[0].format if rows[0].converted else "skip"
            table.append((name, shape, verdict, f"{self.share(rows):.1%}", rows[0].reason))
        if rest := self.parameters - sum(row.parameters for row in self.rows):
            share = f"{rest / self.parameters:.1%}"
            table.append(("(embeddings, norms, biases, ...)", "", "", share, ""))
        return f"{first}\n{indent(aligned(table, right=(3,)), '  ')}"


def conversion_summary(model: nn.Module) -> ConversionSummary:
    """Summarize which weights of a model are in float8 and which are not, with the reasons.

    Call it after ``convert_to_float8_training``, before or after the model is distributed. The
    summary lists linear layers, and also parameters that modules multiply by without an nn.Linear,
    which the conversion does not replace: 3-D parameters of experts, and matrices such as those of
    nn.MultiheadAttention. A 2-D parameter of an unknown module may be a table (of positions, for
    instance). ::

        print(conversion_summary(model))

    Collectives: none.
    """
    size = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    return ConversionSummary(tuple(_rows(model)), size)


def alike_rows(rows: Iterable[WeightSummary]) -> list[tuple[str, list[WeightSummary]]]:
    """Group rows that differ only in the numbers in their names."""
    return alike(rows, lambda row: (row.name, (row.shape, row.reason, row.format)))


def _rows(model: nn.Module) -> Iterator[WeightSummary]:
    # The sizes of weights that no row counts yet, by id.
    sizes = {id(p): p.numel() for p in model.parameters() if not is_lazy(p) and p.ndim > 1}
    leaves = (nn.Linear, *_NO_PRODUCTS)  # a parametrization is a module inside one of these
    inside = {part for m in model.modules() if isinstance(m, leaves) for part in m.modules()}
    for wrapped_name, module in model.named_modules():
        name = without_wrappers(wrapped_name)
        if isinstance(module, nn.Linear):
            # A parametrized weight consists of several parameters. A layer may have children.
            children = {name for name, _ in module.named_children()} - {"parametrizations"}
            held = [p for n, p in module.named_parameters() if n.partition(".")[0] not in children]
            shape, reason = (module.out_features, module.in_features), ""
            if not isinstance(module, Float8Linear):
                reason = LEFT_OUT.get(module) or why_unconvertible(module) or _NOT_SEEN
            size = sum(sizes.pop(id(parameter), 0) for parameter in held)
            format = _format_of(module, "weight")
            yield WeightSummary(name or "(the module itself)", shape, reason, size, format=format)
        elif module not in inside:
            for attribute, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 2 or (parameter.ndim == 3 and parameter.shape[0] > 1):
                    yield _parameter_row(name, attribute, module, sizes.pop(id(parameter), 0))


def _parameter_row(fqn: str, attribute: str, module: nn.Module, size: int) -> WeightSummary:
    """Return the row of a parameter of a module that is not an nn.Linear."""
    name, shape = f"{fqn}.{attribute}".strip("."), tuple(module.get_parameter(attribute).shape)
    classes = [(cls.__module__, cls.__name__) for cls in type(module).__mro__]
    kind: _Kind = "Conv1D" if _CONV1D in classes and attribute == "weight" else "other"
    reason = f"no nn.Linear, but a parameter of {type(module).__name__}"
    if len(shape) == 3 and re.search("expert|moe", f"{name} {type(module).__name__}", re.I):
        kind, reason = "experts", f"no nn.Linear, but a 3-D parameter of {shape[0]} experts"
    reason = "" if attribute in weights_of(module) else reason
    return WeightSummary(name, shape, reason, size, kind, _format_of(module, attribute))


def _format_of(module: nn.Module, attribute: str) -> str:
    weight = weights_of(module).get(attribute)
    packs = weight is not None and any(scheme.packed_dtype for scheme in weight.schemes)
    return "mxfp4" if packs else "float8"
