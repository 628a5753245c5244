"""Results of ``compare_recipes``, as data, as text, and as names of layers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from fp8_dist.debug.rows import aligned
from fp8_dist.recipe import Gemm


@dataclasses.dataclass(frozen=True)
class LayerSqnr:
    """SQNR in dB of a layer's results in one recipe, relative to the results in high precision.

    SQNR is ``10 log10(sum x^2 / sum (found - x)^2)``. It is infinite where nothing differs, NaN
    where values are not finite, and None if the model does not compute the result, such as the
    gradient of a frozen weight or of an input that requires none.

    Attributes:
        recipe: the name of the recipe.
        fqn: the layer.
        output: the SQNR of the output, without the bias, with this layer alone in float8. The layer
            gets the input, weight and output gradient of the run in high precision.
        grad_input: the same for the gradient of the input.
        grad_weight: the same for the gradient of the weight.
        model_output: the SQNR of the output with all compared layers in float8, which includes the
            errors of other layers. It is also NaN where the shape differs, for instance because
            tokens are routed to other experts.
        model_grad_input: the same for the gradient of the input.
        model_grad_weight: the same for the gradient of the weight.
    """

    recipe: str
    fqn: str
    output: float | None
    grad_input: float | None
    grad_weight: float | None
    model_output: float | None
    model_grad_input: float | None
    model_grad_weight: float | None

    @property
    def worst(self) -> tuple[float, Gemm]:
        """The lowest SQNR of ``output``, ``grad_input`` and ``grad_weight``, and its GEMM.

        NaN counts as the lowest.
        """
        gemms: dict[Gemm, float | None] = {
            "output": self.output,
            "grad_input": self.grad_input,
            "grad_weight": self.grad_weight,
        }
        found = [(value, gemm) for gemm, value in gemms.items() if value is not None]
        return min(found, key=lambda each: _rank(each[0]))


@dataclasses.dataclass(frozen=True)
class ParameterSqnr:
    """SQNR of the gradient of a parameter, relative to the gradient in high precision.

    Attributes:
        recipe: the name of the recipe, which all compared layers use.
        name: the name of the parameter, which may be in any module of the model.
        sqnr: the SQNR in dB, as in :class:`LayerSqnr`.
    """

    recipe: str
    name: str
    sqnr: float


class RecipeComparison:
    """The result of :func:`compare_recipes`.

    Attributes:
        recipes: the names of the recipes, in order.
        layers: a :class:`LayerSqnr` for each recipe and each layer that ran, in the model's order.
        parameters: a :class:`ParameterSqnr` for each recipe and each parameter with a gradient.
        gradients: the SQNR in dB of the gradients of all parameters together, by recipe.
        losses: the loss of this rank's batch, by recipe and for ``"high precision"``.
        not_called: the layers that the batch did not reach, such as experts without tokens.
    """

    def __init__(
        self,
        layers: Sequence[LayerSqnr],
        parameters: Sequence[ParameterSqnr],
        gradients: dict[str, float],
        losses: dict[str, float],
        not_called: Sequence[str],
    ) -> None:
        self.recipes = tuple(gradients)
        self.layers, self.parameters = tuple(layers), tuple(parameters)
        self.gradients, self.losses, self.not_called = gradients, losses, tuple(not_called)

    def worst(self, n: int, recipe: str | None = None) -> list[str]:
        """Return the names of the ``n`` layers with the lowest own SQNR, the lowest first.

        Args:
            n: the number of layers.
            recipe: the recipe whose SQNR counts. It may be omitted if only one was compared.
        """
        return [row.fqn for row in self._from_worst(recipe)[:n]]

    def layers_below(self, decibels: float, recipe: str | None = None) -> list[str]:
        """Return the names of the layers whose own SQNR is below a limit, the lowest first.

        Layers whose SQNR is NaN are included. Pass the names to :func:`fp8_dist.auto_filter` as
        ``exclude``.

        Args:
            decibels: the limit in dB.
            recipe: as in :meth:`worst`.
        """
        rows = self._from_worst(recipe)
        return [row.fqn for row in rows if not row.worst[0] >= decibels]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return all rows as plain Python values, with ``kind`` ``"layer"`` or ``"parameter"``."""
        return [
            *({"kind": "layer"} | dataclasses.asdict(row) for row in self.layers),
            *({"kind": "parameter"} | dataclasses.asdict(row) for row in self.parameters),
        ]

    def table(self, n: int | None = None) -> str:
        """Return a table of layers by recipes as text, with the worst layer first.

        A cell has the lowest SQNR of the layer's own GEMMs in dB, and that GEMM. The last lines
        describe the whole model, with all compared layers in float8.

        Args:
            n: the largest number of layers in the table; None: all layers.
        """
        by_layer: dict[str, dict[str, LayerSqnr]] = {}
        for row in self.layers:
            by_layer.setdefault(row.fqn, {})[row.recipe] = row
        order = sorted(
            by_layer, key=lambda fqn: min(_rank(row.worst[0]) for row in by_layer[fqn].values())
        )
        lines = [["layer", *self.recipes]]
        for fqn in order[:n]:
            cells = (by_layer[fqn][recipe].worst for recipe in self.recipes)
            lines.append([fqn, *(f"{value:.2f} {gemm}" for value, gemm in cells)])
        if len(order) > len(order[:n]):
            lines.append([f"({len(order) - len(order[:n])} more)", *("" for _ in self.recipes)])
        whole = [f"{self.gradients[recipe]:.2f}" for recipe in self.recipes]
        lines.append(["the model's gradient", *whole])
        losses = [f"{self.losses[recipe]:.6g}" for recipe in self.recipes]
        lines.append([f"loss ({self.losses[HIGH_PRECISION]:.6g} in high precision)", *losses])
        if self.not_called:
            lines.append([f"not called: {', '.join(self.not_called)}"])
        return aligned(lines, [str.ljust] * len(lines[0]))

    def __repr__(self) -> str:
        layers = len({row.fqn for row in self.layers})
        return f"RecipeComparison({layers} layers, recipes {', '.join(self.recipes)})"

    def _from_worst(self, recipe: str | None) -> list[LayerSqnr]:
        if recipe is None and len(self.recipes) == 1:
            (recipe,) = self.recipes
        if recipe not in self.recipes:
            found = "several were compared" if recipe is None else f"{recipe!r} is not among them"
            raise ValueError(
                f"RecipeComparison: name the recipe, {found}: {', '.join(self.recipes)}"
            )
        rows = [row for row in self.layers if row.recipe == recipe]
        return sorted(rows, key=lambda row: _rank(row.worst[0]))


HIGH_PRECISION = "high precision"


def _rank(value: float) -> float:
    return -math.inf if math.isnan(value) else value
