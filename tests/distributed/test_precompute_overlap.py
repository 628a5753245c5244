"""precompute's all-reduce is under way when the call returns; who first needs a scale waits."""

import gc
import sys
from collections import Counter
from subprocess import run

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
from fp8_dist.mesh import AmaxReduction, all_reduce_max


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
        lambda: [layer.float8_weight.cache.known for layer in float8_layers(world.net).values()],
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


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
def test_the_first_use_waits(ranks: RankPools, dp: int, tp: int) -> None:
    for begun, used, dropped, forward in ranks(dp * tp).run(counts_of_a_step, dp, tp):
        assert begun == {"all_reduce": 1}
        assert used == {"wait_tensor": 1}
        assert dropped == {}
        assert forward == {"all_reduce": 0 if tp == 1 else forward["all_reduce"]}


def unwaited() -> list[int]:
    """Collectives that nobody waited for: a reduction begun, dropped, another begun, waited for."""
    in_flight = torch._C._distributed_c10d._get_work_registry_size
    before = in_flight()
    assert dist.group.WORLD is not None
    groups = [dist.group.WORLD.group_name]
    reduction = AmaxReduction(torch.ones(2), groups)
    counts = [in_flight()]
    del reduction
    counts.append(in_flight())
    reduction = AmaxReduction(torch.ones(2), groups)
    counts.append(in_flight())
    reduction.wait()
    counts.append(in_flight())
    return [count - before for count in counts]


def test_what_nobody_waits_for_is_waited_for_by_the_next_one(ranks: RankPools) -> None:
    assert ranks(2).run(unwaited) == [[1, 1, 1, 0]] * 2


class Cycle:
    """What the garbage collector alone frees."""

    def __init__(self, held: object) -> None:
        self.held, self.itself = held, self


def freed_anywhere() -> float:
    """Reductions that the garbage collector frees at many places of the start of the next one."""
    assert dist.group.WORLD is not None
    groups, amax, thresholds = [dist.group.WORLD.group_name], torch.ones(2), gc.get_threshold()
    gc.collect()
    gc.freeze()  # collections of what other tests left behind would take long
    for allocations in range(1, 120):
        gc.collect()
        gc.disable()
        Cycle(AmaxReduction(amax, groups))
        gc.set_threshold(allocations)
        gc.enable()
        found = all_reduce_max(amax, groups)
        gc.set_threshold(*thresholds)
    gc.unfreeze()
    return found.sum().item()


@pytest.mark.full
def test_a_reduction_may_be_freed_while_another_starts(ranks: RankPools) -> None:
    # A wait in the collector would never end where gloo records the stack of a new collective.
    assert ranks(2).run(freed_anywhere, timeout=60) == [2.0, 2.0]


ENDS = """
import atexit, sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import _get_work_registry_size as in_flight

atexit.register(lambda: print("in flight:", in_flight()))  # runs last
from fp8_dist.mesh import AmaxReduction

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
kept, freed = (AmaxReduction(torch.ones(2), [dist.group.WORLD.group_name]) for _ in range(2))
del freed
if sys.argv[1:]:
    raise KeyError(sys.argv[1])
"""


@pytest.mark.full
@pytest.mark.parametrize(("error", "left"), [([], 0), (["an error"], 2)])
def test_at_exit_all_are_waited_for_but_after_an_error(error: list[str], left: int) -> None:
    done = run([sys.executable, "-c", ENDS, *error], capture_output=True, text=True)
    assert f"in flight: {left}" in done.stdout, done.stderr
    assert done.returncode == len(error)


def scales_after(what: str) -> bool:
    """Whether what is used after something came in between equals the scales waited for at once."""
    results = []
    for waits in (True, False):
        world = Distributed(2, 1)
        net, x = world.net, world.mine(torch.randn(4, 8, 64, generator=torch.Generator()))
        precompute_float8_dynamic_scale(net)
        if waits:
            for layer in float8_layers(net).values():
                assert layer.float8_weight.cache.known is not None
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


def scales_after_all() -> list[str]:
    every = ("nothing", "twice", "evaluation", "selective checkpointing", "dropped")
    return [what for what in every if not scales_after(what)]


def test_what_may_come_in_between(ranks: RankPools) -> None:
    assert ranks(2).run(scales_after_all) == [[], []]
