"""Training on dp 2 x tp 2 with sequence parallelism, held against one process.

A float8 run is chaotic: a relative change of 1e-7 in the weights is soon one of 1e-3 in the losses, on
one device too. So every step is compared with one process that is given the weights of that step; the
curve is compared in high precision, where differences do not build up.
"""

from statistics import median

import torch
from nets import Distributed, full_state
from ranks import RankPools
from torch import Tensor

from fp8_dist import CastConfig, Float8LinearConfig, ScalingType, attach_update
from fp8_dist.linear import float8_layers

STEPS = 20
OFF = CastConfig(scaling_type=ScalingType.DISABLED)
HIGH_PRECISION = Float8LinearConfig(
    cast_config_input=OFF, cast_config_weight=OFF, cast_config_grad_output=OFF
)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """This rank's share of the mean of its data-parallel group."""
    return (output - target).square().sum() / (2 * 8 * 64)


def trained(config: Float8LinearConfig) -> tuple[list[str], list[float], list[float]]:
    """What is wrong with float8 weights of any step; relative differences of losses; losses."""
    float8 = config.gemm_enabled("output")
    world = Distributed(2, 2, config=config, gather=float8)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=5e-3) for m in (world.net, world.twin))
    if float8:
        attach_update(optimizer, world.net)
    wrong, losses, differences = list[str](), list[float](), list[float]()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        if float8:
            world.twin.load_state_dict(full_state(world.net))
        x = torch.randn(4, 8, 64, generator=generator)
        mine, target = world.mine(x), world.mine(x.flip(-1))

        def run(mine: Tensor = mine, target: Tensor = target) -> None:
            loss = loss_of(world.net(mine), target)
            loss.backward()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            losses.append(mean.item() / 2)

        if float8:
            wrong += [f"step {step}: {text}" for text in world.wrong_casts(run)]
        else:
            run()
        # Data-parallel ranks scale their activations by themselves.
        halves = zip(x.chunk(2), x.flip(-1).chunk(2), strict=True)
        expected = sum(loss_of(world.twin(half), t) for half, t in halves) / 2
        differences.append(abs(losses[-1] - expected.item()) / expected.item())
        expected.backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        wrong += [
            f"step {step}: {name}: no fresh scale"
            for name, layer in float8_layers(world.net).items()
            if float8 and not layer.float8_weight.cache.is_fresh(layer.weight)
        ]
    return wrong, differences, losses


def test_high_precision(ranks: RankPools) -> None:
    for wrong, differences, losses in ranks(4).run(trained, HIGH_PRECISION):
        assert wrong == []
        assert max(differences) < 1e-5
        assert losses[-1] < 0.9 * losses[0]


def test_float8(ranks: RankPools) -> None:
    for wrong, differences, losses in ranks(4).run(trained, Float8LinearConfig()):
        assert wrong == []
        # A row-parallel sum in another order makes a rare value round to another code.
        assert median(differences) < 5e-6
        assert max(differences) < 1e-3
        assert losses[-1] < 0.9 * losses[0]
