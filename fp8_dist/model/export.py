"""Export of a trained model's weights in the format of Hugging Face's FP8 block checkpoints.

In this format a converted layer has two entries: ``NAME.weight`` in float8_e4m3fn, and
``NAME.weight_scale_inv`` in fp32, with one scale per block. Despite the name, the scale is not
inverted: ``weight ~= qdata * scale``. The weights of a module's experts are entries of single
experts, under the names of the library that the model is from.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from fp8_dist.kernels import fp32_scales
from fp8_dist.linear.module import config_text, other_users
from fp8_dist.linear.weight import (
    CONVERT_FIRST,
    Float8Weight,
    float8_weights,
    weights_by_layer,
    weights_of,
)
from fp8_dist.mesh import Layout, local_tensor, with_local
from fp8_dist.moe.experts import ExpertWeight, checkpoint_entries, experts_config
from fp8_dist.scaling import BlockScheme, whole_statistics
from fp8_dist.text import without_wrappers
from fp8_dist.torch_internals import fsdp_groups, fsdp_parameters


def float8_state_dict(
    model: nn.Module, *, full_state_dict: bool = False, cpu_offload: bool = False
) -> dict[str, Any]:
    """Return the state dict of a model, with converted weights in float8 as GEMMs multiply them.

    The names are those of ``get_model_state_dict``. For a converted layer, ``NAME.weight`` is
    ``[N, K]`` in float8_e4m3fn, and ``NAME.weight_scale_inv`` has one fp32 scale per block: it is
    ``[ceil(N / 128), ceil(K / 128)]`` for the recipe ``blockwise``. Blocks are 32 x 32 for
    ``mxfp8``. Biases and unconverted modules keep their dtypes.

    The weights ``[E, N, K]`` of transformers' experts become entries of single experts, under the
    names of the model's checkpoints, such as ``experts.3.up_proj.weight``. Where they stay
    DTensors, and for models whose checkpoints do not divide them, an entry is the whole weight
    ``NAME``, and ``NAME_scale_inv`` is ``[E, ceil(N / 128), ceil(K / 128)]``.

    Data and scales are computed from the current values of the weights. They are bit for bit the
    operands that the next forward multiplies on any mesh. If FSDP2 gathers a weight in the dtype of
    ``MixedPrecisionPolicy(param_dtype=...)``, the weight is rounded to that dtype first here, too.

    Call this function on all ranks.

    Args:
        model: a model with layers or experts that are converted by ``blockwise`` or ``mxfp8``. For
            a DDP model, the names don't contain the wrapper.
        full_state_dict: gather full tensors. Otherwise the weight of a distributed parameter is a
            DTensor with the same placements, and its scales are a replicated DTensor, because
            shards may cut blocks.
        cpu_offload: move tensors to the CPU. With ``full_state_dict``, only rank 0 gets them, and
            other ranks get an empty dict, as with torch's ``StateDictOptions``.

    Collectives: for each sharded weight, one all-reduce (MAX) of 1 byte per block for each group of
    the axes that shard the weight. With ``full_state_dict``, one all-gather per sharded dim of each
    tensor, of 1 byte per element for float8 weights.

    Raises:
        ValueError: no layer is converted; a layer's weight has no square blocks of float8_e4m3fn,
            or has other blocks than another layer; a module that is not converted shares a weight;
            a checkpoint divides the weight of an expert within a block; or a weight is on the meta
            device.
        NotImplementedError: a weight is a plain local tensor (``declare_placements``).
    """
    model = _unwrapped(model)
    weights = _checked_weights(model, "float8_state_dict")
    gathered_as = {
        user: parameter.param_dtype
        for parameter in fsdp_parameters(fsdp_groups())
        for user in parameter.users
    }
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    found: dict[str, Any] = {}
    # get_model_state_dict reshards the parameters that FSDP2 has gathered.
    for name, value in get_model_state_dict(model).items():
        weight = weights.get(name)
        if weight is None:
            found[name] = value
            continue
        key = id(weight.parameter())
        if key not in made:  # layers may share a weight
            made[key] = _export(weight, gathered_as.get((weight.module, weight.name)))
        found[name], found[f"{name}_scale_inv"] = made[key]
    state: dict[str, Any] = {}
    for name, value in _moved(found, full_state_dict, cpu_offload):
        end = "_scale_inv" if name not in weights else ""
        weight = weights.get(name.removesuffix(end))
        if weight is None:
            state[name] = value
        else:
            parts = _parts(model, weight, name.removesuffix(end), value)
            state |= {f"{part}{end}": tensor for part, tensor in parts.items()}
    return state


def float8_quantization_config(model: nn.Module) -> dict[str, Any]:
    """Return the ``quantization_config`` for the config.json of a :func:`float8_state_dict`.

    Returns:
        Plain data. ``modules_to_not_convert`` lists the unconverted modules that have matrices of
        their own, except for embeddings and for modules that contain converted layers. The entry is
        always present, because loaders would otherwise assume that the head is in high precision.

    Collectives: none.

    Raises: the errors of :func:`float8_state_dict`.
    """
    model = _unwrapped(model)
    weights = _checked_weights(model, "float8_quantization_config")
    blocks = _blocks_of(next(iter(weights.values())))
    assert blocks is not None
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [blocks.rows, blocks.columns],
        "modules_to_not_convert": [
            without_wrappers(name) for name, module in model.named_modules() if _is_left_out(module)
        ],
    }


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _checked_weights(model: nn.Module, caller: str) -> dict[str, Float8Weight]:
    """Return the float8 weights by their state-dict keys.

    Raises:
        ValueError: there is no converted layer, or a layer can't be exported.
        NotImplementedError: a weight is a plain local tensor (``declare_placements``).
    """
    converted = weights_by_layer(model)
    if not converted:
        raise ValueError(
            f"{caller}: {type(model).__name__} has no converted layers; {CONVERT_FIRST}, with the "
            'recipe "blockwise"'
        )
    first, of_first = next(iter(converted.items()))
    for name, weight in converted.items():
        blocks = _blocks_of(weight)
        if blocks is None:
            config = experts_config(weight.module) or config_text(weight.config)
            raise ValueError(
                f"{caller}: {name} was converted with {config}, but FP8 block checkpoints hold "
                "float8_e4m3fn weights with one scale per square block; load the "
                'state dict into a model that was converted with the recipe "blockwise", and '
                "export that"
            )
        if blocks != _blocks_of(of_first):
            raise ValueError(
                f"{caller}: {first} and {name} have weights in blocks of different sizes or rules, "
                "but a checkpoint has one weight_block_size; convert all layers with one recipe"
            )
        if weight.parameter().is_meta:
            raise ValueError(
                f"{caller}: the weight of {name} is on the meta device and has no values; load a "
                "checkpoint first"
            )
        if getattr(weight.module, "local_placements", None) is not None:
            raise NotImplementedError(
                f"{caller}: the weight of {name} is a plain local tensor (declare_placements), and "
                "where its other parameters belong is not known; load the state dict into a model "
                "that is not parallelized, and export that"
            )
    parameters = {name: weight.parameter() for name, weight in float8_weights(model).items()}
    shared = other_users(model, parameters, [weight.module for weight in converted.values()])
    if shared:
        raise ValueError(
            f"{caller}: {'; '.join(shared)}, which would stay in high precision; leave the layer "
            "unconverted (module_filter_fn), or untie the weights"
        )
    found = {
        f"{without_wrappers(fqn)}.{name}".removeprefix("."): weight
        for fqn, module in model.named_modules(remove_duplicate=False)
        for name, weight in weights_of(module).items()
    }
    assert blocks is not None
    for name, weight in found.items():
        whole = torch.empty(weight.parameter().shape, device="meta")
        _check_parts(caller, name, whole, _parts(model, weight, name, whole), blocks)
    return found


def _check_parts(
    caller: str, name: str, whole: torch.Tensor, parts: dict[str, torch.Tensor], blocks: BlockScheme
) -> None:
    """Check that no part of a weight that becomes an entry of its own begins within a block."""
    sizes = whole.shape[-2:]
    for part in parts.values():
        each = zip(part.shape[-2:], sizes, (blocks.rows, blocks.columns), strict=True)
        if any(size != of and size % block for size, of, block in each):
            raise ValueError(
                f"{caller}: checkpoints divide {name}, {list(sizes)}, into parts of "
                f"{list(part.shape)}, which cut blocks of {blocks.rows} x {blocks.columns}; leave "
                "the experts unconverted (module_filter_fn), or convert with the recipe "
                '"mxfp8", whose blocks are 32 x 32'
            )


def _parts(
    model: nn.Module, weight: Float8Weight, name: str, tensor: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the entries of a checkpoint for a float8 weight, or for its scales."""
    if isinstance(weight, ExpertWeight) and not isinstance(tensor, DTensor):
        return checkpoint_entries(model, weight, name, tensor)
    return {name: tensor}


def _blocks_of(weight: Float8Weight) -> BlockScheme | None:
    """Return the scheme of a weight if FP8 block checkpoints have it, else None."""
    blocks, *others = weight.schemes or (None,)
    if others or not isinstance(blocks, BlockScheme):
        return None
    is_square = blocks.rows == blocks.columns and blocks.dtype is torch.float8_e4m3fn
    return blocks if is_square else None


def _is_left_out(module: nn.Module) -> bool:
    """Return whether a module has unconverted matrices, and contains no converted layers."""
    matrices = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    converted = any(weights_of(part) for part in module.modules())
    return matrices and not (converted or isinstance(module, nn.Embedding))


@torch.no_grad()
def _export(
    weight: Float8Weight, gathered_as: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast a weight to float8 with the functions that cast it in a forward.

    ``gathered_as`` is the dtype in which FSDP2 gathers the weight in high precision, if it does.
    The scales are the same on all ranks. Both tensors are DTensors if the parameter is one.
    """
    parameter, scheme = weight.parameter(), _blocks_of(weight)
    assert scheme is not None
    shard, layout = weight.shard().detach(), Layout.of(parameter)
    home = shard.device
    if layout is not None:  # collectives need the mesh's device; FSDP2 may offload to the CPU
        shard = shard.to(layout.mesh.device_type)
    if gathered_as is not None and weight.shard() is local_tensor(parameter):
        shard = shard.to(gathered_as)
    start = scheme.start(layout)
    every = statistics = scheme.measure(shard, start)
    if layout is not None:
        every = whole_statistics(scheme, statistics, layout)
        statistics = scheme.local_part(every, layout)
    _, _, (qdata,) = scheme.cast(shard, statistics, start, [False])
    scales = fp32_scales(scheme.scales_from(every)[0]).to(home)
    if layout is not None:
        everywhere = (Replicate(),) * layout.mesh.ndim
        scales = Layout(layout.mesh, everywhere, scales.shape).wrap(scales)
    return with_local(parameter, qdata.to(home)), scales


def _moved(
    state_dict: dict[str, Any], full_state_dict: bool, cpu_offload: bool
) -> Iterator[tuple[str, Any]]:
    """Gather and offload the entries as requested, one at a time."""
    keeps = not (full_state_dict and cpu_offload and dist.is_initialized() and dist.get_rank() > 0)
    for name, value in state_dict.items():
        if full_state_dict and isinstance(value, DTensor):
            value = _full(value)
        if cpu_offload and isinstance(value, torch.Tensor):
            value = value.cpu() if keeps else None
        if keeps:
            yield name, value


def _full(tensor: DTensor) -> torch.Tensor:
    """Gather a full tensor on the mesh's device; float8 as bytes, which every backend accepts."""
    local = local_tensor(tensor).detach().to(tensor.device_mesh.device_type)
    is_float8 = local.dtype is torch.float8_e4m3fn
    sent = with_local(tensor, local.view(torch.uint8) if is_float8 else local)
    assert isinstance(sent, DTensor)
    return sent.full_tensor().view(local.dtype)
