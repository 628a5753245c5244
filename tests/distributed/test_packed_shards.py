"""Shards of several pieces (``_StridedShard``), as of a projection that holds both gate and up."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import same_bits, sqnr
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch_releases import pieces_that_torch_moves

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingGranularity,
    cast_to_float8,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
)
from fp8_dist.tensor_parallel import Float8ColwiseParallel, PrepareFloat8ModuleInput, apply_tp_plan


def placed(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """Distribute a tensor that all ranks have, without communication."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def packed(dim: int, parts: int = 2) -> Placement:
    return _StridedShard(dim, split_factor=parts)  # type: ignore[return-value]


CASTS: dict[str, tuple[CastConfig, int | None]] = {
    "tensor": (CastConfig(), None),
    "rows": (CastConfig(scaling_granularity=ScalingGranularity.AXISWISE), -1),
    "columns": (CastConfig(scaling_granularity=ScalingGranularity.AXISWISE), 0),
    **{
        f"{rows} x {columns}": (
            CastConfig(
                scaling_granularity=ScalingGranularity.BLOCKWISE, block_size=(rows, columns)
            ),
            None,
        )
        for rows, columns in ((1, 32), (32, 32), (1, 128), (128, 128))
    },
}


def casts_of(shape: tuple[int, int]) -> dict[str, str]:
    """By placements and cast: whether this rank has its part of one device's bits, or the error."""
    found = {}
    # Rows and columns differ in magnitude, so that no two blocks have the same scale.
    tensor = torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]
    tensor = tensor * torch.logspace(-3, 3, shape[1])
    if dist.get_world_size() == 2:
        mesh = device_mesh(tp=2)
        ways: list[tuple[Placement, ...]] = [(packed(1),), (packed(0),), (packed(1, 3),)]
    else:
        mesh = device_mesh(dp=2, tp=2)
        ways = [(packed(0), Shard(0)), (packed(0), packed(1)), (Shard(1), packed(0))]
    for placements in ways:
        part = placed(tensor, mesh, *placements)
        for name, (config, dim) in CASTS.items():
            whole = cast_to_float8(tensor, config, dim=dim).dequantize()
            expected = placed(whole, mesh, *placements).to_local()
            try:
                local = cast_to_float8(part, config, dim=dim).to_local().dequantize()
                verdict = "same" if same_bits(local, expected) else "WRONG"
            except NotImplementedError as error:
                told = "some begin inside of a" in str(error) and "whole blocks" in str(error)
                verdict = "refused" if told else str(error)
            found[f"{placements} {name}"] = verdict
    return found


@pytest.mark.parametrize(
    ("world_size", "shape"), [(2, (512, 512)), (2, (130, 96)), (4, (512, 512)), (4, (256, 300))]
)
def test_casts_are_one_devices_or_refused_on_all_ranks(
    ranks: RankPools, world_size: int, shape: tuple[int, int]
) -> None:
    first, *others = ranks(world_size).run(casts_of, shape)
    assert others == [first] * (world_size - 1)
    assert set(first.values()) <= {"same", "refused"}, first
    refused = {name for name, verdict in first.items() if verdict == "refused"}
    if shape == (512, 512):  # all pieces but thirds have whole blocks
        assert all("3" in name for name in refused), refused
    # Scales of tensors, rows and columns are never refused; FSDP2's shards are one piece each.
    assert not any(name.endswith(("tensor", "rows", "columns")) for name in refused)
    assert not any(str((packed(0), Shard(0))) in name for name in refused)


def layer_of(recipe: str, weight: torch.Tensor) -> Float8Linear:
    config = Float8LinearConfig.from_recipe_name(recipe)
    layer = Float8Linear(weight.shape[1], weight.shape[0], bias=False, config=config)
    layer.weight = nn.Parameter(weight)
    return layer


def gemms(recipe: str, features: tuple[int, int]) -> dict[str, list[float]]:
    """SQNR of the three results against one device, by placements of the operands."""
    mesh, found = device_mesh(tp=dist.get_world_size()), {}
    torch.manual_seed(0)
    x, grad = torch.randn(2, 8, features[0]), torch.randn(2, 8, features[1])
    w = torch.randn(features[1], features[0])
    inputs, layer = x.clone().requires_grad_(), layer_of(recipe, w)
    expected = layer(inputs)
    expected.backward(grad)
    ways = [(packed(2), packed(1)), (packed(1), packed(2)), (Replicate(), packed(2))]
    for weight in (Replicate(), Shard(0), Shard(1)):
        for x_placements, grad_placements in ways:
            other = layer_of(recipe, placed(w, mesh, weight))
            part = placed(x, mesh, x_placements).requires_grad_()
            output = other(part)
            output.backward(placed(grad, mesh, grad_placements))
            pairs = [(expected, output), (inputs.grad, part.grad)]
            pairs.append((layer.weight.grad, other.weight.grad))
            found[f"{weight} {x_placements} {grad_placements}"] = [
                float(sqnr(a.detach(), b.detach().full_tensor())) for a, b in pairs
            ]
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_folded", "mxfp8"])
def test_layers_take_packed_inputs_and_gradients(ranks: RankPools, recipe: str) -> None:
    world_size, features = (4, (130, 90)) if recipe in ("mxfp8", "rowwise") else (2, (256, 512))
    with pieces_that_torch_moves():
        for found in ranks(world_size).run(gemms, recipe, features):
            assert min(min(each) for each in found.values()) > 100, found


@pytest.mark.parametrize("recipe", ["rowwise_folded", "blockwise"])
@pytest.mark.parametrize(("gathered", "ahead"), [(False, False), (False, True), (True, True)])
@on_ranks(4)
def test_packed_weights_are_refused_on_all_ranks(recipe: str, gathered: bool, ahead: bool) -> None:
    mesh = device_mesh(dp=2, tp=2)
    config = replace(
        Float8LinearConfig.from_recipe_name(recipe), enable_fsdp_float8_all_gather=gathered
    )
    model = nn.Sequential(Float8Linear(96, 64, bias=False, config=config))
    weight = placed(torch.randn(64, 96), mesh["tp"], packed(0))
    model[0].weight = nn.Parameter(weight)
    if gathered:
        fully_shard(model, mesh=mesh["dp"])

    text = "can't be multiplied; distribute it as|have several pieces"

    def forward() -> None:
        if ahead:
            precompute_float8_dynamic_scale(model)
        model(DTensor.from_local(torch.randn(8, 96), mesh["tp"], [Replicate()]))

    with pytest.raises((ValueError, NotImplementedError), match=text):
        forward()


def gradient_on_the_wire(prepared: bool) -> float:
    """SQNR of an input's gradient that is to be reduced and scattered to several pieces."""
    mesh, x = device_mesh(tp=2), torch.randn(2, 8, 64)
    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("mxfp8"))
    inputs, part = x.clone().requires_grad_(), placed(x, mesh, packed(1)).requires_grad_()
    model(inputs).square().sum().backward()
    transport = None if prepared else "float8"
    style = Float8ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    prepare = PrepareFloat8ModuleInput(
        input_layouts=packed(1), desired_input_layouts=Replicate(), use_local_output=False
    )
    apply_tp_plan(model, mesh, {"0": style} | ({"": prepare} if prepared else {}))
    model[0].reduce_transport = transport
    model(part).square().sum().backward()
    return float(sqnr(inputs.grad, part.grad.full_tensor()))


def test_gradients_return_to_packed_inputs(ranks: RankPools) -> None:
    with pieces_that_torch_moves():
        for prepared in (False, True):
            assert min(ranks(2).run(gradient_on_the_wire, prepared)) > 100
