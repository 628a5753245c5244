"""On one GPU: FSDP2's streams when the compute stream falls behind."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from delayed_steps import amaxes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    update_float8_scales,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SLEEP = 2_000_000  # cycles of the GPU, about a millisecond


class _Slow(nn.Module):
    """Linear layers that delay the compute stream in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 512, bias=False)
        self.down = nn.Linear(512, 256, bias=False)
        self.cycles = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(_Wait.apply(x, self.cycles))
        return x + self.down(_Wait.apply(torch.relu(hidden), self.cycles))


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cycles):  # type: ignore[no-untyped-def]
        ctx.cycles = cycles
        _wait(cycles)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        _wait(ctx.cycles)
        return grad.clone(), None


def _wait(cycles: int) -> None:
    if cycles:
        torch.cuda._sleep(cycles)
    elif DEVICE == "cuda":
        torch.cuda.synchronize()


def histories_of_steps(cycles: int, event: bool) -> dict[str, list[float]]:
    """The amax histories after five steps under FSDP2. With 0 cycles, streams are synchronized.

    The other rank of the mesh does not exist: collectives are fake. Gradients are not used; weights
    change by a fixed factor.
    """
    mesh = init_device_mesh(DEVICE, (2,))
    torch.manual_seed(0)
    net = nn.Sequential(*(_Slow() for _ in range(4))).to(DEVICE)
    for block in net:
        block.cycles = cycles
    delayed = Float8LinearConfig.from_recipe_name("delayed")
    config = replace(delayed, enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(net, config=config)
    for module in (*net, net):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    for step in range(5):
        for micro_batch in range(2):
            generator = torch.Generator().manual_seed(10 * step + micro_batch)
            net(torch.randn(256, 256, generator=generator).to(DEVICE)).sum().backward()
        with torch.no_grad():
            for weight in net.parameters():
                weight.to_local().mul_(1.25)
                weight.grad = None
        if event:
            net.set_post_optim_event(torch.cuda.current_stream().record_event())
        update_float8_scales(net)
        _wait(cycles)
    return amaxes(net)


@pytest.mark.parametrize("event", [False, True])
def test_delayed_histories_where_the_compute_stream_is_slow(event: bool) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        expected = histories_of_steps(0, event)
        assert len(expected) == 24
        weight_histories = [h for name, h in expected.items() if name.endswith("weight")]
        assert all(len(set(history)) > 3 for history in weight_histories)
        assert histories_of_steps(SLEEP, event) == expected
    finally:
        dist.destroy_process_group()
