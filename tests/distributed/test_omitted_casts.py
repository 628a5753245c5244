"""Operands are cast only for GEMMs that run."""

from typing import Any

import pytest
import torch
from rank_tests import on_ranks
from ranks import device_mesh
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fp8_dist import Float8Linear, Float8LinearConfig, convert_to_float8_training
from fp8_dist.debug import comm_audit
from fp8_dist.tensor_parallel import Float8ColwiseParallel, apply_tp_plan


def layers(recipe: str) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    return convert_to_float8_training(net, config=Float8LinearConfig.from_recipe_name(recipe))


class Float8Results(TorchDispatchMode):
    """Counts the float8 tensors that operators of the library make."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.namespace == "fp8_dist":
            tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            self.count += sum(t.dtype is torch.float8_e4m3fn for t in tensors)
        return result


def test_what_no_gemm_takes_is_not_cast() -> None:
    counts = []
    for requires_grad, grad_mode in ((True, True), (False, True), (True, False)):
        layer = layers("rowwise")[0]
        x = torch.ones(16, 32, requires_grad=requires_grad)
        with torch.set_grad_enabled(grad_mode), Float8Results() as made:
            layer(x)
        counts.append(made.count)
    assert counts == [4, 3, 2]  # input and weight, each for two GEMMs


def gradients(layer: nn.Module, requires_grad: bool, reentrant: bool = False) -> list[Any]:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    x.requires_grad_(requires_grad)
    layer.weight.grad = None  # type: ignore[assignment]
    output = checkpoint(layer, x, use_reentrant=True) if reentrant else layer(x)
    output.square().sum().backward()
    return [x.grad, layer.weight.grad]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_scale_that_was_left_out_is_found_when_it_is_needed(compiled: bool) -> None:
    torch._dynamo.reset()
    layer, other = (layers("rowwise")[0] for _ in range(2))
    assert isinstance(layer, Float8Linear)
    if compiled:
        layer.compile(backend="aot_eager", fullgraph=True)
    expected = gradients(other, True)
    gradients(layer, False)
    torch.testing.assert_close(gradients(layer, True), expected, rtol=0, atol=0)
    # A pass without gradients, and one within the backward.
    found = gradients(layer, True, reentrant=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@on_ranks(2, returns=[0, 1, 0, 1])
def test_ranks_reduce_a_scale_once() -> list[int]:
    """A column-parallel layer, whose scales for grad_input cover all ranks, in several forwards."""
    net = layers("rowwise")
    apply_tp_plan(net, device_mesh(tp=2), {"0": Float8ColwiseParallel()})
    counts = []
    for requires_grad in (False, True, False, True):
        x = torch.ones(16, 32, requires_grad=requires_grad)
        with comm_audit() as audit:
            net[0](x)
        counts.append(audit.count())
    assert isinstance(net[0].weight, DTensor)
    return counts
