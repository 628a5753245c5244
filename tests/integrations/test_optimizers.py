"""Optimizers with float8 gathers of FSDP2: plain states, current scales, the same bits."""

import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.nn as nn
from nets import Net
from rank_tests import on_ranks
from ranks import device_mesh
from reference import same_bits
from schedulefree import AdamWScheduleFree
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit

from fp8_dist import Float8LinearConfig, attach_update, convert_to_float8_training
from fp8_dist.debug import comm_audit
from fp8_dist.mesh import local_tensor

Parameters = Iterator[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2], lr=1e-2),
    "torchao AdamW8bit": lambda p: AdamW8bit(p, lr=1e-2, block_size=64),
    "schedule-free AdamW": lambda p: AdamWScheduleFree(p, lr=1e-2),
}


def trained(name: str, float8_gather: bool, steps: int = 3) -> tuple[list[torch.Tensor], list[int]]:
    """The weights after some steps on 2 ranks, and the number of amax all-reduces per step."""
    mesh = device_mesh(dp=2)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=float8_gather)
    # GEMMs are float8 in either case; without float8 gathers, each layer casts its weight.
    net = convert_to_float8_training(Net(dim=64, hidden=128), config=config)
    for layer in net.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = OPTIMIZERS[name](net.parameters())
    if float8_gather:
        attach_update(optimizer, net)
    data = torch.Generator().manual_seed(mesh.get_local_rank())
    reduced = []
    for _ in range(steps):
        if isinstance(optimizer, AdamWScheduleFree):
            optimizer.train()
        with comm_audit(mesh) as audit:
            net(torch.randn(2, 4, 64, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        reduced.append(audit.count("all_reduce", dtype=torch.int32))
    # Optimizer states must not have the type of FSDP2's weights with float8 gathers.
    for value in itertools.chain.from_iterable(s.values() for s in optimizer.state.values()):
        assert "fp8_dist" not in type(local_tensor(value)).__module__
    if isinstance(optimizer, AdamWScheduleFree):
        # This changes weights outside of a step.
        optimizer.eval()
    with torch.no_grad():
        output = net(torch.ones(1, 4, 64))
    weights = [p.full_tensor() for p in net.parameters() if isinstance(p, DTensor)]
    return [*weights, output], reduced


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_training(name: str) -> None:
    with mock.patch.object(torch, "compile", lambda function, **_: function):  # used by torchao
        ours, reduced = trained(name, float8_gather=True)
        theirs, _ = trained(name, float8_gather=False)
    assert all(map(same_bits, ours, theirs))
    # The first step has no cached scales: one all-reduce per weight, and that of precompute.
    assert reduced == [7, 1, 1]
