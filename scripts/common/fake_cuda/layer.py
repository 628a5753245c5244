"""One linear layer on the fake CUDA device; called in its process."""

from typing import NamedTuple

import torch
from torch import nn

from fp8_dist import Float8Linear
from scripts.bench.layers import Layer
from scripts.common.candidates import linear_of
from scripts.common.fake_cuda.counter import Counts, KernelCounter
from scripts.common.fake_cuda.device import fake_tensors


class LayerShape(NamedTuple):
    """Of a layer and its input; the default is the first layer of Llama 8B's feed-forward."""

    rows: int = 8192
    in_features: int = 4096
    out_features: int = 14336


def layer_on_fake_cuda(name: str, shape: LayerShape) -> Layer:
    """A candidate's layer in bf16, without bias; delayed scales have a history already."""
    rows, k, n = shape
    on = {"device": "cuda", "dtype": torch.bfloat16}
    module = linear_of(name, nn.Linear(k, n, bias=False, **on))
    if isinstance(module, Float8Linear):
        for history in module.histories.values():
            history.load(torch.ones(1, device="cuda"))
    x = torch.empty(rows, k, requires_grad=True, **on)
    return Layer(module, x, torch.empty(rows, n, **on))


def count_layer(name: str, shape: LayerShape, weight_changed: bool) -> Counts:
    """Forward and backward of a candidate's layer that has run before.

    Args:
        weight_changed: since then, as by an optimizer step. Otherwise the library's float8 copy of
            the weight serves again, as for a second micro-batch.
    """
    with fake_tensors():
        layer = layer_on_fake_cuda(name, shape)
        layer.run()
        if weight_changed:
            layer.change_weight()
        layer.clear()
        with KernelCounter() as counter:
            layer.run()
    return counter.counts
