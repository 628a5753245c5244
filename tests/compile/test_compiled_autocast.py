"""autocast in compiled layers, and with inputs that a style casts."""

import torch
from autocast_steps import DTYPES, forward_and_backward, layer_of
from graphs import Compilations
from nets import Distributed, blocks
from rank_tests import on_ranks
from reference import same_bits, sqnr

from fp8_dist import float8_layers


def test_compiled() -> None:
    """There is one graph per autocast dtype, with the bits of eager code."""
    compilations = Compilations()
    layer = layer_of("tensorwise", bias=False)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, grad = torch.randn(32, 64), torch.randn(32, 48)
    dtypes = [None, *DTYPES]
    for dtype in dtypes * 2:
        expected, found = (forward_and_backward(f, x, grad, dtype) for f in (layer, compiled))
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
    assert (compilations.breaks, compilations.graphs) == (0, len(dtypes))


@on_ranks(2)
def test_inputs_that_a_style_casts() -> None:
    """PrepareFloat8ModuleInput respects autocast, like the layers that get its float8 input."""
    world = Distributed(1, 2, net_arguments={"layers": 1})
    dtypes: list[torch.dtype] = []
    for layer in float8_layers(world.net).values():
        layer.register_forward_hook(lambda layer, args, output: dtypes.append(output.dtype))
    x = torch.randn(2, 8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = blocks(world)(world.mine(x)), world.twin(x)
    output.sum().backward()
    assert dtypes == [torch.bfloat16] * 3
    # The residual sum is fp32 again.
    assert {output.dtype, *(p.grad.dtype for p in world.net.parameters())} == {torch.float32}
    # w2's partial outputs are rounded to bf16 before they are summed.
    assert sqnr(world.mine(expected), output) > 45
