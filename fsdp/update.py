"""Updates of scales after an optimizer step: precompute, sync, or both, also as step hooks."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
import torch.nn as nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8_dist.fsdp.gathers import reshard
from fp8_dist.fsdp.precompute import check_agreement, precompute_weights, warn_of_computed
from fp8_dist.fsdp.weight import keep_casts, shards_of
from fp8_dist.linear import Float8Linear, float8_layers
from fp8_dist.mesh import all_reduce_max, common_groups
from fp8_dist.operand.history import PREPARED_INPUT, AmaxHistory, advance
from fp8_dist.text import kind_of
from fp8_dist.torch_internals import disabled_in_graphs, normal_tensors
from fp8_dist.weight import agreement, optimizer_steps
from fp8_dist.weight.float8_weight import Float8Weight
from fp8_dist.weight.weights import (
    checked_module,
    float8_weights,
    mark_scales_ready,
    weights_of_model,
)

_UNUSED = -1.0  # below every amax
_REMEDY = (
    "Make the optimizer, and call attach_update, after apply_tp_plan and fully_shard, which make "
    "new parameters"
)


@disabled_in_graphs("update_float8_scales updates what graphs ask for when they run")
def update_float8_scales(module: nn.Module) -> None:
    """Update the scales of a model after an optimizer step, as its recipes require.

    Call it on all ranks after every ``optimizer.step()``, for any recipe, or let
    :func:`attach_update` call it. It runs

    * :func:`fp8_dist.precompute_float8_dynamic_scale` for the weights with DYNAMIC scales that
      FSDP2 gathers in float8, or that tensor parallelism distributes. Other weights do not need it:
      when they are cast, each rank has all values that a scale covers. Either they are whole on
      every rank, or FSDP2 has gathered them in high precision. A weight that is computed from other
      parameters (a parametrization, ``weight_norm``) is cast by each forward, with one warning.
    * :func:`fp8_dist.sync_float8_amax_and_scale_history` if an operand has DELAYED scales.

    Args:
        module: the model, or a part of it that contains the FSDP modules of its layers.

    Collectives: those of the functions that run, which are the same on all ranks. The first call
    for a module may compare its layers between ranks, as in precompute.

    Raises:
        ValueError: ranks differ in the layers of ``module``, it has no converted layer, or one of
            the two functions refuses a weight.
        NotImplementedError, torch._dynamo.exc.Unsupported: as in the two functions.
    """
    check_agreement(module, "update_float8_scales")
    weights = weights_of_model(module, "update_float8_scales")
    if kept := {fqn: weight for fqn, weight in weights.items() if weight.kept() is not None}:
        if len(kept) < len(weights):
            warn_of_computed(weights)
        precompute_weights(module, kept)
    if any(weight.histories for weight in weights.values()):
        sync_float8_amax_and_scale_history(module)


@disabled_in_graphs("sync_float8_amax_and_scale_history updates what graphs ask for when they run")
@normal_tensors()
def sync_float8_amax_and_scale_history(module: nn.Module) -> None:
    """Add the amaxes of this step to the histories of all DELAYED operands, and update the scales.

    Call it once per optimizer step, on all ranks, outside of forward and backward: after the last
    micro-batch, and before or after ``optimizer.step()``. Scales become the same on all ranks that
    share the model. These are the ranks on the meshes of its weights, and of inputs that
    ``PrepareFloat8ModuleInput`` casts. Data-parallel ranks with plain weights, as in DDP, each keep
    histories of their own. A call without a forward since the last call changes nothing.

    Args:
        module: the model, or a part of it.

    Collectives: exactly one all-reduce (MAX) of 4 bytes per operand, over all axes of these
    meshes, and of 4 more per weight that is a layer's only DELAYED operand; none if there are no
    meshes. As in precompute, the first call may make the groups of a pipeline's stages, and may
    compare the layers of the module.

    Raises:
        ValueError: ranks differ in the layers of ``module``, or no operand in it is DELAYED.
        NotImplementedError: weights on several meshes that are not slices of one root mesh; or a
            CUDA graph is being captured.
    """
    check_agreement(module, "sync_float8_amax_and_scale_history")
    layers = [layer for layer in float8_layers(module).values() if layer.histories]
    if not layers:
        raise ValueError(
            "sync_float8_amax_and_scale_history: the module has no Float8Linear with a DELAYED "
            "operand; convert it with the recipe 'delayed', or call update_float8_scales(model) "
            "instead, which serves all recipes"
        )
    reshard(module, "sync_float8_amax_and_scale_history")
    meshes = {mesh for layer in layers for mesh in layer.float8_weight.meshes()}
    histories, amaxes, count = _recorded(layers, has_shards=bool(meshes))
    # The device of the mesh, because offloaded weights are on another one.
    of_meshes = (torch.device(mesh.device_type) for mesh in meshes)
    of_amaxes = (x.device for x in amaxes if isinstance(x, torch.Tensor))
    device = next(chain(of_meshes, of_amaxes), torch.device("cpu"))
    numbers = {number: torch.full((), number, device=device) for number in (0.0, _UNUSED)}
    values = [numbers[x] if isinstance(x, float) else x.to(device) for x in amaxes]
    groups, _ = common_groups({mesh: range(mesh.ndim) for mesh in meshes})
    sent = torch.stack(values)
    with agreement.expecting_all_ranks("the update of scales (attach_update, or the sync)"):
        reduced = all_reduce_max(sent, groups)
    _, of_weights, marks = reduced.split([len(reduced) - 2 * count, count, count])
    of_weights.masked_fill_(marks < 0, _UNUSED)
    advance(histories, reduced[: len(histories)], is_local=not meshes)
    for layer in layers:
        layer.float8_weight.note_model(module)
    weights = [w for layer in layers if (w := layer.float8_weight).is_registered]
    keep_casts(shards_of(weight for weight in weights if weight.history is not None))
    mark_scales_ready(weights)


def _recorded(
    layers: Sequence[Float8Linear], has_shards: bool
) -> tuple[list[AmaxHistory], list[torch.Tensor | float], int]:
    """Return the histories of layers, the amaxes of this rank, and the number of weights.

    A rank whose micro-batches did not use a layer has recorded nothing, but FSDP2 has cast its
    shard of the weight for the ranks that did. So this rank contributes the amax of that cast. The
    amax counts only if some rank used the layer. A mark per weight, negative if not, tells this.

    Args:
        has_shards: whether other ranks have shards of the weights.

    Returns:
        The histories; their amaxes, with further marks at the end; and the number W of weights. The
        last 2 * W values are the amaxes of the weights, then their marks, in the same order.
    """
    pairs: list[tuple[AmaxHistory, AmaxHistory | None]] = []
    others: list[AmaxHistory] = []
    for layer in layers:
        operands = dict(layer.histories)
        if has_shards and (weight := operands.pop("weight", None)) is not None:
            # The amax of another operand serves as a mark, but not that of a shared input.
            marking = next((name for name in operands if name != PREPARED_INPUT), "")
            pairs.append((weight, operands.pop(marking, None)))
        others += operands.values()
    pairs.sort(key=lambda pair: pair[1] is None)
    amaxes = [_either(history.current, 0.0) for history in others]
    amaxes += [_either(weight.current, _either(weight.last, _UNUSED)) for weight, _ in pairs]
    for weight, mark in pairs:
        used = _UNUSED if weight.current is None else 0.0
        amaxes.append(used if mark is None else _either(mark.current, used))
    weights = [weight for weight, _ in pairs]
    marks = [mark for _, mark in pairs if mark is not None]
    return [*others, *weights, *marks], amaxes, len(pairs)


def _either(amax: torch.Tensor | None, number: torch.Tensor | float) -> torch.Tensor | float:
    return number if amax is None else amax


def attach_update(optimizer: Optimizer | Iterable[Optimizer], module: nn.Module) -> RemovableHandle:
    """Call :func:`update_float8_scales` after every optimizer step.

    No hook runs for a step that ``torch.amp.GradScaler`` skips. So with DELAYED scales, call
    :func:`update_float8_scales` in the training loop instead.

    Args:
        optimizer: an optimizer that updates float8 weights of ``module``, made after
            ``apply_tp_plan`` and ``fully_shard``. It may also be a wrapper
            (accelerate's AcceleratedOptimizer) or a container (torchtitan's OptimizersContainer, a
            list). If the wrapper or container runs no step hooks itself, the update runs after the
            last of its optimizers that update a weight of ``module``. For several optimizers, pass
            a list in the order of their steps, or the one that steps last. If they step within a
            backward, pass all of them: the update then runs when the backward has ended.
        module: the model, or a part of it.

    Returns:
        A handle whose ``remove()`` ends the calls.

    Raises:
        ValueError: ``module`` has no converted layer, or the optimizer updates none of its float8
            weights, or holds parameters that layers, the plan or ``fully_shard`` have replaced.
            The first step raises it for parameters that were replaced after this call.
        TypeError: ``optimizer`` is not a torch optimizer and holds none.
    """
    checked_module(module, "attach_update(optimizer, module)")
    weights = weights_of_model(module, "attach_update")
    reshard(module, "attach_update")  # puts the parameters in place that an optimizer updates
    optimizers = optimizer_steps.hooked_optimizers(optimizer)
    if not optimizers:
        raise TypeError(
            f"attach_update: {kind_of(optimizer)} is no torch.optim.Optimizer that runs "
            "step hooks, and holds none (as its attribute .optimizer, or by iteration); pass the "
            "optimizer that updates the model"
        )
    registered = {fqn: weight for fqn, weight in weights.items() if weight.is_registered}
    trained = {id(p): fqn for fqn, w in registered.items() if (p := w.parameter()).requires_grad}
    fitting = [opt for opt in optimizers if trained.keys() & optimizer_steps.held_by(opt)]
    if trained and not fitting:
        first = next(iter(trained.values()))
        raise ValueError(
            f"attach_update: the {type(optimizer).__name__} updates none of the module's "
            f"{len(trained)} float8 weights (such as {first}). {_REMEDY}"
        )
    for opt in optimizers:
        optimizer_steps.check_not_replaced(opt)
    _check_not_older(optimizers, module, registered)
    # The parameters until the first step: what shards a model replaces them.
    parameters = {weight: weight.parameter() for weight in registered.values()}
    # The optimizer holds this function, and would not be freed if the function held the optimizer.
    held = [weakref.ref(opt) for opt in optimizers]

    def update_converted() -> None:
        weights = float8_weights(module)
        if not weights:  # after convert_to_linear
            return
        if parameters:
            reshard(module, "attach_update")
            alive = [opt for each in held if (opt := each()) is not None]
            _check_not_replaced(alive, weights, parameters)
            parameters.clear()
        update_float8_scales(module)

    return optimizer_steps.after_steps(fitting or optimizers, update_converted)


def _check_not_replaced(
    optimizers: Sequence[Optimizer],
    weights: Mapping[str, Float8Weight],
    parameters: Mapping[Float8Weight, torch.Tensor],
) -> None:
    """Raise ValueError if optimizers hold parameters that weights had, and have no longer."""
    held = set[int]().union(*map(optimizer_steps.held_by, optimizers))
    replaced = [
        fqn
        for fqn, weight in weights.items()
        if (old := parameters.get(weight)) is not None
        and id(old) in held
        and (new := weight.parameter()) is not old
        and new.requires_grad
    ]
    if replaced:
        raise ValueError(
            f"attach_update: {len(replaced)} float8 weights (such as {replaced[0]}) were replaced "
            f"after the call, so the optimizer does not train them. {_REMEDY}"
        )


def _check_not_older(
    optimizers: Sequence[Optimizer], module: nn.Module, weights: Mapping[str, Float8Weight]
) -> None:
    """Raise ValueError if some parameters were replaced after an optimizer was made.

    The optimizers may be some of those that train the model, and the module a part of it. So a
    parameter that the module does not have was replaced only if a weight of its shape is missing.
    """
    trained = {fqn: p for fqn, w in weights.items() if (p := w.parameter()).requires_grad}
    held = {id(p): p for opt in optimizers for group in opt.param_groups for p in group["params"]}
    own = {id(p) for p in module.parameters()}
    others = {p.shape for p in held.values() if id(p) not in own}
    missing = {fqn: p for fqn, p in trained.items() if id(p) not in held}
    if replaced := [fqn for fqn, p in missing.items() if p.shape in others]:
        raise ValueError(
            f"attach_update: the optimizer holds other parameters than {len(replaced)} of the "
            f"module's {len(trained)} float8 weights (such as {replaced[0]}), of the same shapes. "
            f"{_REMEDY}"
        )
