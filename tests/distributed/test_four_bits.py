"""Weights in MXFP4: FSDP2 gathers two values in a byte, and the bits are those of float8 gathers."""

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from documented import run_shown
from expecttest import assert_expected_inline
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import all_warnings, same_bits
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
    update_float8_scales,
)
from fp8_dist.debug import comm_audit, float8_stats
from fp8_dist.kernels.e2m1 import E2M1_X2
from fp8_dist.mesh import local_tensor
from fp8_dist.moe import (
    Float8ExpertsConfig,
    convert_experts_to_float8_training,
    grouped_linear,
)
from fp8_dist.scaling import Mxfp4
from fp8_dist.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, apply_tp_plan
from fp8_dist.weight.known import KnownWeight
from scripts.common.llama import MODELS, Llama

SIZES = [(256, 384), (384, 256), (256, 256)]
PACKS = Mxfp4.packs
Axes = tuple[int, int, int]  # of replicas, shards and tensor-parallel ranks


def config(recipe: str = "mxfp8", **fields: Any) -> Float8LinearConfig:
    found = Float8LinearConfig.from_recipe_name(recipe, weight_format="mxfp4")
    return replace(found, enable_fsdp_float8_all_gather=True, **fields)


def net(axes: Axes, *, sizes: list[tuple[int, int]] = SIZES, **fsdp: Any) -> nn.Sequential:
    """Layers on a mesh, with alternating recipes."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(k, n, bias=False) for k, n in sizes])
    for i, layer in enumerate(model):
        model[i] = convert_to_float8_training(layer, config=config(("mxfp8", "blockwise")[i % 2]))
    mesh = device_mesh(replicate=axes[0], shard=axes[1], tp=axes[2])
    if axes[2] > 1:
        styles = Float8ColwiseParallel(), Float8RowwiseParallel()
        apply_tp_plan(model, mesh["tp"], {str(i): styles[i % 2] for i in range(len(model))})
    data = mesh["replicate", "shard"] if axes[0] > 1 else mesh["shard"]
    for part in (*model, model):
        fully_shard(part, mesh=data, **fsdp)
    return model


def parts(model: nn.Module) -> list[torch.Tensor]:
    """Copies of this rank's parts of the parameters."""
    return [KnownWeight.unwrap(local_tensor(p)).detach().clone() for p in model.parameters()]


def step(model: nn.Module, features: int, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    loss = model(torch.randn(64, features)).square().mean()
    loss.backward()
    return loss.detach()


def trained(model: nn.Module, features: int = 256) -> list[torch.Tensor]:
    """Losses and weights of three steps, each of two micro-batches; the second one is observed."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for i in range(3):
        for j in range(2):
            with ExitStack() as block:
                if j:
                    block.enter_context(float8_stats(model))
                found.append(step(model, features, 100 * i + 10 * j + dist.get_rank()))
        optimizer.step()
        optimizer.zero_grad()
        if i:
            update_float8_scales(model)
    return found + parts(model)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no reshard": {"reshard_after_forward": False},
    "odd columns": {"sizes": [(256, 256), (256, 65), (65, 256)]},
    "uneven rows": {"sizes": [(256, 250), (250, 131), (131, 256)]},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
}


@on_ranks(2, returns=[])
def test_training_has_the_bits_of_float8_gathers() -> list[str]:
    """The cases in which packed gathers train to other bits. (test_mesh_grid.py has other meshes.)"""
    differing = []
    for name, case in CASES.items():
        packed = trained(net((1, 2, 1), **case))
        with patch.object(Mxfp4, "packs", lambda *_: False):
            plain = trained(net((1, 2, 1), **case))
        if not all(map(same_bits, packed, plain)):
            differing.append(name)
    return differing


def gathered(axes: Axes, sizes: list[tuple[int, int]]) -> tuple[float, int, set[str], list[str]]:
    """The bytes of a step's gathers relative to bf16, the all-reduces of precompute before it, the
    dtypes that are gathered, and the warnings about gathers."""
    with all_warnings() as texts:
        model = net(axes, sizes=sizes)
        mesh = device_mesh(replicate=axes[0], shard=axes[1], tp=axes[2])
        with comm_audit(mesh) as before:
            precompute_float8_dynamic_scale(model)
        with comm_audit(mesh) as audit:
            step(model, sizes[0][0], 0)
    rows = [row for row in audit.rows if row.axis == "shard"]
    assert {row.op for row in rows} <= {"all_gather", "reduce_scatter"}  # no amax in the step
    rows = [row for row in rows if row.op == "all_gather"]
    share_of_bf16 = sum(row.bytes for row in rows) / sum(row.bf16_bytes for row in rows)
    warnings = [text for text in texts if "gathers their weights" in text]
    dtypes = {str(row.dtype) for row in rows}
    return share_of_bf16, before.count("all_reduce"), dtypes, warnings


@pytest.mark.parametrize("axes", [(2, 2, 1), (1, 2, 2)], ids=str)
def test_bytes(ranks: RankPools, axes: Axes) -> None:
    for found in ranks(torch.Size(axes).numel()).run(gathered, axes, SIZES):
        share_of_bf16, all_reduces, dtypes, warnings = found
        assert share_of_bf16 <= 0.2505
        assert all_reduces <= 1
        assert dtypes == {str(E2M1_X2), "torch.uint8"}
        assert not warnings


def test_a_gather_that_is_not_packed_warns_once(ranks: RankPools) -> None:
    sizes = [(256, 250), (250, 128), (128, 65), (65, 64)]
    found = ranks(3).run(gathered, (1, 3, 1), sizes)
    for share_of_bf16, all_reduces, dtypes, warnings in found:
        assert share_of_bf16 <= 0.5005
        assert (all_reduces, dtypes, len(warnings)) == (1, {"torch.float8_e4m3fn"}, 1)
    assert_expected_inline(
        found[0][-1][0],
        """Float8Linear and layers like it: FSDP2 gathers their weights (and keeps frozen ones) as float8, 1 byte per element, because only equal shards of dim 0 with an even number of columns can be packed, not (250, 256) as [Shard(dim=0)] on DeviceMesh((shard=3), 'cpu', stride=(1,))""",
    )


@on_ranks(2)
def test_compiled_layers() -> None:
    found = []
    for compiles in (False, True):
        model = net((1, 2, 1), sizes=SIZES[:2])
        for layer in model if compiles else ():
            layer.compile(backend="aot_eager", dynamic=False)
        found.append(trained(model))
    assert all(map(same_bits, *found))


@on_ranks(2)
def test_memory_of_a_gathered_weight() -> None:
    """Bytes of all-gather outputs and of unpacked data, after unshard and after reshard, twice."""
    (layer, *_), found = net((1, 2, 1)), []
    for _ in range(2):
        for act in (layer.unshard, layer.reshard):
            act()
            (param,) = layer._get_fsdp_state()._fsdp_param_group.fsdp_params
            held = *param.all_gather_outputs, *param._unsharded_inner_tensors
            found.append([tensor.untyped_storage().size() for tensor in held])
    size = SIZES[0][0] * SIZES[0][1]
    # The packed data is freed as soon as it is unpacked.
    assert found == [[0, size // 1024, size], [0, 0, 0]] * 2


class Experts(nn.Module):
    float8_weight_names = ("up", "down")

    def __init__(self, experts: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(experts, 96, 64) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, 64, 96) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts, config = len(self.up), self.float8_experts_config
        offs = torch.arange(1, experts + 1, dtype=torch.int32) * (len(x) // experts)
        return grouped_linear(
            grouped_linear(x, self.up, offs, config).relu(), self.down, offs, config
        )


@pytest.mark.parametrize(
    ("recipe", "experts", "dim", "packs"),
    [("mxfp8", 4, 0, True), ("blockwise", 3, 0, False), ("mxfp8", 4, 1, False)],
)
@on_ranks(2)
def test_experts(recipe: Any, experts: int, dim: int, packs: bool) -> None:
    """They train to the same bits packed and not."""
    found = []
    for packing in (PACKS, lambda *_: False):
        model = Experts(experts)
        config = Float8ExpertsConfig(recipe=recipe, weight_format="mxfp4")
        convert_experts_to_float8_training(model, config=config)
        fully_shard(model, mesh=device_mesh(dp=2), shard_placement_fn=lambda p: Shard(dim))
        with patch.object(Mxfp4, "packs", packing), comm_audit() as audit:
            found.append(trained(model, 64))
        dtypes = {row.dtype for row in audit.rows if row.op == "all_gather"}
        assert (E2M1_X2 in dtypes) == (packs and packing is PACKS)
    assert all(map(same_bits, *found))


@on_ranks(2)
def test_what_is_not_finite_poisons_all_ranks() -> None:
    for value in (float("nan"), float("inf")):
        model = net((1, 2, 1), sizes=[(64, 64), (64, 64)])
        with torch.no_grad():
            if dist.get_rank() == 1:
                local_tensor(model[0].weight)[3, 5] = value
        assert model(torch.randn(4, 64)).isnan().all()


@on_ranks(2)
def test_bytes_of_blocks_of_released_checkpoints() -> None:
    """Gathers of weights in blocks of 1 x 32 send half a byte and a byte per 32 values."""
    blocks: Any = {"weight_format": "mxfp4", "weight_block_size": (1, 32)}
    model = nn.Sequential(nn.Linear(256, 128, bias=False))
    found = Float8LinearConfig.from_recipe_name("mxfp8", **blocks)
    convert_to_float8_training(model, config=replace(found, enable_fsdp_float8_all_gather=True))
    fully_shard(model, mesh=device_mesh(dp=2))
    with comm_audit() as audit:
        step(model, 256, 0)
    gathers = [row.bytes for row in audit.rows if row.op == "all_gather"]
    assert sum(gathers) == audit.count("all_gather") * 256 * 128 * (1 / 2 + 1 / 32)
    assert audit.count("all_reduce") == 0


@on_ranks(2)
def test_the_page() -> None:
    """The loss falls, and rank 0 alone has the export."""
    page = (Path(__file__).parents[2] / "docs" / "four_bits.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
    assert len(code.strip().splitlines()) <= 21
    model = Llama(MODELS["debug"], 0)
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
    losses = []

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        return losses[-1]

    batches = [(tokens[:, :-1], tokens[:, 1:])] * 8
    scope: dict[str, Any] = {"model": model, "batches": batches, "loss_of": loss_of}
    run_shown(code, scope)
    is_first = dist.get_rank() == 0
    assert ("layers.0.attention.wq.weight_blocks" in scope["state"]) == is_first
    assert losses[0] - losses[-1] > 0.5
