"""The table of docs/state.md, row by row: which writes to a weight are noticed."""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from nets import Distributed, Net
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import same_cast, weights_used
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.parallel import DistributedDataParallel

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_layers,
    invalidate_float8_scales,
    precompute_float8_dynamic_scale,
)
from fp8_dist.mesh import local_tensor
from fp8_dist.weight.known import OUTDATED, TRAINED, KnownWeight

PAGE = Path(__file__).parents[2] / "docs" / "state.md"


def column_of_page(column: str) -> dict[str, str]:
    """By change, the cell of the table."""
    page = PAGE.read_text()
    table = page[page.index("| change |") :].partition("\n\n")[0]
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {cells[0]: cells[head.index(column)] for cells in rows}


def every_weight(write: Callable[[Tensor], object]) -> Callable[[nn.Module], None]:
    """Write to each weight."""
    return lambda net: [write(layer.weight) for layer in float8_layers(net).values()] and None


def state_tensors(write: Callable[[list[Tensor]], object]) -> Callable[[nn.Module], None]:
    """Write to the weights that ``state_dict()`` returns."""
    return lambda net: write([v for k, v in net.state_dict().items() if "weight" in k]) and None


def replace_data(weight: Tensor) -> None:
    weight.data = weight.data.clone() * 10


def memory_of(make: Callable[[Tensor], Any]) -> Callable[[nn.Module], None]:
    """Write to each weight's memory, through what ``make`` returns for its local tensor."""

    def write(weight: Tensor) -> None:
        memory = make(local_tensor(weight).detach())
        memory *= 10

    return every_weight(write)


def at_storage(tensor: Tensor) -> Tensor:
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0).set_(tensor.untyped_storage(), *place)


def at_address(tensor: Tensor) -> np.ndarray:
    values = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(values)


def tenfold(tensor: Tensor) -> None:
    tensor.apply_(lambda value: 10 * value)


def replace(net: nn.Module) -> None:
    for layer in float8_layers(net).values():
        layer.weight = nn.Parameter(layer.weight.detach().clone() * 10)


def swap(net: nn.Module) -> None:
    """Exchange weights for others with equal version counters."""
    for layer in float8_layers(net).values():
        other = nn.Parameter(layer.weight.detach() * 10)
        while other._version < layer.weight._version:
            increment_version(other)
        torch.utils.swap_tensors(layer.weight, other)


def step(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, -10.0)
    torch.optim.SGD(net.parameters(), lr=1.0, foreach=True).step()


def load(net: nn.Module) -> None:
    net.load_state_dict({k: v * 10 for k, v in net.state_dict().items()})


WRITES: dict[str, Callable[[nn.Module], None]] = {
    "a step of its optimizer": step,
    "`load_state_dict`": load,
    "another parameter: `layer.weight = ...`": replace,
    "`torch.utils.swap_tensors(weight, other)`": swap,
    "`weight.mul_(2)`, `weight.copy_(ema)`, also of `weight.detach()`": every_weight(
        lambda w: w.mul_(10)
    ),
    "`weight[0].mul_(2)`": every_weight(lambda w: w[:4].mul_(10)),
    "`weight.to_local().mul_(2)`": every_weight(lambda w: local_tensor(w).detach().mul_(10)),
    "`weight.to_local().detach().apply_(f)`": every_weight(
        lambda w: tenfold(local_tensor(w).detach())
    ),
    "`torch._foreach_mul_(weights, 2)`": lambda net: torch._foreach_mul_(
        [layer.weight for layer in float8_layers(net).values()], 10.0
    ),
    "`weight.data.mul_(2)`, `weight.data += delta`": every_weight(lambda w: w.data.mul_(10)),
    "`weight.data[0].mul_(2)`": every_weight(lambda w: w.data[:4].mul_(10)),
    "`weight.data = other`": every_weight(replace_data),
    "`dist.all_reduce(weight)`, of a DTensor `weight.to_local()`": every_weight(
        lambda w: dist.all_reduce(local_tensor(w))
    ),
    "in-place operations on what `state_dict()` returned": state_tensors(
        lambda s: [v.mul_(10) for v in s]
    ),
    "foreach operations on what `state_dict()` returned": state_tensors(
        lambda s: torch._foreach_mul_(s, 10.0)
    ),
    "`.data` of what `state_dict()` returned": state_tensors(
        lambda s: [v.data.mul_(10) for v in s]
    ),
    "collectives into what `state_dict()` returned": state_tensors(
        lambda s: [dist.all_reduce(local_tensor(v)) for v in s]
    ),
    "`apply_` on the local tensor of what `state_dict()` returned": state_tensors(
        lambda s: [tenfold(local_tensor(v)) for v in s]
    ),
    "a numpy array that shares its memory": memory_of(lambda local: local.numpy()),
    "a tensor made from its dlpack": memory_of(lambda local: torch.from_dlpack(local)),
    "a tensor made from its `untyped_storage()`": memory_of(at_storage),
    "its address, `data_ptr()`": memory_of(at_address),
}

FLOAT8 = "FSDP2, float8 gathers"
COLLECTIVES = {write for write in WRITES if "all_reduce" in write or "collectives" in write}
MODES: dict[str, tuple[bool, Callable[[], AbstractContextManager[object]]]] = {
    "train": (True, nullcontext),
    "no_grad": (True, torch.no_grad),
    "eval": (False, torch.no_grad),
    "inference_mode": (False, torch.inference_mode),
}


def net_on(column: str, config: Float8LinearConfig, write: str) -> tuple[nn.Module, Tensor]:
    """A model of a column of the table, and its input on this rank."""
    x = torch.randn(6, 8, 64)
    if column == "one device, DDP":
        net = convert_to_float8_training(Net(layers=1), config=config)
        if WRITES[write] in (replace, swap):  # DDP keeps the parameters that it found
            return net, x
        return DistributedDataParallel(net, process_group=device_mesh(dp=2).get_group("dp")), x
    dp, tp = (1, 2) if column == "tensor parallelism" else (dist.get_world_size(), 1)
    # On three ranks, shards are unequal, and FSDP2 pads some of them when it first runs.
    arguments = {"layers": 1, "hidden": 100 if dp == 3 else 96}
    gather = column == FLOAT8
    world = Distributed(dp, tp, config=config, gather=gather, net_arguments=arguments)
    return world.net, world.mine(x)


def outcome(column: str, config: Float8LinearConfig, write: str, when: str, mode: str) -> str:
    """The cell of the table in one case, with the case if a cast is stale.

    A cast is stale if a forward without cached scales would use another one, on any rank.
    """
    net, x = net_on(column, config, write)
    trains, context = MODES[mode]
    if when != "after a forward":
        precompute_float8_dynamic_scale(net)
    with weights_used(net) as before:
        if when != "after precompute":
            net(x).sum().backward()
    with torch.no_grad():
        WRITES[write](net)
    net.train(trains)
    if WRITES[write] is swap and column == FLOAT8:
        with pytest.raises(ValueError, match=r"0\.\w+: the local tensor of weight was replaced"):
            net(x)
        return "an error"
    with weights_used(net) as used, context():
        net(x)
    invalidate_float8_scales(net)
    with weights_used(net) as fresh, context():
        net(x)
    assert used.keys() == fresh.keys() == float8_layers(net).keys()
    stale = not all(same_cast(used[name], fresh[name]) for name in used)
    kept = bool(before) and all(same_cast(used[name], before[name]) for name in used)
    on_any_rank = torch.tensor([stale, not kept]).int()
    dist.all_reduce(on_any_rank)
    if on_any_rank[0]:
        return f"no: {when}, {mode}"
    return "yes" if on_any_rank[1] else "no effect"


CASES = [("after precompute", mode) for mode in MODES]
CASES += [("after precompute and a forward", mode) for mode in ("train", "no_grad")]
CASES += [("after a forward", mode) for mode in ("train", "no_grad")]


def cells(column: str, config: Float8LinearConfig, first: int) -> dict[str, list[str]]:
    """The table's cells for each change, case by case.

    A change runs in every fourth case only, from the `first` on; one that is not noticed runs in
    all cases, until a cast is stale.
    """
    found: dict[str, list[str]] = {}
    for number, (write, on_page) in enumerate(column_of_page(column).items()):
        # (Unequal shards can't be reduced.)
        if write in COLLECTIVES and dist.get_world_size() == 3:
            continue
        found[write] = []
        for case in CASES if on_page == "no" else CASES[(number + first) % 4 :: 4]:
            found[write].append(outcome(column, config, write, *case))
            if found[write][-1].startswith("no: "):
                break
    return found


def is_right(cell: str, found: list[str]) -> bool:
    """Whether the cases of a change are as the table says."""
    if cell == "no":
        return found[-1].startswith("no: ")
    unseen = {"yes"} if cell == "no effect" else set()  # before the first forward
    return cell in found and {*found} <= {cell} | unseen


COLUMNS = [
    ("one device, DDP", 2, "tensorwise"),
    ("tensor parallelism", 2, "tensorwise"),
    ("FSDP2, high-precision gathers", 2, "tensorwise"),
    (FLOAT8, 2, "tensorwise"),
    (FLOAT8, 3, "mxfp8"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(COLUMNS)))
def test_the_table(ranks: RankPools, number: int) -> None:
    column, world_size, recipe = COLUMNS[number]
    config, on_page = Float8LinearConfig.from_recipe_name(recipe), column_of_page(column)
    found = ranks(world_size).run(cells, column, config, number)[0]
    assert list(WRITES) == list(on_page)
    assert {w: each for w, each in found.items() if not is_right(on_page[w], each)} == {}


@on_ranks(2, returns=[])
def test_tensors_that_are_older_than_the_first_gather() -> list[str]:
    """Optimizers may hold them from their construction on."""
    world, found = Distributed(2, 1), []
    weights = [layer.weight for layer in float8_layers(world.net).values()]
    aliases = {
        ".data": [weight.data for weight in weights],
        "detach": [weight.detach() for weight in weights],
        "to_local": [weight.to_local().detach() for weight in weights],
    }
    x = world.mine(torch.randn(4, 8, 64))
    for name, held in aliases.items():
        world.net(x)
        precompute_float8_dynamic_scale(world.net)
        torch._foreach_mul_(held, 3.0)
        found += [f"{name}: {wrong}" for wrong in world.wrong_casts(partial(world.net, x))]
    return found


@on_ranks(2, returns=True)
def test_a_collective_of_lists_of_lists() -> bool:
    rank = dist.get_rank()
    received, *sent = (KnownWeight(torch.full((4,), float(n))) for n in (-1, 0, 1))
    for weight in (received, *sent):
        weight.valid.fill_(TRAINED)
    dist.scatter(received, sent if rank == 0 else None)  # type: ignore[arg-type]
    # (Schemas of collectives do not say which arguments are written to.)
    expected = [OUTDATED] * 3 if rank == 0 else [OUTDATED, TRAINED, TRAINED]
    states = [int(weight.valid) for weight in (received, *sent)]
    return states == expected and received.plain.tolist() == [float(rank)] * 4
