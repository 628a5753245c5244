"""The rules of propagation, by brute force against the full tensors; the reduction of amax."""

import torch
import torch.distributed as dist
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fp8_dist.cast import quantize
from fp8_dist.mesh import all_reduce_max, groups_over, make_group
from fp8_dist.scaling import Dense


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


@on_ranks(8, returns=[True, True])
def test_a_graph_reduces_over_two_axes() -> list[bool]:
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
