"""The autograd function of a linear layer: three GEMMs on float8 operands.

Where each tensor lives on a tensor-parallel mesh follows from the weight's placement (the table
in :mod:`fp8_dist.mesh.layout`); operands that must move are moved as float8::

    forward     input --cast--> float8 --gather--> float8 @ weight^T --reduce--> output
    backward    grad_output --cast--> float8 --gather--> @ weight  --reduce--> grad_input
                                                         @ input   ----------> grad_weight

Gradients are plain tensors wherever autograd sees them: the cast and the gather of grad_output
happen inside this function, so that no float8 subclass is ever a backward tangent.
"""

import math
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from fp8_dist.casts import Gemm
from fp8_dist.config import Float8LinearConfig
from fp8_dist.kernels import quantize_after, scaled_mm
from fp8_dist.linear.once import Gradients, differentiable_once
from fp8_dist.linear.operands import (
    LinearSpec,
    Local,
    WeightCasts,
    landed,
    prepare_gradient,
    prepare_operand,
    redistributed,
    weight_operand,
)
from fp8_dist.linear.recording import is_recording, note_gemm
from fp8_dist.mesh.layout import (
    Layout,
    LinearLayouts,
    Placements,
    linear_layouts,
    local_tensor,
    reduced,
)


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
    return scaled_mm(a, b, scale_a, scale_b, out_dtype, *options)


def _gemm(
    left: Local, right: Local, gemm: Gemm, spec: LinearSpec, out_dtype: torch.dtype
) -> torch.Tensor:
    """One of the three GEMMs on local operands ``[..., K]``: in float8 if they have scales."""
    a, scale_a, _ = left if left.data.ndim == 2 else _matrix(left)
    b, scale_b, _ = right if right.data.ndim == 2 else _matrix(right)
    if gemm == "grad_weight":
        a, scale_a = a.t(), scale_a.t() if scale_a is not None and scale_a.ndim else scale_a
    elif gemm == "output":
        b, scale_b = b.t(), scale_b.t() if scale_b is not None and scale_b.ndim else scale_b
    if scale_a is None or scale_b is None:
        return torch.mm(a, b.to(a.dtype)).to(out_dtype)
    if spec.config.fold_row_scales and gemm != "output":
        scale_b = scale_b.new_ones(())  # it was folded into the gradient
    return multiply(gemm, a, b, scale_a, scale_b, out_dtype, spec)


def _matrix(operand: Local) -> Local:
    """``[..., K]`` as a matrix ``[M, K]``."""
    data, scale, has_row_scales = operand
    if scale is not None and scale.ndim:
        scale = scale.reshape((-1, 1) if has_row_scales else (1, -1))
    return Local(as_matrix(data), scale, has_row_scales)


def _save(ctx: Any, operand: Local | None, *tensors: torch.Tensor | None) -> None:
    """Save an operand, and others, as plain tensors: hooks on saved tensors see the real bytes."""
    ctx.has_row_scales = operand is not None and operand.has_row_scales
    data, scale = (None, None) if operand is None else operand[:2]
    ctx.save_for_backward(data, scale, *tensors)


def float8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_casts: WeightCasts,
    spec: LinearSpec,
) -> torch.Tensor:
    """``input @ weight^T + bias`` with float8 operands.

    Args:
        input: ``[..., K]``, high precision or cast already; no Partial placements.
        weight: ``[N, K]``, what gradients flow to; a DTensor exactly if ``input`` is one, on the
            same mesh.
        bias: ``[N]`` or None.
        weight_casts: the local weight in each of ``config.casts("weight")``.
        spec: config, where a DTensor output goes, and the amax histories of DELAYED operands.

    Returns:
        ``[..., N]`` in the input's dtype.
    """
    casts, multiplier = weight_casts
    first, second = (*casts, *_NO_CASTS)[:2]
    if not isinstance(input, DTensor):
        return _LinearFunction.apply(input, weight, bias, spec, *first, *second, multiplier)
    output = _LinearFunction.apply(input, weight, None, spec, *first, *second, multiplier)
    placements = spec.output_placements
    if bias is None and placements in (None, tuple(output.placements)):
        return output
    return _FinishOutput.apply(output, bias, placements)


_NO_CASTS = ((None, None), (None, None))


class _Where(NamedTuple):
    """Where the tensors of a call on DTensors live."""

    layouts: LinearLayouts
    input: Layout
    weight: Layout

    @staticmethod
    def of(input: torch.Tensor, weight: torch.Tensor, fqn: str) -> "_Where":
        there, here = Layout.of(input), Layout.of(weight)
        assert there is not None, type(input)
        assert here is not None, type(weight)
        layouts = linear_layouts(there.placements, here.placements, input.ndim, fqn)
        return _Where(layouts, there, here)


# By whether the input needs a gradient, and whether the weight does.
_GRADIENT_GEMMS: dict[tuple[bool, bool], tuple[Gemm, ...]] = {
    (True, True): ("grad_input", "grad_weight"),
    (True, False): ("grad_input",),
    (False, True): ("grad_weight",),
    (False, False): (),
}


class _LinearFunction(torch.autograd.Function):
    """The function of :func:`float8_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        spec: LinearSpec,
        # (Not *args: dynamo (2.13) tells by their number whether a forward takes a ctx.)
        weight_qdata: torch.Tensor | None,
        weight_scale: torch.Tensor | None,
        second_qdata: torch.Tensor | None,
        second_scale: torch.Tensor | None,
        multiplier: torch.Tensor | None,
    ) -> torch.Tensor:
        config = spec.config
        where = _Where.of(input, weight, spec.fqn) if isinstance(input, DTensor) else None
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        gemms: tuple[Gemm, ...] = ("output", "grad_weight") if needs_weight else ("output",)
        x = prepare_operand(input, "input", gemms, where and where.layouts.input, spec)
        casts = ((weight_qdata, weight_scale), (second_qdata, second_scale))
        w = weight_operand(weight, casts, "output", config)
        # The gather of the input is waited for here, after the weight's cast was issued.
        left = landed(x["output"])
        output = _gemm(left, w, "output", spec, input.dtype)
        output = unflatten_rows(output, left.data)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.where = spec, where
        ctx.input_dtype, ctx.weight_dtype = input.dtype, weight.dtype
        ctx.recast = needs_input and multiplier is not None
        saved: tuple[torch.Tensor | None, ...] = (None, None)
        if ctx.recast:
            one_cast = len(config.casts("weight")) == 1
            saved = (weight, weight_scale if one_cast else second_scale, multiplier)
        elif needs_input:
            saved = weight_operand(weight, casts, "grad_input", config)[:2]
        _save(ctx, landed(x["grad_weight"]) if needs_weight else None, *saved)

        if where is None:
            return output if bias is None else output + bias.to(output.dtype)
        shape = torch.Size((*input.shape[:-1], weight.shape[0]))
        return Layout(where.weight.mesh, where.layouts.output, shape).wrap(output)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor | None) -> Gradients:
        unused = (None,) * 6
        if grad is None:
            return None, None, None, *unused
        config, where = ctx.spec.config, ctx.where
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = reduced(grad)
        grad_bias = summed_rows(grad) if needs_bias else None
        gemms = _GRADIENT_GEMMS[needs_input, needs_weight]
        if not gemms:
            return None, None, grad_bias, *unused
        data, scale, *of_the_weight = ctx.saved_tensors
        x = Local(data, scale, ctx.has_row_scales)
        w = _cast_again(config, grad, *of_the_weight) if ctx.recast else Local(*of_the_weight)
        g = prepare_gradient(grad, gemms, where and where.layouts.grad_output, x, w, ctx.spec)
        grad_input = grad_weight = None
        if needs_input:
            left = landed(g["grad_input"])
            grad_input = _gemm(left, w, "grad_input", ctx.spec, ctx.input_dtype)
            grad_input = unflatten_rows(grad_input, left.data)
            if where is not None:
                grad_input = _redistribute_grad_input(grad_input, where.layouts, where.input)
        if needs_weight:
            left = landed(g["grad_weight"])
            grad_weight = _gemm(left, x, "grad_weight", ctx.spec, ctx.weight_dtype)
            if where is not None:
                layout = where.weight._replace(placements=where.layouts.grad_weight)
                grad_weight = layout.wrap(grad_weight)
        return grad_input, grad_weight, grad_bias, *unused


class _FinishOutput(torch.autograd.Function):
    """The bias, and the reduction or move to ``placements``, of a DTensor output.

    It is a function of its own because it saves nothing for backward. Full activation checkpointing
    ends a recomputation as soon as the last tensor is saved. A reduction issued by the function
    that saves tensors would be repeated, and its result dropped without being waited for.

    The gradient passes at the placements at which it arrives: the GEMMs' function gathers it as
    float8.
    """

    @staticmethod
    def forward(
        ctx: Any, output: DTensor, bias: torch.Tensor | None, placements: Placements | None
    ) -> torch.Tensor:
        ctx.bias_layout = Layout.of(bias)
        ctx.set_materialize_grads(False)
        return _add_bias(output, bias, placements)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Gradients:  # type: ignore[override]
        if grad is None:
            return None, None, None
        grad = reduced(grad)
        grad_bias = _bias_gradient(grad, ctx.bias_layout) if ctx.needs_input_grad[1] else None
        return grad, grad_bias, None


def _cast_again(
    config: Float8LinearConfig,
    grad: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    multiplier: torch.Tensor,
) -> Local:
    """The weight for the GEMM of grad_input, from the values that it has again.

    In the backward: a graph would keep the copy of the forward instead.
    """
    cast = config.cast("weight", "grad_input")
    assert cast is not None
    data = quantize_after(local_tensor(weight), multiplier, cast.dtype, local_tensor(grad))
    return Local(data, scale)


def _add_bias(
    output: DTensor, bias: torch.Tensor | None, placements: Placements | None
) -> torch.Tensor:
    """The GEMM's output with the bias added, at the given placements (None: anywhere).

    The bias is added where it already is: to the columns of a column-parallel output, to the sum
    of a row-parallel one.
    """
    if bias is None:
        return output if placements is None else redistributed(output, placements)
    if any(p.is_partial() for p in output.placements):
        summed = tuple(Replicate() if p.is_partial() else p for p in output.placements)
        output = redistributed(output, placements or summed)
    biased: DTensor = output + bias.to(output.dtype)  # type: ignore[assignment]
    return biased if placements is None else redistributed(biased, placements)


def _redistribute_grad_input(
    grad_input: torch.Tensor, layouts: LinearLayouts, input_layout: Layout
) -> torch.Tensor:
    """grad_input where the input came from.

    An input that was gathered here has its gradient reduce-scattered here. One that came gathered
    already keeps a Partial gradient, so that consumers of the same input share one reduction.
    """
    result = input_layout._replace(placements=layouts.grad_input).wrap(grad_input)
    target = tuple(
        grad if now == needed else now
        for now, needed, grad in zip(
            input_layout.placements, layouts.input, layouts.grad_input, strict=True
        )
    )
    return result.redistribute(placements=target, async_op=True)


def _bias_gradient(grad: torch.Tensor, bias_layout: Layout | None) -> torch.Tensor:
    """The sum of the high-precision gradient over its rows, at the placements of the bias."""
    summed = summed_rows(grad)
    if not isinstance(summed, DTensor) or bias_layout is None:
        return summed
    return summed.redistribute(placements=bias_layout.placements)
