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
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate

from fp8_dist.cast import cast_with
from fp8_dist.config import Float8LinearConfig, Gemm, Operand
from fp8_dist.matmul import scaled_mm
from fp8_dist.sharding import (
    Layout,
    LinearLayouts,
    Placements,
    is_shard,
    linear_layouts,
    local_tensor,
    reduced,
)
from fp8_dist.tensor import Float8Tensor


class LinearSpec(NamedTuple):
    """Everything about one call of the linear function that is not a tensor."""

    config: Float8LinearConfig
    output_placements: Placements | None
    fqn: str


class _LocalOperand(NamedTuple):
    """One operand, local, in each precision that some GEMM of its layer takes it in."""

    float8: Float8Tensor | None
    high: torch.Tensor | None

    def wait(self) -> "_LocalOperand":
        """The same, once collectives in flight have ended."""
        return _LocalOperand(*(t if t is None else local_tensor(t) for t in self))  # type: ignore[arg-type]

    def for_gemm(self, config: Float8LinearConfig, gemm: Gemm) -> torch.Tensor:
        operand = self.float8 if config.gemm_enabled(gemm) else self.high
        assert operand is not None, f"no operand was kept for the GEMM of {gemm}"
        return operand


def _prepare_operand(
    tensor: torch.Tensor,
    operand: Operand,
    gemms: tuple[Gemm, ...],
    placements: Placements | None,
    config: Float8LinearConfig,
) -> _LocalOperand:
    """Cast an operand for the given GEMMs, and bring it to ``placements``, as float8 where it is.

    With ``amax_scope="rank"`` amax is reduced only over axes on which the operand then moves.
    """
    enabled = [config.gemm_enabled(gemm) for gemm in gemms]
    float8 = high = None
    if any(enabled):
        float8 = tensor
        if not isinstance(local_tensor(tensor), Float8Tensor):
            axes = None
            if config.amax_scope == "rank" and isinstance(tensor, DTensor):
                assert placements is not None
                pairs = enumerate(zip(tensor.placements, placements, strict=True))
                axes = tuple(i for i, (now, then) in pairs if is_shard(now) and now != then)
            dtype = config.operand_dtype(operand)
            assert dtype is not None
            float8 = cast_with(tensor, dtype, config.round_scales_to_power_of_2, axes)
        float8 = _move(float8, placements)
    if not all(enabled):
        high = _move(tensor, placements)
    return _LocalOperand(float8, high)  # type: ignore[arg-type]


def _move(tensor: torch.Tensor, placements: Placements | None) -> torch.Tensor:
    """Local tensor of ``tensor`` at ``placements``; may be in flight until it is first used."""
    if not isinstance(tensor, DTensor):
        return tensor
    assert placements is not None
    return _redistributed(tensor, placements)._local_tensor


def _gemm(
    left: torch.Tensor,
    right: torch.Tensor,
    gemm: Gemm,
    config: Float8LinearConfig,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """One of the three GEMMs on local matrices: in float8 if the operands are."""
    if not isinstance(left, Float8Tensor):
        return torch.mm(left, right.to(left.dtype)).to(out_dtype)
    assert isinstance(right, Float8Tensor)
    return scaled_mm(
        left,
        right,
        out_dtype=out_dtype,
        use_fast_accum=config.gemm_config(gemm).use_fast_accum,
        # The inner dim of grad_weight is the number of rows of the input. That is data, and may
        # be misaligned on one data-parallel rank alone, where refusing would hang the others.
        pad_inner_dim=config.pad_inner_dim or gemm == "grad_weight",
        emulate=config.emulate,
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` as a matrix ``[M, K]``; either may be 0."""
    if tensor.ndim == 2:
        return tensor
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _unflatten_rows(matrix: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[M, N]`` as ``[..., N]`` with the leading dims of ``like``.

    Not a view for autograd: a function's output that is one can't be modified in place.
    """
    if like.ndim == 2:
        return matrix
    return torch.ops.aten._unsafe_view(matrix, (*like.shape[:-1], matrix.shape[-1]))


def _save(ctx: Any, *operands: _LocalOperand) -> None:
    """Save operands as plain tensors: hooks on saved tensors then see the real bytes."""
    ctx.dtypes = [None if x.float8 is None else x.float8.orig_dtype for x in operands]
    flat: list[torch.Tensor | None] = []
    for operand in operands:
        f8 = operand.float8
        flat += [None, None] if f8 is None else [f8.qdata, f8.scale]
        flat.append(operand.high)
    ctx.save_for_backward(*flat)


def _saved(ctx: Any) -> list[_LocalOperand]:
    flat, operands = ctx.saved_tensors, []
    for i, dtype in enumerate(ctx.dtypes):
        qdata, scale, high = flat[3 * i : 3 * i + 3]
        operands.append(
            _LocalOperand(None if dtype is None else Float8Tensor(qdata, scale, dtype), high)
        )
    return operands


def float8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_float8: Float8Tensor | None,
    spec: LinearSpec,
) -> torch.Tensor:
    """``input @ weight^T + bias`` with float8 operands.

    Args:
        input: ``[..., K]``, high precision or cast already; no Partial placements.
        weight: ``[N, K]``, what gradients flow to; a DTensor exactly if ``input`` is one, on the
            same mesh.
        bias: ``[N]`` or None.
        weight_float8: the local weight as float8 (None where no GEMM takes it so).
        spec: config, and where a DTensor output goes.

    Returns:
        ``[..., N]`` in the input's dtype.
    """
    qdata, scale = (
        (None, None) if weight_float8 is None else (weight_float8.qdata, weight_float8.scale)
    )
    return _LinearFunction.apply(input, weight, bias, qdata, scale, spec)


class _LinearFunction(torch.autograd.Function):
    """The function of :func:`float8_linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        weight_qdata: torch.Tensor | None,
        weight_scale: torch.Tensor | None,
        spec: LinearSpec,
    ) -> torch.Tensor:
        config = spec.config
        input_layout, weight_layout = Layout.of(input), Layout.of(weight)
        layouts: LinearLayouts | None = None
        if input_layout is not None and weight_layout is not None:
            layouts = linear_layouts(
                input_layout.placements, weight_layout.placements, input.ndim, spec.fqn
            )
        x = _prepare_operand(
            input, "input", ("output", "grad_weight"), layouts and layouts.input, config
        )
        w = _weight_operand(weight, weight_qdata, weight_scale, config)
        # The gather of the input is waited for here, after the weight's cast was issued.
        x = x.wait()

        left = x.for_gemm(config, "output")
        right = w.for_gemm(config, "output")
        output = _gemm(_rows(left), right.t(), "output", config, input.dtype)
        output = _unflatten_rows(output, left)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.layouts = spec, layouts
        ctx.input_layout, ctx.weight_layout, ctx.bias_layout = (
            input_layout,
            weight_layout,
            Layout.of(bias),
        )
        ctx.input_shape, ctx.input_dtype, ctx.weight_dtype = input.shape, input.dtype, weight.dtype
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        _save(
            ctx,
            x if needs_weight else _LocalOperand(None, None),
            w if needs_input else _LocalOperand(None, None),
        )

        if layouts is None or weight_layout is None:
            return output if bias is None else output + bias.to(output.dtype)
        shape = torch.Size((*input.shape[:-1], weight.shape[0]))
        wrapped = Layout(weight_layout.mesh, layouts.output, shape).wrap(output)
        return _add_bias(wrapped, bias, spec.output_placements)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 6
        config, layouts = ctx.spec.config, ctx.layouts
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = reduced(grad)
        grad_bias = _bias_gradient(grad, ctx.bias_layout) if needs_bias else None
        gemms: tuple[Gemm, ...] = ()
        gemms += ("grad_input",) if needs_input else ()
        gemms += ("grad_weight",) if needs_weight else ()
        if not gemms:
            return None, None, grad_bias, None, None, None
        x, w = _saved(ctx)
        g = _prepare_operand(grad, "grad_output", gemms, layouts and layouts.grad_output, config)
        g = g.wait()

        grad_input = grad_weight = None
        if needs_input:
            left, right = g.for_gemm(config, "grad_input"), w.for_gemm(config, "grad_input")
            grad_input = _gemm(_rows(left), right, "grad_input", config, ctx.input_dtype)
            grad_input = _unflatten_rows(grad_input, left)
            if layouts is not None:
                grad_input = _redistribute_grad_input(grad_input, layouts, ctx.input_layout)
        if needs_weight:
            left, right = g.for_gemm(config, "grad_weight"), x.for_gemm(config, "grad_weight")
            grad_weight = _gemm(
                _rows(left).t(), _rows(right), "grad_weight", config, ctx.weight_dtype
            )
            if layouts is not None:
                grad_weight = ctx.weight_layout._replace(placements=layouts.grad_weight).wrap(
                    grad_weight
                )
        return grad_input, grad_weight, grad_bias, None, None, None


def _weight_operand(
    weight: torch.Tensor,
    qdata: torch.Tensor | None,
    scale: torch.Tensor | None,
    config: Float8LinearConfig,
) -> _LocalOperand:
    high = None
    if not (config.gemm_enabled("output") and config.gemm_enabled("grad_input")):
        high = local_tensor(weight)
    if qdata is None:
        return _LocalOperand(None, high)
    assert scale is not None
    return _LocalOperand(Float8Tensor(qdata, scale, weight.dtype), high)


def _add_bias(
    output: DTensor, bias: torch.Tensor | None, placements: Placements | None
) -> torch.Tensor:
    """The GEMM's output with the bias added, at the given placements (None: anywhere).

    The bias is added where it already is: to the columns of a column-parallel output, to the sum
    of a row-parallel one.
    """
    if bias is None:
        return output if placements is None else _redistributed(output, placements)
    if any(p.is_partial() for p in output.placements):
        summed = tuple(Replicate() if p.is_partial() else p for p in output.placements)
        output = _redistributed(output, placements or summed)
    biased: DTensor = output + bias.to(output.dtype)  # type: ignore[assignment]
    return biased if placements is None else _redistributed(biased, placements)


def _redistributed(tensor: DTensor, placements: Placements) -> DTensor:
    if tuple(tensor.placements) == placements:
        return tensor
    return tensor.redistribute(placements=placements, async_op=True)


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
