"""Every weight's scale from one all-reduce, after the optimizer step.

One fp32 vector per process holds the local amax of every float8 weight; one MAX all-reduce over
the union of the axes on which any of them is sharded gives all global amaxes. A weight whose own
mesh lacks some of those axes may have other values at other coordinates on them, so it gets one
element (slot) per coordinate there, and fills in only its own: the others stay 0.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fp8_dist.freshness import after_step
from fp8_dist.fsdp.resharding import check_sharded_module
from fp8_dist.linear import Float8Linear, float8_layers
from fp8_dist.scaling import amax, scaling_from_amax
from fp8_dist.sharding import all_reduce_max, group_of, local_tensor, reduce_amax, sharded_axes
from fp8_dist.tensor import Float8Tensor


class _Axis(NamedTuple):
    """A mesh axis as a digit of the global rank: ``rank // stride % size`` is the coordinate."""

    stride: int
    size: int

    def coordinate(self, rank: int) -> int:
        return rank // self.stride % self.size


@torch.no_grad()
def precompute_float8_dynamic_scale(module: nn.Module) -> None:
    """Compute the scales of all float8 weights of a model, once their values have changed.

    Call it on all ranks after ``optimizer.step()``; :func:`attach_precompute` does so by itself.
    The next forward and backward then need no amax collective for weights. It covers weights
    sharded by FSDP2, by tensor parallelism, by both, and not at all, in any mixture.

    Args:
        module: the model, or a part of it.

    Collectives: exactly one all-reduce (MAX) of 4 bytes per weight (more for weights that don't
    live on all axes, see above), none if no weight is sharded.

    Raises:
        ValueError: ``module`` has no converted layer, or a weight is not the 2-D parameter that
            the optimizer updates (FSDP1's flattened shards, parametrizations), or FSDP2 reshards
            to a smaller mesh after forward, which it can't do with float8 gathers.
        NotImplementedError: weights on several meshes that are not slices of one root mesh.
    """
    layers = _float8_layers(module, "precompute_float8_dynamic_scale")
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            check_sharded_module(part, name or "the root")
            part.reshard()  # unsharded weights are those of before the optimizer step
    _check_weights(layers)
    # Layers that share a weight share its amax.
    owners = {id(layer.weight): layer for layer in layers.values()}
    local = torch.stack([amax(layer.local_shard()) for layer in owners.values()])
    reduced = _reduce([layer.weight for layer in owners.values()], local)
    _store(list(layers.values()), dict(zip(owners, reduced, strict=True)))


def attach_precompute(optimizer: Optimizer, module: nn.Module) -> RemovableHandle:
    """Call :func:`precompute_float8_dynamic_scale` after every step of an optimizer.

    Args:
        optimizer: the optimizer of ``module``'s parameters.
        module: the model.

    Returns:
        A handle whose ``remove()`` ends it.

    Raises:
        ValueError: ``module`` has no converted layer.
    """
    _float8_layers(module, "attach_precompute")
    return after_step(optimizer, lambda: precompute_float8_dynamic_scale(module))


def _float8_layers(module: nn.Module, caller: str) -> dict[str, Float8Linear]:
    """The layers of a module that take their weight in float8, by name."""
    layers = {
        name or layer.fqn: layer
        for name, layer in float8_layers(module).items()
        if layer.config.operand_dtype("weight") is not None
    }
    if not layers:
        raise ValueError(
            f"{caller}: the module has no Float8Linear with a float8 weight; call "
            "convert_to_float8_training first"
        )
    return layers


def _check_weights(layers: dict[str, Float8Linear]) -> None:
    computed = [n for n, layer in layers.items() if "weight" not in layer._parameters]
    flat = [n for n, m in layers.items() if n not in computed and m.weight.ndim != 2]
    if computed or flat:
        raise ValueError(
            "precompute_float8_dynamic_scale: these weights are not the parameters that an "
            f"optimizer updates: {', '.join(computed + flat)} (flattened shards, as FSDP1 keeps "
            "them, or parametrized). Use fully_shard (FSDP2), or leave precompute out: the layers "
            "scale what they get"
        )
    unsharded = [n for n, m in layers.items() if isinstance(local_tensor(m.weight), Float8Tensor)]
    if unsharded:
        raise ValueError(
            "precompute_float8_dynamic_scale: these weights are unsharded float8 copies: "
            f"{', '.join(unsharded)}. Call it on the root module, or reshard() the FSDP modules "
            "that hold them first"
        )


def _reduce(weights: Sequence[torch.Tensor], local: torch.Tensor) -> torch.Tensor:
    """Global amaxes of the weights from their local ones (both ``[len(weights)]``, fp32)."""
    sharded = [i for i, weight in enumerate(weights) if _sharded_axes(weight)]
    if not sharded:
        return local
    index = torch.tensor(sharded, device=local.device)
    chosen = [cast(DTensor, weights[i]) for i in sharded]
    one_mesh = len({weight.device_mesh for weight in chosen}) == 1
    reduce = _reduce_on_one_mesh if one_mesh else _reduce_on_submeshes
    return local.index_copy(0, index, reduce(chosen, local.index_select(0, index)))


def _sharded_axes(weight: torch.Tensor) -> set[int]:
    """The mesh axes (of size 2 or more) on which a weight is sharded."""
    if not isinstance(weight, DTensor):
        return set()
    return {a for a in sharded_axes(weight.placements) if weight.device_mesh.size(a) > 1}


def _reduce_on_one_mesh(weights: Sequence[DTensor], local: torch.Tensor) -> torch.Tensor:
    mesh = weights[0].device_mesh
    axes = {axis for weight in weights for axis in _sharded_axes(weight)}
    # Axes on which a weight is replicated may be included.
    return reduce_amax(local, mesh, sorted(axes), replicated=range(mesh.ndim))


def _reduce_on_submeshes(weights: Sequence[DTensor], local: torch.Tensor) -> torch.Tensor:
    meshes = {weight.device_mesh for weight in weights}
    axes_of = {mesh: tuple(_axis(mesh, i) for i in range(mesh.ndim)) for mesh in meshes}
    own = [axes_of[weight.device_mesh] for weight in weights]
    union = sorted({axis for axes in own for axis in axes if axis.size > 1}, reverse=True)
    _check_disjoint(union, weights)
    rank = dist.get_rank()
    sizes: list[int] = []
    mine: list[int] = []
    for axes in own:
        # Along the axes of its own mesh a weight is one tensor; along the others there may be
        # as many as there are coordinates.
        slots, slot = 1, 0
        for axis in union:
            if axis not in axes:
                slots, slot = slots * axis.size, slot * axis.size + axis.coordinate(rank)
        mine.append(sum(sizes) + slot)
        sizes.append(slots)
    index = torch.tensor(mine, device=local.device)
    vector = local.new_zeros(sum(sizes)).index_copy_(0, index, local)
    return all_reduce_max(vector, _group(union, rank)).index_select(0, index)


def _axis(mesh: DeviceMesh, axis: int) -> _Axis:
    """A mesh axis as a digit of the global rank."""
    ranks = mesh.mesh.movedim(axis, 0).reshape(mesh.size(axis), -1)[:, 0].tolist()
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    regular = range(ranks[0], ranks[0] + stride * len(ranks), stride) if stride > 0 else range(0)
    if ranks != list(regular) or ranks[0] // stride % len(ranks) != 0:
        raise NotImplementedError(
            f"precompute_float8_dynamic_scale: weights live on several meshes, and {mesh} does "
            "not enumerate its ranks in ascending, even steps; slice all of them from one "
            "init_device_mesh"
        )
    return _Axis(stride, len(ranks))


def _check_disjoint(axes: Sequence[_Axis], weights: Sequence[DTensor]) -> None:
    """Refuse axes that overlap, such as a flattened one beside one that it was made of."""
    for outer, inner in pairwise(axes):  # strides fall
        if inner.stride * inner.size > outer.stride or outer.stride % inner.stride:
            meshes = "; ".join(sorted({str(weight.device_mesh) for weight in weights}))
            raise NotImplementedError(
                "precompute_float8_dynamic_scale: weights live on meshes whose axes overlap "
                f"({meshes}); use meshes sliced from one root mesh, and flattened axes for all "
                "weights or for none"
            )


def _group(axes: Sequence[_Axis], rank: int) -> dist.ProcessGroup:
    """The group of all ranks that differ from this one only along the given axes."""
    ranks = [rank - sum(axis.coordinate(rank) * axis.stride for axis in axes)]
    for axis in axes:
        ranks = [base + i * axis.stride for base in ranks for i in range(axis.size)]
    return group_of(ranks, "float8_amax")


def _store(layers: Sequence[Float8Linear], amax_of: dict[int, torch.Tensor]) -> None:
    kinds: dict[tuple[torch.dtype | None, bool], list[Float8Linear]] = {}
    for layer in layers:
        config = layer.config
        kind = (config.operand_dtype("weight"), config.round_scales_to_power_of_2)
        kinds.setdefault(kind, []).append(layer)
    for (dtype, power_of_2), same in kinds.items():
        assert dtype is not None
        amaxes = torch.stack([amax_of[id(layer.weight)] for layer in same])
        multipliers, scales = scaling_from_amax(amaxes, dtype, power_of_2)
        for i, layer in enumerate(same):
            layer.weight_cache.store(layer.weight, (multipliers[i], scales[i]), "precompute")
