"""The autograd function of a linear layer: three GEMMs on float8 operands.

The placements of each tensor on a tensor-parallel mesh follow from the weight's placements (the
table in :mod:`fp8_dist.mesh.rules`). Operands that must move are moved as float8::

    forward     input --cast--> float8 --gather--> float8 @ weight^T --reduce--> output
    backward    grad_output --cast--> float8 --gather--> @ weight  --reduce--> grad_input
                                                         @ input   ----------> grad_weight

Autograd never sees a float8 gradient: the cast and the gather of grad_output happen inside this
function, so no float8 subclass is ever a backward tangent.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fp8_dist.config import Gemm
from fp8_dist.granularity import Granularity
from fp8_dist.kernels import block_scaled_mm, quantize_after, quantize_blocks, scaled_mm
from fp8_dist.linear.observing import (
    HighPrecision,
    are_gemms_observed,
    high_precision,
    is_observed,
    note_gemm,
    observe,
    observe_gemm,
)
from fp8_dist.linear.once import Gradients, differentiable_once
from fp8_dist.linear.operands import (
    LinearSpec,
    Local,
    WeightCasts,
    as_matrix,
    prepare_gradients,
    prepare_operand,
    redistributed,
    wait_local,
)
from fp8_dist.linear.sharded_tokens import BlockMatrix, as_block_matrix, reblocked
from fp8_dist.mesh import (
    Layout,
    LinearLayouts,
    linear_layouts,
    local_tensor,
    normalized,
    reduced,
    with_local,
)
from fp8_dist.tensor import Quantized
from fp8_dist.transport import Encoding, Scattering, finish_reduction, reduced_to, start_reduction


def float8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_casts: WeightCasts,
    spec: LinearSpec,
) -> torch.Tensor:
    """``input @ weight^T + bias`` with float8 operands.

    Args:
        input: ``[..., K]``, in high precision or cast already, without Partial placements.
        weight: ``[N, K]``, the tensor that gradients flow to. It is a DTensor if and only if
            ``input`` is one, on the same mesh.
        bias: ``[N]`` or None.
        weight_casts: the local weight in float8.
        spec: config, placements of a DTensor output, and the amax histories of DELAYED operands.

    Returns:
        ``[..., N]`` in the input's dtype.
    """
    first_qdata, first_scale = (weight_casts.output or (None, None))[:2]
    second_qdata, second_scale = (weight_casts.grad_input or (None, None))[:2]
    either = weight_casts.output or weight_casts.grad_input
    if either is not None and either.granularity.blocks is not None:
        spec = spec._replace(weight_blocks=either.granularity)
    multiplier, scale = weight_casts.recast or (None, None)
    # Dynamo refuses to pass a tensor twice.
    second_qdata = None if second_qdata is first_qdata else second_qdata
    scale = None if scale is first_scale or scale is second_scale else scale
    second_scale = None if second_scale is first_scale else second_scale
    # Compiled code uses one function: dynamo assumes that the gradient of an output has the
    # output's placements, but between the two functions it has those of the final output.
    flat = (first_qdata, first_scale, second_qdata, second_scale, multiplier, scale)
    if not isinstance(input, DTensor) or torch.compiler.is_compiling():
        return _LinearFunction.apply(input, weight, bias, spec, *flat)
    if spec.output_placements is not None:
        placements = normalized(spec.output_placements, input.ndim)
        spec = spec._replace(output_placements=placements)
    output = _LinearFunction.apply(input, weight, None, spec, *flat)
    if bias is None and spec.output_placements in (None, output.placements):
        return output
    return _FinishOutput.apply(output, bias, spec)


def _gemm(
    left: Local,
    right: Local,
    gemm: Gemm,
    spec: LinearSpec,
    out_dtype: torch.dtype,
    layouts: tuple[Layout, Layout] | None = None,
) -> torch.Tensor:
    """Run one of the three GEMMs on local operands ``[..., K]``; nothing else starts them.

    ``layouts``: the layouts of the operands of grad_weight.
    """
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        assert isinstance(left, torch.Tensor)
        assert isinstance(right, torch.Tensor)
        a, b = as_matrix(left), as_matrix(right)
        a, b = (a.t() if gemm == "grad_weight" else a), (b.t() if gemm == "output" else b)
        return torch.mm(a, b.to(a.dtype)).to(out_dtype)
    options = spec.config.gemm_options(gemm)
    if left.granularity.blocks is not None:
        return _block_gemm(left, right, gemm, spec, out_dtype, layouts)
    a, scale_a = _as_gemm_operand(left, gemm == "grad_weight")
    b, scale_b = _as_gemm_operand(right, gemm == "output")
    note_gemm(spec.fqn, gemm, (a, scale_a, None), (b, scale_b, None), out_dtype, options)
    return scaled_mm(a, b, scale_a, scale_b, out_dtype, *options)


def _block_gemm(
    left: Quantized,
    right: Quantized,
    gemm: Gemm,
    spec: LinearSpec,
    out_dtype: torch.dtype,
    layouts: tuple[Layout, Layout] | None,
) -> torch.Tensor:
    """:func:`_gemm` for operands with block scales along the contraction."""
    if gemm == "grad_weight":
        where = layouts or (None, None)
        a, b = _turned(reblocked(left, where[0])), reblocked(right, where[1])
    else:
        a, b = as_block_matrix(left), as_block_matrix(right)
        b = _turned(b) if gemm == "output" else b
    options = spec.config.gemm_options(gemm)
    note_gemm(spec.fqn, gemm, a, b, out_dtype, options)
    return block_scaled_mm(a[0], b[0], a[1], b[1], a[2], b[2], out_dtype, options[2])


def _turned(matrix: BlockMatrix) -> BlockMatrix:
    qdata, exponents, (rows, columns, first_row, first_column) = matrix
    return qdata.t(), exponents.t(), (columns, rows, first_column, first_row)


def _as_gemm_operand(operand: Quantized, transpose: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scale of an operand ``[..., K]`` as a matrix."""
    qdata, scale, granularity = operand
    data, scale = as_matrix(qdata), granularity.gemm_scale(scale)
    if not transpose:
        return data, scale
    return data.t(), scale.t() if scale.ndim else scale


def _unflattened(matrix: torch.Tensor, like: Local) -> torch.Tensor:
    """``[M, N]`` as ``[..., N]`` with the leading dims of an operand.

    It is not a view for autograd: a function's output that is a view can't be modified in place.
    """
    operand = like if isinstance(like, torch.Tensor) else like.qdata
    if operand.ndim == 2:
        return matrix
    return torch.ops.aten._unsafe_view.default(matrix, (*operand.shape[:-1], matrix.shape[-1]))


class _LinearFunction(torch.autograd.Function):
    """The GEMMs of :func:`float8_linear`.

    In eager code a DTensor output has the placements in which the GEMM leaves it, for
    :class:`_FinishOutput`. In compiled code it is finished here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        spec: LinearSpec,
        # Not *args: dynamo (2.13) tells by the number of arguments whether a forward takes a ctx.
        first_qdata: torch.Tensor | None,
        first_scale: torch.Tensor | None,
        second_qdata: torch.Tensor | None,
        second_scale: torch.Tensor | None,
        recast_multiplier: torch.Tensor | None,
        recast_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        x_layout, w_layout, layouts = Layout.of(input), Layout.of(weight), None
        if x_layout is not None and w_layout is not None:
            now = x_layout.placements, w_layout.placements
            layouts = linear_layouts(*now, input.ndim, spec.fqn)
        # Under no_grad ctx.needs_input_grad follows the tensors, so spec.record decides.
        needs_input, needs_weight = ctx.needs_input_grad[:2] if spec.record else (False, False)
        gemms: tuple[Gemm, ...] = ("output", "grad_weight") if needs_weight else ("output",)
        whole = _with_features(input, weight.shape[1])
        x = prepare_operand(whole, "input", gemms, layouts and layouts.input, spec)
        w = _as_operand(first_qdata, first_scale, "output", weight, spec)
        # Wait for the gather of the input only here, after the weight's cast was issued.
        left = wait_local(x["output"])
        product = _gemm(left, w, "output", spec, input.dtype)
        output = _unflattened(product, input if layouts is None else left)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.layouts, ctx.x_layout, ctx.w_layout = spec, layouts, x_layout, w_layout
        ctx.input_dtype, ctx.weight_dtype = input.dtype, weight.dtype
        multiplier = recast_multiplier if needs_input else None
        uses_cast = needs_input and multiplier is None
        qdata = first_qdata if second_qdata is None else second_qdata
        scale = first_scale if second_scale is None else second_scale
        right = _as_operand(qdata, scale, "grad_input", weight, spec) if uses_cast else None
        saved_x, ctx.input_cast = _flat(wait_local(x["grad_weight"]) if needs_weight else None)
        saved_w, ctx.weight_cast = _flat(right)
        if multiplier is not None:
            saved_w = [weight, first_scale if recast_scale is None else recast_scale]
        # Plain tensors: hooks on saved tensors see the real bytes.
        ctx.save_for_backward(*saved_x, *saved_w, multiplier)
        ctx.bias_layout = Layout.of(bias)
        if are_gemms_observed():
            ctx.high = high_precision(spec.owner, input, weight)
        if w_layout is None or layouts is None:
            if are_gemms_observed():
                observe_gemm(spec.owner, "output", ctx.high.input, ctx.high.weight, output)
            return output if bias is None else output + bias.to(output.dtype)
        shape = torch.Size((*input.shape[:-1], weight.shape[0]))
        wrapped = Layout(w_layout.mesh, layouts.output, shape).wrap(output)
        compiling = torch.compiler.is_compiling()
        if are_gemms_observed():
            observe_gemm(spec.owner, "output", ctx.high.input, ctx.high.weight, wrapped)
        return _finished(wrapped, bias, spec) if compiling else wrapped

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor | None) -> Gradients:
        unused = (None,) * 7
        if grad is None:
            return None, None, None, *unused
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = reduced(grad)
        grad_bias = _bias_gradient(grad, ctx.bias_layout) if needs_bias else None
        if not (needs_input or needs_weight):
            return None, None, grad_bias, *unused
        spec, layouts = ctx.spec, ctx.layouts
        x_data, x_scale, w_data, w_scale, multiplier = ctx.saved_tensors
        # torch.autograd.grad may ask for fewer gradients than the forward saved operands for.
        x = _unflat(x_data, x_scale, ctx.input_cast) if needs_weight else None
        w = _unflat(w_data, w_scale, ctx.weight_cast) if needs_input else None
        if needs_input and multiplier is not None:
            # FSDP2 has gathered the weight again. The cast depends on the gradient, because a
            # graph would otherwise compute it in the forward and keep the float8 copy.
            cast = spec.config.cast("weight", "grad_input")
            local, after = local_tensor(w_data), local_tensor(grad)
            granularity = spec.weight_blocks or cast.granularity
            if granularity.blocks is not None:
                blocks = granularity.blocks
                qdata = quantize_blocks(local, multiplier, cast.dtype, blocks, after)
            else:
                grouped = cast.granularity.grouped(local)
                qdata = quantize_after(grouped, multiplier, cast.dtype, after)
            w = Quantized(qdata.view(local.shape), w_scale, granularity)
            if is_observed() and cast != spec.config.cast("weight", "output"):
                scale = observe(spec.owner, "weight", ("grad_input",), local, w, repeats=False)
                w = w._replace(scale=scale)
        operands = prepare_gradients(grad, layouts and layouts.grad_output, x, w, spec)
        grad_input = grad_weight = moving = None
        if needs_input:
            left, right = operands["grad_input"]
            left = wait_local(left)
            product = _gemm(left, right, "grad_input", spec, ctx.input_dtype)
            grad_input = _unflattened(product, grad if layouts is None else left)
            if layouts is not None:
                layout = ctx.x_layout._replace(placements=layouts.grad_input)
                grad_input = layout.wrap(grad_input)
                moving = _start_to_input(grad_input, layouts, ctx.x_layout, spec.reduce_transport)
        if needs_weight:
            left, right = operands["grad_weight"]
            where = None
            if layouts is not None:
                where = (
                    ctx.x_layout._replace(placements=layouts.grad_output, shape=grad.shape),
                    ctx.x_layout._replace(placements=layouts.input),
                )
            left, dtype = wait_local(left), ctx.weight_dtype
            grad_weight = _gemm(left, right, "grad_weight", spec, dtype, where)
            if layouts is not None:
                layout = ctx.w_layout._replace(placements=layouts.grad_weight)
                grad_weight = layout.wrap(grad_weight)
        # Observers see what the GEMM gave, before a transport encodes it.
        observed = moving if isinstance(moving, DTensor) else grad_input
        # Finish late: the GEMM of grad_weight hides the transport.
        grad_input = grad_input if moving is None else finish_reduction(moving)
        if are_gemms_observed():
            # The forward may not have been observed. Operands kept in ctx would live as long as
            # the graph.
            high = getattr(ctx, "high", HighPrecision())
            ctx.high = HighPrecision()
            observe_gemm(spec.owner, "grad_input", grad, high.weight, observed)
            observe_gemm(spec.owner, "grad_weight", grad, high.input, grad_weight)
        return grad_input, grad_weight, grad_bias, *unused


def _with_features(input: torch.Tensor, features: int) -> torch.Tensor:
    """The input with ``features`` as the global size of its last dim.

    ``DTensor.from_local`` assumes that all shards have the size of the local one. Where unequal
    shards cut blocks, ranks would disagree about which blocks are cut.
    """
    layout = Layout.of(input)
    if layout is None or layout.shape[-1] == features:
        return input
    shape = torch.Size((*layout.shape[:-1], features))
    return layout._replace(shape=shape).wrap(local_tensor(input))


def _as_operand(
    qdata: torch.Tensor | None,
    scale: torch.Tensor | None,
    gemm: Gemm,
    weight: torch.Tensor,
    spec: LinearSpec,
) -> Local:
    """The copy of the weight that a GEMM takes, or its local tensor in high precision."""
    cast = spec.config.cast("weight", gemm)
    if cast is None or qdata is None or scale is None:
        return local_tensor(weight)
    return Quantized(qdata, scale, spec.weight_blocks or cast.granularity)


def _flat(operand: Local | None) -> tuple[list[torch.Tensor | None], Granularity | None]:
    """The tensors of an operand, and its granularity."""
    if operand is None or isinstance(operand, torch.Tensor):
        return [operand, None], None
    return [operand.qdata, operand.scale], operand.granularity


def _unflat(data: Any, scale: Any, granularity: Granularity | None) -> Any:
    """The inverse of :func:`_flat`."""
    return data if granularity is None else Quantized(data, scale, granularity)


class _FinishOutput(torch.autograd.Function):
    """Add the bias to a DTensor output, and reduce or move it to ``spec.output_placements``.

    This is a function of its own because it saves nothing for backward. Full activation
    checkpointing ends a recomputation as soon as the last tensor is saved. A reduction issued by
    the function that saves tensors would be repeated, and its result dropped without being waited
    for.

    The gradient keeps the placements in which it arrives: the GEMMs' function gathers it as float8.
    """

    @staticmethod
    def forward(
        ctx: Any, output: DTensor, bias: torch.Tensor | None, spec: LinearSpec
    ) -> torch.Tensor:
        ctx.spec, ctx.bias_layout = spec, Layout.of(bias)
        ctx.set_materialize_grads(False)
        finished = _finished(output, bias, spec)
        # Autograd would make a view of an input that is returned, through DTensor's dispatch.
        return with_local(output, local_tensor(output)) if finished is output else finished

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: torch.Tensor | None) -> Gradients:
        if grad is None:
            return None, None, None
        grad = reduced(grad)
        grad_bias = _bias_gradient(grad, ctx.bias_layout) if ctx.needs_input_grad[1] else None
        return grad, grad_bias, None


def _finished(output: DTensor, bias: torch.Tensor | None, spec: LinearSpec) -> torch.Tensor:
    """The GEMM's output with the bias added, at ``spec.output_placements`` (None: any).

    The bias is added without being moved: to the columns of a column-parallel output, to the sum of
    a row-parallel one.
    """
    placements, transport = spec.output_placements, spec.reduce_transport
    if bias is None:
        return output if placements is None else reduced_to(output, placements, transport)
    if any(p.is_partial() for p in output.placements):
        summed = tuple(Replicate() if p.is_partial() else p for p in output.placements)
        output = reduced_to(output, placements or summed, transport)
    biased: DTensor = output + bias.to(output.dtype)  # type: ignore[assignment]
    return biased if placements is None else redistributed(biased, placements)


def _start_to_input(
    grad_input: DTensor, layouts: LinearLayouts, input_layout: Layout, transport: Encoding
) -> DTensor | Scattering:
    """Start to redistribute grad_input to the placements of the input.

    The gradient of an input that was gathered here is reduce-scattered here. An input that arrived
    gathered keeps a Partial gradient, so that consumers of the same input share one reduction.
    """
    each_axis = zip(input_layout.placements, layouts.input, layouts.grad_input, strict=True)
    target = tuple(grad if now == needed else now for now, needed, grad in each_axis)
    return start_reduction(grad_input, target, transport)


def _bias_gradient(grad: torch.Tensor, bias_layout: Layout | None) -> torch.Tensor:
    """Sum of the high-precision gradient over its rows, at the placements of the bias."""
    summed = grad.sum(dim=tuple(range(grad.ndim - 1))) if grad.ndim > 1 else grad
    if not isinstance(summed, DTensor) or bias_layout is None:
        return summed
    return summed.redistribute(placements=bias_layout.placements)
