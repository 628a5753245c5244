"""Delayed scales in compiled models."""

import pytest
import torch
from delayed_steps import DELAYED, amaxes, audited_steps, train
from nets import Distributed, Net
from ranks import RankPools

from fp8_dist import convert_to_float8_training


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(backend: str) -> None:
    torch._dynamo.reset()
    nets = [convert_to_float8_training(Net(layers=1), config=DELAYED) for _ in range(2)]
    nets[1].compile(backend=backend, fullgraph=True)
    assert train(nets[0], 3) == train(nets[1], 3)
    assert amaxes(nets[0]) == amaxes(nets[1])


def compiled(backend: str) -> bool:
    torch._dynamo.reset()
    worlds = [Distributed(1, 2, config=DELAYED, net_arguments={"layers": 1}) for _ in range(2)]
    worlds[1].net.compile(backend=backend)
    x = worlds[0].mine(torch.randn(4, 8, 64))
    found = [audited_steps(world.net, x, world.mesh)["amaxes"] for world in worlds]
    return found[0] == found[1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_tensor_parallel_models(ranks: RankPools, backend: str) -> None:
    assert ranks(2).run(compiled, backend, timeout=120) == [True, True]
