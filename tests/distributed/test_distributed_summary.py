"""conversion_summary counts global weights, and communicates nothing."""

from nets import Distributed
from ranks import RankPools
from torch import randn

from fp8_dist import conversion_summary
from fp8_dist.debug import comm_audit


def summaries() -> tuple[set[str], int]:
    """Of a model on one device, sharded, and unsharded after a forward; how many collectives."""
    world = Distributed(2, 2, fsdp_arguments={"reshard_after_forward": False})
    found = {str(conversion_summary(world.twin))}
    with comm_audit() as audit:
        found.add(str(conversion_summary(world.net)))
    world.net(world.mine(randn(4, 8, 64)))
    with audit:
        found.add(str(conversion_summary(world.net)))
    return found, audit.count()


def test_a_distributed_model_has_the_summary_of_the_whole(ranks: RankPools) -> None:
    found, collectives = ranks(4).run_same(summaries)
    assert len(found) == 1
    assert collectives == 0
