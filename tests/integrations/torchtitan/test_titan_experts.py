"""torchtitan's experts in float8, on one device and with expert parallelism."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from nets import full
from rank_tests import on_ranks
from reference import raised, same_bits, sqnr
from test_torchtitan import train
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.qwen3 import model_registry

from fp8_dist.integrations.torchtitan import Float8ExpertsConverter
from fp8_dist.moe import float8_experts

TOKENS, TOP_K, EXPERTS, DIM = 24, 2, 4, 256


def routed_experts(recipe: str | None) -> Any:
    """A module of small experts, always with the same weights; converted if there is a recipe."""
    spec = model_registry("debugmodel_moe")
    moe = spec.model.layers[0].moe
    moe.num_experts = moe.routed_experts.inner_experts.num_experts = EXPERTS
    moe.routed_experts.token_dispatcher.num_experts = EXPERTS
    moe.routed_experts.token_dispatcher.top_k = TOP_K
    moe.routed_experts.inner_experts.hidden_dim = 96
    if recipe is not None:
        Float8ExpertsConverter.Config(recipe_name=recipe).build().convert(spec.model)
    layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    set_moe_sharding_config(moe, enable_ep=True, enable_sp=False, expert_param_layout=layout)
    module = moe.routed_experts.build()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        size = torch.logspace(0, -2, parameter.shape[1])[:, None]
        parameter.data.copy_(size * torch.randn(parameter.shape, generator=generator) / 8)
    return module


def step(module: Any, rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Run a step with a rank's part of the tokens; return the output and the gradients."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, TOKENS, DIM, generator=generator)
    scores = torch.rand(1, TOKENS, TOP_K, generator=generator)
    ids = torch.rand(1, TOKENS, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K]
    x, scores, ids = (each.chunk(ranks, 1)[rank].contiguous() for each in (x, scores, ids))
    x.requires_grad_()
    scores.requires_grad_()
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    output = module(x, scores, ids, counts)
    output.square().sum().backward()
    return {"output": output.detach(), "x": x.grad, "scores": scores.grad}


@pytest.mark.parametrize("recipe", ["rowwise_folded", "mxfp8"])
@on_ranks(2, returns=[])
def test_expert_parallelism_has_the_bits_of_one_device(recipe: str) -> list[str]:
    """Differences between expert parallelism on two ranks and one device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=2,
        cp=1,
        tp=1,
        pp=1,
        ep=2,
        world_size=size,
        spmd_backend="partial_dtensor",
    )
    with mock.patch.object(parallel_dims, "device_type", "cpu"):
        dims.build_mesh()
    module, twin = routed_experts(recipe), routed_experts(recipe)
    module.parallelize(dims)
    found, expected = step(module, rank, size), step(twin)
    wrong = [n for n, e in found.items() if not same_bits(e, expected[n].chunk(size, 1)[rank])]
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        if not same_bits(full(parameter.grad), twin.get_parameter(name).grad):
            wrong.append(name)
    return wrong


def test_one_device_follows_torchtitan() -> None:
    module, plain = routed_experts("tensorwise"), routed_experts(None)
    assert list(float8_experts(module)) == ["inner_experts"]
    assert module.state_dict().keys() == plain.state_dict().keys()
    found, expected = step(module), step(plain)
    assert min(sqnr(expected[name], found[name]) for name in found) > 20


def test_training(tmp_path: Path) -> None:
    extra = "--parallelism.expert_parallel_degree", "2"
    losses, table = train(tmp_path, "qwen3_moe_debug_float8", 2, 1, "partial_dtensor", *extra)
    assert losses[-1] < losses[0] - 1
    counts, *rows = [row.split() for row in re.findall("all_to_all.*", table)]
    assert counts[2:] == ["int64", "2", "128", "1,024"]
    # In forward and in backward, two layers send 4 x 64 tokens to 8 experts each.
    assert rows[0][2:] == ["float8_e4m3fn", "4", "2,097,152", "2,097,152"]
    assert rows[1][2:] == ["float32", "+", "8,192", "32,768"]
    assert rows[2][2:4] == ["bfloat16", "4"]


def test_what_is_refused() -> None:
    def convert(backend: str = "standard", **fields: Any) -> None:
        spec = model_registry("debugmodel_moe", moe_comm_backend=backend)
        Float8ExpertsConverter.Config(**fields).build().convert(spec.model)

    tp = SimpleNamespace(tp_enabled=True, ep_enabled=False)
    inner = routed_experts("mxfp8").inner_experts
    assert "mxfp9" in raised(ValueError, lambda: convert(recipe_name="mxfp9"))
    messages = [
        raised(NotImplementedError, lambda: convert("deepep")),
        raised(ValueError, lambda: convert(filter_fqns=["routed"])),
        raised(NotImplementedError, lambda: inner.parallelize(tp)),
    ]
    assert_expected_inline(
        "\n".join(messages),
        """\
Float8ExpertsConverter: layers.0.moe.routed_experts has GroupedExperts.Config and DeepEPTokenDispatcher.Config, but only torchtitan's GroupedExperts with its "standard" moe_comm_backend can be converted; name it in filter_fqns
Float8ExpertsConverter: the model has no routed experts to convert, or all have one of ['routed'] in their names
layers.0.moe.routed_experts.inner_experts: torchtitan's tensor parallelism divides each expert between ranks, which is not supported; set parallelism.expert_parallel_degree, or name the experts in filter_fqns""",
    )
