"""Ways to distribute a model beyond FSDP2 x TP: what works, what is refused, and how."""

import io
import logging
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from nets import Distributed, Net, full, full_state, sharded_net, wrong_casts
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, same_cast, sqnr, weights_used
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    ScalingGranularity,
    cast_to_float8,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import clip_grad_norm_
from fp8_dist.mesh.amax import union_of

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


@on_ranks(2)
def test_fsdp1() -> None:
    """Float8 compute, high-precision communication; against one device."""
    net, twin = convert_to_float8_training(Net()), convert_to_float8_training(Net())
    wrapped = FullyShardedDataParallel(net, use_orig_params=True, device_id="cpu")
    for _ in range(2):
        x = torch.randn(2, 4, 64)
        outputs = [model(x) for model in (twin, wrapped)]
        assert sqnr(*outputs) > 100
        for output, model in zip(outputs, (twin, wrapped), strict=True):
            output.sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    text = raised(ValueError, lambda: precompute_float8_dynamic_scale(wrapped))
    assert "flattened shards, as FSDP1 keeps them" in text
    assert "layers.0.w1" in text


@pytest.mark.parametrize(("tp", "precompute"), [(1, True), (2, False)])
@on_ranks(4, "tp")
def test_hybrid_sharding(tp: int, precompute: bool) -> None:
    """HSDP (x TP): layers with a wrong cast; all-reduces of precompute, and of weights after.

    (FSDP2 itself refuses a 2-D mesh without names.)
    """
    mesh = device_mesh(replicate=2, shard=2, tp=tp)
    net, masters = sharded_net(mesh, GATHERED), Net().state_dict()
    with comm_audit(mesh) as audit:
        if precompute:
            precompute_float8_dynamic_scale(net)
    reduces = audit.count()
    with comm_audit(mesh) as audit, weights_used(net) as used:
        net(torch.randn(2, 8, 64)).sum().backward()
    assert len(used) == 6
    wrong = wrong_casts(used, masters, mesh["tp"])
    # Per MLP: the input of w2, and the gradients of w1 and w3.
    activations = 6 if tp > 1 else 0
    later = audit.count("all_reduce", dtype=torch.int32) - activations
    assert (wrong, reduces, later) == (([], 1, 0) if precompute else ([], 0, 6))


@on_ranks(2)
def test_refusals_on_one_axis() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Embedding(16, 16))
    convert_to_float8_training(net, config=GATHERED)
    net[1].weight = net[0].weight
    text = raised(ValueError, lambda: fully_shard(net, mesh=device_mesh(dp=2)))
    assert text.startswith(
        "0: FSDP2 would gather this weight in float8 for all its users, but it is also the weight "
        "of an Embedding that is not converted; leave"
    )
    late = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))
    fully_shard(late, mesh=device_mesh(dp=2))
    text = raised(ValueError, lambda: convert_to_float8_training(late))
    assert "these weights are distributed already: * (2). Convert the model first" in text
    world = Distributed(2, 1, fsdp_arguments={"reshard_after_forward": False})
    world.net(world.mine(torch.randn(4, 8, 64)))
    text = raised(ValueError, lambda: precompute_float8_dynamic_scale(world.net.layers[0].w1))
    assert "these weights are unsharded float8 copies: layers.0.w1. Call it on the root" in text


@on_ranks(4)
def test_irregular_meshes() -> None:
    net = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    convert_to_float8_training(net)
    meshes = (DeviceMesh("cpu", [0, 3, 1, 2]), init_device_mesh("cpu", (4,)))
    for layer, mesh in zip(net, meshes, strict=True):
        weight = distribute_tensor(layer.weight.detach(), mesh, [Shard(0)])
        layer.weight = nn.Parameter(weight)
    text = raised(NotImplementedError, lambda: precompute_float8_dynamic_scale(net))
    assert "does not enumerate its ranks in ascending, even steps; slice all" in text


@on_ranks(4)
def test_resharding_to_a_smaller_mesh() -> None:
    """Float8 gathers refuse it until ``set_reshard_after_forward(True)`` is called."""
    x = torch.randn(2, 8, 64)
    for gathers in (True, False):
        net = convert_to_float8_training(Net(), config=GATHERED if gathers else None)
        for module in (*net.layers, net):
            fully_shard(module, mesh=device_mesh(dp=4), reshard_after_forward=2)
        if gathers:
            text = "layers.0.w1: fully_shard(..., reshard_after_forward=<int>) can't"
            for call in (precompute_float8_dynamic_scale, lambda net: net(x)):
                assert raised(ValueError, partial(call, net)).startswith(text)
            net.set_reshard_after_forward(True)
            precompute_float8_dynamic_scale(net)
        net(x).sum().backward()
        assert all(p.grad is not None for p in net.parameters())


def shared_by_two_configs(*configs: Float8LinearConfig) -> str:
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for i, config in enumerate(configs):
        config = replace(config, enable_fsdp_float8_all_gather=True)
        net[i] = convert_to_float8_training(net[i], config=config)
    net[1].weight = net[0].weight
    fully_shard(net, mesh=device_mesh(dp=2))
    return raised(ValueError, lambda: net(torch.randn(4, 32)))


def test_layers_that_share_a_gathered_weight_round_its_scale_alike(ranks: RankPools) -> None:
    """They must also agree on the granularity of its scales."""
    folded = Float8LinearConfig.from_recipe_name("rowwise_folded")
    text = ranks(2).run_same(shared_by_two_configs, folded, Float8LinearConfig())
    assert "FSDP2 gathered the weight as torch.float8_e4m3fn with one scale per row" in text
    rounded = Float8LinearConfig(round_scales_to_power_of_2=True)
    text = ranks(2).run_same(shared_by_two_configs, Float8LinearConfig(), rounded)
    (gathered, taken) = text.split("for another layer that shares it, but this layer takes")
    assert ("power_of_2=False" in gathered, "power_of_2=True" in taken) == (True, True)


def test_axes_that_overlap() -> None:
    six: Any = SimpleNamespace(mesh=torch.arange(6))
    every_second: Any = SimpleNamespace(mesh=torch.tensor([0, 2]))
    text = raised(NotImplementedError, lambda: union_of([six, every_second]))
    assert text.startswith("weights live on meshes whose axes overlap (")


def right_scales(factor: float, meshes: tuple[DeviceMesh, DeviceMesh]) -> tuple[int, list[bool]]:
    """Collectives of precompute, and whether the scales of two weights are right.

    Each has its own mesh; the first one differs by `factor` along the axes that its mesh lacks.
    """
    net = convert_to_float8_training(nn.Sequential(*(nn.Linear(32, 32) for _ in range(2))))
    masters = [net[0].weight.detach() * factor, net[1].weight.detach().clone()]
    for layer, master, part in zip(net, masters, meshes, strict=True):
        placements = [Shard(0), Shard(1)][: part.ndim]
        weight = distribute_tensor(master, part, placements, src_data_rank=None)
        layer.weight, layer.bias = nn.Parameter(weight), None
    with comm_audit() as audit:
        precompute_float8_dynamic_scale(net)
    with weights_used(net) as used:
        for layer in net:
            layer(distribute_tensor(torch.ones(4, 32), layer.weight.device_mesh))
    expected = [cast_to_float8(master, CastConfig()).scale for master in masters]
    return audit.count(), [torch.equal(used[f"{i}"].scale, s) for i, s in enumerate(expected)]


@on_ranks(4, returns=(1, [True, True]))
def test_weights_on_a_flattened_axis_and_on_its_parts() -> tuple[int, list[bool]]:
    """Of weights on one of two axes, and on both, flattened."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return right_scales(8.0 ** mesh.get_local_rank("b"), (mesh["a"], mesh._flatten("ab")))


@on_ranks(8, returns=(1, [True, True]))
def test_weights_that_differ_along_two_axes_that_they_lack() -> tuple[int, list[bool]]:
    """Of weights on one of three axes, and on the two others."""
    mesh = device_mesh(a=2, b=2, c=2)
    place = 2 * mesh.get_local_rank("b") + mesh.get_local_rank("c")
    return right_scales(2.0**place, (mesh["a"], mesh["b", "c"]))


@on_ranks(4, timeout=60)
def test_empty_batches() -> None:
    """No rows on one data-parallel rank, or on all: finite gradients, no hang."""
    for everywhere in (False, True):
        world = Distributed(2, 2, sequence_parallel=False)
        first = world.mesh.get_local_rank("dp") == 0
        world.net(torch.randn(0 if everywhere or first else 2, 4, 64)).sum().backward()
        for gradient in [full(p.grad) for p in world.net.parameters()]:
            assert gradient.isfinite().all()
            assert gradient.any() != everywhere


BAD = {"input": (math.nan, math.inf), "weight": (math.nan, math.inf, -math.inf)}


@on_ranks(4)
def test_a_non_finite_value_on_one_rank_is_visible_on_all_that_share_it() -> None:
    """Every value of the model's output turns into NaN there."""
    for where, bad in ((where, bad) for where, values in BAD.items() for bad in values):
        world = Distributed(2, 2)
        x, weight = world.mine(torch.randn(2, 8, 64)), world.net.layers[0].w1.weight
        if torch.distributed.get_rank() == 1:
            target = x if where == "input" else weight._local_tensor.plain
            target.detach().view(-1)[3] = bad
        if where == "weight":
            precompute_float8_dynamic_scale(world.net)
        # Ranks 0 and 1 share the activations; 2 and 3 have others.
        shared = where == "weight" or torch.distributed.get_rank() < 2
        assert world.net(x).isnan().all() == shared


@on_ranks(2, returns=(True, True))
def test_a_nan_gradient_on_one_rank_is_visible_on_all() -> tuple[bool, bool]:
    """A NaN in one tensor-parallel rank's part of grad_output: are all gradients NaN here?"""
    world = Distributed(1, 2)
    x = world.mine(torch.randn(2, 8, 64)).requires_grad_()
    output = world.net.layers[0](x)
    grad = torch.randn_like(output)
    if dist.get_rank() == 1:
        grad[0, 0, 0] = torch.nan
    output.backward(grad)
    weight = full(world.net.layers[0].w2.weight.grad)
    return bool(weight.isnan().all()), bool(x.grad.isnan().all())


@pytest.mark.parametrize(
    ("tp", "alone", "norm_type"),
    [(1, False, float("inf")), (2, True, float("inf")), (2, False, 2.0)],
)
@on_ranks(2, "tp")
def test_gradient_clipping(tp: int, alone: bool, norm_type: float) -> None:
    """The norm and the clipped gradients are one device's."""
    world = Distributed(2, tp, sequence_parallel=False)
    torch.manual_seed(1)
    models = []
    for net, distributed in ((world.net, True), (world.twin, False)):
        extra = nn.Linear(64, 16)
        torch.manual_seed(1)
        extra.reset_parameters()
        if distributed and not alone:
            fully_shard(extra, mesh=world.mesh["dp"])  # on dp, beside layers on dp x tp
        models.append(nn.ModuleList([net, extra]))
    x = torch.randn(2, 4, 64)
    norms = []
    for model in models:
        model[1](model[0](x)).sum().backward()
        norms.append(clip_grad_norm_(model.parameters(), 1.0, norm_type).item())
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert min(sqnr(b.grad, full(a.grad)) for a, b in pairs) > 100


@on_ranks(4, returns=(["all_reduce world 1", "all_reduce dp 1"], ""))
def test_the_norm_over_two_axes_is_one_all_reduce() -> tuple[list[str], str]:
    """A number for weights and one for norm layers, which dp alone divides; torch says nothing.

    torch reduces one per parameter and axis, and warns of that on each rank.
    """
    world, heard = Distributed(2, 2), io.StringIO()
    world.net(world.mine(torch.randn(2, 8, 64))).sum().backward()
    handler = logging.StreamHandler(heard)
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addHandler(handler)
    with comm_audit(world.mesh) as audit:
        clip_grad_norm_(world.net.parameters(), 1.0)
    logger.removeHandler(handler)
    return [f"{row.op} {row.axis} {row.elements}" for row in audit.rows], heard.getvalue()


@on_ranks(2)
def test_norms_of_shards_without_elements() -> None:
    """Norms of every type are torch's of the whole, in fp32 also where gradients are in bf16."""
    mesh = device_mesh(tp=2)
    for whole in (torch.randn(1, 5), torch.randn(3, 5).bfloat16(), torch.tensor([[math.nan]])):
        sharded = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]))
        for norm_type in (1.0, 2.0, 3.5, math.inf):
            sharded.grad = distribute_tensor(whole, mesh, [Shard(0)])
            found = clip_grad_norm_([sharded], 1.0, norm_type)
            expected = nn.utils.get_total_norm([whole.float()], norm_type)
            rtol = 2**-8 if whole.dtype is torch.bfloat16 else 1e-6
            torch.testing.assert_close(found, expected, rtol=rtol, atol=0, equal_nan=True)
    exact = torch.tensor([[1 + 2.0**-40], [1.0]], dtype=torch.float64)
    double = nn.Parameter(distribute_tensor(exact, mesh, [Shard(0)]))
    double.grad = distribute_tensor(exact, mesh, [Shard(0)])
    assert clip_grad_norm_([double], 2.0, math.inf).item() == exact.max().item()
    refused = raised(ValueError, lambda: clip_grad_norm_([sharded], 1.0, 0))
    assert refused == "clip_grad_norm_: norm_type must be positive, got 0.0"


@on_ranks(2, returns=[True] * 3)
def test_float8_moves_between_shards() -> list[bool]:
    """float8 DTensors from one sharded dim to another, uneven: bytes stay those of one device."""
    mesh = device_mesh(tp=2)
    whole = torch.randn(5, 7)
    one_device = cast_to_float8(whole, CastConfig())
    cast = cast_to_float8(distribute_tensor(whole, mesh, [Shard(0)]), CastConfig())
    with comm_audit(mesh) as audit:
        moved = cast.redistribute(placements=[Shard(1)])
    group = mesh.get_group().group_name
    sent = torch.ops._c10d_functional.all_to_all_single(one_device[:4], [2, 2], [2, 2], group)
    sent = torch.ops._c10d_functional.wait_tensor(sent)
    return [
        all(row.float8_bytes == row.bytes for row in audit.rows),
        torch.equal(moved.full_tensor().dequantize(), one_device.dequantize()),
        isinstance(sent, type(one_device)) and torch.equal(sent.scale, one_device.scale),
    ]


@on_ranks(3, returns=["torch.float8_e4m3fn"] * 16)
def test_a_rank_beside_the_mesh_has_an_empty_cast() -> list[str]:
    """The dtypes of casts of a DTensor that the last of three ranks has no part of."""
    mesh, found = DeviceMesh("cpu", [0, 1]), []
    axiswise = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
    blocks = CastConfig(scaling_granularity=ScalingGranularity.BLOCKWISE, block_size=(1, 32))
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        tensor = DTensor.from_local(torch.ones(4, 64), mesh, [placement], run_check=False)
        for config, dim in ((CastConfig(), None), (axiswise, -1), (axiswise, 0), (blocks, None)):
            cast = cast_to_float8(tensor, config, dim=dim)
            local = cast.to_local()
            inside = dist.get_rank() < 2
            assert list(local.shape) == ([4, 64] if inside else [0])
            assert list(cast.shape) == list(tensor.shape)
            assert local.dequantize().shape == local.shape
            found.append(str(local.qdata.dtype))
    return found


@pytest.mark.parametrize("rebuilt", [False, True])
@on_ranks(2, 2, returns=[])
def test_uneven_shards_of_torchs_tensor_parallelism(rebuilt: bool) -> list[str]:
    """FSDP2 gathers them in high precision, padded, also if a loader makes new parameters."""
    mesh = device_mesh(dp=2, tp=2)
    net = convert_to_float8_training(nn.Sequential(nn.Linear(64, 60), nn.Linear(60, 33)))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    for layer in net if rebuilt else ():
        layer._parameters["weight"] = nn.Parameter(layer.float8_weight.high_precision().clone())
    precompute_float8_dynamic_scale(net)
    with weights_used(net) as used:
        net(torch.randn(4, 64))
    found = []
    for layer, dim in (("0", 0), ("1", 1)):
        cast = cast_to_float8(full_state(net)[f"{layer}.weight"], CastConfig())
        part = cast.qdata.chunk(2, dim)[mesh.get_local_rank("tp")]
        found += [] if same_cast(used[layer], cast.rewrap(qdata=part)) else [layer]
    return found
