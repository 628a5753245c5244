"""Tensors with a scale per line on two ranks: their casts, and how they travel."""

import torch
from ranks import RankPools, device_mesh
from reference import same_values
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute

from fp8_dist import CastConfig, ScalingGranularity, cast_to_float8
from fp8_dist.debug import comm_audit

AXISWISE = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)


def numbers(shape: tuple[int, ...]) -> torch.Tensor:
    """Of many magnitudes along every dim."""
    return torch.randn(shape) * torch.randn(shape).mul(3).exp()


def part(whole: torch.Tensor, placement: Placement, covered: int | None = None) -> torch.Tensor:
    """This rank's part of two; all of it along a dim that a scale covers."""
    if not isinstance(placement, Shard) or placement.dim == covered:
        return whole
    chunks = whole.split(-(-whole.shape[placement.dim] // 2), placement.dim)
    rank = torch.distributed.get_rank()
    return chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)


def placements_of(shape: tuple[int, ...]) -> list[Placement]:
    return [Replicate(), *(Shard(dim) for dim in range(len(shape)))]


def moved_casts(shape: tuple[int, ...], dim: int, bad: float) -> dict[str, str]:
    """What becomes of casts on one of two ranks, from each placement to each other."""
    mesh, x, found = device_mesh(tp=2), numbers(shape), {}
    x.view(-1)[0] = bad
    whole = cast_to_float8(x, AXISWISE, dim=dim)
    expected = whole.dequantize()
    half = DTensor.from_local(x / 2, mesh, [Partial()])
    summed = cast_to_float8(half, AXISWISE, dim=dim).to_local()
    same = same_values(summed.qdata, whole.qdata) and same_values(summed.scale, whole.scale)
    found["Partial to R"] = "same" if same else "another cast"
    for now in placements_of(shape):
        placed = distribute(x, mesh, [now], src_data_rank=None)
        with comm_audit() as audit:
            local = cast_to_float8(placed, AXISWISE, dim=dim).to_local()
        same = same_values(local.qdata, part(whole.qdata, now))
        same = same and same_values(local.scale, part(whole.scale, now, dim))
        assert same, f"{now}: {local}"
        assert audit.count() == audit.count("all_reduce") == (now == Shard(dim)), audit.table()
        for then in placements_of(shape):
            try:
                cast = cast_to_float8(placed, AXISWISE, dim=dim)
                with comm_audit() as audit:
                    moved = cast.redistribute(placements=[then]).to_local()
                moved = moved.dequantize()
            except Exception as error:  # on both ranks, or the test ends in a time-out
                found[f"{now} to {then}"] = f"{type(error).__name__}: {error}"
                continue
            same = torch.equal(moved.nan_to_num(7), part(expected, then).nan_to_num(7))
            gathers = audit.count("all_gather", dtype=torch.float8_e4m3fn)
            same = same and gathers == audit.count() == (now.is_shard() and now != then)
            found[f"{now} to {then}"] = "same" if same else f"{moved} {audit.table()}"
    return found


SHAPES = [(5,), (6, 8), (5, 7), (1, 8), (3, 1), (3, 5, 7)]
LINES = [(shape, dim) for shape in SHAPES for dim in range(len(shape))]
MOVED = [(*line, bad) for line in LINES if line != ((3, 1), 0) for bad in (0.0, torch.nan)]


def all_moved_casts() -> list[dict[str, str]]:
    return [moved_casts(*case) for case in MOVED]


def test_lines_are_cast_as_on_one_device_and_travel_whole_or_not_at_all(ranks: RankPools) -> None:
    first, second = ranks(2).run(all_moved_casts)
    for (shape, dim, _), *results in zip(MOVED, first, second, strict=True):
        assert results[0].keys() == results[1].keys()
        for move, result in (pair for found in results for pair in found.items()):
            now, then = move.split(" to ")
            # DTensor puts the parts of one row together by a view, which can't know their scale.
            one_row = shape[0] == 1 and now == f"S({len(shape) - 1})"
            may_refuse = (dim != len(shape) - 1 or one_row) and now not in (then, "R")
            refused = may_refuse and result.startswith("NotImplementedError: ")
            expected = result == "same" or (refused and "redistribute it before the cast" in result)
            assert expected, f"{shape}, {dim}, {move}: {result}"


def test_ranks_refuse_alike(ranks: RankPools) -> None:
    # One column in uneven parts: on a rank with one row, its scale looks like that of a row.
    ranks(2).run_same(moved_casts, (3, 1), 0, 0.0, timeout=5)
