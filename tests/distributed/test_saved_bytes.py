"""How much a layer keeps for its backward: what replaces the input takes half of bf16."""

from typing import NamedTuple

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline
from nets import Distributed, blocks
from ranks import RankPools
from recipe_algebra import GEMMS, RECIPES, config_of, exact, layer_of, step
from reference import same_bits, sqnr
from torch.distributed.tensor import DTensor

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)

ROWS, FEATURES = 1024, 512
IN_FLOAT8 = [recipe for recipe in RECIPES if recipe != "rowwise_with_gw_hp"]
LIMIT = 0.55  # of the bf16 input: half of it, and room for scales


class Saved(NamedTuple):
    """Bytes of the storages that a forward keeps for its backward, each counted once.

    What belongs to the weight is there whether the layer runs or not, once for a whole step: its
    parameter, and the float8 copies that the layer keeps of it. All else is kept for each forward,
    and is counted as activations: the input in float8, its scales, and what a view would hold on
    to beyond its own size.
    """

    activations: int
    of_the_weight: int


def saved_by(layer: nn.Module, x: torch.Tensor) -> Saved:
    tensors: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(x)
    assert output.requires_grad
    of_the_weight = {storage(parameter) for parameter in layer.parameters()}
    if isinstance(layer, Float8Linear):
        copies = layer.float8_weight.cache.float8 or ()
        of_the_weight |= {storage(t) for copy in copies for t in (copy.qdata, copy.scale)}
    sizes = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    kept = {at: size for at, size in sizes.items() if at in of_the_weight}
    return Saved(sum(sizes.values()) - sum(kept.values()), sum(kept.values()))


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    x = torch.randn(ROWS, 1).exp() * torch.randn(ROWS, FEATURES)
    w, g = torch.randn(FEATURES, FEATURES) / FEATURES**0.5, torch.randn(ROWS, FEATURES)
    return x.to(dtype), w.to(dtype), g.to(dtype)


def test_bytes_of_a_forward() -> None:
    x, w, _ = operands()
    linear = nn.Linear(FEATURES, FEATURES, bias=False)
    linear.weight = nn.Parameter(w.clone())
    high = saved_by(linear, x.requires_grad_())
    assert high.activations == x.nbytes
    lines = [f"nn.Linear in bf16: {high.activations} B and {high.of_the_weight} B of the weight"]
    for recipe in RECIPES:
        saved = saved_by(layer_of(config_of(recipe), w), x)
        share = saved.activations / high.activations
        assert (share <= LIMIT) is (recipe in IN_FLOAT8), recipe
        lines.append(
            f"{recipe}: {saved.activations} B ({share:.4f}) and {saved.of_the_weight} B of the weight"
        )
    assert_expected_inline(
        "\n".join(lines),
        """\
nn.Linear in bf16: 1048576 B and 524288 B of the weight
tensorwise: 524292 B (0.5000) and 262148 B of the weight
rowwise: 526336 B (0.5020) and 264192 B of the weight
rowwise_with_gw_hp: 1048576 B (1.0000) and 262148 B of the weight
rowwise_folded: 528384 B (0.5039) and 264192 B of the weight
delayed: 524292 B (0.5000) and 262148 B of the weight""",
    )


@pytest.mark.parametrize("recipe", IN_FLOAT8)
def test_bytes_stay_the_same(recipe: str) -> None:
    """Whatever the shape, the bias, autocast, and how many steps were before."""
    x, w, g = operands()
    leaf = x.clone().requires_grad_()
    config = config_of(recipe)
    expected = saved_by(layer_of(config, w), leaf).activations
    assert saved_by(layer_of(config, w), leaf.view(4, 256, FEATURES)).activations == expected
    assert saved_by(layer_of(config, w, torch.zeros(FEATURES)), leaf).activations == expected
    layer = layer_of(config, w.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert saved_by(layer, leaf.float()).activations == expected
    layer = layer_of(config, w)
    for _ in range(2):
        step(layer, x, g)
        if recipe == "delayed":
            sync_float8_amax_and_scale_history(layer)
    assert saved_by(layer, leaf).activations == expected
    layer.weight.requires_grad_(False)
    assert saved_by(layer, leaf).activations == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_without_hooks(recipe: str) -> None:
    """Hooks that move what is saved elsewhere and back, as CPU offload does."""
    x, w, g = operands()
    expected = step(layer_of(config_of(recipe), w), x, g)
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.detach().clone())
        return packed[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda copy: copy.clone()):
        found = step(layer_of(config_of(recipe), w), x, g)
    assert packed
    for gemm in GEMMS:
        assert same_bits(expected[gemm], found[gemm]), gemm
    least = {"output": 26, "grad_input": 23, "grad_weight": 23}
    for gemm, product in exact(x, w, g).items():
        assert sqnr(product, found[gemm]) > least[gemm], gemm


class Held(NamedTuple):
    """Bytes that saved tensors hold between forward and backward; and how many are weights."""

    weights: int
    rest: int
    count: int


def held_by(net: nn.Module, x: torch.Tensor) -> Held:
    sizes = {tuple(p.shape) for p in net.parameters() if p.ndim == 2}
    tensors: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = net(x)
    plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    weights = [t for t in plain if {tuple(t.shape), tuple(t.shape[::-1])} & sizes]
    rest = [t for t in plain if all(t is not weight for weight in weights)]
    held = []
    for group in (weights, rest):
        storages = {storage(t): t.untyped_storage().nbytes() for t in group}
        held.append(sum(storages.values()))
    output.sum().backward()
    return Held(*held, len(weights))


def resident(layers: int, recipe: str, gather: bool) -> Held:
    config = Float8LinearConfig.from_recipe_name(recipe)
    arguments = {"layers": layers}
    world = Distributed(2, 1, config=config, gather=gather, net_arguments=arguments)
    precompute_float8_dynamic_scale(world.net)
    return held_by(world.net, world.mine(torch.randn(4, 8, 64)))


def resident_in_graphs(backend: str, recipe: str, gather: bool) -> int:
    """Bytes of weights that two compiled blocks hold, in their second step."""
    torch._dynamo.reset()
    config = Float8LinearConfig.from_recipe_name(recipe)
    world = Distributed(2, 1, config=config, gather=gather, shard=False)
    model = blocks(world)
    for block in model:
        block.compile(backend=backend, fullgraph=True)
    world.fully_shard(model, model)
    precompute_float8_dynamic_scale(model)
    for _ in range(2):
        found = held_by(model, world.mine(torch.randn(4, 8, 64)).requires_grad_())
    return found.weights


GATHERS = [
    ("tensorwise", True),
    ("rowwise_folded", True),
    # What FSDP2 gathers in high precision is cast again in backward, not kept in float8.
    ("tensorwise", False),
    ("rowwise", False),
    ("rowwise_with_gw_hp", False),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "gather"), GATHERS)
def test_no_unsharded_weight_outlives_its_layer(
    ranks: RankPools, recipe: str, gather: bool
) -> None:
    by_depth = [ranks(2).run(resident, layers, recipe, gather)[0] for layers in (2, 4, 8)]
    weights, rest, count = zip(*by_depth, strict=True)
    # All but w1 and w3 of the first layer, whose input needs no gradient.
    assert count == (4, 10, 22)
    assert weights == (0, 0, 0)  # FSDP2 has freed what it gathered, and nothing else holds it
    assert rest[1] - rest[0] == (rest[2] - rest[1]) // 2 > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(("recipe", "gather"), [("tensorwise", False), ("rowwise", False)])
def test_no_unsharded_weight_outlives_its_graph(
    ranks: RankPools, backend: str, recipe: str, gather: bool
) -> None:
    # (A graph merges equal ops: the cast of the backward with the forward's, were it not told.)
    assert ranks(2).run(resident_in_graphs, backend, recipe, gather, timeout=180) == [0, 0]
