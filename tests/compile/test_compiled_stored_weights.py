"""Graphs of layers with weights stored in float8."""

from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_experts import STORED, batch
from frozen_experts import made as experts_of
from graphs import Compilations, Graphs
from hf_experts import made
from rank_tests import on_ranks
from ranks import device_mesh
from reference import same_bits
from safetensors.torch import save_file
from stored_weights import converted, frozen, released, run, same
from torch.distributed.fsdp import fully_shard

from fp8_dist import float8_state_dict, freeze_to_float8, load_float8_checkpoint
from fp8_dist.moe import grouped_linear


@pytest.mark.parametrize("name", ["rowwise_folded", "blockwise", "vllm", "mxfp4"])
def test_graphs_have_the_bits_of_eager_code_and_cast_no_weights(name: str) -> None:
    graphs, compilations = Graphs(), Compilations()
    net = torch.compile(frozen(name), fullgraph=True, backend=graphs.backend)
    found = run(net)
    assert compilations.graphs == 1
    assert same(found, run(converted(name)))
    # In two passes, only the inputs and output gradients of both layers are cast.
    assert graphs.ops["forward"]["quantize"] == 4
    assert graphs.ops["backward"]["quantize"] <= 4  # the casts of folded gradients are not counted
    assert all(ops["scale_query"] == 0 for ops in graphs.ops.values())


@pytest.mark.parametrize("name", ["1 x 32 of rowwise", "1 x 32 in bf16"])
def test_graphs_dequantize_weights(name: str) -> None:
    compilations = Compilations()
    net = torch.compile(released(name), fullgraph=True, backend="aot_eager")
    assert same(run(net), run(released(name)))
    assert compilations.graphs == 1


@on_ranks(2)
def test_graphs_with_fsdp2() -> None:
    """Graphs have the bits of a model that casts its weights, and look up no weight scales."""
    runs, queries = [], []
    for make in (converted, frozen):
        net, graphs, compilations = make("tensorwise"), Graphs(), Compilations()
        for part in (net[0], net[2], net):
            fully_shard(part, mesh=device_mesh(dp=2))
        net[0] = torch.compile(net[0], fullgraph=True, backend=graphs.backend)
        runs.append(run(net))
        assert compilations.breaks == 0
        assert graphs.ran == {"forward": 2, "backward": 2}
        queries.append(sum(ops["scale_query"] for ops in graphs.ops.values()))
    assert same(*runs)
    assert queries == [0, 0]


def test_names_of_a_compiled_model_of_transformers(tmp_path: Path) -> None:
    """Experts are exported one by one, as without torch.compile."""
    model = made("qwen3_moe", "mxfp8").requires_grad_(False)
    freeze_to_float8(model)
    expected = float8_state_dict(model)
    assert "model.layers.0.mlp.experts.3.up_proj.weight_scale_inv" in expected
    found = float8_state_dict(torch.compile(model))
    assert found.keys() == expected.keys()
    save_file(found, tmp_path / "model.safetensors")
    assert load_float8_checkpoint(torch.compile(model), tmp_path) == ([], [])


def in_one_graph(experts: Any, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    config = experts.float8_experts_config
    hidden = grouped_linear(x, experts.up, offs, config)
    return grouped_linear(hidden, experts.down, offs, config)


@pytest.mark.parametrize("name", ["rowwise_folded", "mxfp4", "1 x 32 of tensorwise"])
def test_graphs_of_experts(name: str) -> None:
    net, offs = experts_of(STORED[name]), torch.tensor([3, 3, 9, 14, 20, 20])
    compiled = torch.compile(in_one_graph, backend="aot_eager", fullgraph=True)
    found = []
    for forward in (in_one_graph, compiled):
        x = batch(0).requires_grad_()
        output = forward(net[0], x, offs)
        output.float().square().mean().backward()
        found.append((output, x.grad))
    assert all(map(same_bits, *found))
