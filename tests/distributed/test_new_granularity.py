"""A granularity that the tests add, on a mesh: bit for bit as on one device."""

import pytest
import torch
from nets import Distributed
from ranks import RankPools
from reference import same_bits
from row_pairs import CONFIG

from fp8_dist import Float8Tensor, precompute_float8_dynamic_scale
from fp8_dist.debug import comm_audit
from fp8_dist.linear.recording import GemmRecord, record_gemms


def recorded_step(model: torch.nn.Module, x: torch.Tensor) -> list[GemmRecord]:
    with record_gemms() as records:
        model(x).square().sum().backward()
    return records


def same_cast_as(mine: Float8Tensor, whole: Float8Tensor, tp: int, rank: int, dim: int) -> bool:
    """Whether an operand is a rank's part, along a dim, of one device's."""
    scale = whole.scale.expand(whole.qdata.shape)
    return same_bits(mine.qdata, whole.qdata.chunk(tp, dim)[rank]) and same_bits(
        mine.scale.expand(mine.qdata.shape).contiguous(), scale.chunk(tp, dim)[rank].contiguous()
    )


def different_operands(dp: int, tp: int, precompute: bool) -> tuple[list[str], int]:
    """Weights, and inputs of the first block, that differ; the collectives of precompute.

    (Later activations differ by the order of reductions.)
    """
    world = Distributed(dp, tp, config=CONFIG)
    with comm_audit(world.mesh) as audit:
        if precompute:
            precompute_float8_dynamic_scale(world.net)
    x = torch.randn(4, 8, 64)
    ours = recorded_step(world.net, world.mine(x).requires_grad_())
    mine = x.chunk(dp)[world.mesh.get_local_rank("dp")].requires_grad_()
    theirs = {(r.fqn, r.gemm): r for r in recorded_step(world.twin, mine)}
    rank, wrong = world.mesh.get_local_rank("tp"), []
    for i, record in enumerate(ours):
        whole = theirs[record.fqn, record.gemm]
        if record.gemm != "grad_weight":
            # b is the weight [N, K] for grad_input, [K, N] for the output.
            rows = 0 if record.gemm == "grad_input" else 1
            dim = 1 - rows if record.fqn.endswith("w2") else rows
            if not same_cast_as(record.b, whole.b, tp, rank, dim):
                wrong.append(f"{record.fqn} {record.gemm}: weight")
        if i < 2 and not same_cast_as(record.a, whole.a, 1, 0, 0):
            wrong.append(f"{record.fqn}: input")
    assert len(ours) == len(theirs) == 18
    return wrong, audit.count()


@pytest.mark.filterwarnings("ignore:.*precomputed scale is not used")
@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1), (2, 2)])
def test_a_new_granularity_on_a_mesh(ranks: RankPools, dp: int, tp: int, precompute: bool) -> None:
    expected = [([], 1 if precompute else 0)] * (dp * tp)
    assert ranks(dp * tp).run(different_operands, dp, tp, precompute) == expected
