"""Messages over several axes of a mesh: reductions of amaxes, and gathers of many tensors at once."""

import torch
import torch.distributed as dist
from rank_tests import on_ranks
from ranks import device_mesh
from reference import same_bits
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distributed
from torch.distributed.tensor.placement_types import _StridedShard

from fp8_dist.debug import comm_audit
from fp8_dist.mesh import all_reduce_max, full_tensors, groups_over, make_group
from fp8_dist.operand.prepare import cast_once
from fp8_dist.scaling import Dense


@on_ranks(8)
def test_meshes_whose_groups_not_all_ranks_can_make() -> None:
    """Without a group that spans both axes, amaxes are reduced over one axis at a time."""
    ranks = [[[0, 1], [3, 2]], [[4, 5], [7, 6]]]
    irregular = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b", "c"))
    part = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]])  # made by all ranks, as torch asks for
    for mesh in (irregular["b", "c"], part):
        if mesh.get_coordinate() is not None:
            names = make_group([mesh])
            assert names == groups_over(mesh, (0, 1))
            assert len(names) == 2
            value = all_reduce_max(torch.tensor(float(dist.get_rank())), names)
            assert value.item() == mesh.mesh.max().item()


@on_ranks(8, returns=[True, True])
def test_a_graph_reduces_over_two_axes() -> list[bool]:
    """Whether a graph and eager code cast a tensor that is sharded over two axes alike."""
    mesh = device_mesh(pp=2, dp=2, tp=2)["dp", "tp"]
    rows = torch.randn(8, 16).chunk(2)[mesh.get_local_rank(0)]
    local = rows.chunk(2, dim=1)[mesh.get_local_rank(1)].contiguous()

    def cast(local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = DTensor.from_local(local, mesh, (Shard(0), Shard(1)), run_check=False)
        qdata, (scale,), *_ = cast_once(whole, Dense())
        return qdata.view(torch.uint8), scale

    compiled = torch.compile(cast, backend="aot_eager", fullgraph=True)
    return [torch.equal(*pair) for pair in zip(cast(local), compiled(local), strict=True)]


def packed(dim: int, parts: int = 2) -> Placement:
    return _StridedShard(dim, split_factor=parts)  # type: ignore[return-value]


WAYS: list[tuple[Placement, Placement]] = [
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Replicate(), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (packed(0), Shard(1)),
    (Shard(1), packed(0, 3)),
    (packed(0, 3), packed(1)),
]


def wrong_on(mesh: DeviceMesh) -> tuple[list[str], list[str]]:
    """The tensors that were gathered wrongly, and the groups and numbers of messages."""
    wholes, parts, names = [], [], []
    for placements in WAYS:
        for rows in (0, 1, 3, 13, 16):
            for dtype in (torch.uint8, torch.bfloat16, torch.float64, torch.bool):
                whole = torch.arange(rows * 5).view(rows, 5).to(dtype)
                wholes.append(whole)
                parts.append(distributed(whole, mesh, placements, src_data_rank=None))
                names.append(f"{rows} rows of {dtype} as {placements} on {mesh}")
    wholes += [torch.ones(3), torch.full((2,), 2.0 * mesh.size(0))]
    added = DTensor.from_local(torch.full((2,), 2.0), mesh, [Partial(), Replicate()])
    parts += [torch.ones(3), added]
    names += ["a plain tensor", "a sum"]
    with comm_audit() as audit:
        found = full_tensors(parts)
        sent = audit.count("all_gather")
        wrong = [n for n, a, b in zip(names, found, wholes, strict=True) if not same_bits(a, b)]
    assert parts == []
    assert audit.count() == sent + 1  # the sum's
    return wrong, [f"{row.op} {row.axis} {row.count}" for row in audit.rows]


@on_ranks(4)
def test_on_a_mesh_of_all_ranks() -> None:
    for mesh in (device_mesh(dp=2, tp=2), DeviceMesh("cpu", [[2, 0], [3, 1]])):
        wrong, sent = wrong_on(mesh)
        assert wrong == []
        assert sum(int(row.split()[-1]) for row in sent if "all_gather" in row) == 3


@on_ranks(8)
def test_where_no_group_spans_both_axes() -> None:
    """One message over each axis; the second carries what the first one gathered."""
    mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]])
    if mesh.get_coordinate() is None:
        return
    wrong, sent = wrong_on(mesh)
    assert wrong == []
    assert sum(int(row.split()[-1]) for row in sent if "all_gather" in row) == 4
