"""Several ranks that share one GPU, with gloo; without a GPU, on CPUs.

Each rank is a process with its own streams.
"""

import faulthandler
import functools
import math
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

import mesh_training
import one_sum as one_sum_training
import pytest
import torch
import torch.distributed as dist
from moe_layers import RECIPES as EXPERTS_RECIPES
from moe_layers import Layer
from ranks import RankPools
from reference import sqnr
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import Float8LinearRecipeName, precompute_float8_dynamic_scale
from fp8_dist.moe import (
    Float8ExpertsConfig,
    convert_experts_to_float8_training,
    dispatch_linear,
    linear_combine,
    route,
)
from fp8_dist.tensor_parallel import Float8ExpertParallel
from fp8_dist.torch_internals import resolve_process_group
from scripts.common.ranks import run_on_ranks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = [recipe.value for recipe in Float8LinearRecipeName]
# Limits in dB. On a GPU, GEMMs of other sizes sum in another order, so operands of the next GEMM
# may be rounded differently. (With relative errors of 1e-5 in GEMMs, outputs had 50 dB, and changes
# of weights in three steps 25 dB. With gradients half or twice as large, changes have under 7 dB.)
SAME_GEMMS, OUTPUTS, CHANGES, EXPERTS = (
    (80, 40, 15, 30) if DEVICE == "cuda" else (90, 90, 90, math.inf)
)
LIMIT = 30  # seconds per check; then a rank, which may be hanging, prints its stack and ends
STEPS = 4 if DEVICE == "cuda" else 1
SIZES = [2, 4] if DEVICE == "cuda" else [2]  # numbers of ranks

# By the number of ranks and by name: axes, and options of the training.
MESHES: dict[int, dict[str, tuple[dict[str, int], dict[str, Any]]]] = {
    2: {
        "FSDP2 x2": ({"dp": 2, "tp": 1}, {}),
        "FSDP2 x2, uneven": ({"dp": 2, "tp": 1}, {"hidden": 97}),
        "FSDP2 x2, offloaded": ({"dp": 2, "tp": 1}, {"offload": True}),
        "TP x2": ({"dp": 1, "tp": 2}, {}),
        "TP x2, SP": ({"dp": 1, "tp": 2}, {"sequence_parallel": True}),
    },
    4: {
        "FSDP2 x4": ({"dp": 4, "tp": 1}, {}),
        "FSDP2 2 x TP 2": ({"dp": 2, "tp": 2}, {}),
        "FSDP2 2 x TP 2, SP": ({"dp": 2, "tp": 2}, {"sequence_parallel": True}),
    },
}

# By name: functions that return what is wrong on a rank.
Checks = dict[str, Callable[[], Iterable[str]]]


def check_on_ranks(ranks: RankPools, size: int, checks: Callable[[], Checks]) -> None:
    """Run checks on ranks, and fail with a line for each that finds or raises something."""
    on_gpu: Any = partial(run_on_ranks, size, device=DEVICE, shared_gpu=True)
    found = (on_gpu if DEVICE == "cuda" else ranks(size).run)(_wrong, checks)
    wrong = [f"rank {rank}: {text}" for rank, texts in enumerate(found) for text in texts]
    assert not wrong, "\n".join(wrong)


def _wrong(checks: Callable[[], Checks]) -> list[str]:
    wrong, _kept = [], functional_gathers_in_place()
    for name, check in checks().items():
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        try:
            wrong += [f"{name}: {text}" for text in check()]
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            # Print it now, because other ranks may hang waiting for this one.
            print(f"{name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    faulthandler.cancel_dump_traceback_later()
    return wrong


def functional_gathers_in_place() -> torch.library.Library:
    """Replace functional all-gathers by in-place ones, as long as the returned library lives.

    gloo's functional all-gathers treat GPU memory as CPU memory, and crash (pytorch/pytorch issue
    152645).
    """

    def into(values: Tensor, size: int, group: Any, *, out: Tensor) -> Tensor:
        among = resolve_process_group(group)
        work = dist.all_gather_into_tensor(out, values, among, async_op=True)
        torch._C._distributed_c10d._register_work(out, work)
        return out

    def gather(values: Tensor, size: int, group: Any) -> Tensor:
        out = values.new_empty((size * len(values), *values.shape[1:]))
        return into(values.contiguous(), size, group, out=out)

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", gather, DEVICE.upper())
    library.impl("all_gather_into_tensor_out", into, DEVICE.upper())
    return library


@functools.cache
def device_mesh(**axes: int) -> DeviceMesh:
    """A mesh, which is cached because process groups are expensive."""
    return init_device_mesh(DEVICE, tuple(axes.values()), mesh_dim_names=tuple(axes))


def layer_on_device(config: Float8ExpertsConfig, *arguments: Any) -> Layer:
    """The layer of all ranks, on the device."""
    with torch.device(DEVICE):
        return Layer.of(config, dist.get_world_size(), *arguments)


def too_low(decibels: dict[str, float], least: float) -> list[str]:
    low = [f"{name} {found:.1f}" for name, found in decibels.items() if not found >= least]
    return [f"{', '.join(low)} dB, below {least}"] if low else []


def some(cases: Iterable[Any]) -> list[Any]:
    """All cases on a GPU; on CPUs only two, because other tests cover them there."""
    cases = [*cases]
    return cases if DEVICE == "cuda" else cases[:: len(cases) - 1]


def trainings() -> Checks:
    """Checks of training on each mesh, in each recipe."""
    return {
        f"{name}, {recipe}": partial(training, recipe, axes, options)
        for (name, (axes, options)), recipe in some(
            product(MESHES[dist.get_world_size()].items(), RECIPES)
        )
    }


def training(recipe: str, axes: dict[str, int], options: dict[str, Any]) -> list[str]:
    mesh = device_mesh(**axes)
    found = mesh_training.trained(recipe, mesh, DEVICE, changes=True, **options)
    outputs = {f"output {i}": each for i, each in enumerate(found[:3])}
    changes = {f"change {i}": each for i, each in enumerate(found[3:])}
    least = (SAME_GEMMS, SAME_GEMMS) if axes["tp"] == 1 else (OUTPUTS, CHANGES)
    return too_low(outputs, least[0]) + too_low(changes, least[1])


@pytest.mark.parametrize("size", SIZES)
def test_training_is_that_on_one_device(ranks: RankPools, size: int) -> None:
    check_on_ranks(ranks, size, trainings)


def one_sum() -> Checks:
    """Checks that training on all ranks gives the same weights as on each rank alone."""
    whole, alone = (one_sum_training.mesh_of(n, DEVICE) for n in (dist.get_world_size(), 1))

    def check(*how: Any, **options: Any) -> list[str]:
        found = (
            one_sum_training.trained(mesh, *how, steps=STEPS, **options) for mesh in (whole, alone)
        )
        return one_sum_training.differing(*found)

    return {
        str((recipe, transport)): partial(check, recipe, transport)
        for recipe, transport in some(
            product(("tensorwise", "rowwise_folded", None), ("float8", "bf16", "fp32"))
        )
    }


@pytest.mark.parametrize("size", SIZES)
def test_weights_have_the_bits_of_one_rank(ranks: RankPools, size: int) -> None:
    check_on_ranks(ranks, size, one_sum)


def layers_of_experts() -> Checks:
    configs = product(EXPERTS_RECIPES, ("high_precision", "float8"))
    spreads = ("uneven", "no tokens on rank 0")
    return {
        f"{recipe}, {combine}, {spread}": partial(
            layer_of_experts, Float8ExpertsConfig(recipe, combine), spread
        )
        for (recipe, combine), spread in product(configs, spreads)
    }


def layer_of_experts(config: Float8ExpertsConfig, spread: str) -> list[str]:
    """Compare a layer on ranks with one device, in bf16, for which GPUs have grouped GEMMs."""
    rank, group = dist.get_rank(), dist.group.WORLD
    layer = layer_on_device(config, spread, torch.bfloat16)
    whole, parts = layer.trained(), layer.part(rank).trained(group)
    found = {name: sqnr(layer.part_of(name, whole[name], rank), parts[name]) for name in whole}
    return too_low(found, EXPERTS)


def test_experts_on_two_ranks(ranks: RankPools) -> None:
    check_on_ranks(ranks, 2, layers_of_experts)


class Experts(nn.Module):
    """A class of experts unknown to the library, with the weights of a layer."""

    float8_weight_names = ("up", "down")
    float8_experts_config: Float8ExpertsConfig | None = None

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(layer.tensors[n].clone()) for n in ("up", "down"))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        group = self.up.device_mesh.get_group() if isinstance(self.up, DTensor) else None
        routing, config = route(ids, 8, group), self.float8_experts_config
        hidden = dispatch_linear(x, self.up, routing, config).relu()
        return linear_combine(hidden, self.down, routing, config)


def experts_under_fsdp() -> Checks:
    return {recipe: partial(steps_of_experts, recipe) for recipe in EXPERTS_RECIPES}


def steps_of_experts(recipe: Any) -> list[str]:
    """Compare EP 2 x FSDP2 2, with different tokens on each rank, with one device for all."""
    mesh, config, rank = device_mesh(dp=2, ep=2), Float8ExpertsConfig(recipe), dist.get_rank()
    layer = layer_on_device(config, "uneven")
    model, twin = Experts(layer), Experts(layer)
    twin.float8_experts_config = config  # its weights are cast in each call
    convert_experts_to_float8_training(model, config=config)
    parallelize_module(model, mesh["ep"], Float8ExpertParallel())
    fully_shard(model, mesh=mesh["dp"])
    model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    model.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    x, decibels = layer.tensors["x"], {}
    for step in range(2):
        precompute_float8_dynamic_scale(model)
        found = model(*(layer.part_of("x", each, rank) for each in (x, layer.ids)))
        expected = twin(x, layer.ids)
        for output in (found, expected):
            output.square().sum().backward()
        expected = layer.part_of("output", expected, rank)
        decibels[f"output {step}"] = sqnr(expected, found)
        for name, parameter in model.named_parameters():
            own = twin.get_parameter(name)
            decibels[f"{name} {step}"] = sqnr(own.grad, parameter.grad.full_tensor())
            with torch.no_grad():
                parameter -= 1e-4 * parameter.grad
                own.copy_(parameter.full_tensor())
            parameter.grad = own.grad = None
    return too_low(decibels, min(EXPERTS, OUTPUTS))


@pytest.mark.full
def test_experts_under_fsdp(ranks: RankPools) -> None:
    check_on_ranks(ranks, 4, experts_under_fsdp)


def test_ranks_that_share_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"^ranks on 'cpu' share no GPU: leave out shared_gpu=True"
    ):
        run_on_ranks(2, dist.get_rank, shared_gpu=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"^2 ranks need a GPU, there are 0: use --device cpu"):
        run_on_ranks(2, dist.get_rank, device="cuda", shared_gpu=True)
