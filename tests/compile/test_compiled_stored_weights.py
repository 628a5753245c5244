"""Graphs of layers whose weights are stored in float8."""

import pytest
import torch
from graphs import Compilations, Graphs
from stored_weights import CONFIGS, converted, frozen, run, same


@pytest.mark.parametrize("name", CONFIGS)
def test_graphs_have_the_bits_of_eager_code_and_cast_no_weights(name: str) -> None:
    graphs, compilations = Graphs(), Compilations()
    net = torch.compile(frozen(name), fullgraph=True, backend=graphs.backend)
    found = run(net)
    assert compilations.graphs == 1
    assert same(found, run(converted(name)))
    # The input and the output's gradient of both layers are cast, and nothing else, in two passes.
    assert graphs.ops["forward"]["quantize"] == 4
    assert graphs.ops["backward"]["quantize"] <= 4  # the casts of folded gradients are not counted
    assert all(ops["scale_query"] == 0 for ops in graphs.ops.values())
