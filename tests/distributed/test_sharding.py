"""The rules of propagation, by brute force against the full tensors; the reduction of amax."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools, device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fp8_dist.mesh import Layout, all_reduce_max, linear_layouts, reduce_amax
from fp8_dist.mesh.groups import group_over


def wrong_rules(input_shape: tuple[int, ...]) -> list[str]:
    """Multiplies full-precision integers placed by the rules; exact, so equal or wrong."""
    mesh = device_mesh(dp=2, tp=2)
    ndim = len(input_shape)
    x = torch.randint(-4, 5, input_shape).double()
    w = torch.randint(-4, 5, (6, input_shape[-1])).double()
    output = x @ w.t()
    grad = torch.randint(-4, 5, output.shape).double()
    expected = {
        "output": output,
        "grad_input": grad @ w,
        "grad_weight": grad.flatten(0, -2).t() @ x.flatten(0, -2),
    }
    per_axis = [Replicate(), *(Shard(d) for d in range(ndim)), Shard(-1)]
    wrong = []
    for w_at in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2):
        for x_at in itertools.product(per_axis, repeat=2):
            at = linear_layouts(x_at, w_at, ndim)
            local_x = put(x, mesh, at.input)
            local_w = put(w, mesh, w_at)
            local_g = put(grad, mesh, at.grad_output)
            found = {
                "output": (at.output, local_x @ local_w.t()),
                "grad_input": (at.grad_input, local_g @ local_w),
                "grad_weight": (
                    at.grad_weight,
                    local_g.flatten(0, -2).t() @ local_x.flatten(0, -2),
                ),
            }
            for name, (placements, local) in found.items():
                layout = Layout(mesh, placements, expected[name].shape)
                if not torch.equal(layout.wrap(local).full_tensor(), expected[name]):
                    wrong.append(f"{name} of input {x_at}, weight {w_at}")
    return wrong


def put(tensor: torch.Tensor, mesh, placements: tuple[Placement, ...]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None).to_local()


@pytest.mark.parametrize("shape", [(8, 4), (4, 8, 4), (5, 3, 7), (2, 4, 4, 4)])
def test_linear_layouts(ranks: RankPools, shape: tuple[int, ...]) -> None:
    assert ranks(4).run(wrong_rules, shape, timeout=120) == [[]] * 4


def reduced_amaxes() -> list[list[float]]:
    mesh = device_mesh(dp=2, tp=2)
    rank = dist.get_rank()
    results = []
    for axes in ((), (0,), (1,), (0, 1)):
        for bad in (1.0, math.inf, math.nan):
            for place in range(4):
                mine = torch.tensor([float(rank), bad if rank == place else 0.5])
                results.append([*axes, -1, place, bad, *reduce_amax(mine, mesh, axes).tolist()])
    return results


def test_amax_is_reduced_over_its_axes_and_keeps_what_is_not_finite(ranks: RankPools) -> None:
    coordinates = [(rank // 2, rank % 2) for rank in range(4)]
    for rank, results in enumerate(ranks(4).run(reduced_amaxes)):
        for row in results:
            axes = [int(a) for a in row[: row.index(-1)]]
            place, bad, largest, second = row[row.index(-1) + 1 :]
            together = [
                other
                for other in range(4)
                if all(coordinates[other][a] == coordinates[rank][a] for a in {0, 1} - set(axes))
            ]
            assert largest == max(together)
            expected = bad if place in together else 0.5
            assert second == expected or (math.isnan(second) and math.isnan(expected))


def groups() -> list[list[int]]:
    """Ranks of the groups over some axes of a 3-D mesh; a stage makes its group alone."""
    mesh = device_mesh(pp=2, dp=2, tp=2)
    stage = mesh["dp", "tp"]
    for pp in (1, 0):
        if mesh.get_local_rank("pp") == pp:
            group = group_over(stage, (0, 1))
            assert group_over(stage, (0, 1)) is group
            largest = all_reduce_max(torch.tensor(float(dist.get_rank())), group.group_name)
            assert largest.item() == 3 + 4 * pp
        dist.barrier()
    return [
        dist.get_process_group_ranks(group_over(mesh, (0, 2))),
        dist.get_process_group_ranks(group_over(mesh, (0, 1, 2))),
        dist.get_process_group_ranks(group_over(mesh, (1,))),
    ]


def test_groups_over_several_axes(ranks: RankPools) -> None:
    results = ranks(8).run(groups, timeout=120)
    for rank, (outer, world, single) in enumerate(results):
        dp = rank // 2 % 2
        assert outer == [2 * dp, 2 * dp + 1, 4 + 2 * dp, 5 + 2 * dp]
        assert world == list(range(8))
        assert single == sorted({rank - 2 * dp, rank - 2 * dp + 2})


def wrapped() -> bool:
    mesh = device_mesh(dp=2)
    whole = torch.randn(3, 5)
    dtensor = distribute_tensor(whole, mesh, [Shard(0)])
    layout = Layout.of(dtensor)
    assert layout is not None
    again = layout.wrap(dtensor.to_local())
    return isinstance(again, DTensor) and torch.equal(again.full_tensor(), whole)


def test_layouts_wrap_uneven_shards(ranks: RankPools) -> None:
    assert ranks(2).run(wrapped) == [True, True]
