"""Compiled blocks of layers of plain local tensors, beside eager ones."""

import pytest
import torch
import torch.nn as nn
from local_nets import local_net
from nets import Block, Distributed, full
from ranks import RankPools
from reference import same_bits
from torch._dynamo.utils import counters

from fp8_dist import Float8LinearConfig, attach_update


def compiled_steps(dp: int, recipe: str, sequence_parallel: bool) -> list[str]:
    """The results of three training steps whose bits differ between eager and compiled blocks."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    world = Distributed(dp, 2, sequence_parallel, config, shard=False)
    config = world.net.layers[0].w1.config  # with float8 gathers, where FSDP2 shards
    torch._dynamo.reset()
    counters.clear()
    results: list[dict[str, torch.Tensor]] = []
    for compiled in (False, True):
        net = local_net(world.mesh["tp"], config, sequence_parallel)
        model = nn.Sequential(*(Block(layer) for layer in net.layers))
        if compiled:
            for block in model:
                block.compile(backend="aot_eager", fullgraph=True)
        world.fully_shard(model, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attach_update(optimizer, model)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            leaf = world.mine(torch.randn(4, 8, 64, generator=generator)).requires_grad_()
            output = model(leaf)
            output.square().mean().backward()
            optimizer.step()
        gradients = {n: full(p.grad) for n, p in model.named_parameters()}
        results.append({"output": output, "grad_input": leaf.grad} | gradients)
    assert sum(counters["graph_break"].values()) == 0
    expected, found = results
    return [name for name in expected if not same_bits(expected[name], found[name])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dp", "recipe", "sequence_parallel"),
    [
        (1, "rowwise_folded", True),
        (1, "delayed", False),
        pytest.param(2, "tensorwise", True, marks=pytest.mark.full),
    ],
)
def test_blocks(ranks: RankPools, dp: int, recipe: str, sequence_parallel: bool) -> None:
    arguments = (dp, recipe, sequence_parallel)
    for differ in ranks(2 * dp).run(compiled_steps, *arguments, timeout=180):
        assert differ == []
