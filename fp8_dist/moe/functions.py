"""The autograd functions of experts: grouped linear layers, alone and fused with their messages.

    up        dispatch of the tokens, and the first GEMMs
    down      the last GEMM; the dispatch of the output's gradient in the backward
    combine   the return of the outputs

Autograd never sees a float8 tangent. *Down* returns the output rows, which have no gradient, and a
stand-in for the slots, which receives the gradient of the slots. *Combine* saves nothing, so
activation checkpointing does not repeat it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard

from fp8_dist.device import autocast
from fp8_dist.kernels.grouped import Groups
from fp8_dist.mesh import Layout, local_tensor, sharded_dim, this_rank
from fp8_dist.moe import operators
from fp8_dist.moe.config import Float8ExpertsConfig, stored_transposed
from fp8_dist.moe.dispatch import Routing, return_rows, send_rows
from fp8_dist.operand import observers
from fp8_dist.operand.prepare import cast_local, cast_once
from fp8_dist.operand.saved import flattened
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import CastPlan, Quantized, transposed
from fp8_dist.scaling.operators import dequantize
from fp8_dist.tensor import Float8Tensor, quantized_as
from fp8_dist.torch_internals import recorded_as_operators_are
from fp8_dist.weight.float8_weight import Float8Weight
from fp8_dist.weight.known import KnownWeight
from fp8_dist.weight.stored import StoredFloat8
from fp8_dist.weight.uncast import Uncast


class Weight(NamedTuple):
    """A weight ``[E, N, K]``.

    Attributes:
        tensor: the local tensor that gradients flow to.
        output, grad_input: the operands of these GEMMs, which may be the same.
        owner: the owner of its casts, for observers; ``None`` if these are not notified.
        layout: its layout. It may be ``None`` if ranks have whole experts.
    """

    tensor: Tensor
    output: Quantized
    grad_input: Quantized | Uncast
    owner: Float8Weight | None = None
    layout: Layout | None = None

    def layout_of_rows(self, rows: int, dim: int) -> Layout | None:
        """The layout of rows if their columns are sharded like ``dim`` of the weight; else None."""
        if self.layout is None:
            return None
        placement = self.layout.placements[-1]
        if sharded_dim(placement, 3) != dim:
            return None
        # Adapters divide the input features of a weight as one piece.
        columns = placement if dim == 1 else Shard(1)
        shape = torch.Size((rows, self.layout.shape[dim]))
        return self.layout._replace(placements=(columns,), shape=shape)


def weight_operand(weight: Tensor, config: Float8ExpertsConfig) -> Weight:
    """The operand of a weight that code of a user passes, cast unless it is stored in float8.

    Collectives: as :func:`cast_weight`; for a stored weight, those of its owner's ``operand``.

    Raises:
        ValueError: as :func:`cast_weight`; or a stored weight is not passed as a whole, was stored
            for another config, or has scales for the rows of a weight that is transposed.
    """
    local = local_tensor(weight)
    if not isinstance(local, StoredFloat8):
        return cast_weight(weight, config)
    if (owner := local.weight()) is None:
        raise ValueError(
            "experts: a weight is stored in float8, and the module with its scales is not known; "
            "pass the parameter of the module that freeze_to_float8 was called on"
        )
    name, (scheme,) = f"{owner.fqn}: {owner.name}", owner.config.recipe.schemes["weight"]
    if scheme.key != config.weight.key:
        raise ValueError(
            f"{name} is stored as {scheme.described}, and the config has "
            f"{config.weight.described}; pass the module's float8_experts_config"
        )
    is_transposed = operators.is_stored_transposed(local)
    parameter, registered = weight.mT if is_transposed else weight, owner.module._parameters
    if (whole := registered.get(owner.name)) is not None and whole.shape != parameter.shape:
        raise ValueError(
            f"{name} is stored in float8 as a whole, {list(whole.shape)}, and the forward passes "
            f"{list(weight.shape)}; pass the parameter itself, and divide the outputs"
        )
    if is_transposed != owner.is_transposed and stored_transposed(scheme) != scheme:
        raise ValueError(
            f"{name} has one scale per {scheme.covers}, but its forward passes it transposed; "
            "make it a parameter [E, N, K], or use a recipe with square blocks"
        )
    operand: Weight = owner.operand(parameter, is_transposed)
    return operand


def cast_weight(weight: Tensor, config: Float8ExpertsConfig) -> Weight:
    """Cast a weight in its memory layout, unless FSDP2 gathered it in float8.

    Collectives: as :func:`fp8_dist.operand.prepare.cast_local`.

    Raises:
        ValueError: FSDP2 gathered the weight for another config.
    """
    local, scheme = local_tensor(weight), config.weight
    if isinstance(local, Float8Tensor):
        if local.key != scheme.key:
            raise ValueError(
                f"experts: FSDP2 gathered a weight as {local.scheme}, and the config has "
                f"{scheme}; pass the module's float8_experts_config"
            )
        cast = quantized_as(local, scheme)
    else:
        high, shard = weight, KnownWeight.unwrap(local).detach()
        if is_transposed := operators.is_stored_transposed(shard):
            high, shard = high.mT, shard.mT
        plan = CastPlan((stored_transposed(scheme) if is_transposed else scheme,))
        (cast,), _ = cast_local(shard, plan.on(Layout.of(high)))
        cast = transposed(cast, scheme) if is_transposed else cast
    return Weight(local_part(weight), cast, cast)


def local_part(tensor: Tensor) -> Tensor:
    """The local part of a tensor, to which gradients flow."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _multiply(
    ctx: Any, x: Tensor, rows: Quantized, weights: Sequence[Weight], places: Tensor | None = None
) -> list[Tensor]:
    """Multiply rows by the weights of their experts, and save the operands for the backward.

    Args:
        x: the rows before their cast, or, with ``places``, the tokens that it indexes.
        rows: the rows of ``ctx.groups``, in float8.
    """
    tensors, ctx.specs = flattened(rows, *[weight.grad_input for weight in weights])
    ctx.save_for_backward(*tensors)
    # The layouts of the gradients of the products.
    ctx.layouts = tuple([weight.layout_of_rows(rows.qdata.shape[0], 1) for weight in weights])
    ctx.dtypes = x.dtype, weights[0].tensor.dtype
    ctx.owners = tuple([weight.owner for weight in weights])
    ctx.high = None  # the rows and the weights in high precision, for observers
    is_whole = ctx.routing is None or ctx.routing.group is None
    if is_whole and observers.keeps_operands():
        high = x.detach() if places is None else x.detach().index_select(0, places)
        ctx.high = [high, *map(_before_cast, weights)]
    high_rows, *high_weights = ctx.high or [None] * (1 + len(weights))
    how, products = (x.dtype, ctx.config.emulate), []
    for weight, high_weight in zip(weights, high_weights, strict=True):
        gemm = operators.GroupedGemm(rows, weight.output, True, ctx.groups, *how)
        product = operators.grouped_mm(gemm)
        operands = rows, weight.output, product
        _notify(ctx, weight.owner, "output", operands, (high_rows, high_weight))
        products.append(product)
    return products


def _before_cast(weight: Weight) -> Tensor:
    """A local weight in high precision, for observers."""
    local = KnownWeight.unwrap(weight.tensor).detach()
    if weight.owner is None or not isinstance(local, StoredFloat8):
        return local
    values = local_tensor(weight.owner.high_precision())
    return values.mT if operators.is_stored_transposed(weight.output.qdata) else values


def _gradients(
    ctx: Any, grads: Sequence[Quantized], needs: Sequence[bool], high: Sequence[Tensor | None]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Compute the gradients of the rows and of each weight.

    Args:
        grads: the gradient of each product, by rows.
        needs: whether gradients of the rows and of each weight are needed.
        high: ``grads`` in high precision, for observers.
    """
    high_rows, *high_weights = ctx.high or [None] * len(ctx.specs)
    ctx.high = None  # ctx lives as long as the graph
    tensors = ctx.saved_tensors  # once: activation checkpointing frees them as they are read
    rows, *weights = (spec.operand(tensors) for spec in ctx.specs)
    options = ctx.config.pad_token_groups_for_grouped_mm, ctx.config.emulate
    rows_dtype, weight_dtype = ctx.dtypes
    sum_of_rows: Tensor | None = None
    grad_weights: list[Tensor | None] = []
    for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
        weight = weight.cast() if isinstance(weight, Uncast) else weight
        dtypes = rows_dtype if needs[0] else None, weight_dtype if needs[1 + i] else None
        gemms = operators.GradientGemms(grad, rows, weight, ctx.groups, dtypes, *options)
        grad_rows, grad_weight = operators.grouped_gradients(gemms, ctx.layouts[i])
        grad_weights.append(grad_weight)
        if grad_rows is not None:
            sum_of_rows = grad_rows if sum_of_rows is None else sum_of_rows + grad_rows
        pair = high[i], high_weights[i]
        _notify(ctx, ctx.owners[i], "grad_input", (grad, weight, grad_rows), pair)
        pair = high[i], high_rows
        _notify(ctx, ctx.owners[i], "grad_weight", (grad, rows, grad_weight), pair)
    return sum_of_rows, grad_weights


def _notify(
    ctx: Any,
    owner: Float8Weight | None,
    gemm: Gemm,
    operands: tuple[Quantized, Quantized, Tensor | None],
    high: tuple[Tensor | None, Tensor | None],
) -> None:
    """Notify observers of a grouped GEMM of a weight that has an owner.

    Args:
        operands: the left and the right operand, and the result.
        high: the operands in high precision, if observers are shown them.
    """
    left, right, result = operands
    if not observers.is_observed() or owner is None or result is None:
        return
    config, layout = ctx.config, owner.layout()
    weight = result if gemm == "grad_weight" else right.qdata
    is_transposed = operators.is_stored_transposed(weight)
    if is_transposed and layout is not None:
        experts, k, n = layout.shape
        layout = layout._replace(shape=torch.Size((experts, n, k)))
    layouts = None, None if gemm == "grad_weight" else layout
    padded = config.pad_token_groups_for_grouped_mm
    options = config.recipe, padded, config.emulate, is_transposed
    rest = options, layouts, ctx.groups
    observers.notify_multiply(owner, observers.Product(gemm, left, right, result, *rest, *high))


def _cast_rows(
    rows: Tensor,
    config: Float8ExpertsConfig,
    operand: Operand,
    owners: Iterable[Float8Weight | None],
    layout: Layout | None = None,
    routing: Routing | None = None,
) -> Quantized:
    """Cast rows.

    Args:
        layout: their layout, if ranks have parts of each row.
        routing: where they are sent, if they are rows of tokens or slots.
    """
    rows, use = rows.detach().contiguous(), None
    told = [owner for owner in owners if owner is not None]
    if told and observers.is_observed():
        dispatch = routing and _dispatch(routing, len(rows))
        use = observers.Use(told, operand, layout or _replicated(rows, told[0]), dispatch)
    (low,), _ = cast_local(rows, CastPlan((config.rows,)).on(layout), None, use)
    return low


def _replicated(rows: Tensor, owner: Float8Weight) -> Layout | None:
    """The layout of rows that are the same on all ranks, if ranks have parts of each expert."""
    layout = owner.layout()
    if layout is None or sharded_dim(layout.placements[-1], 3) == 0:
        return None
    return layout._replace(placements=(Replicate(),), shape=rows.shape)


def _dispatch(routing: Routing, rows: int) -> observers.Dispatch:
    """The experts of rows of tokens, or of slots, for observers."""
    group, ids = routing.group, routing.expert_ids.detach()
    ranks = [this_rank()] if group is None else dist.get_process_group_ranks(group)
    return observers.Dispatch(ids if rows == routing.tokens else ids.reshape(rows, 1), ranks)


class _Up(torch.autograd.Function):
    """The first grouped linear layers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        to: Groups | Routing,
        config: Float8ExpertsConfig,
        weights: tuple[Weight, ...],
        *_: Tensor | None,  # the tensors of the weights
    ) -> tuple[Tensor, ...]:
        routing, groups = (to, to.groups) if isinstance(to, Routing) else (None, to)
        rows = _cast_rows(x, config, "input", [weight.owner for weight in weights], routing=routing)
        places = None if routing is None else routing.slots // routing.top_k
        if routing is not None and places is not None:
            rows = send_rows(rows, places, routing)
        ctx.groups, ctx.config, ctx.routing = groups, config, routing
        return tuple(_multiply(ctx, x, rows, weights, places))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        config, routing, count = ctx.config, ctx.routing, 4 + len(grads)
        needs, unused = ctx.needs_input_grad[:count], ctx.needs_input_grad[count:]
        facts = zip(grads, ctx.owners, ctx.layouts, strict=True)
        rows = [_cast_rows(g, config, "grad_output", [owner], layout) for g, owner, layout in facts]
        grad_x, grad_weights = _gradients(ctx, rows, (needs[0], *needs[4:]), grads)
        if grad_x is not None and routing is not None:
            slots = _returned(grad_x, routing, config)
            by_token = slots.view(routing.tokens, routing.top_k, slots.shape[1])
            grad_x = by_token.sum(1, dtype=torch.float32).to(slots.dtype)
        return grad_x, None, None, None, *grad_weights, *[None for _ in unused]


@recorded_as_operators_are
def grouped_product(
    x: Tensor, weights: Sequence[Weight], to: Groups | Routing, config: Float8ExpertsConfig
) -> tuple[Tensor, ...]:
    """Multiply rows by the weights of their experts; see :func:`fp8_dist.moe.grouped_linear`.

    ``to``: the groups of the rows ``x``, or the routing of tokens ``x``, which are first sent to
    the rows of its groups; see :func:`fp8_dist.moe.dispatch_linear`.
    """
    tensors = [weight.tensor for weight in weights]
    # As in float8_linear: dynamo miscounts the arguments if exactly two tensors come last.
    rest = [*tensors, None] if len(tensors) == 2 else tensors
    return _Up.apply(autocast(x), to, config, tuple(weights), *rest)


def _returned(rows: Tensor, routing: Routing, config: Float8ExpertsConfig) -> Tensor:
    """Send rows back to their slots, in the dtype of ``config.combine``."""
    if config.combine == "high_precision":
        return routing.to_slots(rows)
    return dequantize(return_rows(cast_once(rows, config.rows), routing), rows.dtype)


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        _: Tensor,  # the tensor of the weight
        bias: Tensor | None,
        routing: Routing,
        config: Float8ExpertsConfig,
        weight: Weight,
    ) -> tuple[Tensor, Tensor]:
        layout = weight.layout_of_rows(hidden.shape[0], 2)
        rows = _cast_rows(hidden, config, "input", [weight.owner], layout)
        ctx.groups, ctx.config, ctx.routing = routing.groups, config, routing
        (output,) = _multiply(ctx, hidden, rows, [weight])
        if bias is not None:
            output = operators.add_bias(output, bias.detach(), routing.groups)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(output)
        ctx.set_materialize_grads(False)  # the gradient of the output
        slots = routing.tokens * routing.top_k
        return output, output.new_empty(1, 1).expand(slots, output.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        assert grad is not None  # Combine's backward returns one on every rank.
        routing, config = ctx.routing, ctx.config
        slots = _cast_rows(grad, config, "grad_output", ctx.owners, routing=routing)
        rows = send_rows(slots, routing.slots, routing)
        high = ctx.high and grad.index_select(0, routing.slots)
        grad_hidden, (grad_weight,) = _gradients(ctx, [rows], ctx.needs_input_grad[:2], [high])
        grad_bias = None
        if ctx.needs_input_grad[2]:
            # Only the float8 rows have arrived on this rank.
            values = dequantize(rows)
            sums = values.new_zeros(len(routing.groups.ends), values.shape[1])
            grad_bias = sums.index_add_(0, routing.groups.group_of_row, values).to(ctx.bias_dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output: Tensor, stand_in: Tensor, routing: Routing, config: Float8ExpertsConfig
    ) -> Tensor:
        return _returned(output, routing, config)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, grad, None, None


@recorded_as_operators_are
def combined_product(
    hidden: Tensor,
    weight: Weight,
    routing: Routing,
    config: Float8ExpertsConfig,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply, and return the outputs to their slots; see :func:`fp8_dist.moe.linear_combine`."""
    output, stand_in = _Down.apply(autocast(hidden), weight.tensor, bias, routing, config, weight)
    slots = _Combine.apply(output, stand_in, routing, config)
    return slots.view(routing.tokens, routing.top_k, slots.shape[1])
