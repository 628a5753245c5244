"""CPU time that a layer's step takes until its kernels would be launched; called in a process.

Tensors are real ones here, without memory (``kernels.cpp``), as fake tensors take longer than what
is measured. Call it in a process of its own, whose fake CUDA device then stays so.
"""

import argparse
import ctypes
from collections.abc import Sequence

import torch
from torch import nn

from fp8_dist import Float8Linear
from scripts.bench.layers import Layer
from scripts.bench.timing import Timed, medians
from scripts.common.candidates import linear_of
from scripts.common.fake_cuda.layer import LayerShape
from scripts.common.fake_cuda.process import built
from scripts.common.fake_cuda.triton_kernels import launch_nothing


def seconds_to_dispatch(names: Sequence[str], shape: LayerShape, turns: int) -> dict[str, float]:
    """Median CPU seconds of each candidate's forward and backward, with a weight that has changed.

    Host code of Triton's and the driver's launches is left out.
    """
    ctypes.CDLL(str(built("kernels.cpp")))
    launch_nothing()
    layers = {name: _layer(name, shape) for name in names}
    timed = {name: Timed(layer.run, layer.change_weight) for name, layer in layers.items()}
    options = argparse.Namespace(repeat=turns, clock="cpu", device="cpu")
    return medians(timed, options, warm_up=2, calls=20, description="dispatch")


def _layer(name: str, shape: LayerShape) -> Layer:
    rows, k, n = shape
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    module = linear_of(name, nn.Linear(k, n, bias=False, **bf16))
    if isinstance(module, Float8Linear):
        for history in module.histories.values():
            history.load(torch.ones(1, device="cuda"))
    x = torch.empty(rows, k, requires_grad=True, **bf16)  # type: ignore[call-overload]
    return Layer(module, x, torch.empty(rows, n, **bf16))  # type: ignore[call-overload]
