"""The rule of moves: which operands are redistributed in float8."""

import torch
from torch.distributed.tensor import DTensor

from fp8_dist import mesh
from fp8_dist import torch_internals as internals
from fp8_dist.mesh import Placements
from fp8_dist.operand.observers import Owner
from fp8_dist.recipe import Operand
from fp8_dist.scaling import Scheme
from fp8_dist.text import warn_once


@internals.cached_but_in_graphs
def _scheme_of_move(
    schemes: tuple[Scheme | None, ...],
    placements: Placements,
    target: Placements | None,
    ndim: int,
) -> Scheme | None:
    first = schemes[0]
    # Shards that consist of several pieces are not redistributed as float8.
    if first is None or mesh.has_strided_placements(placements) or any(s != first for s in schemes):
        return None
    pairs = zip(placements, target or (), strict=True)
    changed = [mesh.sharded_dim(now, ndim) for now, needed in pairs if now != needed]
    can_move = first.can_move([dim for dim in changed if dim is not None], ndim)
    return first if can_move and (first.can_gather or placements == target) else None


def scheme_of_move(
    tensor: DTensor,
    operand: Operand,
    schemes: tuple[Scheme | None, ...],
    target: Placements | None,
    owner: Owner,
) -> Scheme | None:
    """The scheme by which an operand is cast for all GEMMs before it is redistributed.

    ``None`` if it moves in high precision. A warning says so if placements prevent a move in
    float8. The result depends only on facts that all ranks share.

    Args:
        schemes: the scheme that each GEMM takes, or ``None`` for high precision.
        target: the placements that the GEMMs need.
    """
    placements = tuple(tensor.placements)
    scheme = _scheme_of_move(schemes, placements, target, tensor.ndim)
    gathered = owner.config.recipe.gather_scheme[operand]
    if scheme is None and gathered is not None and not torch.compiler.is_compiling():
        warn_once(
            f"scales in parts: {operand}",
            f"{owner.fqn}: {operand} is gathered in high precision, because "
            f"{reason_to_move_high(gathered, placements, tensor.ndim)}",
        )
    return scheme


def reason_to_move_high(scheme: Scheme, placements: Placements | None, ndim: int) -> str:
    """The reason why an operand does not move in float8 with this scheme, and what to do."""
    if mesh.has_strided_placements(placements):
        return (
            "ranks have several pieces of it (_StridedShard); redistribute it to Shard or "
            "Replicate first"
        )
    other = "use a recipe with one scale per tensor"
    if scheme.can_move((0,), ndim):  # only the last dim is in the way
        other = f"shard the sequence or the batch instead (Shard(0), Shard(1)), or {other}"
    placed = list(placements or ())
    return f"float8 with one scale per {scheme.covers} can't be moved from {placed}; {other}"
