"""Weights that other code rebuilds: ``.data =``, new parameters, and float8 gathers after that."""

import copy
import pickle
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import is_
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import Distributed, GatedMLP, Net, full_state
from rank_tests import on_ranks
from ranks import device_mesh
from reference import all_warnings, raised, same_bits, validity
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    attach_update,
    convert_to_float8_training,
    float8_layers,
)
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import Float8AllGatherWeight
from fp8_dist.scaling.reduction import packed
from fp8_dist.weight.known import EVALUATED, UNKNOWN, Kept, KnownWeight

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def net(dtype: torch.dtype = torch.float32) -> Net:
    converted = convert_to_float8_training(Net().to(dtype), config=GATHERED)
    assert isinstance(converted, Net)
    return converted


def shard(model: Net) -> None:
    mesh = device_mesh(dp=2)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=POLICY)


def gathers(model: Net) -> tuple[dict[str, int], list[str]]:
    """The number of all-gathers of one step, by dtype; and warnings about high precision."""
    with all_warnings() as texts, comm_audit() as audit:
        model(torch.randn(2, 8, 64)).sum().backward()
    found = Counter[str]()
    for row in audit.rows:
        if row.op == "all_gather" and row.count:
            found[str(row.dtype)] += row.count
    return dict(found), [text for text in texts if "high precision" in text]


IN_FLOAT8 = {"torch.float8_e4m3fn": 4}, []


def wrapped(dtype: torch.dtype = torch.float32) -> Any:
    """A parameter as FSDP2 has it inside of a DTensor."""
    return nn.Parameter(Float8AllGatherWeight(torch.randn(96, 64, dtype=dtype), "weight"))


@pytest.mark.parametrize("given", [Float8AllGatherWeight, torch.Tensor])
def test_what_is_assigned_to_data_is_the_weight(given: type) -> None:
    weight = wrapped(torch.bfloat16)
    before = weight.detach().plain.float()
    weight.data = before if given is torch.Tensor else weight.data.float()
    assert weight.dtype == weight.data.dtype == weight.detach().dtype == torch.float32
    assert same_bits(weight.detach().plain, before)
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, Float8AllGatherWeight)
    weight.data = other = torch.zeros(96, 64)
    other.fill_(3)  # shares its storage, as in torch
    assert weight.sum() == 3 * 96 * 64
    assert weight.data_ptr() == other.data_ptr() != 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_a_copied_parameter_is_one(copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = wrapped().requires_grad_(False)
    weight.label = "w1"
    twin = copied(weight)
    assert isinstance(twin, nn.Parameter)
    assert isinstance(twin, Float8AllGatherWeight) is (copied is copy.deepcopy)
    assert twin.label == "w1"
    assert not twin.requires_grad
    assert same_bits(KnownWeight.unwrap(twin.detach()), weight.detach().plain)
    assert twin.data_ptr() != weight.data_ptr()


def test_what_can_not_be_data_is_refused_by_name() -> None:
    weight = wrapped()
    other = torch.zeros(96, 64, dtype=torch.int32)
    text = raised(TypeError, lambda: setattr(weight, "data", other))
    assert "must be a plain floating-point tensor, got Tensor of torch.int32; assign" in text
    assert weight.dtype == torch.float32


def test_data_assigned_after_writes_drops_scales() -> None:
    for writes in range(4):  # for one of these, the sum of version counters would stay the same
        weight = wrapped()
        weight.data = alias = torch.ones(16, 32)
        for _ in range(writes):
            alias.mul_(0.5)
        kept: Any = Kept(Float8Linear(32, 16).float8_weight.schemes, None)  # type: ignore[arg-type]
        weight.store(kept, packed([(torch.ones(()),)]), weight, EVALUATED)
        assert validity(weight) > 0
        alias.fill_(100)
        weight.data = alias.data  # the same memory, with a version of its own
        assert validity(weight) == UNKNOWN
        assert weight.recall(kept, weight.plain, weight.state()) == {}


def upcast(model: nn.Module) -> None:
    """As accelerate's ``fsdp2_prepare_model`` does for a bf16 model with mixed precision."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.to(torch.float32)


@on_ranks(2, returns=(IN_FLOAT8, True, 1))
def test_an_optimizer_whose_parameters_are_found_by_address() -> tuple[Any, bool, int]:
    """As accelerate's FSDP2 plug-in prepares a model and the optimizer that was made for it.

    It finds the optimizer's parameters again by the addresses of the old ones.
    """
    model = net(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    old = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    (group,) = optimizer.param_groups
    addresses = [parameter.data_ptr() for parameter in group["params"]]
    upcast(model)
    shard(model)
    new = {old[name]: parameter for name, parameter in model.named_parameters()}
    group["params"] = [new[address] for address in addresses]
    attach_update(optimizer, model)
    found = gathers(model)
    with comm_audit() as audit:
        optimizer.step()
    ours = list(model.parameters())
    return found, all(map(is_, group["params"], ours)), audit.count("all_reduce")


def load(model: nn.Module) -> None:
    """As transformers loads into a model that it sharded on the meta device."""
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            values = distribute_tensor(torch.ones(old.shape), old.device_mesh, old.placements)
            module._parameters[name] = nn.Parameter(values)


@on_ranks(2, returns=(IN_FLOAT8, True))
def test_weights_that_are_loaded_after_sharding() -> tuple[Any, bool]:
    with torch.device("meta"):
        model = net()
    shard(model)
    load(model)
    before = list(model.parameters())
    found = gathers(model)
    return found, all(map(is_, before, model.parameters()))


@on_ranks(2, returns=(IN_FLOAT8, IN_FLOAT8))
def test_weights_that_are_assigned_after_a_step() -> tuple[Any, Any]:
    model = net()
    shard(model)
    first = gathers(model)
    model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=True)
    return first, gathers(model)


@on_ranks(2, returns=(nn.Parameter, True))
def test_an_unsharded_layer_becomes_linear() -> tuple[type, bool]:
    model = fully_shard(convert_to_float8_training(Net()), mesh=device_mesh(dp=2))
    before = full_state(model)["layers.0.w1.weight"]
    model.unshard()
    weight = model.layers[0].w1.to_linear().weight
    return type(weight), same_bits(weight.detach(), before)


@on_ranks(4, returns=[])
def test_what_fsdp2_exchanges_is_noted() -> list[str]:
    wrong = []
    for gather in (True, False):
        net = Distributed(2, 2, gather=gather).net
        layer: Any = net.layers[0].w1
        net.layers[0].unshard()
        if (layer.float8_weight.unsharded is None) != gather:
            wrong.append(f"unsharded, {gather=}")
        net.layers[0].reshard()
        if layer.float8_weight.unsharded is not None:
            wrong.append(f"sharded, {gather=}")
        old = layer.weight
        if "cannot assign" not in raised(TypeError, lambda: setattr(layer, "weight", old.detach())):  # noqa: B023
            wrong.append(f"no parameter, {gather=}")
        layer.weight = old
    return wrong


# nn.Module._apply, and torch.utils.swap_tensors

Change = Callable[[nn.Module], object]


def applied(function: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda model: model._apply(function)


def with_flag(name: str, change: Change) -> Change:
    """Make a change with a flag of ``torch.__future__`` set."""

    def make(model: nn.Module) -> None:
        set_flag = getattr(torch.__future__, f"set_{name}_module_params_on_conversion")
        set_flag(True)
        try:
            change(model)
        finally:
            set_flag(False)

    return make


def filled(model: nn.Module) -> None:
    for parameter in model.to_empty(device="cpu").parameters():
        nn.init.constant_(parameter, 0.01)


def swapped(model: nn.Module) -> None:
    """Exchange all parameters for others, plain ones, or ones with the hooks of gathers."""
    for number, parameter in enumerate(model.parameters()):
        values = parameter.detach()
        other = values * 1.25 if number % 2 else values.clone().mul_(1.25)
        torch.utils.swap_tensors(parameter, nn.Parameter(other))


def scaled_within(model: nn.Module) -> None:
    """Call ``_apply`` of the modules within the FSDP modules."""
    for block in model.layers:  # type: ignore[union-attr]
        for module in block.children():
            module._apply(lambda tensor: tensor * 1.25)


SCALED = applied(lambda tensor: tensor * 1.25)
APPLIED: dict[str, Change] = {
    "product": SCALED,
    "product, by swapping": with_flag("swap", SCALED),
    "product, by overwriting": with_flag("overwrite", SCALED),
    "ones": applied(torch.ones_like),
    "small numbers": applied(lambda tensor: torch.zeros_like(tensor) + 1e-3),
    "to_empty": filled,
    "moves": lambda model: model.to("cpu").float(),
}
UNNOTICED: dict[str, Change] = {"swap_tensors": swapped, "_apply within": scaled_within}


def trained(model: nn.Module, change: Change, early: bool) -> list[torch.Tensor]:
    """Outputs around a change between two steps, and the parameters after the second."""
    x, outputs = torch.linspace(-1, 1, 4 * 8 * 64).view(4, 8, 64), []
    for is_changed in (False, True):
        if early or is_changed:
            with torch.no_grad():
                change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # on one device, of new parameters
        updates = attach_update(optimizer, model)
        outputs.append(model(x))
        outputs[-1].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        updates.remove()
    return [*outputs, model(x), *full_state(model).values()]


def twins(recipe: str) -> list[Net]:
    """A model on one device, and one that FSDP2 divides unevenly."""
    config = Float8LinearConfig.from_recipe_name(recipe, enable_fsdp_float8_all_gather="auto")
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(model := Net(layers=0))
        model.layers.append(GatedMLP(64, 97))
        convert_to_float8_training(model, config=config)
    for module in (*model.layers, model):
        fully_shard(module, mesh=device_mesh(dp=2))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded", "mxfp8"])
@on_ranks(2, returns=[])
def test_what_module_apply_returns_is_gathered_in_float8(recipe: str) -> list[str]:
    wrong = []
    for number, (name, change) in enumerate(APPLIED.items()):
        models = twins(recipe)
        found = [trained(model, change, early=bool(number % 2)) for model in models]
        if not all(map(same_bits, *found)):
            wrong.append(name)
        models[1].reshard()  # type: ignore[operator]
        locals_ = [layer.weight.to_local() for layer in float8_layers(models[1]).values()]
        if not all(isinstance(local, Float8AllGatherWeight) for local in locals_):
            wrong.append(f"{name}: {locals_}")
    return wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
@on_ranks("dp", "tp", returns=[])
def test_what_fsdp2_does_not_look_up_again_is_an_error(dp: int, tp: int) -> list[str]:
    """Until ``nn.Module._apply`` of the FSDP module; with TP, gathers in high precision, too."""
    wrong = []
    for name, change in UNNOTICED.items():
        world = Distributed(dp, tp, gather=tp == 1)
        x = world.mine(torch.randn(4, 8, 64))
        attach_update(torch.optim.SGD(world.net.parameters()), world.net)
        for mode in (torch.enable_grad, torch.inference_mode):
            with mode():
                world.net(x)
            world.net.reshard()  # type: ignore[operator]
            with torch.no_grad():
                change(world.net)
            text = raised(ValueError, lambda: world.net(x))  # noqa: B023
            pattern = r"layers\.0\.w1: the local tensor of weight was replaced \(by .* by parameter\.copy_"
            wrong += [] if re.match(pattern, text) else [f"{name}: {text}"]
            world.net._apply(lambda tensor: tensor)
            wrong += [f"{name}: {w}" for w in world.wrong_casts(partial(world.net, x))]
    return wrong
