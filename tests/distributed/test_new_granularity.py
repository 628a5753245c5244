"""A granularity that the tests add, on a mesh: bit for bit as on one device."""

import pytest
import torch
from nets import Distributed
from ranks import RankPools
from reference import same_bits
from row_pairs import CONFIG

from fp8_dist import precompute_float8_dynamic_scale
from fp8_dist.debug import comm_audit
from fp8_dist.linear.recording import GemmRecord, record_gemms


def recorded_step(model: torch.nn.Module, x: torch.Tensor) -> list[GemmRecord]:
    with record_gemms() as records:
        model(x).square().sum().backward()
    return records


def first_operands(dp: int, tp: int, precompute: bool) -> tuple[list[str], int]:
    """The first block's operands that differ from one device's; collectives of precompute."""
    world = Distributed(dp, tp, config=CONFIG)
    with comm_audit(world.mesh) as audit:
        if precompute:
            precompute_float8_dynamic_scale(world.net)
    x = torch.randn(4, 8, 64)
    ours = recorded_step(world.net, world.mine(x).requires_grad_())
    theirs = recorded_step(world.twin, x.chunk(dp)[world.mesh.get_local_rank("dp")])
    rank, wrong = world.mesh.get_local_rank("tp"), []
    for mine, whole in zip(ours[:2], theirs[:2], strict=True):  # w1 and w3: column-parallel
        b, scale = whole.b.qdata.chunk(tp, dim=1)[rank], whole.b.scale.chunk(tp, dim=1)[rank]
        if not (same_bits(mine.a.qdata, whole.a.qdata) and same_bits(mine.a.scale, whole.a.scale)):
            wrong.append(f"{mine.fqn}: input")
        if not (same_bits(mine.b.qdata, b) and same_bits(mine.b.scale, scale)):
            wrong.append(f"{mine.fqn}: weight")
    w2, whole = ours[2], theirs[2]  # row-parallel: its scales are those of whole rows
    if not (
        same_bits(w2.b.qdata, whole.b.qdata.chunk(tp)[rank])
        and same_bits(w2.b.scale, whole.b.scale)
    ):
        wrong.append(f"{w2.fqn}: weight")
    return wrong, audit.count()


@pytest.mark.filterwarnings("ignore:.*precomputed scale is not used")
@pytest.mark.parametrize("precompute", [False, True])
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1), (2, 2)])
def test_a_new_granularity_on_a_mesh(ranks: RankPools, dp: int, tp: int, precompute: bool) -> None:
    reduces = 1 if precompute else 0
    assert ranks(dp * tp).run(first_operands, dp, tp, precompute) == [([], reduces)] * (dp * tp)
