"""The runs of ``compare_recipes``, and the sums of squares that they add up."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_dist.config import Float8LinearConfig, Gemm
from fp8_dist.debug.recipes.comparison import (
    HIGH_PRECISION,
    LayerSqnr,
    ParameterSqnr,
    RecipeComparison,
)
from fp8_dist.debug.recipes.layer_runs import Arithmetic, Call, Seen, SeenCall, layers_in
from fp8_dist.debug.recipes.untouched import reshard, untouched
from fp8_dist.debug.statistics.rows import decibels
from fp8_dist.mesh import local_tensor, make_group
from fp8_dist.names import without_wrappers
from fp8_dist.torch_internals import resolve_process_group, tree_map_only

# The recipe, the layer or parameter, and the kind of result.
_Key = tuple[str, str, str]

_GEMMS: tuple[Gemm, ...] = get_args(Gemm)
_PART = 2**22  # elements that are compared at once, in fp64


class _Sums:
    """Sums of squares of references and of errors, for each key."""

    def __init__(self) -> None:
        self._sums: defaultdict[_Key, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    def add(self, key: _Key, expected: torch.Tensor | None, found: torch.Tensor) -> None:
        """Add a result. Without a reference of the same shape its SQNR will be NaN."""
        sums = self._sums[key]
        sums[2] += 1
        if expected is None or expected.shape != found.shape:
            sums[0] = math.nan
            return
        parts = zip(expected.reshape(-1).split(_PART), found.reshape(-1).split(_PART), strict=True)
        for x, y in parts:
            x, y = x.to(y.device).double(), y.double()
            signal, noise = torch.stack([x.square().sum(), (y - x).square().sum()]).tolist()
            sums[0] += signal
            sums[1] += noise

    def over_ranks(
        self, keys: list[_Key], model: nn.Module
    ) -> dict[_Key, tuple[float, float, float]]:
        """Sum (signal, noise, number of results) for each key over ranks that share parameters.

        Collectives: an all-reduce of 24 bytes per key over the mesh of DTensor parameters.
        """
        sums = torch.tensor([self._sums[key] for key in keys], dtype=torch.float64)
        meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
        if meshes:
            mesh = max(meshes, key=lambda mesh: mesh.size())
            sums = sums.to(mesh.device_type)
            for name in make_group([mesh]):
                dist.all_reduce(sums, group=resolve_process_group(name))
        return {key: (s, n, count) for key, (s, n, count) in zip(keys, sums.tolist(), strict=True)}


class RecipeRuns:
    """Runs of a comparison, one after the other, so that one recipe's tensors exist at a time."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Callable[[Any], torch.Tensor],
        configs: dict[str, Float8LinearConfig],
        layers: dict[str, nn.Linear],
    ) -> None:
        self._model, self._batch, self._loss = model, batch, loss
        self._configs, self._layers = configs, layers
        self._references: defaultdict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
        self._sums = _Sums()
        self._losses: dict[str, float] = {}

    def run(self) -> RecipeComparison:
        """Execute all runs. The first, in high precision, also measures the layers' own errors."""
        exact = Arithmetic(None)
        alone = {recipe: Arithmetic(config) for recipe, config in self._configs.items()}
        see_call = partial(self._compare_alone, exact, alone)
        for name, grad in self._step(HIGH_PRECISION, exact, self._refer, see_call).items():
            self._refer(name, "gradient", grad)
        alone.clear()
        for recipe, config in self._configs.items():
            turns: defaultdict[tuple[str, str], int] = defaultdict(int)
            compare = partial(self._compare, recipe, turns)
            for name, grad in self._step(recipe, Arithmetic(config), compare).items():
                compare(name, "gradient", grad)
        return self._result()

    def _step(
        self, recipe: str, arithmetic: Arithmetic, seen: Seen, seen_call: SeenCall | None = None
    ) -> dict[str, torch.Tensor]:
        """Run a forward and a backward, and return the local gradients by parameter."""
        batch = tree_map_only(torch.Tensor, _as_leaf, self._batch)
        with (
            untouched(self._model),
            layers_in(arithmetic, self._layers, seen, seen_call),
            torch.compiler.set_stance("force_eager"),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            loss = self._loss(_called(self._model, batch))
            if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
                raise ValueError(
                    "compare_recipes: the loss must be a tensor with one element that depends on "
                    f"the parameters, got {_shown(loss)}; give loss=, a function of the model's "
                    "output"
                )
            loss.backward()
            self._losses[recipe] = loss.item()
            reshard(self._model)
            gradients = {n: p.grad for n, p in self._model.named_parameters()}
            return {n: local_tensor(g) for n, g in gradients.items() if g is not None}

    def _refer(self, name: str, what: str, tensor: torch.Tensor) -> None:
        self._references[name, what].append(tensor.detach().to("cpu", copy=True))

    def _compare(
        self,
        recipe: str,
        turns: defaultdict[tuple[str, str], int],
        name: str,
        what: str,
        tensor: torch.Tensor,
    ) -> None:
        """Compare a result with the one of the same call in high precision."""
        references, turn = self._references[name, what], turns[name, what]
        turns[name, what] += 1
        expected = references[turn] if turn < len(references) else None
        key = what if what == "gradient" else f"model_{what}"
        self._sums.add((recipe, name, key), expected, tensor.detach())

    def _compare_alone(
        self,
        exact: Arithmetic,
        alone: dict[str, Arithmetic],
        call: Call,
        grad: torch.Tensor | None,
    ) -> None:
        """Repeat a call of a layer in each recipe."""
        names = ["output"]
        if grad is not None:
            needs = call.input.requires_grad, call.layer.weight.requires_grad
            names = [n for n, need in zip(_GEMMS[1:], needs, strict=True) if need]
        expected = call.repeat(exact, grad)
        for recipe, arithmetic in alone.items():
            found = call.repeat(arithmetic, grad)
            for name, x, y in zip(names, expected, found, strict=True):
                self._sums.add((recipe, call.name, name), x, y)

    def _result(self) -> RecipeComparison:
        parameters = [name for name, _ in self._model.named_parameters()]
        results = (*_GEMMS, "model_output", "model_grad_input")
        keys = [(r, f, what) for r in self._configs for f in self._layers for what in results]
        keys += [(r, name, "gradient") for r in self._configs for name in parameters]
        sums = self._sums.over_ranks(keys, self._model)
        found = {key: decibels(signal, noise) for key, (signal, noise, n) in sums.items() if n}
        called = [f for f in self._layers if any((r, f, "output") in found for r in self._configs)]
        weights = {id(p): name for name, p in self._model.named_parameters()}
        whole = {}
        for recipe in self._configs:
            pairs = zip(*(sums[recipe, name, "gradient"] for name in parameters), strict=True)
            signal, noise, _ = map(sum, pairs)
            whole[recipe] = decibels(signal, noise)
        return RecipeComparison(
            [
                LayerSqnr(
                    recipe,
                    _fqn(f, self._layers[f]),
                    output=found.get((recipe, f, "output")),
                    grad_input=found.get((recipe, f, "grad_input")),
                    grad_weight=found.get((recipe, f, "grad_weight")),
                    model_output=found.get((recipe, f, "model_output")),
                    model_grad_input=found.get((recipe, f, "model_grad_input")),
                    model_grad_weight=found.get(
                        (recipe, weights[id(self._layers[f].weight)], "gradient")
                    ),
                )
                for recipe in self._configs
                for f in called
            ],
            [
                ParameterSqnr(recipe, without_wrappers(name), found[recipe, name, "gradient"])
                for recipe in self._configs
                for name in parameters
                if (recipe, name, "gradient") in found
            ],
            whole,
            self._losses,
            [_fqn(f, layer) for f, layer in self._layers.items() if f not in called],
        )


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return an argument of the model as a leaf, so that the caller's tensor gets no gradient."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    needs = "" if value.requires_grad else " without a gradient"
    return f"a tensor of shape {list(value.shape)}{needs}"


def _fqn(name: str, layer: nn.Linear) -> str:
    return without_wrappers(name) or getattr(layer, "fqn", type(layer).__name__)
