"""PEFT's LoRA beside a float8 base: the frozen weights cost nothing after the first step."""

import pytest
import torch
import torch.nn as nn
from nets import Net
from peft import LoraConfig, inject_adapter_in_model
from ranks import RankPools, device_mesh
from reference import same_bits
from torch.distributed.fsdp import fully_shard

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_layers,
    update_float8_scales,
)
from fp8_dist.debug import comm_audit


def trained(float8_gather: bool) -> tuple[list[torch.Tensor], list[int], list[str]]:
    """The adapters after some steps; amax all-reduces of each step; what has a gradient."""
    mesh = device_mesh(dp=2)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=float8_gather)
    net: nn.Module = convert_to_float8_training(Net(dim=64, hidden=128), config=config)
    torch.manual_seed(1)
    inject_adapter_in_model(LoraConfig(r=8, target_modules=["w1", "w2", "w3"]), net)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:  # zeros, which would hide the gradients of A
            nn.init.normal_(parameter, std=0.1)
    assert len(float8_layers(net)) == 6
    for layer in net.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    reduced = []
    for step in range(4):
        data = torch.Generator().manual_seed(2 * step + mesh.get_local_rank())
        with comm_audit(mesh) as audit:
            net(torch.randn(2, 4, 64, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            update_float8_scales(net)
        reduced.append(audit.count("all_reduce", dtype=torch.int32))
    with_gradients = [n for n, p in net.named_parameters() if p.grad is not None]
    adapters = [p.full_tensor() for n, p in net.named_parameters() if "lora" in n]
    return adapters, reduced, with_gradients


def compared() -> tuple[bool, list[int], bool]:
    adapters, reduced, with_gradients = trained(float8_gather=True)
    expected, _, _ = trained(float8_gather=False)
    same = all(map(same_bits, adapters, expected))
    return same, reduced, all("lora" in name for name in with_gradients)


@pytest.mark.filterwarnings("ignore")
def test_frozen_weights_cost_nothing_after_the_first_step(ranks: RankPools) -> None:
    same, reduced, only_adapters = ranks(2).run_same(compared)
    assert same
    assert only_adapters
    # The first step finds no scales: one all-reduce per weight, and that of the update. No later one
    # needs any.
    assert reduced == [7, 0, 0, 0]
