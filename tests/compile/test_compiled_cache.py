"""torch's caches of compiled graphs: what a second process finds, and what it must not find."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from nets import Block, GatedMLP, Net, full
from rank_tests import on_ranks
from ranks import device_mesh
from reference import same_bits
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_inductor_cache
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    convert_to_float8_training,
    update_float8_scales,
)
from fp8_dist.operand import in_graph
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from fp8_dist.transport import Encoding

RECIPES = ("tensorwise", "rowwise_folded", "mxfp8", "delayed")


def trained(recipe: str, unused: int = 0) -> dict[str, Any]:
    """Two steps of a compiled network: losses, gradients, and what torch's caches counted.

    ``unused``: other float8 layers that are made before, so that handles differ.
    """
    torch._dynamo.reset()
    counters.clear()
    config = Float8LinearConfig.from_recipe_name(recipe)
    for _ in range(unused):
        convert_to_float8_training(Net(layers=1), config=config)
    torch.manual_seed(0)
    net = convert_to_float8_training(Net(layers=2), config=config)
    compiled = torch.compile(net, fullgraph=True)
    values = []
    for _ in range(2):
        loss = compiled(torch.randn(2, 8, 64)).square().mean()
        loss.backward()
        values += [loss.item(), *(p.grad.double().sum().item() for p in net.parameters())]
        update_float8_scales(net)
    kinds = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")
    return {"values": values, "counted": [counters["aot_autograd"][kind] for kind in kinds]}


def in_new_process(cache: Path, seed: int, recipes: tuple[str, ...], unused: int) -> dict[str, Any]:
    """:func:`trained` for several recipes in a process of its own."""
    code = (
        "import json, sys; from test_compiled_cache import trained; "
        "print(json.dumps({name: trained(name, int(sys.argv[1])) for name in sys.argv[2:]}))"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": str(seed),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
    }
    command = [sys.executable, "-c", code, str(unused), *recipes]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first = in_new_process(tmp_path, seed=1, recipes=RECIPES, unused=0)
    second = in_new_process(tmp_path, seed=2, recipes=RECIPES[::-1], unused=3)
    for recipe in RECIPES:
        hits, misses, bypassed = first[recipe]["counted"]
        assert (hits, bypassed) == (0, 0), recipe
        assert misses > 0, recipe
        assert second[recipe]["counted"] == [misses, 0, 0], recipe
        assert second[recipe]["values"] == first[recipe]["values"], recipe


def run(layer: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The output of a layer that is compiled anew, and the hits of AOTAutograd's cache."""
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        output = torch.compile(layer, fullgraph=True)(x)
    return output, counters["aot_autograd"]["autograd_cache_hit"]


def test_layers_of_other_configs_run_other_graphs() -> None:
    weight, x = torch.randn(32, 32), torch.randn(16, 32)
    with fresh_inductor_cache():
        for recipe in RECIPES:
            config = Float8LinearConfig.from_recipe_name(recipe)
            layer = Float8Linear(32, 32, bias=False, config=config)
            with torch.no_grad():
                layer.weight.copy_(weight)
                expected = layer(x)
            output, hits = run(layer, x)
            assert torch.equal(output, expected), recipe
            assert hits == 0, recipe
        # A layer follows its config and its placements, in code that was compiled before, too.
        layer.config = Float8LinearConfig.from_recipe_name("tensorwise")
        with torch.no_grad():
            assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


def test_graphs_of_other_code_or_groups_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Float8Linear(32, 32, bias=False), torch.randn(16, 32)
    groups, code = {"0": [0, 1]}, ["a"]
    monkeypatch.setattr(in_graph.internals, "process_groups", lambda: groups)
    monkeypatch.setattr(in_graph, "code_fingerprint", lambda: code[0])
    with fresh_inductor_cache():
        assert [run(layer, x)[1] for _ in range(2)] == [0, 1]
        groups["0"] = [0, 2]
        assert [run(layer, x)[1] for _ in range(2)] == [0, 1]
        code[0] = "b"
        assert [run(layer, x)[1] for _ in range(2)] == [0, 1]


def tensor_parallel_step(
    recipe: str, transport: Encoding, compiles: bool
) -> tuple[dict[str, torch.Tensor], int]:
    """The output and the gradients of layers that share an input, and the hits of the cache."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    mlp = GatedMLP(64, 96)
    convert_to_float8_training(mlp, config=Float8LinearConfig.from_recipe_name(recipe))
    at: dict[str, Any] = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    plan: dict[str, Any] = {
        "": PrepareFloat8ModuleInput(**at, reduce_transport=transport),
        "w1": Float8ColwiseParallel(),
        "w3": Float8ColwiseParallel(),
        "w2": Float8RowwiseParallel(output_layouts=Shard(1), reduce_transport=transport),
    }
    parallelize_module(mlp, device_mesh(tp=2), plan)
    block = Block(mlp)
    if compiles:
        block.compile(fullgraph=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(2, 4, 64, generator=generator).requires_grad_()
    output = block(x)
    output.square().mean().backward()
    assert x.grad is not None
    found = {"output": output, "input": x.grad}
    for name, parameter in mlp.named_parameters():
        if parameter.ndim > 1:  # Inductor sums the gradients of biases in another order
            found[name] = full(parameter.grad)
    return found, counters["aot_autograd"]["autograd_cache_hit"]


@pytest.mark.parametrize("transport", [None, "float8"])
@on_ranks(2)
def test_tensor_parallel_layers_share_graphs(transport: Encoding) -> None:
    """The cast, the gather and the reduction of a shared input are in cached graphs, too."""
    with fresh_inductor_cache():
        for recipe in ("tensorwise", "delayed"):
            expected, _ = tensor_parallel_step(recipe, transport, compiles=False)
            for turn in range(2):
                found, hits = tensor_parallel_step(recipe, transport, compiles=True)
                assert hits == turn, recipe
                wrong = [n for n in expected if not same_bits(expected[n], found[n])]
                assert wrong == [], f"{recipe} {wrong}"
