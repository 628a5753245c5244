"""The CPU time in which a layer's step launches its kernels, without the time of the driver.

Tensors here are real but have no memory (``kernels.cpp``), because the overhead of fake tensors
would dominate. Call it in a process of its own: the changes to the fake CUDA device are permanent.
"""

import argparse
import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fake_cuda.inductor import compiled_code_launches_nothing
from fake_cuda.layer import LayerShape
from fake_cuda.process import built
from fake_cuda.triton_kernels import launch_nothing
from fp8_dist import Float8Linear
from fp8_dist.kernels.quantization import cast_copies
from fp8_dist.kernels.scale import amax
from scripts.bench.layers import Layer
from scripts.bench.timing import Timed, medians
from scripts.common.candidates import linear_of

KERNELS_ALONE = "tensorwise's kernels alone"
_COMPILED, _IN_GRAPH = ", compiled", ", in a graph"


class Dispatched(NamedTuple):
    """CPU seconds of a layer's forward and backward.

    ``compiled``: in a compiled graph of its own. ``in_graph``: in a graph of several layers.
    """

    eager: float
    compiled: float | None
    in_graph: float | None


def seconds_to_dispatch(
    names: Sequence[str], shape: LayerShape, turns: int, layers_of_graph: int
) -> dict[str, Dispatched]:
    """Median CPU seconds of each candidate's forward and backward, after a change of the weight.

    Triton's launch code is included, the driver is not. The result also has ``KERNELS_ALONE``: an
    eager autograd function that launches the kernels of "tensorwise" and does nothing else.
    """
    ctypes.CDLL(str(built("kernels.cpp")))
    launch_nothing()
    layers = {name: _layer(name, shape) for name in (*names, KERNELS_ALONE)}
    timed = {name: Timed(layer.run, layer.change_weight) for name, layer in layers.items()}
    for name in names:
        run = _compiled(layers[name]).run
        timed[name + _COMPILED] = Timed(run, layers[name].change_weight)
        graph = _Graph([_layer(name, shape) for _ in range(layers_of_graph)])
        timed[name + _IN_GRAPH] = Timed(graph.run, graph.change_weights)
    options = argparse.Namespace(repeat=turns, clock="cpu", device="cpu")
    # The graphs of all candidates belong to one function.
    one_function = torch._dynamo.config.patch(recompile_limit=len(names) + 1)
    with compiled_code_launches_nothing(), one_function:
        found = medians(timed, options, warm_up=2, calls=20, description="dispatch")
    in_graph = {name: found[name + _IN_GRAPH] / layers_of_graph for name in names}
    return {
        name: Dispatched(found[name], found.get(name + _COMPILED), in_graph.get(name))
        for name in layers
    }


def _compiled(layer: Layer) -> Layer:
    module: Any = torch.compile(layer.module, fullgraph=True)
    return Layer(module, layer.x, layer.grad)


class _Graph:
    """Layers, each with its own input, compiled as one graph."""

    def __init__(self, layers: list[Layer]) -> None:
        self._layers = layers
        modules, self._inputs = [each.module for each in layers], [each.x for each in layers]
        self._gradients = [each.grad for each in layers]

        def outputs(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            return [module(x) for module, x in zip(modules, inputs, strict=True)]

        self._compiled = torch.compile(outputs, fullgraph=True)

    def run(self) -> None:
        torch.autograd.backward(self._compiled(self._inputs), self._gradients)

    def change_weights(self) -> None:
        for layer in self._layers:
            layer.change_weight()


class _KernelsAlone(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Kernels.apply(input, self.weight)
        return output


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        xq, xq_t, x_scale = _cast(x, torch.float8_e4m3fn)
        wq, wq_t, w_scale = _cast(w, torch.float8_e4m3fn)
        ctx.save_for_backward(xq_t, x_scale, wq_t, w_scale)
        return _multiplied(xq, wq.t(), x_scale, w_scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        xq_t, x_scale, wq_t, w_scale = ctx.saved_tensors
        q, q_t, scale = _cast(grad, torch.float8_e5m2)
        grad_input = _multiplied(q, wq_t.t(), scale, w_scale)
        return grad_input, _multiplied(q_t, xq_t.t(), scale, x_scale)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> Any:
    scale, qdata, qdata_t = cast_copies(x, [amax(x)], dtype, False, [0, 0], [False, True])
    return qdata, qdata_t, scale


def _multiplied(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> torch.Tensor:
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)


def _layer(name: str, shape: LayerShape) -> Layer:
    rows, k, n = shape
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    linear = nn.Linear(k, n, bias=False, **bf16)
    module = linear
    if name == KERNELS_ALONE:
        module.__class__ = _KernelsAlone
    else:
        module = linear_of(name, linear)
    if isinstance(module, Float8Linear):
        for history in module.histories.values():
            history.load(torch.ones(1, device="cuda"))
    x = torch.empty(rows, k, requires_grad=True, **bf16)  # type: ignore[call-overload]
    return Layer(module, x, torch.empty(rows, n, **bf16))  # type: ignore[call-overload]
