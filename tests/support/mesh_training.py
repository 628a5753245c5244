"""Training on a mesh of any device type, compared with the same training on one device."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from nets import Net, full, net_plan
from reference import sqnr
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from fp8_dist import Float8LinearConfig, convert_to_float8_training, update_float8_scales
from fp8_dist.tensor_parallel import apply_tp_plan


def trained(
    recipe: str,
    mesh: DeviceMesh,
    device: str,
    *,
    data: tuple[str, ...] = ("dp",),
    hidden: int = 96,
    offload: bool = False,
    sequence_parallel: bool = False,
    changes: bool = False,
) -> list[float]:
    """The SQNR of outputs and weights in three steps, compared with one device.

    Every rank has the same batches, or with `sequence_parallel` its part of each sequence. The axis
    "tp" of the mesh is tensor-parallel. FSDP2 shards over the last axis of `data`, and replicates
    over the others. `hidden`: the size of layers; shards may be uneven. `offload`: keep parameters
    on the CPU. `changes`: compare the changes of weights, which are small, instead of weights.
    """
    config = replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True)
    sharded = mesh[data].size() > 1 or offload
    parts = mesh["tp"].size() if sequence_parallel else 1

    def part(x: torch.Tensor) -> torch.Tensor:
        rank = mesh.get_local_rank("tp") if parts > 1 else 0
        return x.chunk(parts, dim=1)[rank].contiguous()

    with torch.device("cpu") if offload else nullcontext():
        net, twin = Net(hidden=hidden), Net(hidden=hidden)
    twin.to(device)
    if not offload:
        net.to(device)
    convert_to_float8_training(twin, config=config)
    gather = "auto" if sharded else False
    convert_to_float8_training(net, config=replace(config, enable_fsdp_float8_all_gather=gather))
    if mesh["tp"].size() > 1:
        apply_tp_plan(net, mesh["tp"], net_plan(net, sequence_parallel))
    if sharded:
        options: dict[str, Any] = {}
        if offload:  # memory is pinned for a GPU
            options = {"offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda")}
        for module in (*net.layers, net):
            fully_shard(module, mesh=mesh[data], **options)
    initial = [parameter.detach() * changes for parameter in twin.parameters()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, twin)]
    found = []
    for step in range(3):
        generator = torch.Generator("cpu").manual_seed(step)
        x = torch.randn(4, 8, 64, generator=generator, device="cpu").to(device)
        outputs = [net(part(x)), twin(x)]
        for output, optimizer, model in zip(outputs, optimizers, (net, twin), strict=True):
            (output.square().sum() / x.numel()).backward()  # the mean, or this rank's part of it
            optimizer.step()
            optimizer.zero_grad()
            update_float8_scales(model)
        found.append(sqnr(part(outputs[1]), outputs[0]))
    weights = zip(net.parameters(), twin.parameters(), initial, strict=True)
    # (Offloaded weights are moved to the GPU first, because NCCL can't gather CPU tensors.)
    each = ((full(mine.detach().to(device)), theirs, zero) for mine, theirs, zero in weights)
    return found + [sqnr(theirs - zero, mine - zero) for mine, theirs, zero in each]
