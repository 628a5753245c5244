"""Checks of a Float8Linear's operands. All ranks check the same facts, so all of them raise."""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fp8_dist.config import Float8LinearConfig
from fp8_dist.kernels.gemm import needs_alignment
from fp8_dist.kernels.quantization import ALIGNMENT
from fp8_dist.mesh import Layout, local_tensor
from fp8_dist.tensor import Float8Tensor


def check_mesh(weight: torch.Tensor, input: torch.Tensor, fqn: str) -> None:
    """Raise ValueError if the input is not on the weight's mesh."""
    w_mesh = weight.device_mesh if isinstance(weight, DTensor) else None
    x_mesh = input.device_mesh if isinstance(input, DTensor) else None
    if w_mesh != x_mesh:
        w, x = (f"on the mesh {mesh}" if mesh else "not a DTensor" for mesh in (w_mesh, x_mesh))
        raise ValueError(
            f"{fqn}: the weight is {w}, the input is {x}; parallelize the layer with "
            "Float8ColwiseParallel or Float8RowwiseParallel, pass an input on the weight's mesh, "
            "or call the module that fully_shard was called on"
        )


def check_local_features(weight: torch.Tensor, input: torch.Tensor, fqn: str) -> None:
    """Raise ValueError if the local input and the local weight differ in their features."""
    features, size = local_tensor(input).shape[-1], local_tensor(weight).shape[-1]
    if features == size:
        return
    w_layout, x_layout = Layout.of(weight), Layout.of(input)
    if w_layout is None or x_layout is None:
        return
    w_shards, x_shards = _shards(w_layout, 1), _shards(x_layout, input.ndim - 1)
    if None in (w_shards, x_shards) or w_shards != x_shards:
        return  # the input is redistributed before the GEMM
    if w_shards:
        raise ValueError(
            f"{fqn}: this rank's input has {features} features, but its part of the weight takes "
            f"{size}; give the layer before it a column-parallel style, or this one "
            "input_layouts=Replicate()"
        )
    raise ValueError(
        f"{fqn}: the input has {features} features, but the layer takes {size}; if they are "
        "this rank's part, from a column-parallel layer, give this one a row-parallel style "
        "(Float8RowwiseParallel)"
    )


def _shards(layout: Layout, dim: int) -> list[int] | None:
    """The axes that shard a dim; None if other placements than Shard might."""
    kinds = (Shard, Replicate, Partial)
    if any(type(placement) not in kinds for placement in layout.placements):
        return None  # a _StridedShard
    return [axis for axis, p in enumerate(layout.placements) if p.is_shard(dim)]


def check_summed_in_fp32(input: torch.Tensor, transport: str | None, fqn: str) -> None:
    """Raise ValueError for an fp64 input of a layer with a transport, which sums in fp32."""
    if transport is not None and input.dtype is torch.float64:
        raise ValueError(
            f"{fqn}: reduce_transport={transport!r} sums in fp32, but the input is in fp64; drop "
            "the argument, or cast the model and the input to fp32"
        )


def check_prepared(config: Float8LinearConfig, input: Float8Tensor, fqn: str) -> None:
    """Raise ValueError if a prepared input was not cast as the layer's config requires."""
    scheme = config.recipe.gather_scheme["input"]
    if scheme is None or scheme.key != input.key:
        needed = scheme.described if scheme else "two different casts of it, or high precision"
        raise ValueError(
            f"{fqn}: the input is float8 already, {input.scheme.described}, but the layer takes "
            f"{needed}; pass it in high precision (PrepareModuleInput instead of "
            "PrepareFloat8ModuleInput), or prepare it as the layer takes it: give the layers that "
            "share an input one config"
        )


def takes_any_size(config: Float8LinearConfig) -> bool:
    """Whether a GPU runs layers of any size: padding, emulation, or schemes without alignment."""
    schemes = [scheme for used in config.recipe.schemes.values() for scheme in used]
    aligned = any(scheme.needs_alignment for scheme in schemes)
    return config.pad_inner_dim or config.emulate or not aligned


def check_alignment(
    config: Float8LinearConfig, weight: torch.Tensor, device: torch.device, fqn: str
) -> None:
    """Raise ValueError, on all ranks, if a float8 GEMM on any rank would refuse its sizes.

    ``weight`` is ``[out_features, in_features]``, with its placements on a tensor-parallel mesh.
    """
    out_features, in_features = weight.shape
    is_aligned = not (out_features % ALIGNMENT or in_features % ALIGNMENT)
    if is_aligned and not isinstance(weight, DTensor):
        return
    if not needs_alignment(device, config.emulate) or takes_any_size(config):
        return
    layout, bad = Layout.of(weight), []
    for dim, name in enumerate(("out_features", "in_features")):
        sizes = {weight.shape[dim]} if layout is None else layout.local_sizes(dim)
        if any(n % ALIGNMENT for n in sizes):
            bad.append(f"{name} {' or '.join(map(str, sorted(sizes)))}")
    if bad:
        raise ValueError(
            f"{fqn}: float8 GEMMs need local sizes that are multiples of {ALIGNMENT} on this "
            f"device, found {', '.join(bad)}; set Float8LinearConfig.pad_inner_dim=True or leave "
            "the layer unconverted"
        )
