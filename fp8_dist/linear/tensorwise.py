"""The shortest way through a linear layer: plain tensors, with one scale for each.

That is a layer with the recipe ``tensorwise`` on one device, or under FSDP2 alone. Nothing has to
be asked there about meshes, rows or a second cast of an operand, and where tensors are small asking
is what takes the time. It computes what :mod:`fp8_dist.linear.autograd` computes, bit for bit.
"""

import math
from typing import Any

import torch

from fp8_dist.casts import Gemm
from fp8_dist.kernels.scaled_mm import scaled_mm_of_data
from fp8_dist.linear.once import Gradients, differentiable_once
from fp8_dist.linear.operands import LinearSpec, quantize_operand
from fp8_dist.linear.recording import is_recording, note_gemm
from fp8_dist.linear.wide import shared_by_gemms, shared_by_layers


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` as ``[M, K]``."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def unflatten_rows(matrix: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[M, N]`` as ``[..., N]`` with the leading dims of ``like``.

    Not a view for autograd: a function's output that is one can't be modified in place.
    """
    if like.ndim == 2:
        return matrix
    return torch.ops.aten._unsafe_view(matrix, (*like.shape[:-1], matrix.shape[-1]))


def summed_rows(grad: torch.Tensor) -> torch.Tensor:
    """The sum of ``[..., N]`` over its rows: the gradient of a bias."""
    return grad.sum(dim=tuple(range(grad.ndim - 1))) if grad.ndim > 1 else grad


def multiply(
    gemm: Gemm,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    spec: LinearSpec,
) -> torch.Tensor:
    """One of a layer's GEMMs on float8 matrices: the one place where a recording listens."""
    options = spec.config.gemm_options(gemm)
    if is_recording():
        note_gemm(spec.fqn, gemm, (a, scale_a), (b, scale_b), out_dtype, options)
    return scaled_mm_of_data(a, b, scale_a, scale_b, out_dtype, *options)


class TensorwiseFunction(torch.autograd.Function):
    """``input @ weight^T + bias`` for a config that ``is_tensorwise``.

    Args:
        input: ``[..., K]``, plain, in high precision.
        weight: ``[N, K]``, what a gradient flows to.
        bias: ``[N]`` or None.
        spec: config and name of the layer.
        qdata: the weight in float8.
        scale: of ``qdata``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        spec: LinearSpec,
        qdata: torch.Tensor,
        scale: torch.Tensor,
    ) -> torch.Tensor:
        config, dtype = spec.config, input.dtype
        x, x_scale = quantize_operand(input, "input", config)
        rows = as_matrix(shared_by_layers(x, input))
        output = multiply("output", rows, qdata.t(), x_scale, scale, dtype, spec)
        output = unflatten_rows(output, x)
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.dtypes = spec, (dtype, weight.dtype)
        ctx.save_for_backward(
            *((x, x_scale) if needs_weight else (None, None)),
            *((qdata, scale) if needs_input else (None, None)),
        )
        return output if bias is None else output + bias.to(dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor | None) -> Gradients:
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_input = grad_weight = grad_bias = None
        if grad is not None and needs_bias:
            grad_bias = summed_rows(grad)
        if grad is not None and (needs_input or needs_weight):
            config = ctx.spec.config
            x, x_scale, qdata, scale = ctx.saved_tensors
            g, g_scale = quantize_operand(grad, "grad_output", config)
            rows = as_matrix(shared_by_gemms(g) if needs_input and needs_weight else g)
            if needs_input:
                dtype = ctx.dtypes[0]
                product = multiply("grad_input", rows, qdata, g_scale, scale, dtype, ctx.spec)
                grad_input = unflatten_rows(product, g)
            if needs_weight:
                inputs, dtype = as_matrix(shared_by_layers(x)), ctx.dtypes[1]
                grad_weight = multiply(
                    "grad_weight", rows.t(), inputs, g_scale, x_scale, dtype, ctx.spec
                )
        return grad_input, grad_weight, grad_bias, None, None, None
