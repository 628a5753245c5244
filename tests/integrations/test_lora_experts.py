"""PEFT's adapters of the parameters of experts of one's own, whose base is stored in float8."""

from typing import Any

import pytest
import torch
from frozen_experts import STORED, Experts, batch, made
from nets import full
from peft import LoraConfig, get_peft_model
from rank_tests import on_ranks
from ranks import device_mesh
from reference import same_bits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import unfreeze_from_float8
from fp8_dist.fsdp import average_gradients_over
from fp8_dist.tensor_parallel import Float8ExpertParallel

ADAPTERS = LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=[],
    target_parameters=[f"0.{name}" for name in Experts.float8_weight_names],
    init_lora_weights=False,
)


def adapted(name: str, store: bool) -> tuple[nn.Module, Any]:
    """A base with adapters; the base's own stay as they are."""
    net = made(STORED[name]).requires_grad_(False)
    if not store:
        unfreeze_from_float8(net)
    torch.manual_seed(5)
    return get_peft_model(net, ADAPTERS), net[0]  # type: ignore[arg-type]


def by_ep(experts: Any) -> None:
    """Adapters are replicated over EP."""
    mesh = device_mesh(dp=1, ep=2)
    parallelize_module(experts.get_base_layer(), mesh["ep"], Float8ExpertParallel())
    for module in experts.modules():
        if isinstance(module, nn.Linear):
            distribute_module(module, mesh["ep"])
    fully_shard(experts, mesh=mesh["dp"])
    average_gradients_over(experts, mesh)


def trained(model: Any, steps: int = 2) -> dict[str, Tensor]:
    """The outputs and the trained parameters."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    optimizer, found = torch.optim.SGD(trained.values(), lr=0.1), {}
    for step in range(steps):
        output = model(batch(step))
        output.float().square().mean().sqrt().backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"output {step}"] = output.detach()
    return found | {name: full(p.detach()) for name, p in trained.items()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name, each in a.items() if not same_bits(each, b[name])]


@pytest.mark.parametrize("name", ["rowwise_folded", "mxfp8", "mxfp4", "1 x 32 in bf16"])
def test_adapters_train_as_beside_the_values(name: str) -> None:
    (model, _), (twin, _) = (adapted(name, store) for store in (True, False))
    found = trained(model)
    assert differing(found, trained(twin)) == []
    assert not same_bits(found["output 0"], found["output 1"])


@on_ranks(2, returns=[])
def test_adapters_on_meshes() -> list[str]:
    wrong = []
    for name in ("rowwise_folded", "1 x 32 in bf16"):
        for way in ("FSDP2", "EP"):
            found = []
            for store in (True, False):
                model, _ = adapted(name, store)
                experts = model.base_model.model[0]  # type: ignore[union-attr,index]
                if way == "EP":
                    by_ep(experts)
                else:
                    fully_shard(experts, mesh=device_mesh(dp=2))
                found.append(trained(model))
            wrong += [f"{name}, {way}: {each}" for each in differing(*found)]
    return wrong
