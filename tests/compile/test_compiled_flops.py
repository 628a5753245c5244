"""torch's FlopCounterMode counts the GEMMs in graphs of float8 layers and experts."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist.moe import Float8ExpertsConfig, grouped_linear

CASES = ["tensorwise", "blockwise", "experts"]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 96, 64))
        self.offs = nn.Buffer(torch.tensor([*accumulate([5, 3, 0, 24])]))

    def forward(self, x: Tensor) -> Tensor:
        output = grouped_linear(x, self.w, self.offs, Float8ExpertsConfig())
        assert isinstance(output, Tensor)
        return output


def made(case: str) -> nn.Module:
    if case == "experts":
        return Experts()
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU())
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(case))


def flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("case", CASES)
def test_compiled(case: str) -> None:
    model, x = made(case), torch.randn(32, 64, requires_grad=True)
    compiled = torch.compile(model, backend="aot_eager")
    loss = compiled(x).sum()
    assert flops(loss.backward) == 2 * 2 * 32 * 64 * 96  # of the graph
    assert flops(lambda: compiled(x)) == 2 * 32 * 64 * 96  # torch runs a forward eagerly, then


@pytest.mark.parametrize("case", CASES)
def test_exported(case: str) -> None:
    x = torch.randn(32, 64)
    program = torch.export.export(made(case).requires_grad_(False), (x,)).module()
    assert flops(lambda: program(x)) == 2 * 32 * 64 * 96
