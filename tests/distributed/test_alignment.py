"""Dims that a GPU's float8 GEMM can't take: padded or refused, alike on all ranks, on the CPU too."""

import os
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import MLP, full
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import sqnr
from torch.distributed.fsdp import fully_shard

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, apply_tp_plan

STRICT = "FP8_DIST_STRICT_ALIGNMENT"


def sharded(dim: int, hidden: int, pad: bool, rows: int) -> dict[str, Any]:
    """This rank's error under strict alignment, or SQNRs against one device without padding."""
    mesh = device_mesh(tp=torch.distributed.get_world_size())
    config = Float8LinearConfig(pad_inner_dim=pad)
    torch.manual_seed(0)
    mlp, twin = (MLP(dim, hidden) for _ in range(2))
    twin.load_state_dict(mlp.state_dict())
    convert_to_float8_training(mlp, config=config)
    convert_to_float8_training(twin)
    column = Float8ColwiseParallel()
    apply_tp_plan(mlp, mesh, {"w1": column, "w3": column, "w2": Float8RowwiseParallel()})
    x = torch.randn(rows, dim)
    expected = twin(x)
    expected.sum().backward()
    os.environ[STRICT] = "1"
    try:
        output = mlp(x)
        output.sum().backward()
    except ValueError as error:
        return {"error": str(error)}
    return {
        "output": sqnr(expected, output),
        "weight": sqnr(twin.w2.weight.grad, full(mlp.w2.weight.grad)),
    }


def test_refused_on_all_ranks_where_it_is_misaligned_on_one(ranks: RankPools) -> None:
    # 48 columns on 2 ranks: 24 each. 33: 17 and 16, of which only the first is misaligned.
    for hidden, found in ((48, "24"), (33, "16 or 17")):
        first, second = ranks(2).run(sharded, 32, hidden, False, 16)
        assert first == second
        assert "w1: float8 GEMMs need local sizes that are multiples of 16" in first["error"]
        assert f"found out_features {found};" in first["error"]


@pytest.mark.parametrize(
    ("world_size", "dim", "hidden", "rows"),
    [
        (2, 32, 33, 16),
        (2, 20, 48, 5),
        # Some ranks hold nothing, and take part all the same.
        (2, 17, 1, 1),
        (4, 32, 5, 6),
    ],
)
@on_ranks("world_size")
def test_padded_on_every_rank(world_size: int, dim: int, hidden: int, rows: int) -> None:
    found = sharded(dim, hidden, True, rows)
    assert "error" not in found, found
    assert min(found.values()) > 120


@on_ranks(2)
def test_rows_are_padded_in_any_case() -> None:
    """The number of rows depends on the data and the rank: it is padded, and never refused."""
    os.environ[STRICT] = "1"
    mesh = device_mesh(dp=2)
    net, twin = nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 32))
    twin.load_state_dict(net.state_dict())
    for model in (net, twin):
        convert_to_float8_training(model)
    fully_shard(net, mesh=mesh)
    rows = (16, 15)[mesh.get_local_rank()]
    x = torch.randn(rows, 32, requires_grad=True)
    output = net(x)
    output.sum().backward()
    del os.environ[STRICT]
    assert sqnr(twin(x), output) > 120


@on_ranks(4, returns=[])
def test_shards_of_fsdp_need_no_alignment() -> list[str]:
    """The gathered weight is the operand, and is aligned; FSDP2's shards need not be."""
    os.environ[STRICT] = "1"
    net = nn.Sequential(nn.Linear(16, 48), nn.Linear(48, 16))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(net, config=config)
    fully_shard(net, mesh=device_mesh(dp=4))
    net(torch.randn(16, 16)).sum().backward()
    return [n for n, p in net.named_parameters() if not full(p.grad).isfinite().all()]
