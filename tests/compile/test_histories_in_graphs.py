"""Histories in graphs: what they record, and what the provided policy of checkpointing saves."""

from functools import partial

import torch
from delayed_steps import amaxes, layer
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fp8_dist import Float8Linear, Float8LinearConfig, selective_checkpoint_policy
from fp8_dist import sync_float8_amax_and_scale_history as sync


def test_graphs_with_a_history_save_no_float8_copies() -> None:
    results: list[list[torch.dtype]] = []

    def forward(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        (output,) = graph.graph.find_nodes(op="output")
        results.append([n.meta["val"].dtype for n in output.args[0] if hasattr(n, "meta")])
        return graph

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(
        fw_compiler=forward, bw_compiler=lambda graph, _: graph, partition_fn=partition
    )
    config = Float8LinearConfig.from_recipe_name("delayed")
    layers = [Float8Linear(32, 32, bias=False, config=config) for _ in range(2)]
    contexts = partial(create_selective_checkpoint_contexts, selective_checkpoint_policy)

    def block(x: torch.Tensor) -> torch.Tensor:
        return layers[1](torch.tanh(layers[0](x)))

    def run(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return found

    torch.compile(run, backend=backend)(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert results
    assert torch.float8_e4m3fn not in results[0]


def test_a_frozen_weight_drops_its_scale_and_uses_what_was_restored() -> None:
    linear, x = layer(), torch.randn(6, 32, requires_grad=True)
    for frozen in (False, True):
        linear.weight.requires_grad_(not frozen)
        for history in linear.histories.values():
            history.restored = True
        torch.compile(linear, backend="aot_eager")(x).sum().backward()
        if not frozen:
            sync(linear)
    weight = linear.histories["weight"]
    assert (weight.statistic, weight.restored) == (None, False)


def test_a_graph_records_the_weight_of_its_pass() -> None:
    linear, x = layer(), torch.randn(6, 32, requires_grad=True)
    run = torch.compile(linear, backend="aot_eager")
    run(x).sum().backward()
    sync(linear)
    linear.zero_grad()
    with torch.no_grad():
        linear(x)  # eager
        linear.weight.mul_(8)
    run(x).sum().backward()
    sync(linear)
    assert amaxes(linear)[".weight"][0] == linear.weight.abs().max()
