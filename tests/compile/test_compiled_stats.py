"""float8_stats of compiled code: what is in the graphs, and when they are made."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from fp8_dist import Float8LinearConfig, Float8LinearRecipeName, convert_to_float8_training
from fp8_dist.debug import float8_stats

RECIPES = [recipe.value for recipe in Float8LinearRecipeName]


def net(recipe: str) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


class Graphs:
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
    model, graphs = net(recipe), Graphs()
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


SOME = ["tensorwise", "rowwise_folded"]


@pytest.mark.parametrize(
    ("backend", "checkpointed", "recipes"),
    [
        ("aot_eager", False, RECIPES),
        ("aot_eager", True, SOME),
        pytest.param("inductor", True, SOME, marks=pytest.mark.full),
    ],
)
def test_the_numbers_of_eager_code(backend: str, checkpointed: bool, recipes: list[str]) -> None:
    torch._dynamo.reset()
    for recipe in recipes:
        model = net(recipe)
        run = partial(checkpoint, model, use_reentrant=False) if checkpointed else model
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        x = torch.randn(16, 64, requires_grad=True)
        eager, other = float8_stats(model), float8_stats(model)
        with eager:
            model(x).sum().backward()
        with other:
            compiled(x).sum().backward()
        assert eager.rows == other.rows
