"""The autograd function of a linear layer: three GEMMs on float8 operands.

Where each tensor lives on a tensor-parallel mesh follows from the weight's placement (the table
in :mod:`fp8_dist.sharding`); operands that must move are moved as float8::

    forward     input --cast--> float8 --gather--> float8 @ weight^T --reduce--> output
    backward    grad_output --cast--> float8 --gather--> @ weight  --reduce--> grad_input
                                                         @ input   ----------> grad_weight

Gradients are plain tensors wherever autograd sees them: the cast and the gather of grad_output
happen inside this function, so that no float8 subclass is ever a backward tangent.
"""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fp8_dist.casts import Gemm
from fp8_dist.config import Float8LinearConfig
from fp8_dist.matmul import scaled_mm_of_data, shared_by_gemms
from fp8_dist.operands import (
    LinearSpec,
    Local,
    WeightCasts,
    landed,
    prepare_gradient,
    prepare_operand,
    redistributed,
    weight_operands,
)
from fp8_dist.scaling import quantize_after
from fp8_dist.sharding import (
    Layout,
    LinearLayouts,
    Placements,
    linear_layouts,
    local_tensor,
    reduced,
)


def _gemm(
    left: Local,
    right: Local,
    gemm: Gemm,
    config: Float8LinearConfig,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """One of the three GEMMs on local operands ``[..., K]``: in float8 if they are."""
    a, scale_a = _matrix(left, transposed=gemm == "grad_weight")
    b, scale_b = _matrix(right, transposed=gemm == "output")
    if scale_a is None or scale_b is None:
        return torch.mm(a, b.to(a.dtype)).to(out_dtype)
    if config.fold_row_scales and gemm != "output":
        scale_b = scale_b.new_ones(())  # it was folded into the gradient
    return scaled_mm_of_data(
        a,
        b,
        scale_a,
        scale_b,
        out_dtype,
        config.gemm_config(gemm).use_fast_accum,
        # The inner dim of grad_weight is the number of rows of the input. That is data, and may
        # be misaligned on one data-parallel rank alone, where refusing would hang the others.
        config.pad_inner_dim or gemm == "grad_weight",
        config.emulate,
    )


def _matrix(operand: Local, transposed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``[..., K]`` as the data and the scale of a matrix ``[M, K]``, or of its transpose."""
    data, scale, has_row_scales = operand
    if data.ndim != 2:
        data = data.reshape(math.prod(data.shape[:-1]), data.shape[-1])
        if scale is not None and scale.ndim:
            scale = scale.reshape((-1, 1) if has_row_scales else (1, -1))
    if transposed:
        data = data.t()
        scale = scale.t() if scale is not None and scale.ndim else scale
    return data, scale


def _unflatten_rows(matrix: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[M, N]`` as ``[..., N]`` with the leading dims of ``like``.

    Not a view for autograd: a function's output that is one can't be modified in place.
    """
    if like.ndim == 2:
        return matrix
    return torch.ops.aten._unsafe_view(matrix, (*like.shape[:-1], matrix.shape[-1]))


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
    flat: list[torch.Tensor | None] = []
    for qdata, scale in weight_casts.casts:
        flat += [qdata, scale]
    flat += [None] * (4 - len(flat))
    return _LinearFunction.apply(input, weight, bias, spec, *flat, weight_casts.multiplier)


class _NoSecondDerivative(torch.autograd.Function):
    """The gradients of a layer, which can't be differentiated."""

    @staticmethod
    def forward(
        ctx: Any, fqn: str, anchor: torch.Tensor, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.fqn = fqn
        return gradients

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        raise NotImplementedError(
            f"{ctx.fqn}: a float8 layer can't be differentiated twice; leave it unconverted"
        )


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
        input_layout, weight_layout = Layout.of(input), Layout.of(weight)
        layouts: LinearLayouts | None = None
        if input_layout is not None and weight_layout is not None:
            layouts = linear_layouts(
                input_layout.placements, weight_layout.placements, input.ndim, spec.fqn
            )
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        gemms: tuple[Gemm, ...] = ("output", "grad_weight") if needs_weight else ("output",)
        x = prepare_operand(input, "input", gemms, layouts and layouts.input, spec)
        casts = ((weight_qdata, weight_scale), (second_qdata, second_scale))
        w = weight_operands(weight, casts, config)
        # The gather of the input is waited for here, after the weight's cast was issued.
        left = landed(x["output"])
        output = _gemm(left, w["output"], "output", config, input.dtype)
        output = _unflatten_rows(output, left.data)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.layouts = spec, layouts
        ctx.input_layout, ctx.weight_layout, ctx.bias_layout = (
            input_layout,
            weight_layout,
            Layout.of(bias),
        )
        ctx.input_dtype, ctx.weight_dtype = input.dtype, weight.dtype
        ctx.recast = needs_input and multiplier is not None
        saved: tuple[torch.Tensor | None, ...] = (None, None)
        if ctx.recast:
            one_cast = len(config.casts("weight")) == 1
            saved = (weight, weight_scale if one_cast else second_scale, multiplier)
        elif needs_input:
            saved = w["grad_input"][:2]
        _save(ctx, landed(x["grad_weight"]) if needs_weight else None, *saved)

        if layouts is None or weight_layout is None:
            return output if bias is None else output + bias.to(output.dtype)
        shape = torch.Size((*input.shape[:-1], weight.shape[0]))
        wrapped = Layout(weight_layout.mesh, layouts.output, shape).wrap(output)
        return _add_bias(wrapped, bias, spec.output_placements)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return _LinearFunction._backward(ctx, grad)
        with torch.no_grad():
            gradients = _LinearFunction._backward(ctx, grad)
        # create_graph=True: what is differentiated again must raise, not count as constant.
        found = [g for g in gradients if g is not None]
        marked = iter(
            _NoSecondDerivative.apply(ctx.spec.fqn, torch.zeros((), requires_grad=True), *found)
        )
        return tuple(None if g is None else next(marked) for g in gradients)

    @staticmethod
    def _backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        unused = (None,) * 6
        if grad is None:
            return None, None, None, *unused
        config, layouts = ctx.spec.config, ctx.layouts
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = reduced(grad)
        grad_bias = _bias_gradient(grad, ctx.bias_layout) if needs_bias else None
        gemms: tuple[Gemm, ...] = ()
        gemms += ("grad_input",) if needs_input else ()
        gemms += ("grad_weight",) if needs_weight else ()
        if not gemms:
            return None, None, grad_bias, *unused
        data, scale, *of_the_weight = ctx.saved_tensors
        x = Local(data, scale, ctx.has_row_scales)
        w = _cast_again(config, grad, *of_the_weight) if ctx.recast else Local(*of_the_weight)
        g = prepare_gradient(
            grad, gemms, layouts and layouts.grad_output, {"input": x, "weight": w}, ctx.spec
        )
        left = {gemm: landed(operand) for gemm, operand in g.items()}
        if len(gemms) == 2 and g["grad_input"] is g["grad_weight"]:
            both = left["grad_input"]
            data = shared_by_gemms(both.data)
            left = dict.fromkeys(gemms, both._replace(data=data))
        grad_input = grad_weight = None
        if needs_input:
            grad_input = _gemm(left["grad_input"], w, "grad_input", config, ctx.input_dtype)
            grad_input = _unflatten_rows(grad_input, left["grad_input"].data)
            if layouts is not None:
                grad_input = _redistribute_grad_input(grad_input, layouts, ctx.input_layout)
        if needs_weight:
            grad_weight = _gemm(left["grad_weight"], x, "grad_weight", config, ctx.weight_dtype)
            if layouts is not None:
                grad_weight = ctx.weight_layout._replace(placements=layouts.grad_weight).wrap(
                    grad_weight
                )
        return grad_input, grad_weight, grad_bias, *unused


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
    summed = grad.sum(dim=tuple(range(grad.ndim - 1))) if grad.ndim > 1 else grad
    if not isinstance(summed, DTensor) or bias_layout is None:
        return summed
    return summed.redistribute(placements=bias_layout.placements)
