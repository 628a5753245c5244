"""precompute's all-reduce is under way when the call returns; who first needs a scale waits."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from checkpointed import SELECTIVE
from nets import Distributed
from ranks import RankPools
from reference import same_bits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fp8_dist import invalidate_float8_scales, precompute_float8_dynamic_scale
from fp8_dist.debug import comm_audit
from fp8_dist.linear import float8_layers
from fp8_dist.mesh import AmaxReduction


class Waits(TorchDispatchMode):
    """Counts begun all-reduces, and waits, of fp32 numbers read as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.partition("::")[2]
        if name in ("all_reduce", "wait_tensor") and args[0].dtype is torch.int32:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def counts_of_a_step(dp: int, tp: int) -> list[dict[str, int]]:
    world = Distributed(dp, tp)
    x = world.mine(torch.randn(4, 8, 64))
    found = []
    for call in (
        lambda: precompute_float8_dynamic_scale(world.net),
        lambda: [layer.float8_weight.cache.scaling for layer in float8_layers(world.net).values()],
        lambda: invalidate_float8_scales(world.net),
    ):
        with Waits() as waits:
            call()
        found.append(dict(waits.counts))
    precompute_float8_dynamic_scale(world.net)
    with comm_audit(world.mesh) as audit:
        world.net(x)
    found.append({"all_reduce": sum(r.count for r in audit.rows if r.op == "all_reduce")})
    return found


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_the_first_use_waits(ranks: RankPools, dp: int, tp: int) -> None:
    for begun, used, dropped, forward in ranks(dp * tp).run(counts_of_a_step, dp, tp):
        assert begun == {"all_reduce": 1}
        assert used == {"wait_tensor": 1}
        assert dropped == {}
        assert forward == {"all_reduce": 0 if tp == 1 else forward["all_reduce"]}


def unwaited() -> tuple[int, int, bool]:
    """Collectives nobody waited for: before, once a reduction was dropped; and its exit handler."""
    in_flight = torch._C._distributed_c10d._get_work_registry_size
    before = in_flight()
    assert dist.group.WORLD is not None
    reduction = AmaxReduction(torch.ones(2), [dist.group.WORLD.group_name])
    begun = in_flight() - before
    waits_at_exit = reduction._finalizer.atexit
    del reduction
    return begun, in_flight() - before, waits_at_exit


def test_what_nobody_waits_for_is_waited_for_in_the_end(ranks: RankPools) -> None:
    # torch would complain of it when the process exits.
    assert ranks(2).run(unwaited) == [(1, 0, True)] * 2


def scales_after(what: str) -> bool:
    """Whether what is used after something came in between equals the scales waited for at once."""
    results = []
    for waits in (True, False):
        world = Distributed(2, 1)
        net, x = world.net, world.mine(torch.randn(4, 8, 64, generator=torch.Generator()))
        precompute_float8_dynamic_scale(net)
        if waits:
            for layer in float8_layers(net).values():
                assert layer.float8_weight.cache.scaling is not None
        elif what == "twice":
            precompute_float8_dynamic_scale(net)
        elif what == "evaluation":
            with torch.no_grad():
                net(x)
        elif what == "dropped":
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(1).sub_(1)
            invalidate_float8_scales(net)
        selective = SELECTIVE if what == "selective checkpointing" else None
        leaf = x.clone().requires_grad_()
        out = leaf
        for block in net.layers:
            out = out + (
                checkpoint(block, out, use_reentrant=False, **selective)
                if selective
                else block(out)
            )
        out.square().mean().backward()
        results.append([out.detach(), leaf.grad, *(p.grad.to_local() for p in net.parameters())])
    if what == "dropped":
        return all(torch.allclose(a, b, atol=0.1) for a, b in zip(*results, strict=True))
    return all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "what", ["nothing", "twice", "evaluation", "selective checkpointing", "dropped"]
)
def test_what_may_come_in_between(ranks: RankPools, what: str) -> None:
    assert ranks(2).run(scales_after, what) == [True, True]
