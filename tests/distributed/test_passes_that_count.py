"""Delayed scales follow the passes of a step, also where FSDP2 or a pipeline holds its gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from delayed_steps import DRY_RUNS, GATHERED, histories, recorded
from nets import Net, net_plan
from rank_tests import on_ranks
from ranks import device_mesh
from reference import same_bits
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from fp8_dist import Float8LinearConfig, attach_update, convert_to_float8_training
from fp8_dist.tensor_parallel import apply_tp_plan

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def not_yet_synced(net: FSDPModule, last: bool) -> None:
    net.set_requires_gradient_sync(last)


def not_yet_reduced(net: FSDPModule, last: bool) -> None:
    net.set_requires_all_reduce(last)


ONE = MixedPrecisionPolicy()


@pytest.mark.parametrize(
    ("sizes", "hold", "policy", "gathers"),
    [
        ({"dp": 2}, not_yet_synced, BF16, True),
        ({"dp": 2}, not_yet_synced, BF16, False),
        ({"replicate": 2, "shard": 2}, not_yet_reduced, BF16, True),
        ({"dp": 2, "tp": 2}, not_yet_synced, ONE, True),
    ],
    ids=["FSDP2", "gathers in high precision", "HSDP", "FSDP2 x TP"],
)
@on_ranks("sizes")
def test_fsdp_holds_gradients_of_micro_batches(
    sizes: dict[str, int], hold: Callable, policy: MixedPrecisionPolicy, gathers: bool
) -> None:
    """What the input of the first layer has recorded in two micro-batches."""
    mesh = device_mesh(**sizes)
    config = GATHERED if gathers else Float8LinearConfig.from_recipe_name("delayed")
    net = convert_to_float8_training(Net(layers=1), config=config)
    if "tp" in sizes:
        apply_tp_plan(net, mesh["tp"], net_plan(net, False))
    data = tuple(name for name in sizes if name != "tp")
    for module in (*net.layers, net):
        fully_shard(module, mesh=mesh[data], mp_policy=policy)
    name = "layers.0.w1.prepared_input" if "tp" in sizes else "layers.0.w1.input"
    torch.manual_seed(dist.get_rank() // sizes.get("tp", 1))
    for _ in range(2):
        for kind in DRY_RUNS:
            kind(net, net, torch.full((2, 4, 64), 1e10, requires_grad=True))
        x = torch.randn(2, 4, 64)
        for factor in (8.0, 1.0):
            hold(net, factor == 1.0)
            net((x * factor).requires_grad_()).square().mean().backward()
        largest = (x * 8).to(policy.param_dtype or x.dtype).abs().max()
        assert recorded(net)[name] == largest.item()
        net.zero_grad()
        for history in histories(net).values():
            history.current = None


def stage_model(number: int, recipe: str, frozen: bool) -> nn.Module:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    if frozen:
        model[2].weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("recipe", "schedule", "frozen"),
    [
        ("rowwise_folded", Schedule1F1B, False),
        ("delayed", Schedule1F1B, True),
        ("delayed", ScheduleGPipe, False),
    ],
)
@on_ranks(2, returns=[])
def test_gradients_of_a_pipeline_are_those_of_one_device(
    recipe: str, schedule: Any, frozen: bool
) -> list[str]:
    """Names of gradients that differ from those of the same stages on one device.

    torch infers the shapes by passes over uninitialized memory, which holds large numbers here.
    """
    rank = dist.get_rank()
    mine, twins = (
        stage_model(rank, recipe, frozen),
        [stage_model(i, recipe, frozen) for i in (0, 1)],
    )
    models, differ = [mine, *twins], []
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for optimizer, model in zip(optimizers, models, strict=True):
        attach_update(optimizer, model)
    junk = [torch.full((4, 64), 1e20) for _ in range(64)]
    del junk
    run = schedule(PipelineStage(mine, rank, 2, torch.device("cpu")), 4, loss_fn=F.mse_loss)
    for step in range(3):
        torch.manual_seed(100 + step)
        x, target = torch.randn(16, 64), torch.randn(16, 64)
        run.step(x) if rank == 0 else run.step(target=target)
        for part, expected in zip(x.chunk(4), target.chunk(4), strict=True):
            F.mse_loss(twins[1](twins[0](part)), expected).backward()
        for (name, own), twin in zip(
            mine.named_parameters(), twins[rank].parameters(), strict=True
        ):
            if (own.grad is None) is not (twin.grad is None):
                differ.append(f"step {step}: {name}")
            elif own.grad is not None and twin.grad is not None:
                twin.grad /= 4
                if not (same_bits(own.grad, twin.grad) and own.grad.any()):
                    differ.append(f"step {step}: {name}")
        for parameter in twins[1 - rank].parameters():
            if parameter.grad is not None:
                parameter.grad /= 4
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return differ
