"""Frozen weights that are stored in float8: LoRA bases, reference and reward models."""

from typing import Literal

import torch
import torch.nn as nn

from fp8_dist.linear.module import other_users
from fp8_dist.moe.experts import ExpertWeight, FilterFn, check_arguments
from fp8_dist.operand.prepare import cast_by_state
from fp8_dist.scaling import CastPlan, Mxfp4, Scheme
from fp8_dist.text import kind_of
from fp8_dist.torch_internals import give_back_to_ddp, leave_out_of_ddp, normal_tensors
from fp8_dist.weight.float8_weight import Float8Weight
from fp8_dist.weight.stored_weight import share, store_in_float8
from fp8_dist.weight.weights import float8_weights, warn_of_ddp, weights_of, weights_of_model


@normal_tensors()
def freeze_to_float8(
    module: nn.Module,
    *,
    module_filter_fn: FilterFn | None = None,
    format: Literal["float8", "mxfp4"] = "float8",
    block_size: tuple[int, int] | None = None,
) -> list[str]:
    """Store the frozen weights of converted layers and experts in float8, in place.

    A weight that does not require gradients then takes 1 byte per element plus its scales. Layers
    compute with the same bits as before, without casts or amaxes. FSDP2 and tensor parallelism
    shard and gather the stored bytes. A weight that requires gradients stays as it is.

    Freeze after the model was converted, and before it is distributed::

        convert_to_float8_training(model, config=config)
        model.requires_grad_(False)
        freeze_to_float8(model)
        model = get_peft_model(model, lora_config)  # or before freeze_to_float8
        fully_shard(model)

    The layer's ``weight`` keeps its shape and its high-precision dtype, so that adapters are made
    to match. A ``state_dict`` has float8 data ``NAME.weight`` and scales
    ``NAME.weight_scale_inv`` (``weight ~= data * scale``), the names of FP8 checkpoints.
    ``load_state_dict`` accepts these, and a weight in high precision, which it casts. For
    transformers' ``save_pretrained``, pass a state dict, or unfreeze first (``docs/frozen.md``).
    ``model.to(dtype)`` changes neither data nor scales. With gloo, a distributed model can't take
    a whole state dict (``set_model_state_dict`` with ``full_state_dict``), but it can return one.

    An in-place addition casts the sum again, as when PEFT merges adapters (without ``safe_merge``).
    Undoing it does not restore the bits. ``weight + x`` and ``torch.baddbmm(weight, ...)``, as in
    the forward of PEFT's adapters of parameters, take the dequantized values. Other operators on
    the parameters raise errors, and so does a forward if they require gradients. FSDP2 calls
    ``shard_placement_fn`` for scales too; ``Shard(0)`` fits all of them. A model on the meta device
    may be frozen, sharded, and then loaded (:func:`fp8_dist.load_float8_checkpoint`).

    ``DistributedDataParallel`` does not broadcast these weights from rank 0: load the same
    checkpoint on all ranks. Call this function on the module that DDP will wrap. If that is made
    from ``module`` afterwards (``get_peft_model``), call this function on it too.

    Args:
        module: the model, or a part of it.
        module_filter_fn: a function ``(module, fqn) -> bool`` that is called for each module with
            float8 weights. If it returns False, they stay in high precision.
        format: ``"mxfp4"`` stores the weights of layers with ``weight_format="mxfp4"`` in half a
            byte per element. Each GEMM unpacks them, and the backward unpacks them again, so that
            autograd keeps no float8 copy. Unless FSDP2 shards dim 0 evenly, it can't gather them
            packed, and they become float8. A ``state_dict`` has float8 data with both formats.
        block_size: ``(1, 32)``, with ``"mxfp4"``, stores weights as released MXFP4 checkpoints do,
            with one exponent per 32 values of a row, whatever the recipe. Exponents follow the rule
            of a recipe with such blocks, and otherwise ``"floor"``. Each GEMM dequantizes
            them, which is exact, and takes the recipe's cast of these values, so the layer has the
            bits of one with the dequantized weight. For GEMMs in bf16, convert experts with
            ``Float8ExpertsConfig(recipe=None)``, and linear layers with the recipe ``"bf16"``.
            ``None``: the weights are stored as they are multiplied.

    Returns:
        The FQNs of all weights in ``module`` that are stored in float8.

    Collectives: none.

    Raises:
        ValueError: ``module`` has no converted layer, or no frozen float8 weight that the filter
            admits; a weight is distributed, or shared with a module that is not stored in float8;
            its recipe casts it twice, or not at all; ``format`` or ``block_size`` is unknown; or,
            with ``"mxfp4"``, its recipe has another format, or other blocks in four bits than
            ``block_size``, its number of columns is odd, or ``block_size`` does not divide its
            dims.
        TypeError: ``module`` is not an nn.Module.
    """
    check_arguments("freeze_to_float8", module, module_filter_fn)
    if (format, block_size) not in (("float8", None), ("mxfp4", None), ("mxfp4", (1, 32))):
        raise ValueError(
            f"freeze_to_float8: format={format!r} with block_size={block_size!r}; pass "
            'format="mxfp4", block_size=(1, 32), or "float8" or "mxfp4" without block_size to '
            "store weights as the recipe casts them"
        )
    weights = weights_of_model(module, "freeze_to_float8")
    admitted = {
        fqn: weight
        for fqn, weight in weights.items()
        if not weight.parameter().requires_grad
        and (module_filter_fn is None or module_filter_fn(weight.module, weight.fqn))
    }
    chosen = {fqn: weight for fqn, weight in admitted.items() if not weight.is_stored}
    for fqn, weight in chosen.items():
        _check(fqn, weight, block_size)
    for fqn, weight in admitted.items() if format == "mxfp4" else ():
        _check_packs(fqn, weight, _scheme(weight, block_size))
    parameters = {fqn: weight.parameter() for fqn, weight in chosen.items()}
    if shared := other_users(module, parameters, [weight.module for weight in chosen.values()]):
        raise ValueError(
            f"freeze_to_float8: {'; '.join(shared)}, which stays in high precision, and both "
            "together would take more memory; leave the layer out (module_filter_fn)"
        )
    firsts: dict[int, Float8Weight] = {}
    for weight in chosen.values():
        first = firsts.setdefault(id(weight.parameter()), weight)
        if first is weight:
            layout = weight.layout()
            plan = CastPlan((_scheme(weight, block_size),)).on(layout)
            state = weight.state(weight.parameter(), layout) if block_size is None else None
            (cast,), _ = cast_by_state(weight.shard(), plan, state)
            cast = cast._replace(qdata=cast.qdata.clone(), scales=(cast.scales[0].clone(),))
            store_in_float8(weight, cast, packs=format == "mxfp4")
        else:  # layers may share a weight
            share(weight, first.parameter(), first.module.get_parameter(first.scales_name))
    stored = [fqn for fqn, weight in weights.items() if weight.is_stored]
    if not stored:
        raise ValueError(
            "freeze_to_float8: no float8 weight of the module is frozen, or module_filter_fn "
            "admits none; call model.requires_grad_(False), or layer.weight.requires_grad_(False)"
        )
    leave_out_of_ddp(module, _stored_parameters)  # which flattens parameters with others
    return stored


@normal_tensors()
def unfreeze_from_float8(module: nn.Module) -> list[str]:
    """Store weights in high precision again, in place: the inverse of :func:`freeze_to_float8`.

    The new parameters have the values of the float8 data times the scales. They do not
    require gradients until ``requires_grad_()`` is called.

    Args:
        module: the model, or a part of it, before ``fully_shard``.

    Returns:
        The FQNs of the weights.

    Collectives: for a weight that tensor parallelism has distributed, an all-gather of its scales.

    Raises:
        ValueError: ``module`` has no converted layer, or FSDP2 has sharded a weight.
        TypeError: ``module`` is not an nn.Module.
    """
    weights = weights_of_model(module, "unfreeze_from_float8")
    stored = {fqn: weight for fqn, weight in weights.items() if weight.is_stored}
    for fqn, weight in stored.items():
        if weight.fsdp is not None:
            raise ValueError(
                f"unfreeze_from_float8: {fqn} is sharded by FSDP2, which goes on gathering its "
                "bytes; unfreeze before fully_shard, or load its state dict into another model"
            )
    warn_of_ddp(stored.values())
    parameters: dict[int, nn.Parameter] = {}
    for weight in stored.values():
        key = id(weight.parameter())
        if key not in parameters:  # layers may share a weight
            parameters[key] = nn.Parameter(weight.high_precision(), requires_grad=False)
        del weight.module._parameters[weight.scales_name]
        weight.replace(parameters[key])
    give_back_to_ddp(module)
    return list(stored)


@torch.no_grad()
def dequantized(module: nn.Module, name: str = "weight") -> torch.Tensor:
    """Return a weight of a converted module in high precision.

    Args:
        module: a Float8Linear, or a module of converted experts.
        name: the name of the parameter.

    Returns:
        The weight, detached; a DTensor if the parameter is one. If it is stored in float8, a new
        tensor: its data times its scales, rounded to the weight's dtype.

    Collectives: for a stored weight that is distributed, an all-gather of its scales.

    Raises:
        ValueError: the module has no float8 weight of that name.
    """
    weight = weights_of(module).get(name)
    if weight is None:
        raise ValueError(
            f"dequantized: {kind_of(module)} has no float8 weight {name!r}; pass a converted layer"
        )
    return weight.high_precision()


def _scheme(weight: Float8Weight, block_size: tuple[int, int] | None) -> Scheme:
    """The scheme that a weight, which a GEMM takes in float8, is stored with."""
    if block_size is None or weight.schemes[0].is_storage:  # which has the layer's own rule
        return weight.schemes[0]
    is_transposed = isinstance(weight, ExpertWeight) and weight.is_transposed
    return Mxfp4(torch.float8_e4m3fn, *(block_size[::-1] if is_transposed else block_size))


def _check(fqn: str, weight: Float8Weight, block_size: tuple[int, int] | None) -> None:
    uses = set(weight.config.recipe.uses["weight"].values())
    is_recast = block_size is not None and None not in uses
    if not is_recast and (len(uses) > 1 or None in uses or len(weight.schemes[0].levels) != 1):
        raise ValueError(
            f"freeze_to_float8: {fqn} is multiplied in high precision in a GEMM, or cast with "
            "several scales for each value, so no one copy in float8 can take its place; convert "
            'the model with "tensorwise", "rowwise_folded", "blockwise" or "mxfp8", store the '
            'weight in four bits (format="mxfp4", block_size=(1, 32)), or leave the layer out '
            "(module_filter_fn)"
        )
    if block_size and weight.schemes[0].packed_dtype and not weight.schemes[0].is_storage:
        raise ValueError(
            f"freeze_to_float8: {fqn} is cast to four bits in squares, and block_size={block_size} "
            "would cast it twice; leave block_size out, or pass weight_block_size to the recipe"
        )
    if weight.layout() is not None or not weight.is_registered:
        raise ValueError(
            f"freeze_to_float8: {fqn} is distributed already, or is not a plain parameter; freeze "
            "the model before apply_tp_plan and fully_shard"
        )


def _check_packs(fqn: str, weight: Float8Weight, scheme: Scheme) -> None:
    held, size = weight.stored(), list(weight.parameter().shape)
    if scheme.packed_dtype is None or (held and not (held.is_packed and held.scheme == scheme)):
        raise ValueError(
            f"freeze_to_float8: {fqn} is not cast to four bits, or stored in float8 already; "
            'convert the model with weight_format="mxfp4", or pass block_size=(1, 32), and call '
            'unfreeze_from_float8 before format="mxfp4"; or leave the layer out (module_filter_fn)'
        )
    if size[-1] % 2:
        raise ValueError(
            f"freeze_to_float8: {fqn} is {size}, and an odd number of columns can't be packed in "
            "pairs; leave the layer out (module_filter_fn)"
        )
    contracted = -2 if isinstance(scheme, Mxfp4) and scheme.columns == 1 else -1
    if scheme.is_storage and size[contracted] % 32:
        raise ValueError(
            f"freeze_to_float8: {fqn} is {size}, whose input features 32 does not divide; leave "
            "the layer out (module_filter_fn)"
        )


def _stored_parameters(module: nn.Module) -> list[str]:
    """The FQNs of the stored weights in ``module``, and of their scales."""
    stored = [fqn for fqn, weight in float8_weights(module).items() if weight.is_stored]
    return [name for fqn in stored for name in (fqn, f"{fqn}_scale_inv")]
