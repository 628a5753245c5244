"""Steps in captures of a CUDA graph, which are pretended, and eager code between replays."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from captures import captured, multiply, number
from nets import Distributed, full
from rank_tests import on_ranks
from ranks import device_mesh
from test_kept_casts import config_of
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8_dist import (
    convert_to_float8_training,
    invalidate_float8_scales,
    update_float8_scales,
)
from fp8_dist import device as devices
from fp8_dist.device import current_capture

NAMES = ["tensorwise", "rowwise_folded", "blockwise", "mxfp8", "mxfp8 mxfp4"]
Capture = Callable[[], AbstractContextManager[Any]]


def change(net: Any, factor: float, graph: Any) -> None:
    """Multiply weights in a replay of a graph, or without a graph."""
    multiply(net, factor)
    if graph is None:
        invalidate_float8_scales(net)
    else:
        graph.replay()


def results_of(net: Any, x: torch.Tensor, capture: Capture) -> Iterator[Any]:
    """Captured and eager steps, and evaluations after replays; yield what they compute, by name."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)

    def step(name: str, updates: bool = True) -> Iterator[Any]:
        if updates:
            update_float8_scales(net)
        for micro_batch in range(2):
            out = net(x + micro_batch)
            out.square().mean().backward()
            yield f"{name} {micro_batch}", out.detach().clone()
        for parameter_name, parameter in net.named_parameters():
            yield f"{name} {parameter_name}", full(parameter.grad).clone()
        optimizer.step()
        optimizer.zero_grad()

    def evaluated(name: str) -> Iterator[Any]:
        with torch.no_grad():
            yield name, net(x).clone()

    yield from step("eager")
    with capture() as first:
        yield from step("first capture, after an eager step")
    yield from evaluated("after a capture")
    update_float8_scales(net)
    change(net, 3.0, first)
    yield from evaluated("after an update and a replay")
    yield from step("eager, after a capture")
    update_float8_scales(net)
    with capture():
        yield from step("without an update", updates=False)
    with capture():
        update_float8_scales(net)
        yield from evaluated("a capture that writes nothing")
    yield from evaluated("after a capture that writes nothing")
    with capture() as updating:
        update_float8_scales(net)
    change(net, 0.2, updating)
    with capture():
        yield from evaluated("in another capture")
    update_float8_scales(net)
    with capture() as evaluating:
        change(net, 0.5, evaluating)  # the values that a replay sees
        yield from evaluated("a capture after an update")
    with capture() as unused:
        update_float8_scales(net)
    multiply(net, 3.0)  # what that capture computed is nowhere in memory before a replay
    if unused is None:
        invalidate_float8_scales(net)
    yield from evaluated("after a capture that was not replayed")
    update_float8_scales(net)
    change(net, 4.0, first)
    with capture():
        yield from step("last")


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (3, 1), (2, 2)])
@on_ranks("dp", "tp", returns={})
def test_steps_have_the_bits_of_eager_steps(dp: int, tp: int) -> dict[str, list[str]]:
    wrong = {}
    for name in NAMES:
        how: Any = {"dp": dp, "tp": tp, "sequence_parallel": False}
        worlds = [Distributed(**how, config=config_of(name, keep)) for keep in (True, False)]
        x = worlds[0].mine(torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(1)))
        found = dict(results_of(worlds[0].net, x, captured))
        expected = dict(results_of(worlds[1].net, x, nullcontext))
        assert found.keys() == expected.keys()
        differs = [key for key, value in found.items() if not torch.equal(value, expected[key])]
        wrong |= {name: differs} if differs else {}
    return wrong


def trains(net: Any, x: torch.Tensor) -> None:
    """(A compiled optimizer that is captured, too, writes unnoticed.)"""
    net(x).sum().backward()


@torch.no_grad()
def writes(net: Any, x: torch.Tensor) -> None:
    for parameter in net.parameters():
        parameter.mul_(1.5)


def updates(net: Any, x: torch.Tensor) -> None:
    update_float8_scales(net)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("action", [trains, writes, updates])
@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}])
@on_ranks(2, returns=[])
def test_a_replay_is_noticed(
    mesh: dict[str, int], action: Callable[..., None], stale: bool
) -> list[str]:
    """Replay a graph that does nothing else with the weights, after an update in eager code."""
    wrong = []
    for name in NAMES:
        outputs = []
        for capture in (captured, nullcontext):
            world = Distributed(**mesh, sequence_parallel=False, config=config_of(name, True))
            x = world.mine(torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(1)))
            update_float8_scales(world.net)
            if stale:
                writes(world.net, x)
            with capture() as graph:
                action(world.net, x)
            update_float8_scales(world.net)
            change(world.net, 3.0, graph)
            with torch.no_grad():
                outputs.append(world.net(x).clone())
        if not torch.equal(*outputs):
            wrong.append(name)
    return wrong


@on_ranks(2, returns=[])
def test_weights_that_were_gathered_before_a_replay_are_gathered_again() -> list[str]:
    wrong = []
    for name in NAMES:
        outputs = []
        for leaves_gathered in (False, True):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Linear(256, 64, bias=False))
            convert_to_float8_training(net, config=config_of(name, True))
            fully_shard(net, mesh=device_mesh(dp=2))
            sharded = SimpleNamespace(parameters=[*net.parameters()].copy)
            with captured() as graph:
                update_float8_scales(net)
            with torch.no_grad():
                if leaves_gathered:
                    net(torch.ones(4, 128))  # FSDP2 does not reshard the root
                multiply(sharded, 3.0)
                graph.replay()
                outputs.append(net(torch.ones(4, 128)).clone())
        if not torch.equal(*outputs):
            wrong.append(name)
    return wrong


def test_a_capture_may_end_in_two_halves() -> None:
    """As in torch 2.14, whose capture_end calls two methods that other code may call, too."""
    ended = []

    class Graph:
        capture_begin = replay = lambda self: None

        def capture_end_pre(self) -> None:
            ended.append("pre")

        def capture_end(self) -> None:
            self.capture_end_pre()
            ended.append("post")

    with patch.object(devices, "END_OF_CAPTURE", "capture_end_pre"):
        number(Graph)
    answers = {"is_initialized": lambda: True, "is_current_stream_capturing": lambda: True}
    with patch.multiple(torch.cuda, **answers):
        for end in ("capture_end_pre", "capture_end"):
            graph: Any = Graph()
            graph.capture_begin()
            assert current_capture() == current_capture()
            getattr(graph, end)()
            # What is captured now belongs to no graph that is known.
            assert current_capture() != current_capture()
    assert ended == ["pre", "pre", "post"]
