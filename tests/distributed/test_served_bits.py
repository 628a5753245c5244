"""The weights that a sharded model has trained are, byte for byte, those that an engine makes."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from engines import FORMS, engine_cast
from nets import Net, full, net_plan
from rank_tests import on_ranks
from ranks import device_mesh
from reference import same_bits
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

from fp8_dist import (
    Float8LinearConfig,
    attach_update,
    convert_to_float8_training,
    float8_layers,
    float8_state_dict,
)
from fp8_dist.tensor_parallel import apply_tp_plan

SIZES = {"dim": 192, "hidden": 320, "layers": 1}  # shards cut blocks


def trained(config: Float8LinearConfig, dp: int, tp: int) -> Net:
    """A model after 5 steps of AdamW."""
    net = Net(**SIZES)
    convert_to_float8_training(net, config=config)
    mesh = device_mesh(dp=dp, tp=tp)
    if tp > 1:
        apply_tp_plan(net, mesh["tp"], net_plan(net, False))
    if dp > 1:
        for module in (*net.layers, net):
            fully_shard(module, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    attach_update(optimizer, net)
    for _ in range(5):
        net(torch.randn(4, 8, SIZES["dim"])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2)])
@on_ranks("dp", "tp", returns=[])
def test_weights_are_those_of_the_engine(dp: int, tp: int) -> list[str]:
    """Runs on each rank: the weights, of all forms, that differ from the engine's."""
    found = []
    for form, source in product(FORMS, ("master", "bf16")):
        options = {} if form == "ue8m0" else {"scale_format": "fp32"}
        config = Float8LinearConfig.from_recipe_name("blockwise", weight_source=source, **options)
        config = replace(config, enable_fsdp_float8_all_gather="auto", pad_inner_dim=True)
        net = trained(config, dp, tp)
        masters, state = get_model_state_dict(net), float8_state_dict(net, full_state_dict=True)
        assert len(float8_layers(net)) == 3
        for name in float8_layers(net):
            master = full(masters[f"{name}.weight"])
            sent = master.bfloat16() if source == "bf16" else master
            codes, scales = engine_cast(sent, form, 128, 128)
            if not same_bits(state[f"{name}.weight"], codes):
                found.append(f"codes of {name}, {form}, {source}")
            if not same_bits(state[f"{name}.weight_scale_inv"], scales):
                found.append(f"scales of {name}, {form}, {source}")
    return found
