"""One linear layer, to be run in the process of a fake CUDA device."""

from typing import NamedTuple

import torch
from torch import nn

from fake_cuda.counter import Counts, KernelCounter
from fake_cuda.device import FakeCudaMode, capability, fake_tensors
from fake_cuda.inductor import compiled_code_is_counted
from fp8_dist import Float8Linear, freeze_to_float8
from fp8_dist.kernels.blocks import pack_blocks
from fp8_dist.kernels.e2m1 import unpack_e2m1
from scripts.bench.layers import Layer
from scripts.common.candidates import linear_of


class LayerShape(NamedTuple):
    """The shape of a layer and its input; the default is w1 of Llama 8B."""

    rows: int = 8192
    in_features: int = 4096
    out_features: int = 14336


def layer_on_fake_cuda(name: str, shape: LayerShape, mode: FakeCudaMode) -> Layer:
    """A candidate's layer in bf16, without bias. Histories of delayed scales are filled."""
    rows, k, n = shape
    with mode, torch.device("cuda"):
        linear = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
        x = torch.empty(rows, k, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.empty(rows, n, dtype=torch.bfloat16)
    # Not under the mode, because the handles that identify a layer in graphs need values.
    module = linear_of(name, linear)
    if isinstance(module, Float8Linear):
        with mode:
            for history in module.histories.values():
                history.load(torch.ones(1, device="cuda"))
    return Layer(module, x, grad)


def count_layer(name: str, shape: LayerShape, device: tuple[int, int] = (9, 0)) -> Counts:
    """Count forward and backward of a candidate's layer after a change of its weight.

    ``device``: the compute capability.
    """
    mode = FakeCudaMode()
    layer = layer_on_fake_cuda(name, shape, mode)
    with fake_tensors(mode), capability(*device):
        layer.run()
        layer.change_weight()
        layer.clear()
        with KernelCounter() as counter:
            layer.run()
    return counter.counts


def count_compiled_layer(name: str, shape: LayerShape) -> Counts:
    """Count the second step of the layer compiled by Inductor, after a change of its weight."""
    torch._dynamo.reset()
    mode, counter = FakeCudaMode(), KernelCounter()
    layer = layer_on_fake_cuda(name, shape, mode)
    module: nn.Linear = torch.compile(layer.module, fullgraph=True)  # type: ignore[assignment]
    compiled = Layer(module, layer.x, layer.grad)
    with compiled_code_is_counted(mode, counter):
        compiled.run()
        with fake_tensors(mode):
            layer.change_weight()
        counter.counts = Counts()
        compiled.run()
    return counter.counts


def count_packed_weight(shape: LayerShape) -> Counts:
    """Count the cast of a weight to packed MXFP4, and the unpacking after a gather."""
    with fake_tensors(), torch.device("cuda"):
        weight = torch.empty(shape.out_features, shape.in_features, dtype=torch.bfloat16)
        data = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        exponents = torch.empty(
            shape.out_features // 32, shape.in_features // 32, dtype=torch.uint8
        )
        with KernelCounter() as counter:
            unpack_e2m1(pack_blocks(weight, exponents, (32, 32, 0, 0)), data)
    return counter.counts


def count_frozen_layer(
    name: str, shape: LayerShape, is_stored: bool, device: tuple[int, int] = (9, 0)
) -> Counts:
    """Count the second step of a layer with a frozen weight, which may be stored in float8."""
    mode = FakeCudaMode()
    layer = layer_on_fake_cuda(name, shape, mode)
    with fake_tensors(mode), capability(*device):
        layer.module.requires_grad_(False)
        if is_stored:
            freeze_to_float8(layer.module)
        layer.run()
        layer.clear()
        with KernelCounter() as counter:
            layer.run()
    return counter.counts
