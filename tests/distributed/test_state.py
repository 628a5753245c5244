"""State: checkpoints and optimizer state hold plain tensors under nn.Linear's keys."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from nets import Distributed, Net, full, net_plan, wrong_casts
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import same_bits, weights_used
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fp8_dist import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale
from fp8_dist.fsdp import Float8AllGatherWeight
from fp8_dist.tensor_parallel import apply_tp_plan

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


def kinds(state: dict[str, object]) -> set[tuple[str, str]]:
    """(type, type inside a DTensor) of every tensor in a (nested) state."""
    found: set[tuple[str, str]] = set()
    for value in torch.utils._pytree.tree_leaves(state):
        if isinstance(value, torch.Tensor):
            inside = value._local_tensor if isinstance(value, DTensor) else value
            found.add((type(value).__name__, type(inside).__name__))
    return found


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
@on_ranks("dp", "tp")
def test_model_and_optimizer_state_are_plain(dp: int, tp: int) -> None:
    world = Distributed(dp, tp)
    assert kinds(world.net.state_dict()) == {("DTensor", "Tensor")}
    for make in (torch.optim.AdamW, torch.optim.Adagrad, partial(torch.optim.SGD, momentum=0.9)):
        optimizer = make(world.net.parameters(), lr=1e-3)
        world.net(world.mine(torch.randn(4, 8, 64))).sum().backward()
        optimizer.step()
        state = kinds(optimizer.state_dict()["state"])
        assert state <= {("DTensor", "Tensor"), ("Tensor", "Tensor")}


def saved(folder: str, dp: int, tp: int) -> None:
    world = Distributed(dp, tp, net_arguments={"seed": 1})
    dcp.save({"model": world.net.state_dict()}, checkpoint_id=folder)


def loaded(folder: str, dp: int, tp: int) -> list[str]:
    """Names of tensors and casts that differ after loading."""
    target = Distributed(dp, tp, net_arguments={"seed": 2})
    precompute_float8_dynamic_scale(target.net)
    state = {"model": target.net.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    target.net.load_state_dict(state["model"])
    expected = Net(seed=1).state_dict()
    wrong = [n for n, v in target.net.state_dict().items() if not same_bits(full(v), expected[n])]
    with torch.no_grad(), weights_used(target.net) as used:
        target.net(target.mine(torch.randn(4, 8, 64)))
    return wrong + wrong_casts(used, expected, target.mesh["tp"])


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"), [((4, 1), (2, 2)), ((2, 2), (1, 2)), ((1, 4), (2, 1))]
)
def test_distributed_checkpoints_reshard(
    ranks: RankPools, tmp_path: Path, saved_as: tuple[int, int], loaded_as: tuple[int, int]
) -> None:
    ranks(4).run(saved, str(tmp_path), *saved_as, timeout=120)
    world_size = math.prod(loaded_as)
    assert ranks(world_size).run(loaded, str(tmp_path), *loaded_as) == [[]] * world_size


@on_ranks(4, returns=[])
def test_meta_init() -> list[str]:
    """meta init -> convert -> parallelize -> fully_shard -> to_empty -> load."""
    mesh = device_mesh(dp=2, tp=2)
    with torch.device("meta"):
        net = Net()
    convert_to_float8_training(net, config=GATHERED)
    apply_tp_plan(net, mesh["tp"], net_plan(net, True))
    for module in (*net.layers, net):
        fully_shard(module, mesh=mesh["dp"])
    net.to_empty(device="cpu")
    values = Net(seed=1).state_dict()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(distribute_tensor(values[name], p.device_mesh, p.placements))
    x = torch.randn(2, 8, 64).chunk(2, 1)[mesh.get_local_rank("tp")]
    with weights_used(net) as used:
        net(x.contiguous()).sum().backward()
    weights = [p for name, p in net.named_parameters() if name.endswith("weight")]
    assert {type(p._local_tensor) for p in weights} == {Float8AllGatherWeight}
    return wrong_casts(used, values, mesh["tp"])
