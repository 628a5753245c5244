"""Summary of a conversion: the share of a model's parameters and FLOPs that is in float8."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from fp8_dist.convert import skip_reason
from fp8_dist.linear.module import Float8Linear
from fp8_dist.products import Product, products_of, share_of, size_of


@dataclass(frozen=True)
class WeightSummary:
    """A weight that the model multiplies by, or may multiply by.

    Attributes:
        name: the FQN of the linear layer, or of the parameter if no nn.Linear owns it.
        shape: the global shape.
        converted: whether the layer computes in float8.
        reason: the reason why it does not; empty if it does.
        parameters: elements of the weight; 0 if an earlier row shares it.
        flops: FLOPs of its product in the forward per token, 2 per multiplication. For experts,
            only those that a token visits count, or all if their number is not known; 0 for a 2-D
            parameter that may be a table. The reason states these cases.
    """

    name: str
    shape: tuple[int, ...]
    converted: bool
    reason: str
    parameters: int
    flops: int


@dataclass(frozen=True)
class ConversionSummary:
    """The result of :func:`conversion_summary`; ``str()`` prints a table.

    Attributes:
        rows: every weight that the model multiplies by, or may multiply by, in its order.
        parameters: the number of the model's parameters, shared ones counted once.
    """

    rows: tuple[WeightSummary, ...]
    parameters: int

    @property
    def converted(self) -> tuple[WeightSummary, ...]:
        """The rows of layers in float8."""
        return tuple(row for row in self.rows if row.converted)

    @property
    def skipped(self) -> tuple[WeightSummary, ...]:
        """The other rows."""
        return tuple(row for row in self.rows if not row.converted)

    @property
    def parameter_share(self) -> float:
        """The share of all parameters that belongs to weights of float8 layers, 0 to 1."""
        return share_of(sum(row.parameters for row in self.converted), self.parameters)

    @property
    def flop_share(self) -> float:
        """The share of the FLOPs of all products with weights that is in float8, 0 to 1."""
        total = sum(row.flops for row in self.rows)
        return share_of(sum(row.flops for row in self.converted), total)

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
        """Cells of the table, with like rows of numbered blocks on one line; then the rest."""
        flops = sum(row.flops for row in self.rows)
        for name, rows in alike(self.rows):
            first = rows[0]
            yield (
                name if len(rows) == 1 else f"{name} ({len(rows)})",
                " x ".join(map(str, first.shape)),
                "float8" if first.converted else "skip",
                f"{share_of(sum(row.parameters for row in rows), self.parameters):.1%}",
                f"{share_of(sum(row.flops for row in rows), flops):.1%}",
                first.reason,
            )
        rest = self.parameters - sum(row.parameters for row in self.rows)
        if rest:
            share = f"{share_of(rest, self.parameters):.1%}"
            yield "(embeddings, norms, biases, ...)", "", "", share, "", ""


def conversion_summary(model: nn.Module) -> ConversionSummary:
    """Summarize the weights of a model: those in float8, those that are not, and the reasons.

    Call it after ``convert_to_float8_training``, before or after the model is distributed. Besides
    linear layers it lists parameters that modules multiply by without an nn.Linear, which no
    conversion reaches: 3-D parameters of experts, and matrices such as those of
    nn.MultiheadAttention. A 2-D parameter of another module may be a table (of positions, for
    instance), and counts no FLOPs. ::

        print(conversion_summary(model))

    Collectives: none.
    """
    return ConversionSummary(tuple(map(_row, products_of(model))), size_of(model))


def _row(product: Product) -> WeightSummary:
    layer = product.owner
    converted = isinstance(layer, Float8Linear)
    reason = product.reason
    if isinstance(layer, nn.Linear) and not converted:
        reason = skip_reason(layer)
    return WeightSummary(
        name=product.name or "(the module itself)",
        shape=product.shape,
        converted=converted,
        reason=reason,
        parameters=product.parameters,
        flops=product.flops,
    )


def alike(rows: Iterable[WeightSummary]) -> list[tuple[str, list[WeightSummary]]]:
    """Group rows whose names differ only by numbers, under the name with ``*`` for the numbers."""
    alike: dict[tuple[object, ...], list[WeightSummary]] = {}
    for row in rows:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.name)
        key = (pattern, row.shape, row.converted, row.reason)
        alike.setdefault(key, []).append(row)
    return [
        (str(key[0]) if len(found) > 1 else found[0].name, found) for key, found in alike.items()
    ]
