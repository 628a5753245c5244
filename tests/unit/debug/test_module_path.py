"""``ModulePath``: the name of the module that is running, forward and backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8_dist.debug.module_path import ModulePath

seen: list[str] = []
path: ModulePath


class Probe(torch.autograd.Function):
    """Identity that records the current path, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        seen.append(path.current)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        assert ctx.saved_tensors[0].shape == grad.shape  # this recomputes a checkpointed forward
        seen.append(f"{path.current}'")
        return grad


class Leaf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Probe.apply(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = Leaf(), Leaf(), Leaf()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(Probe.apply(self.q(x) + self.k(x)))


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return Probe.apply(x)


@contextmanager
def recorded() -> Iterator[None]:
    global path
    seen.clear()
    with ModulePath() as path:
        yield


FORWARD = ["blocks.0.q", "blocks.0.k", "blocks.0", "blocks.0.out"]
FORWARD += [name.replace("0", "1") for name in FORWARD] + [""]


@pytest.mark.parametrize("recompute", [False, True])
def test_forward_and_backward_of_nested_modules(recompute: bool) -> None:
    with recorded():
        Model(recompute)(torch.ones(2, requires_grad=True)).sum().backward()
        assert path.current == ""
    assert seen[:9] == FORWARD
    backward = [name for name in seen[9:] if name.endswith("'")]
    # q and k share their input; autograd runs the later one first.
    assert backward == [f"{name}'" for name in reversed(FORWARD)]
    again = [name for name in seen[9:] if not name.endswith("'")]
    assert sorted(again) == (sorted(FORWARD[:-1]) if recompute else [])


def test_the_gradient_of_an_input_alone() -> None:
    x = torch.ones(2, requires_grad=True)
    with recorded():
        torch.autograd.grad(Model()(x).sum(), x)
        assert path.current == ""
    assert seen[9:] == [f"{name}'" for name in reversed(FORWARD)]


def test_what_hooks_of_a_module_do_in_backward_is_inside_of_it() -> None:
    """FSDP2 gathers weights in a hook on the output's gradient."""
    model = Model()

    def gather_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: seen.append(f"gather in {path.current}"))

    for block in model.blocks:
        block.out.register_forward_hook(gather_in_backward)
    with recorded():
        model(torch.ones(2, requires_grad=True)).sum().backward()
    gathers = [name for name in seen if name.startswith("gather")]
    assert gathers == ["gather in blocks.1.out", "gather in blocks.0.out"]


def test_an_error_in_forward_leaves_no_trace() -> None:
    model = Model()
    raising = model.blocks[1].k.register_forward_pre_hook(lambda m, args: 1 / 0)
    with recorded():
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, requires_grad=True))
        raising.remove()
        assert path.current == ""
        seen.clear()
        model(torch.ones(2))
    assert seen == FORWARD
    assert path.current == ""


def test_a_traced_model_has_the_names_of_its_parts() -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    for layer in model.children():
        layer.register_forward_hook(lambda module, args, out: seen.append(path.current))
    with recorded():
        model(torch.ones(2))
    assert seen == ["0", "1"]
