"""``compare_recipes``: the error of each layer in each recipe, for one batch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from fp8_dist.config import Float8LinearConfig, Float8LinearRecipeName
from fp8_dist.debug.recipes.comparison import HIGH_PRECISION, RecipeComparison
from fp8_dist.debug.recipes.recipe_runs import RecipeRuns
from fp8_dist.linear.module import Float8Linear
from fp8_dist.names import without_wrappers
from fp8_dist.torch_internals import has_hooks_after_accumulation, tree_leaves

Recipes = Iterable[Float8LinearRecipeName | str] | Mapping[str, Float8LinearConfig] | None
LayerFilter = Callable[[nn.Module, str], bool]


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

    Choose the layers to leave out by their own SQNR: this layer alone computes in float8, on the
    tensors of the run in high precision. With all layers in float8, the SQNR of a layer's output
    also contains the errors of the layers before it. It falls with depth, and leaving that layer
    out would not raise it. These numbers are in the rows too (``model_output``, ...).

    The model is left unchanged, also after an error: parameters, gradients, buffers, amax
    histories, and torch's generators. All runs use the same random numbers. ``torch.compile`` is
    off inside, and activation checkpointing works. A model in training mode runs in training mode.
    To use autocast, call the function inside of it. Call it between two steps, not while gradients
    are being accumulated without a reduction (``set_requires_gradient_sync(False)``).

    Each recipe takes the time of one forward and backward, and of the layers alone. A GPU holds the
    tensors of one run at a time. The references are kept on the CPU: the inputs, outputs and input
    gradients of the layers.

    Args:
        model: converted or not; DDP's wrapper is left out. On one device, or under ``fully_shard``
            without float8 gathers and tensor parallelism, on all ranks with their batches.
        batch: a tensor, a tuple or list of arguments, or a dictionary of keyword arguments.
        loss: maps the model's output to a scalar tensor. Default: the output's ``loss``, if it has
            one (transformers' models, given labels); the output itself, if it is a scalar;
            otherwise the mean of the squares of the first tensor in it, a stand-in: give the loss
            of training where gradients matter.
        recipes: names of recipes, or configs by name. Default: all; ``delayed`` only for a model
            with amax histories. Without histories its scales are those of ``tensorwise``.
        module_filter_fn: as in ``convert_to_float8_training``. Default: the converted layers;
            all linear layers of a model without any.

    Returns:
        A :class:`RecipeComparison`, the same on all ranks except for its losses.

    Collectives: those of FSDP2, once for each recipe and once for high precision; one all-reduce of
    24 bytes for each recipe, layer, result and parameter over the parameters' mesh.

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
    return RecipeRuns(model, batch, loss or _default_loss, configs, layers).run()


def _layers_of(model: nn.Module, module_filter_fn: LayerFilter | None) -> dict[str, nn.Linear]:
    """The layers to compare, by name."""
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
    """The configs to compare, by name."""
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
    """The loss that transformers' models return, or a stand-in."""
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
