"""A cast of one tensor against the formula, value by value; a distributed one against one device's."""

import torch
from property_cases import CastCase
from property_values import DTYPES, laid_out, values
from property_verdicts import WrongResult
from ranks import device_mesh
from recipe_algebra import E4M3, E5M2, rounded
from reference import same_values
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fp8_dist import CastConfig, Float8Tensor, ScalingGranularity, cast_to_float8

TARGETS = {None: E4M3, "e4m3": E4M3, "e5m2": E5M2}


def run_cast(case: CastCase) -> None:
    """Runs on each of the case's ranks; raises WrongResult."""
    dtype = DTYPES[case.dtype]
    whole = laid_out(values(case.values, case.shape, dtype, case.seed), case.layout)
    if case.ranks == 1:
        check_cast(whole, cast_of(whole, case), case)
        return
    expected = cast_of(whole.contiguous(), case)
    mesh = device_mesh(tp=case.ranks)
    place = Shard(case.placement) if isinstance(case.placement, int) else Replicate()
    found = cast_of(distribute_tensor(whole.contiguous(), mesh, [place]), case)
    assert isinstance(found, DTensor)
    local = found.to_local()
    check_part(local, expected, place, case.ranks, mesh.get_local_rank())


def cast_of(tensor: torch.Tensor, case: CastCase) -> torch.Tensor:
    granularity = ScalingGranularity.TENSORWISE if case.dim is None else ScalingGranularity.AXISWISE
    target = None if case.target is None else TARGETS[case.target]
    config = CastConfig(scaling_granularity=granularity, target_dtype=target)
    return cast_to_float8(tensor, config, dim=case.dim, round_scales_to_power_of_2=case.power_of_2)


def check_cast(x: torch.Tensor, found: torch.Tensor, case: CastCase) -> None:
    """The formula of docs/numerics.md, computed elsewhere."""
    assert isinstance(found, Float8Tensor)
    if (found.shape, found.dtype) != (x.shape, x.dtype):
        raise WrongResult(f"{found} of {x.dtype} {tuple(x.shape)}")
    if not x.numel():
        return
    magnitudes = x.double().abs()
    amax = magnitudes.amax() if case.dim is None else magnitudes.amax(case.dim, keepdim=True)
    expected = rounded(x, TARGETS[case.target], amax, case.power_of_2)
    actual = found.qdata.double() * found.scale.double()
    if not torch.equal(actual.nan_to_num(7e77), expected.nan_to_num(7e77)):
        raise WrongResult(f"{found} dequantizes to {actual}, expected {expected}")
    if case.dim is None and found.scale.ndim:
        raise WrongResult(f"a scale of shape {tuple(found.scale.shape)}")


def check_part(
    local: torch.Tensor, whole: torch.Tensor, place: Shard | Replicate, ranks: int, rank: int
) -> None:
    """Whether a rank's part of a distributed cast is bitwise its part of one device's."""
    assert isinstance(local, Float8Tensor)
    assert isinstance(whole, Float8Tensor)
    qdata, scale = whole.qdata, whole.scale
    if isinstance(place, Shard):
        qdata = part_of(qdata, place.dim, ranks, rank)
        if scale.ndim and scale.shape[place.dim] > 1:
            scale = part_of(scale, place.dim, ranks, rank)
    if not same_values(local.qdata, qdata):
        raise WrongResult(f"rank {rank} holds the bytes {local.qdata}, expected {qdata}")
    if qdata.numel() and not same_values(local.scale, scale):
        raise WrongResult(f"rank {rank} has the scale {local.scale}, expected {scale}")


def part_of(tensor: torch.Tensor, dim: int, ranks: int, rank: int) -> torch.Tensor:
    """The part of a tensor that a shard of a dim holds, as DTensor divides it."""
    size = tensor.shape[dim]
    length = -(-size // ranks)
    start = min(rank * length, size)
    return tensor.narrow(dim, start, min(length, size - start))
