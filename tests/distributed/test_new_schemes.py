"""What is communicated for scaling schemes that the tests add. (test_mesh_grid.py has their bits.)"""

import pytest
import torch
from nets import Distributed
from ranks import RankPools
from schemes import CONFIG, GATHERED_CONFIG
from two_level import two_level_config

from fp8_dist import Float8LinearConfig, precompute_float8_dynamic_scale
from fp8_dist.debug import comm_audit


def communicated(config: Float8LinearConfig, dp: int, tp: int) -> tuple[int, list[torch.dtype]]:
    """All-reduces of amaxes of precompute and a step, and the dtypes that are gathered."""
    world = Distributed(dp, tp, config=config)
    x = torch.randn(12, 8, 64)
    with comm_audit(world.mesh) as audit:
        precompute_float8_dynamic_scale(world.net)
        world.net(world.mine(x).requires_grad_()).square().sum().backward()
    reductions = audit.count("all_reduce", dtype=torch.int32)
    return reductions, [*{row.dtype for row in audit.rows if row.op == "all_gather" and row.count}]


@pytest.mark.parametrize(
    ("config", "dp", "tp", "reductions", "gathered"),
    [
        (CONFIG, 1, 2, 7, torch.float32),
        (GATHERED_CONFIG, 3, 1, 1, torch.float8_e4m3fn),
        # Each layer reduces the amaxes of two inputs and three gradients.
        (two_level_config(), 2, 2, 11, torch.float8_e4m3fn),
    ],
    ids=["pairs", "quads", "two levels"],
)
def test_messages(
    ranks: RankPools,
    config: Float8LinearConfig,
    dp: int,
    tp: int,
    reductions: int,
    gathered: torch.dtype,
) -> None:
    found = ranks(dp * tp).run_same(communicated, config, dp, tp)
    assert found == (reductions, [gathered])
