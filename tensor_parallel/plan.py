"""Checked application of a tensor-parallel plan.

A *plan* maps module names to parallel styles, as for torch's ``parallelize_module``. Each of the
dot-separated parts of a name may contain ``*``. Names leave out the parts that wrappers add, such
as ``_checkpoint_wrapped_module``.

torch's styles give each module a new parameter, so modules whose parameters are *tied* would no
longer share one. If all of them shard it in the same way, they share the first module's parameter
again. Otherwise the plan is an error.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from weakref import WeakSet

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, parallel

from fp8_dist.linear import Float8Linear
from fp8_dist.mesh import check_axis
from fp8_dist.tensor_parallel.lengths import check_lengths
from fp8_dist.tensor_parallel.replicas import compare_at_first_forward
from fp8_dist.tensor_parallel.styles import CheckedStyle, facts_of
from fp8_dist.text import alike_names, is_torchaos, kind_of, without_wrappers
from fp8_dist.weight import agreement
from fp8_dist.weight.weights import checked_module, float8_modules

# The parallel styles of modules, by their names or by patterns of names.
Plan = dict[str, parallel.ParallelStyle]

# Attributes of an attention module whose values the tensor-parallel size must divide.
_HEADS = ("n_heads", "n_head", "num_heads", "n_kv_heads", "n_kv_head", "num_key_value_heads")

# Names of layers that combine projections. (DeepSeek's kv_b_proj is ordered by head.)
_FUSED = re.compile(r"qkv|c_attn|query_?key_?value|gate_?up|^in_proj$|(^|_)w?kv(_proj)?$", re.I)

# Layers that look fused under a plan for which check_tp_plan has passed.
checked_layers: "WeakSet[nn.Module]" = WeakSet()


def apply_tp_plan(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> nn.Module:
    """Parallelize ``model`` in place, after checking every entry of ``plan``.

    Args:
        model: the model. Convert it before this call, and shard it with ``fully_shard`` afterwards.
        mesh: the tensor-parallel axis, 1-D: ``mesh["tp"]`` of a larger mesh.
        plan: a dict from module names, whose parts may contain ``*``, to styles of torch or of
            this library.

    Returns:
        ``model``.

    Parameters that modules share (tied embeddings) stay shared. Converted layers may have torch's
    styles. Their activations are then redistributed in high precision, with a warning.

    A warning lists column-parallel layers whose names are those of fused layers (``qkv``,
    ``c_attn``, ``in_proj``, ``gate_up_proj``, ``kv``). Each rank gets consecutive output features,
    so the model must order q, k and v by head. Layers are not listed if the model has passed
    :func:`check_tp_plan` with a plan under which they look fused, or if ``hf_tp_plan`` made the
    plan.

    The first forward compares two things between the ranks of ``mesh``: the input that the plan
    takes to be the same on all of them (``input_layouts=Replicate()`` of the first entry that
    runs), and the parameters that they all have whole, such as norms. A difference leads to a
    warning on all of these ranks. So does the first forward without gradients. Compiled code
    compares nothing.

    Collectives: one all-reduce of 16 bytes, which ``comm_audit`` does not count, to compare the
    float8 layers and the plan between ranks. Then those of torch's ``parallelize_module``, which
    scatters the parameters. In the first forward, another all-reduce of 16 bytes.

    Raises:
        TypeError: an argument has the wrong type, or an entry's value is not a style.
        ValueError: the mesh is not 1-D; ranks differ in the plan, in the layers or in their
            configs; an entry matches no module; two entries match one module; a float8 style is on
            a module without a ``Float8Linear``; a head count is not divisible by the mesh's size; a
            :class:`CheckedStyle` does not fit its module; or modules that share a parameter would
            shard it in several ways.
            The error lists all offenders, the same on all ranks. Nothing has been changed, unless
            the error is about shared parameters, which are checked last. A forward raises it if the
            plan divides a sequence into unequal plain tensors that other styles read.
    """
    check_plan_arguments("apply_tp_plan(model, mesh, plan)", model, mesh, plan)
    for pattern, style in plan.items():
        if not isinstance(style, parallel.ParallelStyle):
            raise TypeError(
                f"the plan's entry {pattern!r} is {style!r}, not a parallel style: give an "
                f"instance, such as ColwiseParallel()"
            )
    facts: dict[str, str] = {}
    for pattern, style in plan.items():
        facts |= facts_of(style, f"the plan's entry {pattern!r}")
    agreement.check_placed(float8_modules(model), mesh, "apply_tp_plan", facts)
    # Names instead of patterns, for which torch warns about every module that does not match.
    resolved = styles_by_name(model, plan)
    ties = _ties(model)
    # Without duplicates, because all projections of an attention module report its head counts.
    if offenders := dict.fromkeys(_offenders(model, mesh.size(), plan)):
        listing = "\n".join(f"  - {offender}" for offender in alike_names(offenders))
        raise ValueError(f"this tensor-parallel plan does not fit the model:\n{listing}")
    if missed := [
        name
        for name, style in resolved.items()
        if isinstance(model.get_submodule(name), Float8Linear)
        and isinstance(style, parallel.ColwiseParallel | parallel.RowwiseParallel)
        and not isinstance(style, CheckedStyle)
    ]:  # as in a plan made before the conversion
        warnings.warn(
            f"apply_tp_plan: {len(missed)} converted layers, such as {missed[0]!r}, have torch's "
            "styles, which move their inputs and output gradients in high precision. Make the plan "
            "after convert_to_float8_training, or use the float8 styles",
            stacklevel=2,
        )
    if fused := _fused(model, mesh, resolved):
        warnings.warn(
            f"apply_tp_plan: {', '.join(alike_names(fused))}: column-parallel, and called like "
            "several projections in one layer. Each rank gets consecutive output features, not a "
            "part of each projection, so chunk(3, -1) or split mixes them. Order the rows by head "
            "and use unflatten(-1, (-1, 3, head_dim)), separate the projections, or gather the "
            "output (output_layouts=Replicate()). check_tp_plan compares the model with one device",
            stacklevel=2,
        )
    check_lengths(model, mesh.size(), resolved)
    compare_at_first_forward(model, mesh, resolved)
    parallel.parallelize_module(model, mesh, resolved)
    for tie in ties:
        tied = [model.get_parameter(name) for name in tie]
        places = [p.placements[-1] if isinstance(p, DTensor) else "whole" for p in tied]
        if len({*places}) > 1:
            listed = ", ".join(f"{name} {place}" for name, place in zip(tie, places, strict=True))
            raise ValueError(
                f"apply_tp_plan: {' and '.join(map(repr, tie))} are one parameter (tied), which "
                f"the plan would untie: {listed}. Give its modules entries that divide it alike "
                "(RowwiseParallel for an nn.Embedding and ColwiseParallel for an nn.Linear are "
                "Shard(0)), or untie them before"
            )
        for name in tie[1:]:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, tied[0])
    return model


def check_plan_arguments(call: str, model: object, mesh: object, plan: object) -> None:
    """Raise for arguments of wrong types; ``call``: the function with its arguments' names."""
    checked_module(model, call)
    check_axis(mesh, call)
    if not isinstance(plan, Mapping):
        raise TypeError(
            f"{call}: plan must be a dict of module names to styles, got {kind_of(plan)}"
        )


def _fused(model: nn.Module, mesh: DeviceMesh, styles: Plan) -> list[str]:
    """Return the column-parallel layers that look like several projections in one.

    The list is empty on a mesh of one rank, and leaves out layers that have been checked.
    """
    fused = []
    for name, style in styles.items() if mesh.size() > 1 else ():
        layer, (parent, _, child) = (
            model.get_submodule(name),
            without_wrappers(name).rpartition("."),
        )
        if not isinstance(style, parallel.ColwiseParallel) or not isinstance(layer, nn.Linear):
            continue
        # The style that hf_tp_plan gives to the parent lists layers that transformers declares to
        # be ordered: no rank splits one of the ``parts`` of their outputs.
        is_ordered = child in getattr(styles.get(parent), "parts", ())
        is_whole = style.output_layouts == (Replicate(),)
        if not (is_ordered or is_whole or layer in checked_layers) and _FUSED.search(child):
            fused.append(name)
    return fused


def mark_checked(model: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    """Exclude the layers of a model that look fused under a plan from later warnings."""
    fused = _fused(model, mesh, styles_by_name(model, plan))
    checked_layers.update(map(model.get_submodule, fused))


def styles_by_name(model: nn.Module, plan: Plan) -> Plan:
    """The styles of a plan, by the names of the modules that its patterns match."""
    matches = _matched(model, plan)
    return {name: plan[pattern] for pattern, names in matches.items() for name in names}


def _matched(model: nn.Module, plan: Plan) -> dict[str, dict[str, nn.Module]]:
    """The modules that each pattern matches, by their first name, the only one that torch knows."""
    names = {module: name for name, module in model.named_modules()}
    return {
        pattern: {names[m]: m for m in _matches(model, without_wrappers(pattern))}
        for pattern in plan
    }


def _matches(module: nn.Module, pattern: str) -> Iterator[nn.Module]:
    """Yield the modules with a name that a pattern matches. A module may have several names."""
    children = module._modules.items()
    if inner := next((child for name, child in children if not without_wrappers(name)), None):
        yield from _matches(inner, pattern)
        return
    if not pattern:
        yield module
        return
    token, _, rest = pattern.partition(".")
    for name, child in children:
        if child is not None and fnmatch(name, token):
            yield from _matches(child, rest)


def _offenders(model: nn.Module, size: int, plan: Plan) -> Iterator[str]:
    """Yield the reasons why ``plan`` can't be applied on ``size`` ranks, one line each."""
    claimed: dict[str, str] = {}
    matched = _matched(model, plan)
    if unmatched := [repr(pattern) for pattern, matches in matched.items() if not matches]:
        yield (
            f"{', '.join(unmatched)} {'match' if len(unmatched) > 1 else 'matches'} no module: a "
            "name has one part per level, as in model.named_modules(), and '*' stands for one part"
        )
    for pattern, matches in matched.items():
        style = plan[pattern]
        for name, module in matches.items():
            if name in claimed:
                yield (
                    f"{name!r} is matched by two entries, {claimed[name]!r} and {pattern!r}: "
                    f"leave one of them"
                )
            claimed[name] = pattern
            if is_torchaos(type(style)) and float8_modules(module):
                kind = type(style).__name__
                yield (
                    f"{name!r}: {kind} is torchao's, and is for layers that torchao has converted: "
                    f"import {kind} from fp8_dist.tensor_parallel"
                )
            if isinstance(style, CheckedStyle):
                yield from (f"{name!r}: {misfit}" for misfit in style.misfits(module, size))
            parent = name.rpartition(".")[0]
            for attribute in _HEADS if isinstance(style, parallel.ColwiseParallel) else ():
                count = getattr(model.get_submodule(parent), attribute, None)
                if isinstance(count, int) and count % size:
                    yield (
                        f"{parent!r} has {attribute}={count}, which {size} tensor-parallel ranks "
                        "cannot share evenly: use a tensor-parallel size that divides it"
                    )


def _ties(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]
