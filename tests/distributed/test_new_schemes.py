"""Scaling schemes that the tests add, on a mesh: bit for bit as on one device."""

import pytest
import torch
from nets import Distributed
from ranks import RankPools
from reference import same_bits
from schemes import CONFIG, GATHERED_CONFIG
from two_level import two_level_config

from fp8_dist import Float8LinearConfig, Float8Tensor, precompute_float8_dynamic_scale
from fp8_dist.debug import comm_audit
from fp8_dist.linear.observing import GemmRecord, record_gemms


def recorded_step(model: torch.nn.Module, x: torch.Tensor) -> list[GemmRecord]:
    with record_gemms() as records:
        model(x).square().sum().backward()
    return records


def same_cast_as(mine: Float8Tensor, whole: Float8Tensor, tp: int, rank: int, dim: int) -> bool:
    """Whether an operand is a rank's part, along a dim, of one device's."""
    parts = (x.chunk(tp, dim)[rank] for x in (whole.qdata, scales_of(whole)))
    return all(map(same_bits, (mine.qdata, scales_of(mine)), parts))


def scales_of(x: Float8Tensor) -> torch.Tensor:
    """The scale of each element."""
    return x.scheme.element_scales(x.scales, x.shape, x.start).expand(x.shape).contiguous()


def different_operands(
    config: Float8LinearConfig, dp: int, tp: int, precompute: bool
) -> tuple[list[str], int, set[torch.dtype]]:
    """Weights, and inputs of the first block, that differ from one device's.

    (Later activations differ by the order of reductions.) With them the number of all-reduces of
    amaxes, precompute's included, and the dtypes that the step gathers.
    """
    world = Distributed(dp, tp, config=config)
    x = torch.randn(12, 8, 64)
    with comm_audit(world.mesh) as audit:
        if precompute:
            precompute_float8_dynamic_scale(world.net)
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
    reductions = sum(r.count for r in audit.rows if (r.op, r.dtype) == ("all_reduce", torch.int32))
    gathered = [r for r in audit.rows if r.op == "all_gather" and r.count]
    return wrong, reductions, {r.dtype for r in gathered}


@pytest.mark.parametrize(
    ("dp", "tp", "precompute", "reductions"),
    [(1, 2, False, 12), (1, 2, True, 7), (2, 1, True, 1), (2, 2, False, 12)],
)
def test_a_new_scheme_on_a_mesh(
    ranks: RankPools, dp: int, tp: int, precompute: bool, reductions: int
) -> None:
    # (What precompute finds is not used where FSDP2 gathers the weight in high precision.)
    expected = [([], reductions, {torch.float32})] * (dp * tp)
    assert ranks(dp * tp).run(different_operands, CONFIG, dp, tp, precompute) == expected


@pytest.mark.parametrize(
    ("dp", "tp", "precompute", "reductions"),
    # Scales of unequal shards come from an all-reduce: precompute's, or one for each such weight.
    [(1, 2, True, 0), (2, 2, False, 0), (3, 1, False, 2), (3, 1, True, 1)],
)
def test_a_scheme_that_is_gathered(
    ranks: RankPools, dp: int, tp: int, precompute: bool, reductions: int
) -> None:
    expected = [([], reductions, {torch.float8_e4m3fn})] * (dp * tp)
    found = ranks(dp * tp).run(different_operands, GATHERED_CONFIG, dp, tp, precompute)
    assert found == expected


@pytest.mark.parametrize(
    ("dp", "tp", "precompute", "reductions"),
    [(2, 1, False, 6), (2, 1, True, 1), (3, 1, True, 1), (1, 2, True, 11), (2, 2, True, 11)],
)
def test_two_levels(ranks: RankPools, dp: int, tp: int, precompute: bool, reductions: int) -> None:
    # Under tensor parallelism each layer reduces the amaxes of two inputs and three gradients.
    expected = [([], reductions, {torch.float8_e4m3fn})] * (dp * tp)
    assert (
        ranks(dp * tp).run(different_operands, two_level_config(), dp, tp, precompute) == expected
    )
