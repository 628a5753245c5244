"""What FSDP2 gathered is held by no layer and by no graph until the backward."""

from typing import NamedTuple

import pytest
import torch
import torch.nn as nn
from graphs import Graphs
from nets import Distributed, blocks
from ranks import RankPools
from reference import saved_in
from torch.distributed.tensor import DTensor

from fp8_dist import Float8LinearConfig, precompute_float8_dynamic_scale


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Held(NamedTuple):
    """Bytes that saved tensors hold between forward and backward; and how many are weights."""

    weights: int
    rest: int
    count: int


def held_by(net: nn.Module, x: torch.Tensor) -> Held:
    sizes = {tuple(p.shape) for p in net.parameters() if p.ndim == 2}
    output, tensors = saved_in(lambda: net(x))
    plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    weights = [t for t in plain if {tuple(t.shape), tuple(t.shape[::-1])} & sizes]
    rest = [t for t in plain if all(t is not weight for weight in weights)]
    held = []
    for group in (weights, rest):
        storages = {storage(t): t.untyped_storage().nbytes() for t in group}
        held.append(sum(storages.values()))
    output.sum().backward()
    return Held(*held, len(weights))


def resident(recipe: str, gather: bool) -> list[Held]:
    """By the number of layers: 2, 4, 8."""
    config, found = Float8LinearConfig.from_recipe_name(recipe), []
    for layers in (2, 4, 8):
        arguments = {"layers": layers}
        world = Distributed(2, 1, config=config, gather=gather, net_arguments=arguments)
        precompute_float8_dynamic_scale(world.net)
        found.append(held_by(world.net, world.mine(torch.randn(4, 8, 64))))
    return found


def resident_in_graphs(backend: str, recipe: str) -> int:
    """Bytes of weights that two compiled blocks hold, in their second step."""
    torch._dynamo.reset()
    config = Float8LinearConfig.from_recipe_name(recipe)
    world = Distributed(2, 1, config=config, gather=False, shard=False)
    model = blocks(world)
    for block in model:
        block.compile(backend=Graphs().backend if backend == "aot" else backend, fullgraph=True)
    world.fully_shard(model, model)
    precompute_float8_dynamic_scale(model)
    for _ in range(2):
        found = held_by(model, world.mine(torch.randn(4, 8, 64)).requires_grad_())
    return found.weights


@pytest.mark.filterwarnings("ignore")
# (What FSDP2 gathers in high precision is cast again in backward, not kept in float8.)
@pytest.mark.parametrize(
    ("recipe", "gather"), [("rowwise_folded", True), ("tensorwise", False), ("rowwise", False)]
)
def test_no_unsharded_weight_outlives_its_layer(
    ranks: RankPools, recipe: str, gather: bool
) -> None:
    weights, rest, count = zip(*ranks(2).run(resident, recipe, gather)[0], strict=True)
    # All but w1 and w3 of the first layer, whose input needs no gradient.
    assert count == (4, 10, 22)
    assert weights == (0, 0, 0)  # FSDP2 has freed what it gathered, and nothing else holds it
    assert rest[1] - rest[0] == (rest[2] - rest[1]) // 2 > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("backend", "recipe"),
    [
        ("aot", "tensorwise"),
        ("aot", "rowwise"),
        pytest.param("inductor", "tensorwise", marks=pytest.mark.full),
    ],
)
def test_no_unsharded_weight_outlives_its_graph(
    ranks: RankPools, backend: str, recipe: str
) -> None:
    # (A graph merges equal ops: the cast of the backward with the forward's, were it not told.)
    assert ranks(2).run(resident_in_graphs, backend, recipe, timeout=180) == [0, 0]
