"""``compare_recipes``: the error of each layer in each recipe, for one batch.

The batch runs once in high precision and once in each recipe. The layers stay in the model, and
only their forwards are replaced. Hooks, wrappers and FSDP2, which swaps a layer's parameters, work
as before. During the run in high precision, each layer has a *twin* for each recipe: a
``Float8Linear`` that computes on the same operands. An observer of the twins' GEMMs measures the
errors of each layer alone.
"""

import copy
import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from fp8_dist.config import Float8LinearConfig, Float8LinearRecipeName
from fp8_dist.debug.comparison import HIGH_PRECISION, LayerSqnr, ParameterSqnr, RecipeComparison
from fp8_dist.debug.measures import gemm_results
from fp8_dist.debug.rows import decibels
from fp8_dist.linear.module import Float8Linear
from fp8_dist.linear.observing import Observer, Owner, gemms_observed_by
from fp8_dist.mesh import local_tensor, make_group
from fp8_dist.names import without_wrappers
from fp8_dist.recipe import Gemm
from fp8_dist.tensor.float8_tensor import Float8Tensor
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

_GEMMS: tuple[Gemm, ...] = get_args(Gemm)
_PART = 2**22  # elements that are compared at once, in fp64


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

    Choose the layers to leave out by their own SQNR. It is measured with that layer alone in
    float8, on the tensors of the run in high precision. With all layers in float8, the SQNR of a
    layer's output also contains the errors of the layers before it. It falls with depth, and
    leaving that layer out would not raise it. The rows have these numbers too (``model_output``,
    ...).

    Parameters, gradients, buffers, amax histories and torch's generators are left unchanged, even
    if the function raises an error. All runs use the same random numbers. The model runs without
    ``torch.compile``. Activation checkpointing works. A model in training mode runs in training
    mode. To use autocast, call the function inside an autocast block. Call it between two steps,
    not while gradients are being accumulated without a reduction
    (``set_requires_gradient_sync(False)``).

    For each recipe, the model runs one forward and backward, and each compared layer computes once
    more in float8. A GPU holds the tensors of one run at a time. The references are kept on the
    CPU: the inputs, outputs and input gradients of the layers, and the gradients of all parameters.

    Args:
        model: a model, converted or not. It is on one device, or under ``fully_shard`` without
            float8 gathers and without tensor parallelism. Under ``fully_shard``, call the function
            on all ranks, each with its batch. A DDP model is compared without its wrapper.
        batch: a tensor, a tuple or list of arguments, or a dictionary of keyword arguments.
        loss: a function that maps the model's output to a scalar tensor. Default: the output's
            ``loss`` if it has one (transformers' models have one if they are given labels);
            otherwise the output itself if it is a scalar; otherwise the mean of the squares of the
            first tensor in the output. The latter is only a stand-in: pass the training loss if
            gradients matter.
        recipes: names of recipes, or a dictionary of configs by name. Default: all recipes, with
            ``delayed`` only for a model with amax histories. Without histories, the scales of
            ``delayed`` are those of ``tensorwise``.
        module_filter_fn: as in ``convert_to_float8_training``. Default: the converted layers, or
            all linear layers if none is converted.

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
    return _Runs(model, batch, loss or _default_loss, configs, layers).run()


def _layers_of(model: nn.Module, module_filter_fn: LayerFilter | None) -> dict[str, nn.Linear]:
    """Return the layers to compare, by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"compare_recipes: expected a model, got a {type(model).__name__}")
    # The layers that convert_to_float8_training can convert.
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward in (nn.Linear.forward, Float8Linear.forward)
        and not is_parametrized(module)
        and "weight" in module._parameters
        and not isinstance(module, LazyModuleMixin)
    }
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
    """Return the configs to compare, by name."""
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
    """Return the loss in an output, such as a transformers model's, or a stand-in."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is not None:
        return loss
    values = output.values() if isinstance(output, Mapping) else tree_leaves(output)
    tensors = [t for t in values if isinstance(t, torch.Tensor) and t.requires_grad]
    first = tensors[0] if tensors else output
    is_scalar = not isinstance(first, torch.Tensor) or first.numel() == 1
    return first if is_scalar else first.float().square().mean()


class _Runs(Observer):
    """The runs of a comparison, one after the other, so that one run's tensors exist at a time.

    This object observes the GEMMs of the twins during the run in high precision.
    """

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
        # The results in high precision, by layer or parameter and by kind; and the number of them
        # that each recipe's results have been compared with so far.
        self._references: defaultdict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
        self._turns: Counter[_Key] = Counter()
        # The sums of squares of the references and of the errors, and the number of results.
        self._sums: defaultdict[_Key, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self._losses: dict[str, float] = {}
        # The twins of each layer in the run in high precision; and the recipe and layer of each.
        self._twins: dict[str, list[Float8Linear]] = {}
        self._twin_of: dict[Owner, tuple[str, str]] = {}

    def run(self) -> RecipeComparison:
        """Run in high precision first, then in each recipe, and return the comparison."""
        for recipe, config in self._configs.items():
            for name, layer in self._layers.items():
                twin = _twin(name, layer, config)
                self._twins.setdefault(name, []).append(twin)
                self._twin_of[twin.float8_weight] = recipe, name
        with gemms_observed_by(self):
            self._step(HIGH_PRECISION, None)
        self._twins.clear()  # they refer to weights of the model
        self._twin_of.clear()
        for recipe, config in self._configs.items():
            self._step(recipe, config)
        return self._result()

    def _step(self, recipe: str, config: Float8LinearConfig | None) -> None:
        """Run a forward and a backward, in high precision if ``config`` is None."""
        batch = tree_map_only(torch.Tensor, _as_leaf, self._batch)
        with (
            _untouched(self._model),
            torch.compiler.set_stance("force_eager"),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            for name, layer in self._layers.items():
                twin = None if config is None else _twin(name, layer, config)
                layer.__dict__["forward"] = partial(self._forward, recipe, name, layer, twin)
            loss = self._loss(_called(self._model, batch))
            if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
                raise ValueError(
                    "compare_recipes: the loss must be a tensor with one element that depends on "
                    f"the parameters, got {_shown(loss)}; give loss=, a function of the model's "
                    "output"
                )
            loss.backward()
            self._losses[recipe] = loss.item()
            _reshard(self._model)
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None:
                    self._see(recipe, name, "gradient", local_tensor(parameter.grad))

    def _forward(
        self,
        recipe: str,
        name: str,
        layer: nn.Linear,
        twin: Float8Linear | None,
        input: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the forward of a layer in a run, and keep or compare its results."""
        weight: Any = layer.weight
        if any(isinstance(t, DTensor | Float8Tensor) for t in (input, weight)):
            raise NotImplementedError(
                f"compare_recipes: {name} computes on a {type(weight).__name__} weight and a "
                f"{type(input).__name__} input. Tensor parallelism and float8 gathers are not "
                "supported: compare before the model is parallelized, or under fully_shard alone "
                "with enable_fsdp_float8_all_gather=False"
            )
        # The views add autograd nodes that no other code has hooks on. So the hooks below run
        # between other hooks, such as FSDP2's.
        x = input.view_as(input)
        if twin is None:
            output = F.linear(x, weight, layer.bias)
        else:
            output = _run_twin(twin, x, weight, layer.bias)
        repeats = in_backward()  # a recomputation by activation checkpointing
        if not repeats:
            self._see(recipe, name, "output", output)
        if x.requires_grad:
            x.register_hook(partial(self._see, recipe, name, "grad_input"))
        if twin is None:
            autocast = _autocast(x.device.type)
            kept = x.detach().to("cpu", copy=True).requires_grad_(x.requires_grad)
            if not repeats:
                self._run_twins(name, layer, kept, autocast, None)
            if output.requires_grad:
                output.register_hook(partial(self._run_twins, name, layer, kept, autocast))
        return output.view_as(output)

    def _run_twins(
        self,
        name: str,
        layer: nn.Linear,
        input: torch.Tensor,
        autocast: Any,
        grad: torch.Tensor | None,
    ) -> None:
        """Repeat a layer's forward in each recipe, or its backward if ``grad`` is given."""
        for twin in self._twins[name]:
            # No grad mode in the forward, because activation checkpointing counts saved tensors.
            with torch.set_grad_enabled(grad is not None), autocast:
                weight = nn.Parameter(layer.weight.detach(), layer.weight.requires_grad)
                x = input.detach().to(weight.device).requires_grad_(input.requires_grad)
                output = _run_twin(twin, x, weight, None)
            inputs = [tensor for tensor in (x, weight) if tensor.requires_grad]
            if grad is not None and inputs:
                torch.autograd.grad(output, inputs, grad)

    def on_gemm(
        self,
        owner: Owner,
        gemm: Gemm,
        left: torch.Tensor,
        right: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        """Compare a twin's GEMM with the product in high precision."""
        if owner not in self._twin_of:
            return  # a layer of the model that is not compared
        recipe, name = self._twin_of[owner]
        exact, found = gemm_results(gemm, left, right, result) or (result, result)
        if not owner.config.gemm_enabled(gemm):
            exact = found  # the recipe computes this GEMM in high precision
        self._add((recipe, name, gemm), exact.to(result.dtype), found)

    def _see(self, recipe: str, name: str, what: str, tensor: torch.Tensor) -> None:
        """Keep a high-precision result, or compare a recipe's result of the same call with it."""
        references = self._references[name, what]
        if recipe == HIGH_PRECISION:
            references.append(tensor.detach().to("cpu", copy=True))
            return
        turn = self._turns[recipe, name, what]
        self._turns[recipe, name, what] += 1
        expected = references[turn] if turn < len(references) else None
        self._add((recipe, name, f"model_{what}"), expected, tensor.detach())

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

    def _sums_over_ranks(self, keys: list[_Key]) -> dict[_Key, tuple[float, float, float]]:
        """Sum (signal, noise, number of results) by key over the ranks that share parameters.

        Collectives: an all-reduce of 24 bytes per key over the mesh of DTensor parameters.
        """
        sums = torch.tensor([self._sums[key] for key in keys], dtype=torch.float64)
        meshes = {p.device_mesh for p in self._model.parameters() if isinstance(p, DTensor)}
        if meshes:
            mesh = max(meshes, key=lambda mesh: mesh.size())
            sums = sums.to(mesh.device_type)
            for name in make_group([mesh]):
                dist.all_reduce(sums, group=resolve_process_group(name))
        return {key: (s, n, count) for key, (s, n, count) in zip(keys, sums.tolist(), strict=True)}

    def _result(self) -> RecipeComparison:
        names = {id(p): name for name, p in self._model.named_parameters()}
        results = (*_GEMMS, "model_output", "model_grad_input")
        keys = [(r, f, what) for r in self._configs for f in self._layers for what in results]
        keys += [(r, n, "model_gradient") for r in self._configs for n in names.values()]
        sums = self._sums_over_ranks(keys)
        found = {key: decibels(signal, noise) for key, (signal, noise, n) in sums.items() if n}
        called = [f for f in self._layers if any((r, f, "output") in found for r in self._configs)]
        layers, parameters, whole = [], [], {}
        for recipe in self._configs:
            for name in called:
                values = {what: found.get((recipe, name, what)) for what in results}
                of_weight = recipe, names[id(self._layers[name].weight)], "model_gradient"
                values["model_grad_weight"] = found.get(of_weight)
                layers.append(LayerSqnr(recipe, _fqn(name, self._layers[name]), **values))
            gradients = {name: (recipe, name, "model_gradient") for name in names.values()}
            for name, key in gradients.items():
                if key in found:
                    parameters.append(ParameterSqnr(recipe, without_wrappers(name), found[key]))
            signals, noises, _ = zip(*(sums[key] for key in gradients.values()), strict=True)
            whole[recipe] = decibels(sum(signals), sum(noises))
        not_called = [_fqn(f, layer) for f, layer in self._layers.items() if f not in called]
        return RecipeComparison(layers, parameters, whole, self._losses, not_called)


def _twin(name: str, layer: nn.Linear, config: Float8LinearConfig) -> Float8Linear:
    """Return a float8 layer of the same shape, with copies of the layer's amax histories."""
    # Pad, because a GPU's GEMM may refuse the sizes of a rank's parts. The twin gathers nothing in
    # float8.
    changes: dict[str, Any] = {"enable_fsdp_float8_all_gather": "auto"}
    changes |= {"pad_inner_dim": True, "cache_float8_shards": False}
    config = dataclasses.replace(config, **changes)
    twin = Float8Linear(layer.in_features, layer.out_features, device="meta", config=config)
    twin.fqn = name
    if isinstance(layer, Float8Linear):
        known = {name: layer.histories.get(name) for name in twin.histories}
        twin.histories.update({k: copy.deepcopy(v) for k, v in known.items() if v is not None})
    return twin.train(layer.training)


def _run_twin(
    twin: Float8Linear, x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute the output of a twin with the given parameters."""
    twin.float8_weight.cache.drop()
    twin.weight, twin.bias = weight, bias  # type: ignore[assignment]
    return twin(x)


def _autocast(device: str) -> Any:
    """Return a context manager that applies the current autocast settings."""
    enabled = torch.is_autocast_enabled(device)
    return torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=enabled)


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


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Restore a model at the end of the block, also after an error.

    At the start of the block, no parameter has a gradient. After the block, gradients, buffers,
    ``forward`` attributes of modules, and torch's generators are as before, and parameters that
    FSDP2 has gathered are freed. The block must not write to parameters.
    """
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    forwards = {module: module.__dict__.get("forward") for module in model.modules()}
    devices = [d for d in {p.device for p in gradients} if d.type not in ("cpu", "meta")]
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        try:
            for parameter in gradients:
                parameter.grad = None
            yield
        finally:
            _reshard(model)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            with torch.no_grad():
                for module, name, buffer, values in buffers:
                    buffer.copy_(values)
                    module._buffers[name] = buffer
            for module, forward in forwards.items():
                module.__dict__.pop("forward", None)
                if forward is not None:
                    module.__dict__["forward"] = forward


def _reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP2 has gathered, and put the sharded ones back in place."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
