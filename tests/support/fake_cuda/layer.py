"""One linear layer on the fake CUDA device; called in its process."""

from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from fake_cuda.counter import Counts, KernelCounter
from fake_cuda.device import FakeCudaMode, fake_tensors
from fake_cuda.inductor import compiled_code_is_counted
from fp8_dist import Float8Linear, freeze_to_float8
from fp8_dist.kernels.blocks import pack_blocks
from fp8_dist.kernels.cuda import gemm
from fp8_dist.kernels.e2m1 import unpack_e2m1
from scripts.bench.layers import Layer
from scripts.common.candidates import linear_of


class LayerShape(NamedTuple):
    """Shape of a layer and its input; the default is the first layer of Llama 8B's feed-forward."""

    rows: int = 8192
    in_features: int = 4096
    out_features: int = 14336


def layer_on_fake_cuda(name: str, shape: LayerShape, mode: FakeCudaMode) -> Layer:
    """A candidate's layer in bf16, without bias; delayed scales have a history already."""
    rows, k, n = shape
    with mode, torch.device("cuda"):
        linear = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
        x = torch.empty(rows, k, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.empty(rows, n, dtype=torch.bfloat16)
    # Not under the mode: the handles by which graphs ask a layer for its scales have values.
    module = linear_of(name, linear)
    if isinstance(module, Float8Linear):
        with mode:
            for history in module.histories.values():
                history.load(torch.ones(1, device="cuda"))
    return Layer(module, x, grad)


def count_layer(name: str, shape: LayerShape, gemm_of: str = "hopper") -> Counts:
    """Forward and backward of a candidate's layer whose weight an update has changed.

    ``gemm_of``: the device whose GEMMs with scales of blocks there are: "hopper" or "blackwell".
    """
    mode = FakeCudaMode()
    layer = layer_on_fake_cuda(name, shape, mode)
    with fake_tensors(mode), patch.object(gemm, "device_kind", lambda device: gemm_of):
        layer.run()
        layer.change_weight()
        layer.clear()
        with KernelCounter() as counter:
            layer.run()
    return counter.counts


def count_compiled_layer(name: str, shape: LayerShape) -> Counts:
    """The same compiled by Inductor, in the second step, with a weight that has changed."""
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
    """A weight that is cast to MXFP4 and packed, and unpacked once it is gathered."""
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
    name: str, shape: LayerShape, is_stored: bool, gemm_of: str = "hopper"
) -> Counts:
    """The second forward and backward of a layer whose weight is frozen, and may be stored."""
    mode = FakeCudaMode()
    layer = layer_on_fake_cuda(name, shape, mode)
    with fake_tensors(mode), patch.object(gemm, "device_kind", lambda device: gemm_of):
        layer.module.requires_grad_(False)
        if is_stored:
            freeze_to_float8(layer.module)
        layer.run()
        layer.clear()
        with KernelCounter() as counter:
            layer.run()
    return counter.counts
