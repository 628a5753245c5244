"""Conversion of a model: ``nn.Linear`` layers become ``Float8Linear``."""

import warnings
from collections.abc import Iterable
from typing import cast

import torch.nn as nn
from torch.distributed.tensor import DTensor

from fp8_dist.config import Float8LinearConfig
from fp8_dist.kernels import ALIGNMENT
from fp8_dist.linear.agreement import note_converted
from fp8_dist.linear.checks import takes_any_size
from fp8_dist.linear.module import Float8Linear, other_users
from fp8_dist.model.filters import FilterFn, note_left_out, why_misaligned, why_unconvertible
from fp8_dist.model.report import ConversionSummary, WeightSummary, conversion_summary

# For weights that no nn.Linear owns, the subject of the message about them, and the remedy.
_NOT_LINEAR = {
    "Conv1D": (
        "Conv1D layers (transformers.pytorch_utils.Conv1D)",
        ". Replace them by nn.Linear layers with the transposed weight before the conversion "
        "(docs/transformers.md shows how)",
    ),
    "experts": (
        "Experts whose weights are 3-D parameters",
        ". fp8_dist.moe.convert_experts_to_float8_training converts those that it knows",
    ),
}


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: FilterFn | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:
    """Replace the linear layers of a model with float8 ones, in place.

    Call it before tensor parallelism, ``torch.compile`` and ``fully_shard`` are applied. The new
    layers keep the parameters, hooks and attributes of the old ones.

    One warning lists the layers that stay in high precision although no filter excludes them:
    subclasses of nn.Linear that override ``forward``, layers whose weight is computed
    (``weight_norm``), layers whose weight nn.MultiheadAttention reads, lazy layers, layers whose
    weight is not floating point or is a tensor subclass with its own GEMM, transformers' Conv1D
    layers, and experts whose weights are 3-D parameters. The warning also lists converted layers
    that a GPU would refuse, because in_features or out_features is not a multiple of 16.

    Args:
        module: the model.
        module_filter_fn: a function ``(module, fqn) -> bool`` that is called for each linear layer.
            If it returns False, the layer stays unconverted. ``None``: convert all linear layers.
        config: the config of the layers. Default: the ``tensorwise`` recipe.

    Returns:
        ``module``, or the converted layer if ``module`` is an nn.Linear.

    Collectives: none.

    Raises:
        ValueError: no layer was converted (the message has the reason for each layer), a layer is
            already converted with another config, a weight is already distributed, or an
            unconverted module shares a weight that is to be gathered in float8.
        TypeError: ``config`` is not a Float8LinearConfig.
    """
    if config is not None and not isinstance(config, Float8LinearConfig):
        raise TypeError(
            f"convert_to_float8_training: config must be a Float8LinearConfig, got {config!r}; "
            "Float8LinearConfig.from_recipe_name(name) makes one from a recipe's name"
        )
    chosen = _choose(module, module_filter_fn, config)
    config = config or Float8LinearConfig()
    late = [fqn or "the module" for fqn, m in chosen.items() if isinstance(m.weight, DTensor)]
    if late:
        raise ValueError(
            "convert_to_float8_training: these weights are distributed already: "
            f"{', '.join(late)}. Convert the model first, then apply tensor parallelism, then "
            "fully_shard"
        )
    own = {f"{name}.weight": layer.weight for name, layer in chosen.items()}
    # FSDP2 would gather a weight in float8 for an unconverted module, too.
    shared = config.fsdp_float8_all_gather and other_users(module, own, chosen.values())
    if shared:
        raise ValueError(
            "convert_to_float8_training: enable_fsdp_float8_all_gather="
            f"{config.enable_fsdp_float8_all_gather!r} gathers a weight in float8 for all of its "
            f"users, but {'; '.join(shared)}. Leave these layers unconverted (module_filter_fn), "
            "or untie them"
        )
    converted: dict[nn.Module, Float8Linear] = {}
    weights: dict[int, nn.Parameter] = {}
    for fqn, layer in chosen.items():
        new = Float8Linear.from_float(layer, config, fqn=fqn)
        # Layers that shared a weight share the new parameter.
        new.weight = weights.setdefault(id(layer.weight), cast(nn.Parameter, new.weight))
        converted[layer] = new
    # A linear layer may have children, which its Float8Linear takes over.
    for parent in (*module.modules(), *converted.values()):
        for name, child in list(parent._modules.items()):
            if child in converted:
                setattr(parent, name, converted[child])  # type: ignore[index]
    module = converted.get(module, module)
    note_converted(module)
    return module


def _choose(
    module: nn.Module, module_filter_fn: FilterFn | None, config: Float8LinearConfig | None
) -> dict[str, nn.Linear]:
    """Return the layers to convert, by name, and warn about layers that can't be converted."""
    chosen: dict[str, nn.Linear] = {}
    reasons: dict[str, str] = {}
    left: list[str] = []
    not_linear = _not_linear(module)
    for fqn, layer in module.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        if module_filter_fn is not None and not module_filter_fn(layer, fqn):
            reason_of = getattr(module_filter_fn, "reason", None)
            default = "module_filter_fn returned False"
            reasons[fqn] = reason_of(fqn) if callable(reason_of) else default
            note_left_out(layer, reasons[fqn])
        elif isinstance(layer, Float8Linear):
            if config not in (None, layer.config):
                raise ValueError(
                    f"convert_to_float8_training: {fqn or 'the module'} is converted already, with "
                    f"another config: {layer.extra_repr()}. Convert it once, or exclude it in "
                    "module_filter_fn"
                )
            reasons[fqn] = "it is a Float8Linear already"
        elif reason := why_unconvertible(layer):
            reasons[fqn] = reason
            note_left_out(layer, reason)
            left.append(f"{fqn} ({reason})")
        else:
            chosen[fqn] = layer
    if not chosen and not any(isinstance(m, Float8Linear) for m in module.modules()):
        raise ValueError(_nothing_converted(module, reasons, not_linear))
    others = not_linear if chosen else []
    sizes = {fqn: (layer.out_features, layer.in_features) for fqn, layer in chosen.items()}
    bad = [(fqn, shape) for fqn, shape in sizes.items() if why_misaligned(*shape)]
    if bad and not takes_any_size(config or Float8LinearConfig()):
        others = [
            "A GPU will refuse these converted layers, whose out_features or in_features is not a "
            f"multiple of {ALIGNMENT}: {_listed(bad)}. Leave them in high precision "
            "(module_filter_fn=skip_head(model) does), or set "
            "Float8LinearConfig.pad_inner_dim=True",
            *others,
        ]
    if left or others:
        start = "convert_to_float8_training: "
        if left:
            start = (
                "convert_to_float8_training left these layers in high precision: "
                f"{'; '.join(left)}. Exclude them in module_filter_fn to say that this is meant\n"
            )
        warnings.warn((start + "\n".join(others)).rstrip(), stacklevel=3)
    return chosen


def _not_linear(module: nn.Module) -> list[str]:
    """Return messages about weights that stay unconverted because no nn.Linear owns them."""
    summary, said = conversion_summary(module), []
    for kind, (subject, remedy) in _NOT_LINEAR.items():
        if rows := [row for row in summary.rows if row.kind == kind and not row.converted]:
            said.append(
                f"{subject} are not nn.Linear and stay in high precision: "
                f"{_listed((row.name, row.shape) for row in rows)}. They hold "
                f"{_shares(rows, summary)}{remedy}"
            )
    return said


def _shares(part: list[WeightSummary], summary: ConversionSummary) -> str:
    """Describe the share of some rows in parameters, and in FLOPs if they are known."""
    parameters, flops = summary.shares(part)
    said = f"{parameters:.1%} of the model's parameters"
    experts = [row for row in summary.rows if row.kind == "experts"]
    if not all(row.visited for row in experts):
        return (
            f"{said} (their share of FLOPs is not known: neither the modules nor the config say "
            "how many experts a token uses)"
        )
    used = " or ".join(sorted({f"{row.visited} of {row.shape[0]} experts" for row in experts}))
    how = f" (per token, which uses {used})" if used else ""
    return f"{said} and {flops:.1%} of the FLOPs of products with weights{how}"


def _listed(layers: Iterable[tuple[str, tuple[int, ...]]], limit: int = 4) -> str:
    """Return names with sizes as text. A long list is cut, and ends with the number of the rest."""
    named = [f"{name or 'the module'} ({' x '.join(map(str, shape))})" for name, shape in layers]
    more = [f"and {len(named) - limit} more"] if len(named) > limit + 1 else []
    return ", ".join([*(named[:limit] if more else named), *more])


def _nothing_converted(module: nn.Module, skipped: dict[str, str], not_linear: list[str]) -> str:
    kind = type(module).__name__
    lines = [f"convert_to_float8_training: {kind} contains no nn.Linear, so nothing was converted"]
    if skipped:
        lines = [f"convert_to_float8_training: no layer of {kind} was converted:"]
    lines += [f"  {fqn or '(the module itself)'}: {why}" for fqn, why in skipped.items()]
    return "\n".join([*lines, *not_linear])
