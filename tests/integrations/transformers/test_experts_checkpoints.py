"""Checkpoints of experts: from any mesh to any other, and to an unconverted model."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hf_experts import IDS, made, step
from hf_models import build
from nets import full
from ranks import RankPools, device_mesh
from reference import same_bits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import attach_update
from fp8_dist.moe import convert_experts_to_float8_training, float8_experts
from fp8_dist.tensor_parallel import Float8ExpertParallel

State = dict[str, Tensor]


def placed(kind: str) -> nn.Module:
    """A model on the mesh of a kind, with random weights, which a checkpoint must replace."""
    model = made("mixtral")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    mesh = device_mesh(ranks=dist.get_world_size())
    for experts in float8_experts(model).values():
        if kind == "EP":
            parallelize_module(experts, mesh, Float8ExpertParallel())
        else:
            fully_shard(experts, mesh=mesh, shard_placement_fn=lambda _: Shard(int(kind[-1])))
    if kind != "EP":
        fully_shard(model, mesh=mesh)
    return model


def whole_state(model: Any, optimizer: Any) -> State:
    """The state of a model and its optimizer, by name."""
    state, optimizer_state = get_state_dict(model, optimizer)
    found = {name: full(tensor).clone() for name, tensor in state.items()}
    for name, each in optimizer_state["state"].items():
        found |= {f"{name}: {key}": full(value).clone() for key, value in each.items()}
    return found


def resumed(kind: str, source: str, target: str) -> tuple[State, Tensor, State]:
    """The state and logits after loading, and the state after two more steps, which is saved.

    All ranks have the same tokens, so that EP ranks agree on parameters outside of experts.
    """
    model = placed(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    attach_update(optimizer, model)

    def trained() -> Tensor:
        logits, _ = step(model, IDS[:1])
        optimizer.step()
        optimizer.zero_grad()
        return logits

    trained()  # caches scales of the old weights, and creates optimizer states
    if source:
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=source)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    loaded, logits = whole_state(model, optimizer), trained()
    trained()
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=target)
    return loaded, logits, whole_state(model, optimizer)


def different(a: State, b: State) -> list[str]:
    return [n for n in a.keys() | b.keys() if n not in a or n not in b or not same_bits(a[n], b[n])]


MESHES = [("EP", 2), ("EP", 4), ("FSDP2 on dim 0", 4), ("FSDP2 on dim 1", 2)]


def test_from_mesh_to_mesh(ranks: RankPools, tmp_path: Path) -> None:
    """Resume from each mesh on the next, and finally on one device, converted or not."""
    source, expected = "", State()
    for kind, size in MESHES:
        target = str(tmp_path / f"{kind} {size}")
        loaded, logits, saved = ranks(size).run(resumed, kind, source, target)[0]
        if source:
            assert different(loaded, expected) == [], kind
            assert same_bits(logits_of(expected), logits), kind
        source, expected = target, saved
    model = made("mixtral")
    step(model)  # caches scales of the old weights
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=source, no_dist=True)
    model.load_state_dict(state)
    assert different(state, {name: expected[name] for name in build("mixtral").state_dict()}) == []
    assert same_bits(model(IDS[:1]).logits, logits_of(expected))


def logits_of(state: State) -> Tensor:
    """The logits of a model that loads a state before it is converted."""
    model: Any = build("mixtral")
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    logits: Tensor = convert_experts_to_float8_training(model)(IDS[:1]).logits
    return logits
