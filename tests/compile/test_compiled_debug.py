"""capture, float8_stats and comm_audit of compiled models."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Compilations
from nets import Net
from reference import same_bits
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist.debug import (
    CapturedCast,
    capture,
    comm_audit,
    float8_stats,
    load_capture,
)

RECIPES = ["tensorwise", "rowwise_folded"]


def batch() -> torch.Tensor:
    return torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))


def compiled(net: nn.Module, backend: str) -> Any:
    torch._dynamo.reset()
    counters.clear()
    for layer in net.layers:  # type: ignore[union-attr]
        layer.compile(backend=backend, fullgraph=True)
    return net


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("rowwise_folded", "aot_eager"),
        pytest.param("delayed", "aot_eager", marks=pytest.mark.full),
        pytest.param("tensorwise", "inductor", marks=pytest.mark.full),
    ],
)
def test_compiled_code_is_captured(tmp_path: Path, recipe: str, backend: str) -> None:
    config = Float8LinearConfig.from_recipe_name(recipe)

    def saved(net: nn.Module, folder: Path) -> dict[Any, CapturedCast]:
        recorded = capture(net, folder, steps=[1])
        for _ in range(3):
            with recorded:
                net(batch()).square().mean().backward()
        files = map(load_capture, recorded.files)
        return {(c.fqn, c.operand, c.gemms, c.call): c for c in files}

    net = compiled(convert_to_float8_training(Net(), config=config), backend)
    mine = saved(net, tmp_path / "compiled")
    its = saved(convert_to_float8_training(Net(), config=config), tmp_path / "eager")
    assert mine.keys() == its.keys()
    for key, cast in mine.items():
        other, (fqn, operand, *_) = its[key], key
        assert abs(cast.stats().sqnr - other.stats().sqnr) < 0.5
        # What no compiled operator of another kind has made is the same, bit for bit.
        if operand == "weight" or (operand == "input" and fqn in ("layers.0.w1", "layers.0.w3")):
            for name in ("high", "qdata", "scale"):
                assert same_bits(getattr(cast, name), getattr(other, name)), (fqn, operand, name)


def model_of(recipe: str) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


class Observing:
    """A backend that keeps the operators of the graphs that it runs, forward and backward."""

    def __init__(self) -> None:
        self.made: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
            self.made.append([str(node.target) for node in graph.graph.nodes])
            return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

        return torch._dynamo.backends.common.aot_autograd(fw_compiler=keep)(graph, inputs)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded", "mxfp8", "delayed"])
def test_operators_are_in_the_graph_only_while_it_is_recorded(recipe: str) -> None:
    torch._dynamo.reset()
    model, graphs = model_of(recipe), Observing()
    for layer in model:  # one graph serves both
        layer.compile(backend=graphs, fullgraph=True)
    x = torch.randn(16, 64, requires_grad=True)
    stats = float8_stats(model, every=2)

    def observed(steps: int) -> list[bool]:
        """For each new graph whether it has operators that observe."""
        graphs.made.clear()
        for _ in range(steps):
            with stats:
                model(x).sum().backward()
        return [any("observe" in op for op in ops) for ops in graphs.made]

    counters.clear()
    model(x).sum().backward()
    assert [any("observe" in op for op in ops) for ops in graphs.made] == [False, False]
    assert observed(1) == [True, True]
    assert observed(4) == []
    assert counters["stats"]["unique_graphs"] == 2
    assert len({row.step for row in stats.rows}) == 3
    layers = {row.fqn for row in stats.rows}
    assert layers == {"0", "1"}


@pytest.mark.parametrize(
    ("backend", "checkpointed", "recipes"),
    [
        ("aot_eager", False, ["rowwise_with_gw_hp", "mxfp8", "delayed"]),
        ("aot_eager", True, RECIPES),
        pytest.param("inductor", True, RECIPES, marks=pytest.mark.full),
    ],
)
def test_the_numbers_of_eager_code(backend: str, checkpointed: bool, recipes: list[str]) -> None:
    torch._dynamo.reset()
    for recipe in recipes:
        model = model_of(recipe)
        run = partial(checkpoint, model, use_reentrant=False) if checkpointed else model
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        x = torch.randn(16, 64, requires_grad=True)
        eager, other = float8_stats(model), float8_stats(model)
        with eager:
            model(x).sum().backward()
        with other:
            compiled(x).sum().backward()
        assert eager.rows == other.rows


@torch.compile(backend="aot_eager", fullgraph=True, dynamic=False)
def update(param: torch.Tensor, grad: torch.Tensor, average: torch.Tensor) -> None:
    """Stands for the step of one parameter in torchao's 8-bit optimizers."""
    average.copy_(average.lerp(grad, 0.1))
    param.sub_(0.1 * average)


def test_compiled_code_runs_under_an_audit() -> None:
    param, grad, average = torch.zeros(3), torch.ones(3), torch.zeros(3)
    with comm_audit() as audit:
        update(param, grad, average)
    assert torch.allclose(param, torch.full((3,), -0.01))
    assert audit.rows == []


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_audits_compile_nothing_anew(backend: str) -> None:
    for warm in (False, True):
        compilations = Compilations()
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        if warm:
            compiled(torch.ones(2, 4)).sum().backward()
        for _ in range(10):  # more than torch compiles one function
            with comm_audit():
                compiled(torch.ones(2, 4)).sum().backward()
            compiled(torch.ones(2, 4)).sum().backward()
        assert compilations.graphs == 1
