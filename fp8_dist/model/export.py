"""Export of a trained model's weights in the format of Hugging Face's FP8 block checkpoints.

In this format a converted layer has two entries: ``NAME.weight`` in float8_e4m3fn, and
``NAME.weight_scale_inv`` in fp32, with one scale per block. Despite the name, the scale is not
inverted: ``weight ~= qdata * scale``. The weights of a module's experts are entries of single
experts, under the names of the library that the model is from.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import Replicate

from fp8_dist.linear.weight import weights_of
from fp8_dist.mesh import Layout
from fp8_dist.model.weight_stream import blocks_of, checked_weights, float8_stream, unwrapped
from fp8_dist.text import without_wrappers


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

    Collectives: those of :func:`fp8_dist.iter_float8_weights`; this function collects its stream.

    Raises: its errors.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    keeps = is_first or not (full_state_dict and cpu_offload)
    stream = float8_stream(model, "float8_state_dict", gather=full_state_dict, keeps=keeps)
    state: dict[str, Any] = {}
    for name, ((tensor, scales),) in stream:
        state[name] = tensor.cpu() if cpu_offload else tensor
        if scales is not None:
            scales = scales.cpu() if cpu_offload else scales
            state[f"{name}_scale_inv"] = _replicated(scales, Layout.of(tensor))
    if keeps:
        plain = get_model_state_dict(unwrapped(model))
        state |= {k: extra for k, extra in plain.items() if not isinstance(extra, torch.Tensor)}
    return state


def _replicated(scales: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """The scales of a weight, as a DTensor if the weight is one."""
    if layout is None:
        return scales
    everywhere = (Replicate(),) * layout.mesh.ndim
    return Layout(layout.mesh, everywhere, scales.shape).wrap(scales)


def float8_quantization_config(model: nn.Module) -> dict[str, Any]:
    """Return the ``quantization_config`` for the config.json of a :func:`float8_state_dict`.

    Returns:
        Plain data. ``modules_to_not_convert`` lists the unconverted modules that have matrices of
        their own, except for embeddings and for modules that contain converted layers. The entry is
        always present, because loaders would otherwise assume that the head is in high precision.

    Collectives: none.

    Raises: the errors of :func:`float8_state_dict`.
    """
    model = unwrapped(model)
    weights = checked_weights(model, "float8_quantization_config")
    blocks = blocks_of(next(iter(weights.values())))
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


def _is_left_out(module: nn.Module) -> bool:
    """Return whether a module has unconverted matrices, and contains no converted layers."""
    matrices = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    converted = any(weights_of(part) for part in module.modules())
    return matrices and not (converted or isinstance(module, nn.Embedding))
