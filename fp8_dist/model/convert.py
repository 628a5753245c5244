"""Conversion of a model: ``nn.Linear`` layers become ``Float8Linear`` in place, and back."""

import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch.nn as nn
from torch.distributed.tensor import DTensor

from fp8_dist.config import Float8LinearConfig, check_config
from fp8_dist.fsdp.gathers import reshard
from fp8_dist.fsdp.weight import unwrap_float8_weights
from fp8_dist.kernels.quantization import ALIGNMENT
from fp8_dist.linear import Float8Linear, checks, class_change, float8_layers
from fp8_dist.linear.module import become_float8, other_users, why_unconvertible
from fp8_dist.mesh import Placements, linear_layouts, local_tensor, redistributed
from fp8_dist.model.break_even import why_slower
from fp8_dist.model.filters import LEFT_OUT, LayerFilter, why_misaligned
from fp8_dist.model.report import ConversionSummary, conversion_summary
from fp8_dist.model.routers import routers
from fp8_dist.moe import experts as moe_experts
from fp8_dist.moe.experts import CONVERT_BEFORE, FilterFn, check_arguments
from fp8_dist.text import alike, alike_names, warn_once, without_wrappers
from fp8_dist.torch_internals import normal_tensors
from fp8_dist.weight import agreement
from fp8_dist.weight.weights import float8_weights, weights_of


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: FilterFn | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:
    """Turn the linear layers of a model into float8 ones, in place.

    Call it before tensor parallelism, ``torch.compile`` and ``fully_shard`` are applied. The layers
    stay the same objects, with their parameters, hooks and attributes; only their class changes, so
    that references to them go on working. (A bound method ``layer.forward`` that was taken before
    goes on computing in high precision.) A layer of a subclass of nn.Linear remains an instance of
    it.

    Parameters stay the same. With ``enable_fsdp_float8_all_gather``, ``fully_shard`` wraps the
    local tensors of its sharded parameters in a type that FSDP2 gathers in float8.

    One warning lists the layers that stay in high precision although no filter excludes them:
    subclasses of nn.Linear that override ``forward`` (torchao's Float8Linear, too), layers whose
    own ``forward``, or that of nn.Linear, was replaced (except by accelerate's hooks, which go on
    working), layers whose weight is computed
    (``weight_norm``), layers whose weight nn.MultiheadAttention reads, lazy layers, layers whose
    weight is not floating point or is a tensor subclass with its own GEMM, transformers' Conv1D
    layers (GPT-2), and experts whose weights are 3-D parameters. The warning also lists converted
    layers that a GPU would refuse, because in_features or out_features is not a multiple of 16, and
    converted routers of experts.

    A process is warned once if the layers, on a Hopper or B200, are so small that the host bounds
    their steps with any usual number of tokens, which makes float8 slower than bf16.

    Args:
        module: the model.
        module_filter_fn: a function ``(module, fqn) -> bool`` that is called for each nn.Linear,
            with its name in the keys of ``state_dict()``, without the parts that wrappers add
            (``_checkpoint_wrapped_module``, ``_orig_mod``). If it returns False, the layer stays
            unconverted. ``None``: convert all of them.
        config: the config of the layers. Default: the ``tensorwise`` recipe.

    Returns:
        ``module``.

    Collectives: none.

    Raises:
        ValueError: no layer was converted (the message has the reason for each layer), a layer is
            already converted with another config, a weight is already distributed, or an
            unconverted module shares a weight that is to be gathered in float8.
        TypeError: an argument has the wrong type.
    """
    check_arguments("convert_to_float8_training", module, module_filter_fn)
    if config is not None:
        check_config("convert_to_float8_training", config, Float8LinearConfig)
    chosen = _choose(module, module_filter_fn, config)
    config = config or Float8LinearConfig()
    if distributed := [fqn for fqn, layer in chosen.items() if isinstance(layer.weight, DTensor)]:
        raise ValueError(
            "convert_to_float8_training: these weights are distributed already: "
            f"{', '.join(alike_names(distributed)) or 'that of the module'}. {CONVERT_BEFORE}"
        )
    weights = {f"{name}.weight": layer.weight for name, layer in chosen.items()}
    # FSDP2 would gather a weight in float8 for an unconverted module, too.
    if shared := config.fsdp_float8_all_gather and other_users(module, weights, chosen.values()):
        raise ValueError(
            "convert_to_float8_training: enable_fsdp_float8_all_gather gathers a weight in float8 "
            f"for all of its users, but {'; '.join(shared)}. Leave these layers unconverted "
            "(module_filter_fn), or untie them"
        )
    for fqn, layer in chosen.items():
        become_float8(layer, config, fqn)
        LEFT_OUT.pop(layer, None)
    for weight in float8_weights(module).values():
        weight.note_model(module)
    agreement.note_converted(module)
    if why := why_slower(local_tensor(layer.weight) for layer in chosen.values()):
        warn_once("slower than bf16", f"convert_to_float8_training: {why}")
    return module


@normal_tensors()
def convert_to_linear(module: nn.Module) -> nn.Module:
    """Turn the float8 layers and experts of a model back, in place.

    This is the inverse of :func:`convert_to_float8_training`, also for a model that tensor
    parallelism and FSDP2 have distributed, and of
    :func:`fp8_dist.moe.convert_experts_to_float8_training`, for experts that are not distributed.
    Weights keep their values. Layers keep their hooks and attributes, and get their classes back.
    The model then computes as if it had never been converted: FSDP2 gathers weights in high
    precision, and tensor parallelism communicates as torch's styles do, except that prepared inputs
    keep their ``reduce_transport``. A call on a model without float8 layers changes nothing.

    Parameters stay the same objects, so optimizers stay valid. Updates attached to an optimizer
    (:func:`fp8_dist.attach_update`) end by themselves. A model that is distributed can't be
    converted again: load its state dict into one that was converted before it was distributed.

    Args:
        module: the model; or a part of it that has all layers of the blocks whose inputs are
            prepared in float8, and the FSDP modules of its layers.

    Returns:
        ``module``.

    Collectives: none.

    Raises:
        ValueError: a weight is stored in float8, is gathered by FSDP2 at the moment, or was
            declared as a local tensor; the ``forward`` of a layer was replaced after the
            conversion; or a layer outside of ``module`` shares a layer's weight under FSDP2, or its
            config casts a layer's input. Nothing has been changed then.
        NotImplementedError: ``module`` has converted experts that are distributed, or that were
            built in float8 (torchtitan's). Nothing has been changed then.
        TypeError: ``module`` is not an nn.Module.
    """
    layers, experts = float8_layers(module), moe_experts.float8_experts(module)
    for fqn, part in experts.items():
        if why := moe_experts.why_not_convertible_back(part):
            raise NotImplementedError(
                f"convert_to_linear: the experts {fqn or '(the module itself)'} can't be converted "
                f"back in place: {why}; load the state_dict, which is the same, into a model that "
                "is not converted"
            )
    reshard(module, "convert_to_linear")
    names = {layer.fqn for layer in layers.values()}
    reasons = {fqn: _why_not_linear(layer, names) for fqn, layer in layers.items()}
    stored = [n for n, m in experts.items() if any(w.is_stored for w in weights_of(m).values())]
    reasons |= dict.fromkeys(stored, _STORED)
    for fqn, why in reasons.items():
        if why:
            raise ValueError(
                f"convert_to_linear: {fqn or 'the module'} can't become an nn.Linear: it {why}"
            )
    unwrap_float8_weights(float8_weights(module).values())
    for layer in layers.values():
        placements = layer.output_placements
        layer.become_linear()
        if placements is not None:
            # The style's hooks run around these: they annotate the input, and take the output.
            layer.register_forward_pre_hook(_place_input)
            layer.register_forward_hook(partial(_place_output, placements), prepend=True)
    for part in experts.values():
        moe_experts.convert_back(part)
    agreement.CONVERTED.discard(module)
    return module


_STORED = "is stored in float8; call unfreeze_from_float8 first, before fully_shard"


def _why_not_linear(layer: Float8Linear, names: set[str]) -> str:
    """Return the reason why a layer can't become an nn.Linear, with the remedy, or ``""``."""
    weight = layer.float8_weight
    if weight.is_stored:
        return _STORED
    if weight.is_registered and weight.master() is not weight.parameter():
        return "is gathered by FSDP2; pass the model that fully_shard was called on"
    if layer.local_placements is not None:
        return (
            "communicates in its forward, as declare_placements says; load the state_dict, which "
            "is the same, into a model that is not converted"
        )
    if class_change.why_forward_is_kept(layer):
        return "has a forward that was replaced after the conversion; delete the attribute first"
    users = [] if weight.fsdp is None else weight.fsdp.users
    sharing = {shared.fqn for m, name in users if (shared := weights_of(m).get(name))}
    if outside := (layer.prepared_by | sharing) - names:
        return f"shares its input or weight with {min(outside)}; pass the block that has both"
    return ""


def _place_input(layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Redistribute the input of a tensor-parallel layer for its weight, as torch's styles do."""
    input, *others = args
    layouts = linear_layouts(input.placements, layer.weight.placements, input.ndim)
    return (redistributed(input, layouts.input), *others)


def _place_output(placements: Placements, layer: nn.Linear, args: Any, output: DTensor) -> DTensor:
    return redistributed(output, placements)


def _choose(
    module: nn.Module, module_filter_fn: FilterFn | None, config: Float8LinearConfig | None
) -> dict[str, nn.Linear]:
    """Return the layers to convert, by name, and warn about layers that can't be converted."""
    chosen: dict[str, nn.Linear] = {}
    unfit: dict[str, str] = {}  # the reasons for layers that no filter excludes
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        fqn = without_wrappers(name)
        if module_filter_fn is not None and not module_filter_fn(layer, fqn):
            reasons = module_filter_fn.reasons if isinstance(module_filter_fn, LayerFilter) else {}
            LEFT_OUT[layer] = reasons.get(fqn, "module_filter_fn returned False")
        elif isinstance(layer, Float8Linear):
            if config not in (None, layer.config):
                raise ValueError(
                    f"convert_to_float8_training: {fqn or 'the module'} is converted already, with "
                    f"another config: {layer.extra_repr()}. Convert it once, or exclude it in "
                    "module_filter_fn"
                )
        elif reason := why_unconvertible(layer):
            LEFT_OUT[layer] = unfit[fqn] = reason
        else:
            chosen[fqn] = layer
    summary = conversion_summary(module)
    not_linear = [*_not_linear(summary)]
    if not chosen and not float8_layers(module):
        kind = type(module).__name__
        linear = [(row.name, row.reason) for row in summary.rows if row.kind == "linear"]
        title = f"no layer of {kind} was converted:"
        if not linear:
            title = f"{kind} contains no nn.Linear, so nothing was converted"
        lines = [f"  {name}: {group[0][1]}" for name, group in alike(linear, lambda row: row)]
        raise ValueError("\n".join([f"convert_to_float8_training: {title}", *lines, *not_linear]))
    if notes := [*_notes(module, chosen, unfit, config), *(not_linear if chosen else [])]:
        warnings.warn("convert_to_float8_training: " + "\n".join(notes), stacklevel=3)
    return chosen


def _notes(
    module: nn.Module,
    chosen: dict[str, nn.Linear],
    unfit: dict[str, str],
    config: Float8LinearConfig | None,
) -> Iterator[str]:
    """Yield messages about layers that can't be converted, or should not be."""
    if unfit:
        names: dict[str, list[str]] = {}
        for name, group in alike(unfit.items(), lambda item: item):
            names.setdefault(group[0][1], []).append(name)
        listed = "; ".join(f"{', '.join(layers)} ({reason})" for reason, layers in names.items())
        yield (
            f"these layers stay in high precision: {listed}. Exclude them in module_filter_fn to "
            "say that this is meant"
        )
    shapes = {fqn: (layer.out_features, layer.in_features) for fqn, layer in chosen.items()}
    known_routers = set(routers(module))
    if deciding := [item for item in shapes.items() if chosen[item[0]] in known_routers]:
        yield (
            "These converted layers are routers, so float8 changes which experts compute: "
            f"{_listed(deciding)}. module_filter_fn=skip_head(model) leaves them in high precision"
        )
    misaligned = [item for item in shapes.items() if why_misaligned(*item[1])]
    if misaligned and not checks.takes_any_size(config or Float8LinearConfig()):
        yield (
            "A GPU will refuse these converted layers, whose out_features or in_features is not a "
            f"multiple of {ALIGNMENT}: {_listed(misaligned)}. Leave them in high precision "
            "(module_filter_fn=skip_head(model)), or set Float8LinearConfig.pad_inner_dim=True"
        )


def _not_linear(summary: ConversionSummary) -> Iterator[str]:
    """Yield messages about weights that stay unconverted because no nn.Linear has them."""
    if conv1d := [row for row in summary.skipped if row.kind == "Conv1D"]:
        yield (
            "transformers' Conv1D layers are not nn.Linear and stay in high precision: "
            f"{_listed((row.name, row.shape) for row in conv1d)}. Replace them by nn.Linear layers "
            "with the transposed weight before the conversion (docs/transformers.md shows how)"
        )
    if experts := [row for row in summary.skipped if row.kind == "experts"]:
        yield (
            "Experts whose weights are 3-D parameters are not nn.Linear and stay in high "
            f"precision: {_listed((row.name, row.shape) for row in experts)}. They hold "
            f"{summary.share(experts):.1%} of the model's parameters. "
            "fp8_dist.moe.convert_experts_to_float8_training converts those that it knows"
        )


def _listed(layers: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """Return names with sizes as text. A long list is cut, and ends with the number of the rest."""
    named = [f"{name or 'the module'} ({' x '.join(map(str, shape))})" for name, shape in layers]
    shown = named if len(named) < 6 else [*named[:4], f"and {len(named) - 4} more"]
    return ", ".join(shown)
