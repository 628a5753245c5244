"""record, float8_stats and comm_audit with compiled models."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Compilations
from recordings import casts, written
from torch import nn

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist.debug import comm_audit, float8_stats, record


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_recorded_steps_run_eagerly_and_graphs_know_nothing_of_it(
    tmp_path: Path, recipe: str
) -> None:
    """Graphs have no operators and no guards for observers, and are not recompiled."""
    guards: list[str] = []

    def record_guards(entries: Any) -> list[bool]:
        guards.extend(entry.name for entry in entries)
        return [True] * len(entries)

    def made() -> nn.Sequential:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
        config = Float8LinearConfig.from_recipe_name(recipe)
        return convert_to_float8_training(model, config=config)

    compilations, x = Compilations(), torch.randn(16, 64, requires_grad=True)
    model, eager = made(), made()
    options = {"guard_filter_fn": record_guards}
    forward = torch.compile(model, backend="aot_eager", fullgraph=True, options=options)
    found, expected = float8_stats(model, every=2), float8_stats(eager)
    recorder = record(model, tmp_path, layers="1", steps=3)
    for i in range(4):
        with found, ExitStack() as blocks:
            if i % 2 == 0:
                blocks.enter_context(recorder.at(i))
            forward(x).sum().backward()
        with expected:
            eager(x).sum().backward()
    assert found.rows == [row for row in expected.rows if row.step % 2 == 0]
    parts = [part for cast in casts(written(recorder)) for part in cast.parts]
    inputs = [part for part in parts if (part["fqn"], part["operand"]) == ("1", "input")]
    assert [part["step"] for part in inputs] == [0, 2]
    assert compilations.graphs == 1
    assert guards
    assert not [name for name in guards if "._observers" in name]


def test_audits_compile_nothing_anew() -> None:
    for warm in (False, True):
        compilations = Compilations()
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        if warm:
            compiled(torch.ones(2, 4)).sum().backward()
        for _ in range(10):  # more often than torch would recompile a function
            with comm_audit():
                compiled(torch.ones(2, 4)).sum().backward()
            compiled(torch.ones(2, 4)).sum().backward()
        assert compilations.graphs == 1
