"""precompute_float8_dynamic_scale in compiled code, and between steps of compiled models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Compilations, Graphs
from nets import Distributed, Net, blocks
from rank_tests import on_ranks
from reference import known, raised, same_bits, validity
from torch import nn

from fp8_dist import (
    CastConfig,
    Float8Linear,
    attach_update,
    cast_to_float8,
    convert_to_float8_training,
    invalidate_float8_scales,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import comm_audit
from fp8_dist.linear import float8_layers
from fp8_dist.mesh import local_tensor
from fp8_dist.scaling.reduction import packed
from fp8_dist.weight.known import PRECOMPUTED, STALE, Kept, KnownWeight


def scales(net: nn.Module) -> list[torch.Tensor]:
    """The cached statistics of all weights."""
    found = [known(layer.weight) for layer in float8_layers(net).values()]
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def test_what_a_graph_wrote_is_what_it_sees() -> None:
    # Within one graph it would see old values (Inductor writes at the end, which nothing notices).
    def update(net: Net) -> None:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(3)
        precompute_float8_dynamic_scale(net)

    net = convert_to_float8_training(Net(layers=1))
    torch.compile(update, backend="inductor")(net)
    for layer in float8_layers(net).values():
        cast = layer.float8_weight.operands(layer.weight, True).output
        assert same_bits(cast.scales[0], cast_to_float8(layer.weight, CastConfig()).scale)


def test_a_full_graph_is_refused() -> None:
    torch._dynamo.reset()  # drop code of this function for the same backend
    net = convert_to_float8_training(Net(layers=1))
    compiled = torch.compile(precompute_float8_dynamic_scale, backend="eager", fullgraph=True)
    assert (
        "precompute_float8_dynamic_scale looks at weights, which graphs write to when they end; "
        "call it outside of code that is compiled with fullgraph=True"
    ) in raised(torch._dynamo.exc.Unsupported, lambda: compiled(net))


def plainly(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        precompute_float8_dynamic_scale(model)

    return step


def together(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[[], None]:
    return torch.compile(plainly(optimizer, model), backend="aot_eager")


def attached(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[[], None]:
    attach_update(optimizer, model)
    return torch.compile(optimizer.step, backend="aot_eager")


@on_ranks(2, returns=[], timeout=180)
def test_between_compiled_steps() -> list[str]:
    """Problems in steps of compiled blocks, compared with an eager twin."""
    worlds = [Distributed(1, 2, net_arguments={"layers": 1}) for _ in range(2)]
    models = [blocks(world) for world in worlds]
    compilations, graphs = Compilations(), Graphs()
    for block in models[0]:
        block.compile(backend=graphs.backend, fullgraph=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    wrong, made = [], []
    for way in (together, attached):
        ends = [way(optimizers[0], models[0]), plainly(optimizers[1], models[1])]
        for _ in range(3):
            x = torch.randn(4, 8, 64)
            for world, model, end in zip(worlds, models, ends, strict=True):
                model(world.mine(x)).square().mean().backward()
                with comm_audit(world.mesh) as audit:
                    end()
                model.zero_grad()
                if {audit.count(), audit.count("all_reduce", dtype=torch.int32)} != {1}:
                    wrong.append(f"{way.__name__}:\n{audit.table()}")
            if not same(scales(models[0]), scales(models[1])):
                wrong.append(f"{way.__name__}: scales")
            made.append((compilations.graphs, dict(graphs.made)))
        if made[-1] != made[-2] or graphs.made != {"forward": 1, "backward": 1}:
            wrong.append(f"{way.__name__}: recompiled, {made}")
    return wrong


# Events between steps, each of which is followed by a forward.
EVENTS = "step", "precomputed step", "eval", "no_grad", "inference_mode", "load", "precomputed step"


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, returns=[], timeout=180)
def test_nothing_between_steps_recompiles_twice() -> list[str]:
    """Graphs that were made after all events had happened once, and differences from eager code."""
    compilations = Compilations()
    wrong: list[str] = []
    losses: list[list[torch.Tensor]] = []
    for compiled in (False, True):
        world = Distributed(2, 1, shard=False, net_arguments={"layers": 1})
        model = blocks(world)
        if compiled:
            for block in model:
                block.compile(backend="aot_eager", fullgraph=True)
        world.fully_shard(model, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(0)
        found: list[torch.Tensor] = []
        for turn in range(2):
            known = compilations.graphs
            for event in EVENTS:
                x = world.mine(torch.randn(4, 8, 64, generator=generator))
                if event == "precomputed step":
                    precompute_float8_dynamic_scale(model)
                if event == "load":
                    model.load_state_dict({n: t * 0.9 for n, t in model.state_dict().items()})
                elif event in ("no_grad", "inference_mode"):
                    with getattr(torch, event)():
                        found.append(model(x).clone())
                else:
                    model.train(event != "eval")
                    loss = model(x).square().mean()
                    loss.backward()
                    found.append(loss.detach())
                    optimizer.step()
                    optimizer.zero_grad()
            if turn and compilations.graphs != known:
                wrong.append(f"turn {turn}: {known} graphs became {compilations.graphs}")
        losses.append(found)
    if not same(*losses):
        wrong.append("other losses than in eager code")
    return wrong


@on_ranks(2, returns=[], timeout=180)
def test_a_graph_marks_the_weights_that_it_writes_to() -> list[str]:
    """Writes by graphs after which a weight's statistics are not marked as stale."""
    wrong = []
    for name in ("step", "mul_", "foreach", "to_local"):
        torch._dynamo.reset()
        world = Distributed(1, 2, net_arguments={"layers": 1})
        weights = [layer.weight for layer in float8_layers(world.net).values()]
        world.net(world.mine(torch.randn(4, 8, 64))).square().mean().backward()
        optimizer = torch.optim.AdamW(world.net.parameters(), lr=0.1)
        optimizer.step()  # initializes its state
        precompute_float8_dynamic_scale(world.net)
        assert all(known(weight) is not None for weight in weights)

        def write(name: str = name, optimizer: Any = optimizer, weights: Any = weights) -> None:
            with torch.no_grad():
                if name == "step":
                    optimizer.step()
                elif name == "foreach":
                    torch._foreach_mul_(weights, 2.0)
                else:
                    for weight in weights:
                        (weight.to_local() if name == "to_local" else weight).mul_(2.0)

        before = [local_tensor(weight.detach()).clone() for weight in weights]
        torch.compile(write, backend="aot_eager")()
        same = [
            torch.equal(a, local_tensor(b.detach())) for a, b in zip(before, weights, strict=True)
        ]
        if any(same) or {validity(weight) for weight in weights} != {STALE}:
            wrong.append(f"{name}: {same} {[validity(weight) for weight in weights]}")
    return wrong


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_graph_marks_a_weight_that_is_no_dtensor(backend: str) -> None:
    layer = Float8Linear(4, 4)
    weight: Any = nn.Parameter(KnownWeight(torch.randn(4, 4)))
    kept: Any = Kept(layer.float8_weight.schemes, None)  # type: ignore[arg-type]
    weight.store(kept, packed([(torch.ones(()),)]), weight, PRECOMPUTED)

    def write() -> None:
        with torch.no_grad():
            weight.mul_(2)

    torch.compile(write, backend=backend)()
    assert validity(weight) == STALE


@on_ranks(2, returns=[True, False])
def test_what_only_eager_code_notices() -> list[bool]:
    """Whether eager and compiled code notice the writes that graphs miss by docs/state.md."""
    found = []
    for compiled in (False, True):
        world = Distributed(1, 2, net_arguments={"layers": 1})
        block = (
            torch.compile(world.net.layers[0], backend="aot_eager")
            if compiled
            else world.net.layers[0]
        )
        x = world.mine(torch.randn(4, 8, 64))
        precompute_float8_dynamic_scale(world.net)
        for name, tensor in world.net.state_dict().items():
            if name.endswith("weight"):
                tensor.mul_(10)
        with torch.no_grad():
            output = block(x)
            invalidate_float8_scales(world.net)
            found.append(torch.equal(local_tensor(output), local_tensor(block(x))))
    return found
