"""Evaluations between two steps of a training, in each mode: they leave no trace.

A training is run without evaluations, and with them. Losses, weights and amax histories must be the
same, bit by bit. An evaluation may fail where it also fails without float8.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import Net, net_plan
from rank_tests import on_ranks
from ranks import device_mesh
from reference import same_bits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import (
    Float8LinearConfig,
    Float8State,
    convert_to_float8_training,
    dequantized,
    freeze_to_float8,
    unfreeze_from_float8,
    update_float8_scales,
)
from fp8_dist.mesh import local_tensor
from fp8_dist.moe import (
    Float8ExpertsConfig,
    convert_experts_to_float8_training,
    dispatch_linear,
    linear_combine,
    route,
)
from fp8_dist.tensor_parallel import Float8ExpertParallel, apply_tp_plan
from fp8_dist.weight.known import KnownWeight

# Sizes for which FSDP2's gather carries scales of rows and of blocks.
DIM, HIDDEN, EXPERTS = 64, 256, 4
STEPS = 2

named = Float8LinearConfig.from_recipe_name
CONFIGS = {
    "tensorwise": named("tensorwise"),
    "delayed": named("delayed"),
    "rowwise": named("rowwise"),
    "rowwise_with_gw_hp": named("rowwise_with_gw_hp"),
    "rowwise_folded": named("rowwise_folded"),
    "blockwise": named("blockwise"),
    "mxfp8": named("mxfp8"),
    "mxfp4 of mxfp8": named("mxfp8", weight_format="mxfp4"),
    "mxfp4 of blockwise": named("blockwise", weight_format="mxfp4"),
}
# Recipes that cast a weight once, so that it can be stored.
STORED = [name for name in CONFIGS if name not in ("rowwise", "rowwise_with_gw_hp")]
OF_EXPERTS = ["tensorwise", "rowwise_folded", "blockwise", "mxfp8"]

PLACES = ("before the first step", "between micro-batches", "before the update", "after the update")
UPDATE = "the update"
MODES = ("no_grad", "inference_mode", "eval()", "eval() under no_grad")

# By name: the sizes of a mesh, and how FSDP2 reshards. None: FSDP2's default, for the whole model.
SHARDED = {
    "FSDP2": ({"dp": 2, "tp": 1}, None),
    "FSDP2, resharded": ({"dp": 2, "tp": 1}, True),
    "FSDP2, kept": ({"dp": 2, "tp": 1}, False),
    "TP": ({"dp": 1, "tp": 2}, None),
    "TP + SP": ({"dp": 1, "tp": 2}, None),
    "FSDP2 x TP": ({"dp": 2, "tp": 2}, None),
}


class Experts(nn.Module):
    """Experts [E, N, K] of two linear layers, after a linear layer."""

    float8_weight_names = ("up", "down")
    float8_experts_config: Float8ExpertsConfig | None = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        ids = torch.stack([torch.arange(len(x)) % EXPERTS, torch.arange(len(x)) // 3 % EXPERTS], 1)
        if (config := self.float8_experts_config) is None:
            up, down = self.up.to_local(), self.down.to_local()
            return torch.relu(x @ up[0].T) @ down[0].T
        up, down = self.up, self.down
        group = up.device_mesh.get_group() if isinstance(up, DTensor) else None
        routing = route(ids, EXPERTS, group)
        hidden = dispatch_linear(x, up, routing, config).relu()
        return linear_combine(hidden, down, routing, config).sum(1)


def network(config: Float8LinearConfig | None, sharding: str, has_stored: bool) -> Net:
    """A model on a mesh; the first layer, and a part of the second, may be frozen."""
    net = Net(DIM, HIDDEN)
    if has_stored:
        net.layers[0].requires_grad_(False)
        net.layers[1].w2.weight.requires_grad_(False)
    if config is not None:
        convert_to_float8_training(
            net, config=replace(config, enable_fsdp_float8_all_gather="auto")
        )
    if config is not None and has_stored:
        in_four_bits = config.cast_config_weight.format == "mxfp4"
        freeze_to_float8(net, format="mxfp4" if in_four_bits else "float8")
    sizes, reshards = SHARDED[sharding]
    mesh = device_mesh(**sizes)
    if sizes["tp"] > 1:
        if config is None:  # the layers of the plan, without float8
            convert_to_float8_training(net, config=named("bf16"))
        apply_tp_plan(net, mesh["tp"], net_plan(net, sharding == "TP + SP"))
    if sizes["dp"] > 1:
        for part in [net] if reshards is None else [*net.layers, net]:
            fully_shard(part, mesh=mesh["dp"], reshard_after_forward=reshards)
    return net


def experts(recipe: Any, sharding: str) -> nn.Module:
    """Experts that are divided between ranks, and perhaps also sharded."""
    net = nn.Sequential(Experts())
    mesh = device_mesh(dp=dist.get_world_size() // 2, ep=2)
    if recipe is not None:
        convert_experts_to_float8_training(net, config=Float8ExpertsConfig(recipe))
        parallelize_module(net[0], mesh["ep"], Float8ExpertParallel())
    else:
        for name, parameter in list(net[0].named_parameters()):
            part = distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)])
            setattr(net[0], name, nn.Parameter(part))
    if sharding == "EP x FSDP2":
        fully_shard(net, mesh=mesh["dp"])
    return net


def mode_of(name: str) -> AbstractContextManager[Any]:
    modes = {"inference_mode": torch.inference_mode, "eval()": nullcontext}
    return modes.get(name, torch.no_grad)()


def trained(model: nn.Module, evaluations: Mapping[str, str]) -> Iterator[Tensor | None]:
    """Train; yield each loss, None for each evaluation, then local weights, and amaxes.

    ``evaluations``: the modes of evaluations by their places, and of the update of scales.
    """
    rank, generator = dist.get_rank(), torch.Generator()
    trains = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trains, lr=0.5)
    batches = [torch.randn(2, 4, DIM, generator=generator.manual_seed(i)) for i in range(2)]
    if rank and isinstance(model[0] if isinstance(model, nn.Sequential) else None, Experts):
        batches.reverse()

    def evaluate(place: str, x: Tensor) -> Iterator[None]:
        if (mode := evaluations.get(place)) is None:
            return
        model.train(not mode.startswith("eval()"))
        with mode_of(mode):
            model(x)
            model(4 * x)  # with other amaxes
        model.train()
        yield None

    yield from evaluate(PLACES[0], batches[0])
    for _ in range(STEPS):
        for i, x in enumerate(batches):
            loss = model(x).square().mean()
            loss.backward()
            yield loss.detach()
            if i == 0:
                yield from evaluate(PLACES[1], batches[1])
        optimizer.step()
        optimizer.zero_grad()
        yield from evaluate(PLACES[2], batches[0])
        if is_float8(model):
            with mode_of(evaluations.get(UPDATE, "no_grad")):
                update_float8_scales(model)
        yield from evaluate(PLACES[3], batches[0])
    yield from map(KnownWeight.unwrap, map(local_tensor, trains))
    yield from amaxes(model)


def is_float8(model: nn.Module) -> bool:
    return any(getattr(part, "float8_weights", None) for part in model.modules())


def amaxes(model: nn.Module) -> list[Tensor]:
    state = Float8State(model).state_dict().values()
    return [torch.tensor(row) for rows in state for row in rows.values()]


def problems(make: Callable[[bool], nn.Module], runs: list[dict[str, str]]) -> list[str]:
    """The runs that differ from one without evaluations, or end earlier than in plain models.

    ``make``: makes the model, in float8 or not.
    """
    expected, found = list(trained(make(True), {})), []
    for evaluations in runs:
        results, error = until_error(trained(make(True), evaluations))
        if error is not None:
            of_plain, _ = until_error(trained(make(False), evaluations))
            if len(results) < len(of_plain):
                found.append(f"{evaluations}: {error}")
        kept = [result for result in results if result is not None]
        if not all(map(same_bits, kept, expected)):
            found.append(f"{evaluations}: other bits")
    return found


def until_error(results: Iterator[Tensor | None]) -> tuple[list[Tensor | None], Exception | None]:
    found = list[Tensor | None]()
    try:
        found.extend(results)
    except RuntimeError as error:
        return found, error
    return found, None


# In the default tier, evaluations are at several places at once. FSDP2 itself can't train if its
# first gather is in inference mode.
FEW = [
    dict.fromkeys((*PLACES[1:], UPDATE), "inference_mode"),
    {PLACES[0]: "no_grad", PLACES[1]: "eval()", PLACES[2]: "eval()", PLACES[3]: "inference_mode"},
]
EACH = [{place: mode} for place, mode in itertools.product(PLACES, MODES)]
RUNS = pytest.mark.parametrize(
    "runs", [pytest.param(FEW, id="few"), pytest.param(EACH, id="each", marks=pytest.mark.full)]
)
ON_TWO_RANKS = [name for name in SHARDED if name != "FSDP2 x TP"]


def problems_of_recipes(
    names: list[str], sharding: str, has_stored: bool, runs: list[dict[str, str]]
) -> list[str]:
    found = []
    for name in names:

        def make(in_float8: bool, name: str = name) -> nn.Module:
            return network(CONFIGS[name] if in_float8 else None, sharding, has_stored)

        found += [f"{name}, {problem}" for problem in problems(make, runs)]
    return found


@RUNS
@pytest.mark.parametrize("sharding", ON_TWO_RANKS)
@on_ranks(2, returns=[], timeout=600)
def test_on_two_ranks(sharding: str, runs: list[dict[str, str]]) -> list[str]:
    return problems_of_recipes([*CONFIGS], sharding, False, runs)


@pytest.mark.parametrize("sharding", [name for name in ON_TWO_RANKS if "FSDP2" in name])
@on_ranks(2, returns=[])
def test_first_pass_in_inference_mode(sharding: str) -> list[str]:
    """FSDP2's buffers are inference tensors then: it can evaluate with them, but not train."""
    found, x = [], torch.ones(4, DIM)
    for name, has_stored in [(n, False) for n in CONFIGS] + [(n, True) for n in STORED]:
        with torch.no_grad():
            expected = network(CONFIGS[name], sharding, has_stored)(x)
        net = network(CONFIGS[name], sharding, has_stored)
        with torch.inference_mode():
            found += [name for _ in range(2) if not same_bits(net(x), expected)]
    return found


@RUNS
@pytest.mark.parametrize("sharding", ON_TWO_RANKS)
@on_ranks(2, returns=[], timeout=600)
def test_frozen_parts_on_two_ranks(sharding: str, runs: list[dict[str, str]]) -> list[str]:
    return problems_of_recipes(STORED, sharding, True, runs)


@RUNS
@on_ranks(4, returns=[], timeout=600)
def test_on_four_ranks(runs: list[dict[str, str]]) -> list[str]:
    return problems_of_recipes([*CONFIGS], "FSDP2 x TP", False, runs)


@pytest.mark.full
@on_ranks(4, returns=[], timeout=600)
def test_frozen_parts_on_four_ranks() -> list[str]:
    return problems_of_recipes(STORED, "FSDP2 x TP", True, FEW)


@RUNS
@pytest.mark.parametrize(("sharding", "ranks_"), [("EP", 2), ("EP x FSDP2", 4)])
@on_ranks("ranks_", returns=[], timeout=600)
def test_experts(sharding: str, ranks_: int, runs: list[dict[str, str]]) -> list[str]:
    found = []
    for recipe in OF_EXPERTS:

        def make(in_float8: bool, recipe: str = recipe) -> nn.Module:
            return experts(recipe if in_float8 else None, sharding)

        found += [f"{recipe}, {problem}" for problem in problems(make, runs)]
    return found


@pytest.mark.full
@on_ranks(2, returns=[], timeout=600)
def test_compiled() -> list[str]:
    found = []
    for name in ("mxfp8", "delayed"):

        def make(in_float8: bool, name: str = name) -> nn.Module:
            net = network(CONFIGS[name] if in_float8 else None, "FSDP2", False)
            for layer in net.layers:
                layer.compile(backend="aot_eager")
            return net

        found += [f"{name}, {problem}" for problem in problems(make, FEW)]
    return found


def check_enabled_gradients(net: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        expected = net(x)
    with torch.inference_mode(), torch.enable_grad():
        found = net(x)
    assert same_bits(found, expected)
    assert not found.requires_grad


@pytest.mark.parametrize("recipe", CONFIGS)
def test_gradients_that_are_enabled_in_inference_mode(recipe: str) -> None:
    """They have no effect there, as for nn.Linear."""
    layer = nn.Linear(DIM, HIDDEN)
    net = convert_to_float8_training(nn.Sequential(layer), config=CONFIGS[recipe])
    check_enabled_gradients(net, torch.randn(4, DIM))


@pytest.mark.parametrize("recipe", OF_EXPERTS)
def test_gradients_of_experts_that_are_enabled_in_inference_mode(recipe: str) -> None:
    net = Experts()
    convert_experts_to_float8_training(net, config=Float8ExpertsConfig.from_recipe_name(recipe))
    check_enabled_gradients(net, torch.randn(2, 6, DIM))


@on_ranks(2, returns=True)
def test_weights_are_read_in_inference_mode() -> bool:
    """torch can't detach a DTensor there."""
    layer = network(CONFIGS["tensorwise"], "TP", False).layers[0].w1
    expected = dequantized(layer)
    with torch.inference_mode():
        found = dequantized(layer)
    return same_bits(local_tensor(found), local_tensor(expected)) and not found.is_inference()


@pytest.mark.parametrize("change", [freeze_to_float8, unfreeze_from_float8])
def test_weights_that_are_stored_in_inference_mode(change: Callable[[nn.Module], object]) -> None:
    net = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM))
    convert_to_float8_training(net, config=CONFIGS["rowwise_folded"]).requires_grad_(False)
    if change is unfreeze_from_float8:
        freeze_to_float8(net)
    with torch.inference_mode():
        change(net)
    x = torch.randn(4, DIM, requires_grad=True)
    net(x).square().sum().backward()
    assert x.grad is not None
