"""FSDP2's training steps on simulated CUDA streams: no data races, no memory reused too early."""

import dataclasses
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from fake_cuda import streams
from fake_cuda.device import fake_tensors
from fake_cuda.process import FakeCudaProcess
from fake_cuda.world import meshes
from one_sum import sums
from stream_hazards import Hazards
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    float8_layers,
    update_float8_scales,
)
from fp8_dist.fsdp import set_gradient_transport, weight
from fp8_dist.mesh import local_tensor
from fp8_dist.weight.known import KnownWeight

BLOCKS, DIM, STEPS = 3, 64, 2


@dataclass(frozen=True)
class Training:
    """How a model is trained."""

    recipe: str
    update: bool = True  # by update_float8_scales after each step: precompute, sync, or both
    prefetch: bool = False  # each block prefetches the next in forward, the one before in backward
    explicit: bool = False  # unshard all blocks before the forward
    evaluate: bool = False  # two forwards without gradients before each optimizer step
    micro_batches: int = 2
    event: bool = False  # set_post_optim_event gets an event recorded before the update
    unshard_async: bool = False  # in the second step
    parts: bool = False  # the scales of each block are updated by themselves
    aside: bool = False  # a step's last forward finds a gather under way on a stream of the user
    pending: bool = False  # a gather is under way at the optimizer's step and the update
    invalidate: bool = False  # what that gather reads has been dropped
    transport: bool = False  # gradients in float8, summed from those that are accumulated
    nodes: bool = False  # the ranks are on two nodes
    alone: bool = False  # on one rank
    moves: bool = False  # each update runs on a stream of its own
    captured: bool = False  # each step begins with the update; all but the first are CUDA graphs


def drop_scales(model: nn.Module) -> None:
    """Free the memory of the cached statistics, as the next update does, of sharded parameters."""
    for parameter in model.parameters():
        local = local_tensor(parameter)
        if isinstance(local, KnownWeight):
            local.forget()
            local.known = torch.empty(0, dtype=torch.int32, device="cuda")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


def _model(training: Training, mesh: DeviceMesh) -> nn.Sequential:
    with torch.device("cuda"):
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    named = Float8LinearConfig.from_recipe_name
    packs = training.recipe == "mxfp4"
    config = named("mxfp8", weight_format="mxfp4") if packs else named(training.recipe)
    config = dataclasses.replace(config, enable_fsdp_float8_all_gather="auto")
    convert_to_float8_training(model, config=config)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    if training.prefetch:
        for before, after in pairwise(model):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
    if training.transport:
        sums(model)
        nodes = init_device_mesh("cuda", (2, 4)) if training.nodes else None
        set_gradient_transport(model, "float8", nodes=nodes)
    return model


def hazards_of(training: Training) -> Counter[str]:
    """The hazards in some steps of a training; called in the process with the device."""
    return followed(training).found


def held_by(training: Training) -> Counter[str]:
    """The bytes of blocks that ``record_stream`` holds back in some steps."""
    return followed(training).held


def followed(training: Training) -> Hazards:
    mesh = meshes(dp=8)["tp" if training.alone else "dp"]
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
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph) if training.captured and step else nullcontext():
                    if training.captured:
                        _update(model, training)
                    _run(model, training)
                    optimizer.step()
                    optimizer.zero_grad()
                if not training.captured:
                    _update(model, training)
            if training.captured:
                graph.replay()
                _run(model, training)
    return hazards


def _run(model: nn.Sequential, training: Training) -> None:
    """Run forward and backward of each micro-batch, and what else precedes an optimizer's step."""
    for batch in range(training.micro_batches):
        if training.aside and batch == training.micro_batches - 1:
            _unshard_aside(model)
            if training.invalidate:
                drop_scales(model)
            for size in (1, DIM, 2 * DIM * DIM):
                torch.zeros(size, device="cuda")
        x = torch.empty(32, DIM, device="cuda", dtype=torch.bfloat16)
        if training.explicit:
            for block in model:
                block.unshard()  # type: ignore[operator]
        model(x).sum().backward()
    if training.evaluate:
        with torch.no_grad():
            model(x)
            model(x)
    if training.pending:
        _unshard_aside(model)


def _update(model: nn.Sequential, training: Training) -> None:
    if training.event:
        model.set_post_optim_event(torch.cuda.Event().record())
    stream = torch.cuda.Stream() if training.moves else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if training.update:
            for part in model if training.parts else [model]:
                update_float8_scales(part)
    torch.cuda.current_stream().wait_stream(stream)


def _unshard_aside(model: nn.Sequential) -> None:
    (aside := torch.cuda.Stream()).wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        model[-1].unshard(async_op=True)  # type: ignore[operator]


def hazards_without(name: str, training: Training) -> Counter[str]:
    """The hazards where a method, given by its full name, does nothing, or yields nothing."""
    with patch(name, lambda *args, **kwargs: ()):
        return hazards_of(training)


OPTIONS = {
    "no update": {"update": False, "evaluate": True},
    "prefetch": {"prefetch": True, "evaluate": True},
    "event, prefetch": {"event": True, "prefetch": True, "micro_batches": 1},
    "event, explicit": {"event": True, "explicit": True},
    "event, asynchronous": {"event": True, "unshard_async": True, "micro_batches": 3},
    "transport": {"transport": True, "micro_batches": 3, "prefetch": True},
    "transport, nodes": {"transport": True, "nodes": True, "micro_batches": 3, "prefetch": True},
    "transport, alone": {"transport": True, "alone": True, "micro_batches": 3},
    "moves": {"moves": True, "prefetch": True},
    "aside": {"aside": True, "micro_batches": 1, "explicit": True},
    "aside, invalidate": {"aside": True, "invalidate": True, "explicit": True},
    "aside, event": {"aside": True, "invalidate": True, "event": True},
    "aside, parts": {"aside": True, "invalidate": True, "parts": True, "micro_batches": 1},
    "captured": {"captured": True, "evaluate": True},
    "captured, event": {"captured": True, "event": True, "prefetch": True},
    "captured, asynchronous": {"captured": True, "unshard_async": True, "explicit": True},
    "captured, aside": {"captured": True, "update": False, "aside": True, "invalidate": True},
}


# Every option, and every recipe whose weights are gathered in a different way.
CASES = {
    "tensorwise": (
        *("no update", "event, asynchronous", "aside, invalidate", "transport, alone", "moves"),
        *("captured", "captured, event", "captured, asynchronous", "captured, aside"),
    ),
    "rowwise": ("event, prefetch",),
    "rowwise_folded": (
        "transport",
        "transport, nodes",
        "event, explicit",
        "aside, parts",
        "captured, event",
    ),
    "mxfp4": ("prefetch", "aside", "captured, event"),
    "delayed": ("event, prefetch", "aside, event"),
}


@pytest.mark.parametrize(
    ("recipe", "options"), [(recipe, options) for recipe in CASES for options in CASES[recipe]]
)
def test_steps(recipe: str, options: str, fake_cuda: FakeCudaProcess) -> None:
    found = fake_cuda.run(hazards_of, Training(recipe, **OPTIONS[options]))
    assert not found, shown(found)


# What makes statistics (all-reduces for tensors, kernels for rows and histories) and kept casts.
_MADE = r"(all_reduce on NCCL|(_many|_cast_many|amax) on (compute|stream \d+)) .*"
_SCALES_TOO_EARLY = f"(_cast|add|all_gather_copy_in) on .* reads what {_MADE}"
_EVENT = Training("tensorwise", event=True)
_INVALIDATED = Training("tensorwise", aside=True, invalidate=True)


@pytest.mark.parametrize(
    ("left_out", "training", "expected"),
    [
        (
            "fp8_dist.fsdp.update.mark_scales_ready",
            Training("delayed", event=True),
            f"{_SCALES_TOO_EARLY}|memory of .* is allocated again before stack on compute .*",
        ),
        ("fp8_dist.fsdp.precompute.mark_scales_ready", _EVENT, _SCALES_TOO_EARLY),
        # What gathers on other streams need.
        (
            f"{weight.__name__}.keep_for",
            dataclasses.replace(_INVALIDATED, explicit=True),
            "memory of compute .* before _cast on .*; made at .*:all_reduce_max .*",
        ),
        # The same in a capture.
        (
            "fp8_dist.fsdp.precompute.mark_scales_ready",
            dataclasses.replace(_EVENT, captured=True),
            _SCALES_TOO_EARLY,
        ),
        (
            f"{weight.__name__}.keep_for",
            dataclasses.replace(_INVALIDATED, captured=True, explicit=True, update=False),
            "memory of .* before _cast on .*; made at .*:all_reduce_max .*",
        ),
    ],
)
def test_what_the_library_must_not_leave_out(
    left_out: str, training: Training, expected: str, fake_cuda: FakeCudaProcess
) -> None:
    found = fake_cuda.run(hazards_without, left_out, training)
    assert found
    for hazard in found:
        assert re.fullmatch(expected, hazard), shown(found)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp4", "delayed"])
def test_a_gather_under_way_keeps_what_it_reads(recipe: str, fake_cuda: FakeCudaProcess) -> None:
    """(That the optimizer writes to weights meanwhile, which FSDP2 may gather, is the user's.)"""
    wait = f"{weight.__name__}._wait_for_readers"
    training = Training(recipe, pending=True)
    for found, is_left_out in (
        (fake_cuda.run(hazards_of, training), False),
        (fake_cuda.run(hazards_without, wait, training), True),
    ):
        reused = [text for text in found if text.startswith("memory of compute is allocated again")]
        assert any("before all_gather_copy_in" in text for text in reused) == is_left_out
        assert is_left_out or not reused, shown(found)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded", "mxfp4"])
def test_new_casts_take_the_memory_of_old_ones(recipe: str, fake_cuda: FakeCudaProcess) -> None:
    """``record_stream`` would hold it back while the host is ahead: two casts of each weight."""
    bytes_of_casts = BLOCKS * 4 * DIM * DIM // 8 // (2 if recipe == "mxfp4" else 1)
    training = Training(recipe, prefetch=True, micro_batches=1)
    assert max(fake_cuda.run(held_by, training).values(), default=0) < bytes_of_casts // 4
    # Neither does a graph whose gathers cast by themselves, on the streams that read.
    captured = dataclasses.replace(training, captured=True, update=False)
    assert max(fake_cuda.run(held_by, captured).values(), default=0) < bytes_of_casts // 4
    # An update on another stream can't take it.
    moved = dataclasses.replace(training, moves=True)
    assert max(fake_cuda.run(held_by, moved).values()) >= bytes_of_casts


def test_waits_of_fsdp(fake_cuda: FakeCudaProcess) -> None:
    wait = f"{streams.__name__}.Stream.wait_event"
    found = fake_cuda.run(hazards_without, wait, Training("tensorwise"))
    assert any("reads what" in hazard for hazard in found), shown(found)


def shown(found: Counter[str]) -> str:
    return "\n".join(f"{count} x {hazard}" for hazard, count in found.most_common(10))
