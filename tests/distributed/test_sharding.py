"""The rules of propagation, by brute force against the full tensors; the reduction of amax."""

import itertools
import math

import torch
import torch.distributed as dist
from ranks import RankPools, device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fp8_dist.cast import quantize
from fp8_dist.mesh import (
    Layout,
    all_reduce_max,
    groups_over,
    linear_layouts,
    make_group,
)
from fp8_dist.scaling import Dense
from fp8_dist.torch_internals import resolve_process_group


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


def test_linear_layouts(ranks: RankPools) -> None:
    assert ranks(4).run(wrong_rules, (5, 3, 7)) == [[]] * 4


def reduced_amaxes() -> list[list[float]]:
    mesh = device_mesh(dp=2, tp=2)
    rank = dist.get_rank()
    results = []
    for axes in ((), (0,), (1,), (0, 1)):
        for bad in (1.0, math.inf, math.nan):
            for place in range(4):
                mine = torch.tensor([float(rank), bad if rank == place else 0.5])
                largest = all_reduce_max(mine, groups_over(mesh, axes))
                results.append([*axes, -1, place, bad, *largest.tolist()])
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


def groups() -> list[list[list[int]]]:
    """Ranks of the groups over some axes of a 3-D mesh, before and after one was made."""
    mesh = device_mesh(pp=2, dp=2, tp=2)
    stage = mesh["dp", "tp"]

    def ranks_over(mesh: DeviceMesh, *axes: int) -> list[list[int]]:
        return [ranks_of(name) for name in groups_over(mesh, axes)]

    before = ranks_over(mesh, 0, 2)
    made = make_group([mesh["pp", "tp"]])
    assert made == make_group([mesh["pp", "tp"]]) == groups_over(mesh, (0, 2))
    (whole,) = make_group([stage["dp"], stage["tp"]])
    assert groups_over(stage, (0, 1)) == (whole,)
    largest = all_reduce_max(torch.tensor(float(dist.get_rank())), [whole])
    assert largest.item() == 3 + 4 * mesh.get_local_rank("pp")
    return [before, ranks_over(mesh, 0, 2), ranks_over(mesh, 0, 1, 2), ranks_over(mesh, 1)]


def ranks_of(name: str) -> list[int]:
    return dist.get_process_group_ranks(resolve_process_group(name))


def test_groups_over_several_axes(ranks: RankPools) -> None:
    results = ranks(8).run(groups)
    for rank, (before, outer, world, single) in enumerate(results):
        dp = rank // 2 % 2
        assert before == [sorted({rank % 4, rank % 4 + 4}), sorted({rank, rank ^ 1})]
        assert outer == [[2 * dp, 2 * dp + 1, 4 + 2 * dp, 5 + 2 * dp]]
        assert world == [list(range(8))]
        assert single == [sorted({rank - 2 * dp, rank - 2 * dp + 2})]


def meshes_without_a_group() -> list[bool]:
    """Where no group can be made on all ranks of the world: reductions over one axis at a time."""
    ranks = [[[0, 1], [3, 2]], [[4, 5], [7, 6]]]
    irregular = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b", "c"))
    part = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]])  # made by all ranks, as torch asks for
    found = []
    for mesh in (irregular["b", "c"], part):
        if mesh.get_coordinate() is not None:
            names = make_group([mesh])
            found.append(names == groups_over(mesh, (0, 1)) and len(names) == 2)
            value = all_reduce_max(torch.tensor(float(dist.get_rank())), groups_over(mesh, (0, 1)))
            found.append(value.item() == mesh.mesh.max().item())
    return found


def test_meshes_whose_groups_not_all_ranks_can_make(ranks: RankPools) -> None:
    results = ranks(8).run(meshes_without_a_group)
    assert results == [[True] * 4] * 6 + [[True] * 2] * 2


def cast_over_two_axes() -> list[bool]:
    """Whether a graph casts a tensor that two axes shard as eager code does."""
    mesh = device_mesh(pp=2, dp=2, tp=2)["dp", "tp"]
    rows = torch.randn(8, 16).chunk(2)[mesh.get_local_rank(0)]
    local = rows.chunk(2, dim=1)[mesh.get_local_rank(1)].contiguous()

    def cast(local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = DTensor.from_local(local, mesh, (Shard(0), Shard(1)), run_check=False)
        qdata, (scale,), *_ = quantize(whole, Dense())
        return qdata.view(torch.uint8), scale

    compiled = torch.compile(cast, backend="aot_eager", fullgraph=True)
    return [torch.equal(*pair) for pair in zip(cast(local), compiled(local), strict=True)]


def test_a_graph_reduces_over_two_axes(ranks: RankPools) -> None:
    assert ranks(8).run(cast_over_two_axes) == [[True, True]] * 8
