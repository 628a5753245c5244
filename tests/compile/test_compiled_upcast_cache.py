"""Graphs keep no upcast copies of GEMM operands."""

from typing import Any

import torch
from reference import same_bits

from fp8_dist import Float8Linear, Float8LinearConfig
from fp8_dist.kernels.cpu.gemm import left_upcasts

ROWS, FEATURES, OUT = 96, 64, 48
BF16 = torch.bfloat16


def layers(count: int, recipe: str = "tensorwise") -> list[Float8Linear]:
    config = Float8LinearConfig.from_recipe_name(recipe)
    sizes: Any = FEATURES, OUT, False, None, BF16
    return [Float8Linear(*sizes, config=config) for _ in range(count)]


def an_input(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS,)), FEATURES, dtype=BF16, requires_grad=True)


def test_a_graph_keeps_nothing() -> None:
    shared = layers(2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return shared[0](x) + shared[1](x)

    found = []
    for run in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        left_upcasts._entry = None
        x = an_input()
        output = run(x)
        assert (left_upcasts._entry is None) is (run is not forward)
        output.square().sum().backward()
        found.append(x.grad)
    assert found[0] is not None
    assert found[1] is not None
    assert same_bits(*found)
