"""autocast in compiled layers, and of inputs that a style casts."""

import pytest
import torch
from autocast_steps import DTYPES, forward_and_backward, layer_of
from graphs import Compilations
from nets import Distributed, blocks
from ranks import RankPools
from reference import same_bits, sqnr

from fp8_dist import float8_layers


def test_compiled() -> None:
    """One graph for each autocast dtype; the same bits."""
    compilations = Compilations()
    layer = layer_of("tensorwise", bias=False)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, grad = torch.randn(32, 64), torch.randn(32, 48)
    dtypes = [None, *DTYPES]
    for dtype in dtypes * 2:
        expected, found = (forward_and_backward(f, x, grad, dtype) for f in (layer, compiled))
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
    assert (compilations.breaks, compilations.graphs) == (0, len(dtypes))


def on_a_mesh(compiled: bool) -> tuple[list[torch.dtype], float]:
    """dtypes of layers' outputs and of gradients, and the SQNR to one device, under autocast."""
    world = Distributed(1, 2, net_arguments={"layers": 1})
    model = blocks(world)
    outputs: list[torch.dtype] = []
    if compiled:
        torch._dynamo.reset()
        for block in model:
            block.compile(backend="aot_eager", fullgraph=True)
    else:
        for layer in float8_layers(world.net).values():
            layer.register_forward_hook(lambda layer, args, output: outputs.append(output.dtype))
    x = torch.randn(2, 8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = model(world.mine(x)), world.twin(x)
    output.sum().backward()
    gradients = {p.grad.dtype for p in world.net.parameters()}
    return [*outputs, output.dtype, *gradients], sqnr(world.mine(expected), output)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_inputs_that_a_style_casts(ranks: RankPools) -> None:
    """PrepareFloat8ModuleInput heeds autocast as the layers do, which get its float8 input."""
    eager = ranks(2).run(on_a_mesh, False)
    compiled = ranks(2).run(on_a_mesh, True, timeout=180)
    for dtypes, distance in eager:
        # The residual sum is fp32 again.
        layers = len(dtypes) - 2
        assert layers > 1
        assert dtypes == [torch.bfloat16] * layers + [torch.float32] * 2
        assert distance > 45  # parts of w2's output are rounded to bf16 before they are summed
    assert compiled == [(dtypes[-2:], distance) for dtypes, distance in eager]
