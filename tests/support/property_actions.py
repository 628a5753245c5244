"""The actions of a train case on a model and its twin."""

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from property_cases import TrainCase, processes
from property_training import GatedNet, World, all_finite
from property_verdicts import WrongResult
from reference import same_values
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_dist import (
    Float8State,
    invalidate_float8_scales,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.fsdp.weight import Float8AllGatherWeight
from fp8_dist.mesh import local_tensor


def run_training(case: TrainCase) -> list[str]:
    """Run a case; called on each of its ranks. Raises WrongResult, or errors of the library.

    Returns the documented errors of actions, each of which must leave the model unchanged.
    """
    world = World(case)
    for i, action in enumerate(case.actions):
        try:
            ACTIONS[action](world)
        except WrongResult as error:
            raise WrongResult(f"after {list(case.actions[: i + 1])}: {error}") from None
    if case.differs:
        raise WrongResult("a rank with another config was not noticed")
    return world.refused


def load(net: nn.Module) -> None:
    with torch.no_grad():
        net.load_state_dict({name: tensor * 3 for name, tensor in net.state_dict().items()})


def edit(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)


def write_data(net: nn.Module) -> None:
    for parameter in net.parameters():
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        getattr(local, "plain", local).data.mul_(3)
    invalidate_float8_scales(net)


def write_after_precompute(world: World) -> None:
    """Write to weights between precompute and the next pass, in a way that must be noticed."""
    precompute_float8_dynamic_scale(world.net)
    weights = [parameter for parameter in world.net.parameters() if parameter.ndim == 2]
    local = [local_tensor(weight) for weight in weights]
    counted = all(isinstance(each, Float8AllGatherWeight) for each in local)
    kinds: list[Callable[[], object]] = [
        lambda: torch._foreach_mul_(weights, 3.0),
        lambda: [weight.data.mul_(3) for weight in weights],
        lambda: [weight.data[1:].mul_(3) for weight in weights],
        lambda: [each.detach().mul_(3) for each in local],
        lambda: [weight.copy_(weight.detach() * 3) for weight in weights],
    ]
    write = world.case.seed + world.passes
    with torch.no_grad():
        kinds[write % 5 if counted else 3 + write % 2]()
    (world.run if write % 3 else world.evaluate)()


def load_checkpoint(world: World) -> None:
    """Save, train a step, and restore the model and its histories by one ``dcp.load``."""
    # (The twin has the same histories, which are restored from its own state_dict.)
    histories = Float8State(world.twin).state_dict()
    with checkpoint_folder(processes(world.case.mesh)) as folder:
        state = {"model": world.net, "float8": Float8State(world.net)}
        no_dist = processes(world.case.mesh) == 1
        dcp.save(state, checkpoint_id=folder, no_dist=no_dist)
        step(world)
        dcp.load(state, checkpoint_id=folder, no_dist=no_dist)
    Float8State(world.twin).load_state_dict(histories)
    world.run()


def load_elsewhere(world: World) -> None:
    """Load a DCP checkpoint on another mesh, into a model with other weights, and continue."""
    histories = Float8State(world.twin).state_dict()
    before = world.weights()
    had_tp = world.tp > 1
    with checkpoint_folder(processes(world.case.mesh)) as folder:
        no_dist = processes(world.case.mesh) == 1
        state = {"model": world.net, "float8": Float8State(world.net)}
        dcp.save(state, checkpoint_id=folder, no_dist=no_dist)
        world.mesh_name = world.meshes[world.meshes[0] == world.mesh_name]
        world.build()
        edit(world.net)
        state = {"model": world.net, "float8": Float8State(world.net)}
        dcp.load(state, checkpoint_id=folder, no_dist=no_dist)
    after = world.weights()
    changed = [name for name in before if not same_values(before[name], after[name])]
    if changed:
        raise WrongResult(f"{changed} are not what was saved")
    if had_tp is not (world.tp > 1) and histories:
        # Tensor parallelism casts one input for both layers; only the first saves its history.
        first, other = histories["layers.0.w1"], histories["layers.0.w3"]
        other["input"] = [] if had_tp else first["input"]
    Float8State(world.twin).load_state_dict(histories)
    world.run()


@contextmanager
def checkpoint_folder(ranks: int) -> Iterator[str]:
    """A temporary folder for all ranks, which is deleted when they are done with it."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        if ranks > 1:
            dist.broadcast_object_list(folders)
        yield folders[0]
        if ranks > 1:
            dist.barrier()


def freeze(frozen: bool, net: GatedNet) -> None:
    for layer in net.layers:
        layer.w1.weight.requires_grad_(not frozen)


def step(world: World, update: bool = True, evaluates: bool = False) -> None:
    world.run()
    world.optimizer.step()
    if evaluates:
        world.evaluate()
    if update:
        world.update()


def scaled_step(world: World, overflow: bool = False) -> None:
    """Step with a GradScaler, which skips the optimizer step if a gradient is not finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))  # initializes the scaler
    world.run(overflow=overflow)
    before = world.weights()
    skips = not all_finite(grad for _, grad in world.gradients() if grad is not None)
    scaler.step(world.optimizer)
    scaler.update()
    after = world.weights()
    same = all(same_values(before[name], after[name]) for name in before)
    if skips and not (same and scaler.get_scale() == 1.0):
        raise WrongResult("a step with gradients that are not finite was not skipped")
    world.update()
    world.run()


def micro_batches(world: World, evaluates: bool = False) -> None:
    world.run()
    if evaluates:
        world.evaluate()
    world.run(accumulates=True)
    world.optimizer.step()
    world.update()


def deep_copy(world: World) -> None:
    if world.replicas == 1:  # FSDP2 modules can't be copied
        world.net = copy.deepcopy(world.net)
        world.optimizer = world.make_optimizer(world.net)
    world.run()


def changed(change: Callable[[nn.Module], object]) -> Callable[[World], None]:
    """An action that applies a change, and then checks that training uses the new values."""

    def take(world: World) -> None:
        world.both(change)
        world.run()

    return take


def written(change: Callable[[nn.Module], object]) -> Callable[[World], None]:
    """As `changed`, for changes of the parameters."""

    def take(world: World) -> None:
        world.reshard()
        changed(change)(world)

    return take


def toggle_checkpointing(world: World) -> None:
    world.checkpointing = not world.checkpointing
    world.run()


ACTIONS: dict[str, Callable[[World], None]] = {
    "step": step,
    "step without update": partial(step, update=False),
    "step, evaluate, update": partial(step, evaluates=True),
    "micro-batches": micro_batches,
    "micro-batches, evaluate": partial(micro_batches, evaluates=True),
    "evaluate": World.evaluate,
    "load_state_dict": written(load),
    "edit in place": written(edit),
    "write .data, invalidate": written(write_data),
    "freeze": written(partial(freeze, True)),
    "unfreeze": written(partial(freeze, False)),
    "deepcopy": deep_copy,
    "checkpointing": toggle_checkpointing,
    "precompute": changed(precompute_float8_dynamic_scale),
    "precompute, write": write_after_precompute,
    "dcp.load": load_checkpoint,
    "dcp.load, another mesh": load_elsewhere,
    "GradScaler": scaled_step,
    "GradScaler, overflow": partial(scaled_step, overflow=True),
    "sync": changed(sync_float8_amax_and_scale_history),
    "invalidate": changed(invalidate_float8_scales),
}
