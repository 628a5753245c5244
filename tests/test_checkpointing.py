"""Activation checkpointing: what is computed and communicated a second time."""

from collections import Counter
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline
from nets import Distributed, Net, full
from ranks import RankPools
from reference import same_bits
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fp8_dist import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
    selective_checkpoint_policy,
)
from fp8_dist.debug import comm_audit

RECIPES = [r.value for r in Float8LinearRecipeName if r is not Float8LinearRecipeName.DELAYED]
SELECTIVE = {
    "context_fn": partial(create_selective_checkpoint_contexts, selective_checkpoint_policy)
}
OPS = ("amax", "quantize", "scaled_mm", "mm", "all_gather", "reduce_scatter", "all_reduce")


class Ops(TorchDispatchMode):
    """Counts the ops that matter: passes over tensors, GEMMs, collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.partition("::")[2]
        for op in OPS:
            if name in (op, f"{op}_into_tensor", f"{op}_tensor"):
                self.counts[op] += 1
        return func(*args, **(kwargs or {}))


def forward(net: Net, x: torch.Tensor, mode: str) -> torch.Tensor:
    for layer in net.layers:
        if mode == "none":
            x = x + layer(x)
        else:
            arguments = SELECTIVE if mode == "selective" else {}
            x = x + checkpoint(layer, x, use_reentrant=False, **arguments)
    return x


def step(net: Net, x: torch.Tensor, mode: str) -> torch.Tensor:
    output = forward(net, x, mode)
    output.square().sum().backward()
    return output.detach()


def results(
    dp: int, tp: int, recipe: str, mode: str, precompute: bool = True
) -> tuple[Counter[str], str, list[torch.Tensor]]:
    """Op counts, the table of collectives, and output and gradients of a step."""
    world = Distributed(dp, tp, config=Float8LinearConfig.from_recipe_name(recipe))
    if precompute:
        precompute_float8_dynamic_scale(world.net)
    generator = torch.Generator().manual_seed(1)
    x = world.mine(torch.randn(4, 8, 64, generator=generator)).requires_grad_()
    with comm_audit(world.mesh) as audit:
        output = step(world.net, x, mode)
    gradients = [full(p.grad) for p in world.net.parameters()]
    # Counted apart: two modes at once see each other's rewrites.
    with Ops() as ops:
        step(world.net, x, mode)
    return ops.counts, audit.table(), [output, x.grad.clone(), *gradients]


def shown(counts: dict[str, Counter[str]]) -> str:
    lines = ["".join([f"{'':16}", *(f"{mode:>10}" for mode in counts)])]
    for op in OPS:
        numbers = [f"{counts[mode][op]:>10}" for mode in counts]
        lines.append("".join([f"{op:16}", *numbers]))
    return "\n".join(lines)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1), (2, 2)])
def test_same_bits_and_nothing_twice(ranks: RankPools, dp: int, tp: int, recipe: str) -> None:
    by_mode = {
        mode: ranks(dp * tp).run(results, dp, tp, recipe, mode)
        for mode in ("none", "full", "selective")
    }
    for mode in ("full", "selective"):
        for expected, found in zip(by_mode["none"], by_mode[mode], strict=True):
            assert all(same_bits(a, b) for a, b in zip(expected[2], found[2], strict=True))
    plain, selective = (by_mode[mode][0][0] for mode in ("none", "selective"))
    for op in OPS:
        if op != "quantize":
            # (Those of a weight that was not precomputed are not seen in the selective run.)
            assert selective[op] <= plain[op], op
    assert by_mode["selective"][0][1] == by_mode["none"][0][1]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded"])
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 1)])
def test_scales_found_out_on_the_way(ranks: RankPools, dp: int, tp: int, recipe: str) -> None:
    """A recomputation knows scales of weights that the forward had to compute."""
    by_mode = [
        ranks(2).run(results, dp, tp, recipe, mode, False) for mode in ("none", "full", "selective")
    ]
    for found in by_mode[1:]:
        for expected, rank in zip(by_mode[0], found, strict=True):
            assert all(same_bits(a, b) for a, b in zip(expected[2], rank[2], strict=True))


def test_counts_of_a_step(ranks: RankPools) -> None:
    counts = {
        mode: ranks(2).run(results, 1, 2, "tensorwise", mode)[0][0]
        for mode in ("none", "full", "selective")
    }
    # Two layers of three GEMMs each. full: per layer the casts of two inputs, none of a weight.
    assert_expected_inline(
        shown(counts),
        """\
                      none      full selective
amax                    10        14        10
quantize                10        14        14
scaled_mm               18        24        18
mm                       0         0         0
all_gather               4         6         4
reduce_scatter           4         6         4
all_reduce              12        16        12""",
    )


def test_full_checkpointing_gathers_float8_again(ranks: RankPools) -> None:
    assert_expected_inline(
        ranks(2).run(results, 1, 2, "tensorwise", "full")[0][1],
        """\
op              axis  dtype          count  elements   bytes
all_reduce      tp    int32             14        14      56
all_gather      tp    float8_e4m3fn      4     8,192   8,192
reduce_scatter  tp    float32            6    12,288  49,152
all_reduce      tp    float32            2       128     512
all_gather      tp    float8_e5m2        2     4,096   4,096
total                                   28            62,008
  float8                                              12,288
  other                                               49,720""",
    )


def test_on_one_device_without_gradients_of_the_input() -> None:
    results = []
    for mode in ("none", "full", "selective"):
        net = convert_to_float8_training(Net())
        output = step(net, torch.ones(2, 4, 64), mode)  # type: ignore[arg-type]
        results.append([output, *(p.grad for p in net.parameters())])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("recipe", [r.value for r in Float8LinearRecipeName])
def test_compiled(recipe: str, mode: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    net = convert_to_float8_training(
        Net(layers=1), config=Float8LinearConfig.from_recipe_name(recipe)
    )
    x, results = torch.randn(2, 4, 64), []
    for run in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        output = run(net, leaf, mode)
        output.square().sum().backward()
        results.append([output.detach(), leaf.grad, *(p.grad for p in net.parameters())])
        net.zero_grad()
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    assert sum(counters["graph_break"].values()) == 0
