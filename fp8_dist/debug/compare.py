"""``compare_recipes``: the error of each layer in each recipe, for one batch.

The batch runs once in high precision and once in each recipe. The layers stay in the model, and
only their forwards are replaced. Hooks, wrappers and FSDP2, which swaps a layer's parameters, work
as before. In a recipe's run, an observer of the GEMMs measures the errors of each layer alone.
"""

import copy
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8_dist.config import Float8LinearConfig, Float8LinearRecipeName
from fp8_dist.debug.measures import gemm_results
from fp8_dist.debug.rows import decibels
from fp8_dist.linear.module import Float8Linear, why_unconvertible
from fp8_dist.linear.observing import Observer, Owner, observed_by
from fp8_dist.linear.weight import float8_modules
from fp8_dist.mesh import local_tensor, make_group
from fp8_dist.recipe import Gemm
from fp8_dist.tensor.float8_tensor import Float8Tensor
from fp8_dist.text import aligned, without_wrappers
from fp8_dist.torch_internals import (
    has_hooks_after_accumulation,
    in_backward,
    resolve_process_group,
    tree_leaves,
    tree_map_only,
)

Recipes = Iterable[Float8LinearRecipeName | str] | Mapping[str, Float8LinearConfig] | None
LayerFilter = Callable[[nn.Module, str], bool]

# The recipe, the layer or parameter, and the kind of result.
_Key = tuple[str, str, str]

HIGH_PRECISION = "high precision"
_PART = 2**22  # elements that are compared at once, in fp64


@dataclasses.dataclass(frozen=True)
class LayerSqnr:
    """SQNR in dB of a layer's results in one recipe, relative to the results in high precision.

    SQNR is ``10 log10(sum x^2 / sum (found - x)^2)``. It is infinite where nothing differs, NaN
    where values are not finite, and None if the model does not compute the result, such as the
    gradient of a frozen weight or of an input that requires none.

    Attributes:
        recipe: the name of the recipe.
        fqn: the layer.
        output, grad_input, grad_weight: the SQNR of the layer's own GEMMs, relative to the products
            of the same operands in high precision. The operands are those of the recipe's run.
        model_output, model_grad_input, model_grad_weight: the SQNR of the layer's results, relative
            to the run in high precision. It includes the errors of other layers. It is also NaN
            where the shape differs, for instance because tokens are routed to other experts.
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
        results = ((getattr(self, gemm), gemm) for gemm in get_args(Gemm))
        found = [(value, gemm) for value, gemm in results if value is not None]
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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RecipeComparison:
    """The result of :func:`compare_recipes`.

    Attributes:
        layers: a :class:`LayerSqnr` for each recipe and each layer that ran, in the model's order.
        parameters: a :class:`ParameterSqnr` for each recipe and each parameter with a gradient.
        gradients: the SQNR in dB of the gradients of all parameters together, by recipe.
        losses: the loss of this rank's batch, by recipe and for ``"high precision"``.
        not_called: the layers that the batch did not reach, such as experts without tokens.
        in_float8: the modules that are not compared but converted, such as the experts of
            :mod:`fp8_dist.moe`. They compute in float8 in all runs, also in high precision.
    """

    layers: Sequence[LayerSqnr]
    parameters: Sequence[ParameterSqnr]
    gradients: Mapping[str, float]
    losses: Mapping[str, float]
    not_called: Sequence[str]
    in_float8: Sequence[str] = ()

    @property
    def recipes(self) -> tuple[str, ...]:
        """The names of the recipes, in order."""
        return tuple(self.gradients)

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
        for row in sorted(self.layers, key=lambda row: _rank(row.worst[0])):
            by_layer.setdefault(row.fqn, {})[row.recipe] = row
        lines = [["layer", *self.recipes]]
        for fqn, rows in [*by_layer.items()][:n]:
            cells = (rows[recipe].worst for recipe in self.recipes)
            lines.append([fqn, *(f"{value:.2f} {gemm}" for value, gemm in cells)])
        if more := len(by_layer) + 1 - len(lines):
            lines.append([f"({more} more)", *("" for _ in self.recipes)])
        whole = [f"{self.gradients[recipe]:.2f}" for recipe in self.recipes]
        lines.append(["the model's gradient", *whole])
        losses = [f"{self.losses[recipe]:.6g}" for recipe in self.recipes]
        lines.append([f"loss ({self.losses[HIGH_PRECISION]:.6g} in high precision)", *losses])
        if self.not_called:
            lines.append([f"not called: {', '.join(self.not_called)}"])
        if self.in_float8:
            lines.append([f"not compared, in float8 in all runs: {', '.join(self.in_float8)}"])
        return aligned(lines)

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


def _rank(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def compare_recipes(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    recipes: Recipes = None,
    module_filter_fn: LayerFilter | None = None,
) -> RecipeComparison:
    """Run one batch in every recipe and in high precision, and compare layer by layer.

    ::

        comparison = compare_recipes(model, batch, recipes=["tensorwise", "rowwise"])
        print(comparison.table())
        low = comparison.layers_below(20, "tensorwise")
        convert_to_float8_training(model, module_filter_fn=lambda layer, fqn: fqn not in low)

    Choose the layers to leave out by the SQNR of their own GEMMs (``output``, ...). The SQNR of a
    layer's results (``model_output``, ...) also contains the errors of the layers before it. It
    falls with depth, and leaving that layer out would not raise it.

    Parameters, gradients, buffers, amax histories and torch's generators are left unchanged, even
    if the function raises an error. All runs use the same random numbers, and run without
    ``torch.compile``, in the model's training or evaluation mode, under the caller's autocast.
    Activation checkpointing works. Call the function between two steps, not while gradients are
    being accumulated without a reduction (``set_requires_gradient_sync(False)``).

    A GPU holds the tensors of one run at a time. The references are kept on the CPU: the outputs
    and input gradients of the layers, and the gradients of all parameters.

    Args:
        model: a model, converted or not. It is on one device, or under ``fully_shard`` without
            float8 gathers and without tensor parallelism. Under ``fully_shard``, call the function
            on all ranks, each with its batch. A DDP model is compared without its wrapper.
        batch: a tensor, a tuple or list of arguments, or a dictionary of keyword arguments.
        loss: a function that maps the model's output to a scalar tensor. Default: the output's
            ``loss`` if it has one, as transformers' models do for labels; otherwise the output if
            it is a scalar; otherwise the mean of the squares of its first tensor, which is only a
            stand-in: pass the training loss if gradients matter.
        recipes: names of recipes, or a dictionary of configs by name. Default: all recipes, with
            ``delayed`` only for a model with amax histories. Without histories, the scales of
            ``delayed`` are those of ``tensorwise``.
        module_filter_fn: as in ``convert_to_float8_training``. Default: the converted layers, or
            all linear layers if none is converted. Other converted layers, and converted experts,
            compute in float8 in all runs; ``in_float8`` of the result names them.

    Returns:
        A :class:`RecipeComparison`, the same on all ranks except for its losses.

    Collectives: the collectives of FSDP2, once for each recipe and once for high precision; one
    all-reduce over the parameters' mesh, of 24 bytes for each recipe and each result of a layer or
    gradient of a parameter.

    Raises:
        TypeError: ``model`` is not a module, or a config is not a ``Float8LinearConfig``.
        ValueError: a name is not a recipe, there is no layer to compare, or the loss is not a
            scalar.
        NotImplementedError: tensor parallelism, float8 gathers, a layer whose forward was replaced,
            parameters that a hook updates in the backward.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    layers = _layers_of(model, module_filter_fn)
    configs = _configs_of(recipes, layers)
    updated = [n for n, p in model.named_parameters() if has_hooks_after_accumulation(p)]
    if updated:
        raise NotImplementedError(
            f"compare_recipes: {updated[0]} has a hook that runs after its gradient is accumulated "
            "(register_post_accumulate_grad_hook), which may update it: compare before such hooks "
            "are registered, or on a copy of the model"
        )
    runs = _Runs(model, layers)
    for recipe, config in {HIGH_PRECISION: None, **configs}.items():
        runs.step(recipe, config, batch, loss or _default_loss)
    return runs.result(configs)


def _layers_of(model: nn.Module, module_filter_fn: LayerFilter | None) -> dict[str, nn.Linear]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"compare_recipes: expected a model, got a {type(model).__name__}")
    # The layers that convert_to_float8_training converts or has converted.
    linear: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        known = Float8Linear if isinstance(module, Float8Linear) else nn.Linear
        if not isinstance(module, nn.Linear):
            continue
        if "forward" in vars(module) or not why_unconvertible(module, known):
            linear[name] = module
    if module_filter_fn is not None:
        chosen = {n: m for n, m in linear.items() if module_filter_fn(m, without_wrappers(n))}
    else:
        chosen = {n: m for n, m in linear.items() if isinstance(m, Float8Linear)} or linear
    if not chosen:
        raise ValueError(
            f"compare_recipes: {type(model).__name__} has no linear layer to compare, or "
            "module_filter_fn leaves all of them out"
        )
    for name, layer in chosen.items():
        if "forward" in vars(layer):
            raise NotImplementedError(
                f"compare_recipes: other code has replaced the forward of {name or 'the model'}; "
                "compare before that, or leave the layer out (module_filter_fn)"
            )
    return chosen


def _configs_of(recipes: Recipes, layers: dict[str, nn.Linear]) -> dict[str, Float8LinearConfig]:
    if isinstance(recipes, Mapping):
        configs = dict(recipes)
    else:
        if recipes is None:
            has_histories = any(getattr(layer, "histories", None) for layer in layers.values())
            delayed = Float8LinearRecipeName.DELAYED
            recipes = [r for r in Float8LinearRecipeName if r is not delayed or has_histories]
        elif isinstance(recipes, str):
            recipes = [recipes]
        names = [r.value if isinstance(r, Float8LinearRecipeName) else r for r in recipes]
        configs = {name: Float8LinearConfig.from_recipe_name(name) for name in names}
    wrong = [config for config in configs.values() if not isinstance(config, Float8LinearConfig)]
    if wrong:
        raise TypeError(f"compare_recipes: recipes must map names to configs, got {wrong[0]!r}")
    if not configs or HIGH_PRECISION in configs:
        raise ValueError(
            f"compare_recipes: recipes={recipes!r} must name at least one recipe, and none "
            f"{HIGH_PRECISION!r}"
        )
    return configs


def _default_loss(output: Any) -> Any:
    is_dict = isinstance(output, Mapping)
    loss = output.get("loss") if is_dict else getattr(output, "loss", None)
    if loss is not None:
        return loss
    values = output.values() if is_dict else tree_leaves(output)
    tensors = [t for t in values if isinstance(t, torch.Tensor) and t.requires_grad]
    first = tensors[0] if tensors else output
    is_scalar = not isinstance(first, torch.Tensor) or first.numel() == 1
    return first if is_scalar else first.float().square().mean()


class _Runs(Observer):
    """The runs of a comparison, one after the other, so that one run's tensors exist at a time."""

    def __init__(self, model: nn.Module, layers: dict[str, nn.Linear]) -> None:
        self._model, self._layers = model, layers
        self._fqns = {
            name: without_wrappers(name) or getattr(layer, "fqn", type(layer).__name__)
            for name, layer in layers.items()
        }
        self._recipe = HIGH_PRECISION  # the one that runs
        self._owners: set[Owner] = set()  # of the casts and GEMMs of its layers
        # The results in high precision, by layer or parameter and by kind, and those of them that
        # results of the run have not been compared with.
        self._references: defaultdict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
        self._expected: dict[tuple[str, str], Iterator[torch.Tensor]] = {}
        # The sums of squares of the references and of the errors, and the number of results.
        self._sums: defaultdict[_Key, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.losses: dict[str, float] = {}

    def step(
        self,
        recipe: str,
        config: Float8LinearConfig | None,
        batch: Any,
        loss_of: Callable[[Any], torch.Tensor],
    ) -> None:
        """Run a forward and a backward, in high precision if ``config`` is None."""
        self._recipe = recipe
        self._expected = {key: iter(results) for key, results in self._references.items()}
        # Leaves, so that the caller's tensors get no gradients.
        batch = tree_map_only(
            torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), batch
        )
        with (
            _untouched(self._model, self._layers.values()),
            observed_by(self, gemms=True),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            self._owners.clear()
            for name, layer in self._layers.items():
                twin = None if config is None else _twin(name, layer, config)
                if twin is not None:
                    self._owners.add(twin.float8_weight)
                layer.__dict__["forward"] = partial(self._forward, name, layer, twin)
            if isinstance(batch, Mapping):
                output = self._model(**batch)
            else:
                output = self._model(*batch if isinstance(batch, tuple | list) else (batch,))
            loss = loss_of(output)
            if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
                found = f"a {type(loss).__name__}"
                if isinstance(loss, torch.Tensor):
                    needs = "" if loss.requires_grad else " without a gradient"
                    found = f"a tensor of shape {list(loss.shape)}{needs}"
                raise ValueError(
                    "compare_recipes: the loss must be a tensor with one element that depends on "
                    f"the parameters, got {found}; give loss=, a function of the model's output"
                )
            loss.backward()
            self.losses[recipe] = loss.item()
            _reshard(self._model)
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None:
                    self._see(name, "gradient", local_tensor(parameter.grad))

    def _forward(
        self, name: str, layer: nn.Linear, twin: Float8Linear | None, input: torch.Tensor
    ) -> torch.Tensor:
        """Compute the forward of a layer in a run, and keep or compare its results."""
        weight: Any = layer.weight
        if isinstance(layer, Float8Linear) and layer.float8_weight.is_stored:
            weight = nn.Parameter(layer.float8_weight.dequantized(), requires_grad=False)
        if any(isinstance(t, DTensor | Float8Tensor) for t in (input, weight)):
            raise NotImplementedError(
                f"compare_recipes: {name} computes on a {type(weight).__name__} weight and a "
                f"{type(input).__name__} input. Tensor parallelism and float8 gathers are not "
                "supported: compare before the model is parallelized, or under fully_shard alone "
                "with enable_fsdp_float8_all_gather=False"
            )
        # The views add autograd nodes that no other code has hooks on. So the hook below runs
        # between other hooks, such as FSDP2's.
        x = input.view_as(input)
        if twin is None:
            output = F.linear(x, weight, layer.bias)
        else:
            twin.float8_weight.cache.drop()
            twin.weight, twin.bias = weight, layer.bias  # FSDP2 swaps them
            output = twin(x)
        if not in_backward():  # else a recomputation by activation checkpointing
            self._see(name, "output", output)
        if x.requires_grad:
            x.register_hook(partial(self._see, name, "grad_input"))
        return output.view_as(output)

    def on_gemm(self, owner: Owner, gemm: Gemm, *tensors: torch.Tensor) -> None:
        if owner not in self._owners:
            return  # a layer of the model that is not compared
        *_, result = tensors
        exact, found = gemm_results(gemm, *tensors) or (result, result)
        if not owner.config.gemm_enabled(gemm):
            exact = found  # the recipe computes this GEMM in high precision
        self._add((self._recipe, owner.fqn, gemm), exact.to(result.dtype), found)

    def _see(self, name: str, what: str, tensor: torch.Tensor) -> None:
        """Keep a high-precision result, or compare a recipe's result of the same call with it."""
        if self._recipe == HIGH_PRECISION:
            self._references[name, what].append(tensor.detach().to("cpu", copy=True))
        else:
            expected = next(self._expected.get((name, what), iter(())), None)
            self._add((self._recipe, name, f"model_{what}"), expected, tensor.detach())

    def _add(self, key: _Key, expected: torch.Tensor | None, found: torch.Tensor) -> None:
        """Add a result to the sums. Without a reference of the same shape, its SQNR will be NaN."""
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

    def result(self, recipes: Iterable[str]) -> RecipeComparison:
        """Return the comparison of the runs, over all ranks that share parameters."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        results = (*get_args(Gemm), "model_output", "model_grad_input")
        keys = [(r, f, what) for r in recipes for f in self._layers for what in results]
        keys += [(r, n, "model_gradient") for r in recipes for n in names.values()]
        totals = torch.tensor([self._sums[key] for key in keys], dtype=torch.float64)
        meshes = {p.device_mesh for p in self._model.parameters() if isinstance(p, DTensor)}
        if meshes:
            mesh = max(meshes, key=lambda mesh: mesh.size())
            totals = totals.to(mesh.device_type)
            for group in make_group([mesh]):
                dist.all_reduce(totals, group=resolve_process_group(group))
        sums = dict(zip(keys, totals.tolist(), strict=True))
        found = {key: decibels(signal, noise) for key, (signal, noise, n) in sums.items() if n}
        called = {name for _, name, what in found if what == "output"}
        layers, parameters, whole = [], [], {}
        for recipe in recipes:
            for name, layer in self._layers.items():
                if name in called:
                    values = {what: found.get((recipe, name, what)) for what in results}
                    of_weight = recipe, names[id(layer.weight)], "model_gradient"
                    values["model_grad_weight"] = found.get(of_weight)
                    layers.append(LayerSqnr(recipe, self._fqns[name], **values))
            gradients = [(recipe, name, "model_gradient") for name in names.values()]
            for key in gradients:
                if key in found:
                    parameters.append(ParameterSqnr(recipe, without_wrappers(key[1]), found[key]))
            signals, noises, _ = zip(*(sums[key] for key in gradients), strict=True)
            whole[recipe] = decibels(sum(signals), sum(noises))
        not_called = [fqn for name, fqn in self._fqns.items() if name not in called]
        others = float8_modules(self._model).keys() - self._layers.keys()
        in_float8 = sorted(map(without_wrappers, others))
        return RecipeComparison(layers, parameters, whole, self.losses, not_called, in_float8)


def _twin(name: str, layer: nn.Linear, config: Float8LinearConfig) -> Float8Linear:
    """Return a float8 layer of the same shape, with copies of the layer's amax histories."""
    # Pad, because a GPU's GEMM may refuse the sizes of a rank's parts. The twin gathers nothing in
    # float8.
    config = dataclasses.replace(
        config, enable_fsdp_float8_all_gather="auto", pad_inner_dim=True, cache_float8_shards=False
    )
    twin = Float8Linear(layer.in_features, layer.out_features, device="meta", config=config)
    twin.fqn = name
    if isinstance(layer, Float8Linear):
        known = {name: layer.histories.get(name) for name in twin.histories}
        twin.histories.update({k: copy.deepcopy(v) for k, v in known.items() if v is not None})
    return twin.train(layer.training)


@contextmanager
def _untouched(model: nn.Module, layers: Iterable[nn.Linear]) -> Iterator[None]:
    """Restore a model at the end of the block, also after an error.

    At the start of the block, no parameter has a gradient. After the block, gradients, buffers,
    forwards of layers and torch's generators are as before, and parameters that FSDP2 has gathered
    are freed. The block must not write to parameters.
    """
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = [d for d in {p.device for p in gradients} if d.type not in ("cpu", "meta")]
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        try:
            for parameter in gradients:
                parameter.grad = None
            yield
        finally:
            _reshard(model)
            for layer in layers:
                layer.__dict__.pop("forward", None)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            with torch.no_grad():
                for module, name, buffer, values in buffers:
                    buffer.copy_(values)
                    module._buffers[name] = buffer


def _reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered, and put the sharded ones back in place."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
