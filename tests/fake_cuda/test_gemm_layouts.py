"""Operands of float8 GEMMs on every path, on none of which the host waits for the device."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from fake_cuda.counter import Counts, KernelCounter
from fake_cuda.device import fake_tensors
from fake_cuda.process import FakeCudaProcess
from fake_cuda.world import meshes
from nets import Net, net_plan
from stream_hazards import Hazards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_layers,
    update_float8_scales,
)
from fp8_dist.tensor_parallel import apply_tp_plan
from scripts.common.recipes import OURS

DIM, HIDDEN, BATCH, SEQUENCE = 256, 384, 2, 32


@dataclass(frozen=True)
class Path:
    """A way to distribute a model over 8 ranks."""

    dp: int = 1  # sizes of the axes; 1: FSDP2, or TP with SP, is left out
    tp: int = 1
    offload: bool = False  # FSDP2 keeps parameters on the CPU
    odd: bool = False  # sizes that are no multiples of 16, which are padded


OFFLOAD = "FSDP2, CPU offload"
PATHS = {
    "one device": Path(),
    "one device, odd sizes": Path(odd=True),
    "FSDP2": Path(dp=8),
    "TP + SP": Path(tp=8),
    "FSDP2 x TP": Path(dp=2, tp=4),
    OFFLOAD: Path(dp=8, offload=True),
}


def _net(recipe: str, path: Path, mesh: dict[str, DeviceMesh]) -> Net:
    odd = 7 if path.odd else 0
    with torch.device("cuda"):
        net = Net(DIM + odd, HIDDEN + odd, layers=1)
    if path.dp == 1:
        for parameter in net.parameters():  # before the conversion: fake ones can't be swapped
            parameter.data = parameter.data.bfloat16()
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        enable_fsdp_float8_all_gather="auto" if path.dp > 1 else False,
        pad_inner_dim=path.odd,
    )
    convert_to_float8_training(net, config=config)
    if path.tp > 1:
        apply_tp_plan(net, mesh["tp"], net_plan(net, sequence_parallel=True))
    if path.dp == 1:
        return net
    arguments: dict[str, Any] = {
        "mesh": mesh["dp"],
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "offload_policy": CPUOffloadPolicy() if path.offload else OffloadPolicy(),
    }
    for module in (*net.layers, net):
        fully_shard(module, **arguments)
    return net


def count_step(recipe: str, path: Path) -> tuple[Counts, Counter[str]]:
    """Counts of the last step, with the update after it, and the hazards of all steps."""
    mesh = meshes(path.dp, path.tp) if path.dp * path.tp > 1 else {}
    with fake_tensors():
        net = _net(recipe, path, mesh)
        if path.offload:
            net.cpu()
        for layer in float8_layers(net).values():
            for history in layer.histories.values():
                history.load(torch.ones(1, device="cuda"))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with Hazards() as hazards:
            # The second step is the first one with scales of an update: the addresses of the shards
            # that it casts are copied to the device then, once.
            for _ in range(3):
                counter = KernelCounter()
                _step(net, path, counter)
                optimizer.step()
                optimizer.zero_grad()
                with counter:
                    update_float8_scales(net)
    return counter.counts, hazards.found


def _step(net: Net, path: Path, counter: KernelCounter) -> None:
    size = (BATCH, SEQUENCE // path.tp, DIM)
    if path.odd:
        size = (BATCH, SEQUENCE + 1, DIM + 7)
    x = torch.empty(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.empty_like(x)
    with counter:
        net(x).backward(grad)


# Each recipe on two paths, and each path with two recipes or more.
@pytest.mark.parametrize(
    ("recipe", "path"),
    [
        (recipe, path)
        for (i, recipe), (j, path) in product(enumerate(OURS), enumerate(PATHS))
        if (i + j) % len(PATHS) in (0, 3)
    ],
)
def test_a_step(recipe: str, path: str, fake_cuda: FakeCudaProcess) -> None:
    counts, hazards = fake_cuda.run(count_step, recipe, PATHS[path])
    # (The device that is faked has no GEMM for blocks of 32, nor for blocks in odd sizes.)
    block_gemm = "mm" if PATHS[path].odd else "_scaled_mm_v2"
    name = {"blockwise": block_gemm, "mxfp8": "mm"}.get(recipe, "_scaled_mm")
    gemms = [kernel for kernel in counts.kernels if kernel.name == name]
    assert len(gemms) == (6 if recipe == "rowwise_with_gw_hp" else 9)
    assert counts.problems == []
    assert not hazards
    if path == OFFLOAD and recipe in ("tensorwise", "rowwise_folded", "blockwise", "mxfp8"):
        # One copy: the amaxes of all shards, which the CPU computes and the GPU reduces and uses.
        assert counts.syncs == ["_to_copy from cpu to cuda"]
    else:
        assert counts.syncs == []
