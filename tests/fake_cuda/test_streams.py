"""FSDP2's training steps on simulated CUDA streams: no data races, no memory reused too early."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist
from stream_hazards import Hazards
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8_dist import Float8LinearConfig, convert_to_float8_training, float8_layers, update_float8_scales
from scripts.common.candidates import OURS
from scripts.common.fake_cuda.device import fake_tensors
from scripts.common.fake_cuda.process import FakeCudaProcess

BLOCKS, DIM, STEPS = 4, 64, 3


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        update: call ``update_float8_scales`` after each step (precompute, sync, or both).
        prefetch: each block prefetches the next in forward, the one before in backward.
        explicit: unshard all blocks before the forward.
        evaluate: a forward without gradients, twice, before each optimizer step.
        micro_batches: per step.
        event: the event given to ``set_post_optim_event`` is recorded before the update.
        unshard_async: unshards of the second step on are asynchronous.
        cache: keep float8 shards between micro-batches.
    """

    recipe: str
    update: bool = True
    gather: bool = True
    prefetch: bool = False
    explicit: bool = False
    evaluate: bool = False
    micro_batches: int = 2
    event: bool = False
    unshard_async: bool = False
    cache: bool = True


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


@cache
def _mesh() -> DeviceMesh:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    return init_device_mesh("cuda", (8,), mesh_dim_names=("dp",))


def _model(training: Training, mesh: DeviceMesh) -> nn.Sequential:
    with torch.device("cuda"):
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(training.recipe),
        enable_fsdp_float8_all_gather="auto" if training.gather else False,
        cache_float8_shards=training.cache,
    )
    convert_to_float8_training(model, config=config)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    if training.prefetch:
        for before, after in zip(model, model[1:], strict=False):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    return model


def hazards_of(training: Training) -> Counter[str]:
    """The hazards in some steps of a training; called in the process with the device."""
    mesh = _mesh()
    with fake_tensors():
        model = _model(training, mesh)
        for layer in float8_layers(model).values():
            for history in layer.histories.values():  # a first sync reads values on the host
                history.load(torch.ones(1, device="cuda"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Hazards() as hazards:
            for step in range(STEPS):
                if step == 1 and training.unshard_async:
                    model._set_unshard_async_op(True)
                for _ in range(training.micro_batches):
                    x = torch.empty(32, DIM, device="cuda", dtype=torch.bfloat16)
                    if training.explicit:
                        for block in model:
                            block.unshard()
                    model(x).sum().backward()
                if training.evaluate:
                    with torch.no_grad():
                        model(x)
                        model(x)
                optimizer.step()
                optimizer.zero_grad()
                if training.event:
                    model.set_post_optim_event(torch.cuda.Event().record())
                if training.update:
                    update_float8_scales(model)
    return hazards.found


@pytest.mark.parametrize("recipe", OURS)
def test_steps(recipe: str, fake_cuda: FakeCudaProcess) -> None:
    for t in (Training(recipe), Training(recipe, event=True), Training(recipe,update=False)):
        found = fake_cuda.run(hazards_of, t)
        print(t)
        for k, n in found.most_common(12): print(n, k)
