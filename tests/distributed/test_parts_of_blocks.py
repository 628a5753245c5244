"""Where blocks that shards cut can't travel: in high precision instead, or refused on all ranks."""

import warnings

import pytest
import torch
import torch.nn as nn
from ranks import RankPools, device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fp8_dist import (
    CastConfig,
    Float8LinearConfig,
    ScalingGranularity,
    ScalingType,
    cast_to_float8,
    convert_to_float8_training,
    warn,
)
from fp8_dist.linear.recording import record_gemms
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    PrepareFloat8ModuleInput,
    apply_tp_plan,
)


def redistributed(size: int, shape: tuple[int, int], block: int) -> list[str]:
    """The error of each of several redistributions of a tensor whose rows are sharded."""
    mesh = device_mesh(tp=size)
    config = CastConfig(scaling_granularity=ScalingGranularity.BLOCKWISE, block_size=(1, block))
    tensor = distribute_tensor(torch.randn(shape), mesh, [Shard(1)])
    found = []
    for placement in (Replicate(), Shard(0)):
        try:
            cast_to_float8(tensor, config).redistribute(placements=[placement])
        except NotImplementedError as error:
            found.append(str(error).partition(": ")[2])
    return found


@pytest.mark.parametrize(
    ("size", "shape", "block"),
    [
        (
            2,
            (4, 300),
            128,
        ),  # one rank has 2 blocks, the other has 2 as well, of which they share one
        (3, (300, 260), 128),
        (3, (384, 512), 32),
        (3, (5, 130), 128),
    ],
)
def test_parts_of_rows_are_refused_on_all_ranks(
    ranks: RankPools, size: int, shape: tuple[int, int], block: int
) -> None:
    text = (
        "ranks have unequal parts, or parts of one block, which can't be gathered as float8; "
        "redistribute the high-precision tensor and cast it then"
    )
    assert ranks(size).run(redistributed, size, shape, block) == [[text] * 2] * size


def whole_blocks() -> None:
    mesh = device_mesh(tp=3)
    config = CastConfig(scaling_granularity=ScalingGranularity.BLOCKWISE, block_size=(1, 128))
    torch.manual_seed(0)
    tensor = torch.randn(4, 384)
    moved = cast_to_float8(distribute_tensor(tensor, mesh, [Shard(1)]), config)
    moved = moved.redistribute(placements=[Replicate()]).to_local()
    assert torch.equal(moved.dequantize(), cast_to_float8(tensor, config).dequantize())


def test_whole_blocks_of_rows_travel(ranks: RankPools) -> None:
    ranks(3).run(whole_blocks)


class Twice(nn.Module):
    """Two layers that share their input."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(features, 64, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


def prepared(size: int, recipe: str, features: int) -> tuple[list[bool], str]:
    """Whether each rank multiplies the input of one device, and what was warned of."""
    mesh = device_mesh(tp=size)
    config = Float8LinearConfig.from_recipe_name(recipe)
    torch.manual_seed(0)
    model = Twice(features)
    convert_to_float8_training(model, config=config)
    x = torch.randn(6, features)
    with record_gemms() as expected:
        model(x)
    style = Float8ColwiseParallel()
    prepare = PrepareFloat8ModuleInput(
        input_layouts=Shard(-1), desired_input_layouts=Replicate(), use_local_output=False
    )
    apply_tp_plan(model, mesh, {"": prepare, "first": style, "second": style})
    part = distribute_tensor(x, mesh, [Shard(1)])
    with record_gemms() as found, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warn._warned.discard("prepared in parts")  # of an earlier test on these ranks
        model(part)
    same = [
        torch.equal(a.a.qdata.view(torch.uint8), b.a.qdata.view(torch.uint8))
        and torch.equal(a.a.scale, b.a.scale)
        for a, b in zip(found, expected, strict=True)
    ]
    return same, " ".join(str(w.message) for w in warned if "PrepareFloat8" in str(w.message))


@pytest.mark.parametrize(("size", "features"), [(2, 300), (3, 300), (3, 512)])
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_prepared_inputs_in_parts_move_in_high_precision(
    ranks: RankPools, size: int, features: int, recipe: str
) -> None:
    for same, warned in ranks(size).run(prepared, size, recipe, features):
        assert same == [True, True]
        assert "leaves its input in high precision" in warned


def gradients_alone(size: int) -> list[float]:
    """Errors of grad_input where the weight is in blocks for that GEMM alone, by TP style."""
    off = CastConfig(scaling_type=ScalingType.DISABLED)
    config = Float8LinearConfig.from_recipe_name("blockwise")
    fields = {
        "cast_config_input": off,
        "cast_config_weight": off,
        "cast_config_weight_for_grad_input": config.cast_config_weight,
        "cast_config_input_for_grad_weight": config.cast_config_input,
        "cast_config_grad_output": config.cast_config_grad_output,
        "round_scales_to_power_of_2": True,
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 300, bias=False))
    convert_to_float8_training(model, config=Float8LinearConfig(**fields))
    x, grad = torch.randn(8, 300), torch.randn(8, 300)
    inputs = x.clone().requires_grad_()
    model(inputs).backward(grad)
    expected = inputs.grad.clone()
    apply_tp_plan(
        model, device_mesh(tp=size), {"0": Float8ColwiseParallel(output_layouts=Replicate())}
    )
    inputs = x.clone().requires_grad_()
    model(inputs).backward(grad)
    return [((inputs.grad - expected).norm() / expected.norm()).item()]


@pytest.mark.parametrize("size", [2, 4])
def test_a_weight_in_blocks_for_grad_input_alone(ranks: RankPools, size: int) -> None:
    for errors in ranks(size).run(gradients_alone, size):
        assert max(errors) < 1e-6
