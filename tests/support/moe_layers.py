"""References for experts: GEMMs in fp64, and a layer on one device or on several ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from reference import reference_blocks
from torch import Tensor

from fp8_dist.moe import Float8ExpertsConfig, dispatch_linear, linear_combine, route
from fp8_dist.moe.config import ExpertsRecipe

RECIPES: tuple[str, ...] = get_args(ExpertsRecipe)
SPREADS = ("even", "uneven", "no tokens on rank 0", "one expert", "foreign ids", "a NaN")
GEMMS = ("output", "grad_input", "grad_weight")
Products = tuple[Tensor, Tensor, Tensor]


def cast(x: Tensor, rows: int, columns: int, rule: str | None = None) -> tuple[Tensor, Tensor]:
    """Cast with a power-of-two scale per block: (e4m3 values, scale of each element), in fp64."""
    exponents, values = reference_blocks(x, torch.float8_e4m3fn, [rows, columns, 0, 0], rule)
    i, j = torch.arange(x.shape[0]) // rows, torch.arange(x.shape[1]) // columns
    return values, torch.exp2(exponents[i][:, j].double() - 127)


def rounded(x: Tensor, rows: int, columns: int, rule: str | None = None) -> Tensor:
    values, scale = cast(x, rows, columns, rule)
    return values * scale


def products_of_expert(formula: str, x: Tensor, w: Tensor, g: Tensor) -> Products:
    """The three products for x ``[M, K]``, w ``[N, K]`` and the output gradient g ``[M, N]``.

    ``formula``: a recipe, ``"high_precision"``, or ``"rowwise"``, which casts both operands of each
    product with one scale per row or column that is not contracted.
    """
    (m, k), n = x.shape, len(w)
    if formula == "high_precision":
        return x @ w.t(), g @ w, g.t() @ x
    if formula == "rowwise":
        grad_weight = rounded(g, m, 1).t() @ rounded(x, m, 1)
        return (
            rounded(x, 1, k) @ rounded(w, 1, k).t(),
            rounded(g, 1, n) @ rounded(w, n, 1),
            grad_weight,
        )
    if formula in ("blockwise", "mxfp8"):
        size, rule = (128, None) if formula == "blockwise" else (32, "ceil")
        x, w, g = rounded(x, 1, size, rule), rounded(w, size, size, rule), rounded(g, 1, size, rule)
        return x @ w.t(), g @ w, rounded(g, size, 1, rule).t() @ rounded(x, size, 1, rule)
    folds = formula == "rowwise_folded"
    (xq, t), (wq, s), g0 = cast(x, 1, k), cast(w, 1 if folds else n, k), rounded(g, 1, n)
    grad_input = rounded(g0 * s[:, 0], 1, n) @ wq if folds else g0 @ (wq * s)
    return (xq * t) @ (wq * s).t(), grad_input, rounded(g0 * t[:, :1], m, 1).t() @ xq


def expected(formula: str, x: Tensor, w: Tensor, g: Tensor, counts: Sequence[int]) -> Products:
    """The products of all experts in fp64. Rows that belong to no expert are 0."""
    x, w, g = x.double(), w.double(), g.double()
    output, grad_input, grad_weight = map(torch.zeros_like, (g, x, w))
    begin = 0
    for expert, count in enumerate(counts):
        own, begin = slice(begin, begin + count), begin + count
        if count:
            output[own], grad_input[own], grad_weight[expert] = products_of_expert(
                formula, x[own], w[expert], g[own]
            )
    return output, grad_input, grad_weight


@dataclass
class Layer:
    """Experts: two projections, their product, a projection back, and a routed sum.

    Attributes:
        tokens: the number of tokens of each rank.
        ids: the experts of tokens, ``[T, top_k]``.
        tensors: the tensors that get a gradient, by name.
        grad: the gradient of the output.
    """

    config: Float8ExpertsConfig
    tokens: list[int]
    ids: Tensor
    tensors: dict[str, Tensor]
    grad: Tensor

    @staticmethod
    def of(
        config: Float8ExpertsConfig,
        ranks: int,
        spread: str = "even",
        dtype: torch.dtype = torch.float32,
        sizes: Sequence[int] = (8, 160, 96, 2),
    ) -> "Layer":
        """The layer of all ranks. ``sizes``: experts, features, hidden features, top_k."""
        experts, k, hidden, top_k = sizes
        torch.manual_seed(1)
        tokens = [5 + 11 * rank if spread == "uneven" else 24 for rank in range(ranks)]
        tokens[0] *= spread != "no tokens on rank 0"
        total = sum(tokens)
        ids = torch.rand(total, experts).argsort(1)[:, :top_k]
        if spread == "one expert":
            ids.fill_(experts - 2)
        elif spread == "foreign ids":
            ids[::3, 0] = ids[5] = experts
        shapes = {"x": (total, k), "probs": (total, top_k), "down": (experts, k, hidden)}
        shapes |= dict.fromkeys(("gate", "up"), (experts, hidden, k))
        shapes |= {"gate_bias": (experts, hidden), "down_bias": (experts, k), "grad": (total, k)}
        tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
        if spread == "a NaN":
            tensors["x"][7, 3] = torch.nan
        return Layer(config, tokens, ids, tensors, tensors.pop("grad"))

    def part_of(self, name: str, tensor: Tensor, rank: int) -> Tensor:
        """A rank's part of a tensor or a gradient: the rows of its tokens, or its experts."""
        if name in ("x", "probs", "output"):
            return tensor.split(self.tokens)[rank]
        return tensor.chunk(len(self.tokens))[rank]

    def part(self, rank: int) -> "Layer":
        """The layer with the tokens and experts of one rank."""
        ids, grad = (self.part_of("x", each, rank) for each in (self.ids, self.grad))
        tensors = {n: self.part_of(n, each, rank) for n, each in self.tensors.items()}
        return Layer(self.config, self.tokens, ids, tensors, grad)

    def forward(
        self, group: dist.ProcessGroup | None, frozen: Sequence[str] = ()
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and the leaf tensors, which require gradients unless they are ``frozen``."""
        t: Any = {n: e.clone().requires_grad_(n not in frozen) for n, e in self.tensors.items()}
        return self.output(t, group), t

    def output(self, t: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
        """The output for the given tensors."""
        routing = route(self.ids, len(t["down"]) * (group.size() if group else 1), group)
        gate, up = dispatch_linear(t["x"], [t["gate"], t["up"]], routing, self.config)
        hidden = (gate + t["gate_bias"][routing.groups.group_of_row]) * up
        slots = linear_combine(hidden, t["down"], routing, self.config, t["down_bias"])
        return (slots * t["probs"].unsqueeze(-1)).sum(1)

    def trained(
        self, group: dist.ProcessGroup | None = None, frozen: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        """The output and the gradients, by name."""
        return results(*self.forward(group, frozen), self.grad)


def results(output: Tensor, tensors: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    output.backward(grad)
    grads = {n: each.grad for n, each in tensors.items() if each.grad is not None}
    return {"output": output.detach(), **grads}
