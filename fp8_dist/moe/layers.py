"""Grouped linear layers to call from your own experts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8_dist.config import check_config
from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.kernels.grouped import Groups
from fp8_dist.moe.config import DEFAULT, Float8ExpertsConfig
from fp8_dist.moe.dispatch import Routing
from fp8_dist.moe.functions import Weight, combined_product, grouped_product, weight_operand
from fp8_dist.moe.operators import add_bias


def grouped_linear(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    offs: Tensor,
    config: Float8ExpertsConfig | None = None,
    bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Multiply rows, sorted by expert, by the weights of their experts, in float8.

    Args:
        x: ``[R, K]``, high precision. It is cast once for all weights.
        weights: ``[E, N, K]``, or several of these, in high precision; plain tensors or DTensors,
            whose local part is multiplied. Pass a weight that is stored as ``[E, K, N]`` as
            ``weight.mT``: its cast and its gradient keep the memory layout.
        offs: int32 or int64 ``[E]``: the end of each expert's rows. The rows from ``offs[-1]`` on
            belong to no expert; their outputs are 0.
        config: default ``Float8ExpertsConfig()``.
        bias: ``[E, N]``, for a single weight.

    Returns:
        ``[R, N]`` in the dtype of ``x``; for several weights a tuple.

    Collectives: none, unless a scale of a weight covers values of several ranks; then an all-reduce
    of 4 bytes per scale (1 byte per block). The host waits once, for ``offs``.

    Raises:
        ValueError: shapes or offsets do not fit.
    """
    several, config = not isinstance(weights, Tensor), config or DEFAULT
    operands = _operands("grouped_linear", x, weights, config, bias)
    groups = _groups(offs, x.shape[0], len(operands[0].tensor))
    # torch.export can't trace len() of an unknown number of rows.
    rows = groups.group_of_row.numel()
    part = torch.compiler.is_compiling() or rows < x.shape[0]
    # (The backward of a view of all rows would copy the gradient.)
    products = list(grouped_product(x.narrow(0, 0, rows) if part else x, operands, groups, config))
    if bias is not None:
        products[0] = add_bias(products[0], bias, groups)
    if part:
        products = [pad(product, (0, 0, 0, x.shape[0] - rows)) for product in products]
    return tuple(products) if several else products[0]


def dispatch_linear(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    routing: Routing,
    config: Float8ExpertsConfig | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Send tokens in float8 to the ranks of their experts, and multiply them by the weights there.

    Args:
        x: ``[T, K]``, high precision.
        weights: this rank's experts ``[E, N, K]``, or several weights, as in
            :func:`grouped_linear`.
        routing: the result of :func:`fp8_dist.moe.route`.

    Returns:
        ``[R, N]``, the rows of ``routing.groups``, in the dtype of ``x``; for several weights a
        tuple.

    Collectives: with a group, an all-to-all of K bytes and the scales of each row. In the backward,
    an all-to-all of the gradients of ``x``: in float8 with ``combine="float8"``, otherwise in high
    precision.
    """
    several, config = not isinstance(weights, Tensor), config or DEFAULT
    operands = _operands("dispatch_linear", x, weights, config)
    _check_routing("dispatch_linear", x, routing.tokens, operands[0], routing)
    products = grouped_product(x, operands, routing, config)
    return products if several else products[0]


def linear_combine(
    hidden: Tensor,
    weight: Tensor,
    routing: Routing,
    config: Float8ExpertsConfig | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply rows by the weights of their experts, and send the outputs back to their slots.

    Args:
        hidden: ``[R, K]``, the rows of ``routing.groups``, high precision.
        weight: this rank's experts ``[E, N, K]``.
        bias: ``[E, N]``.

    Returns:
        ``[T, top_k, N]`` in the dtype of ``hidden``.

    Collectives: with a group, an all-to-all of the outputs, in high precision, or in float8 with
    ``combine="float8"``. In the backward, an all-to-all of N bytes and the scales of each slot.
    """
    config = config or DEFAULT
    (operand,) = _operands("linear_combine", hidden, weight, config, bias)
    rows = routing.groups.group_of_row.numel()
    _check_routing("linear_combine", hidden, rows, operand, routing)
    return combined_product(hidden, operand, routing, config, bias)


def _operands(
    caller: str,
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    config: Float8ExpertsConfig,
    bias: Tensor | None = None,
) -> list[Weight]:
    """Check the arguments of a grouped linear layer, and return the operands of the weights."""
    given = [weights] if isinstance(weights, Tensor) else list(weights)
    check_config(caller, config, Float8ExpertsConfig)
    if not given or not x.dtype.is_floating_point:
        raise ValueError(
            f"{caller}: floating-point rows and at least one weight are needed, got rows of "
            f"{x.dtype} and {len(given)} weights"
        )
    for weight in given:
        if weight.ndim != 3 or x.ndim != 2 or x.shape[1] != weight.shape[2]:
            raise ValueError(
                f"{caller}: rows of shape [R, K] need weights of shape [E, N, K], got "
                f"{tuple(x.shape)} and {tuple(weight.shape)}"
            )
        if len(weight) != len(given[0]):
            raise ValueError(
                f"{caller}: the weights have {len(given[0])} and {len(weight)} experts"
            )
    operands = [weight_operand(weight, config) for weight in given]
    shape = tuple(operands[0].tensor.shape)
    if bias is not None and len(operands) > 1:
        raise ValueError(f"{caller}: bias is for a single weight; add the biases afterwards")
    if bias is not None and bias.shape != shape[:2]:
        raise ValueError(
            f"{caller}: the bias of a weight {shape} must be of shape {shape[:2]}, got "
            f"{tuple(bias.shape)}"
        )
    return operands


def _check_routing(caller: str, x: Tensor, rows: int, weight: Weight, routing: Routing) -> None:
    routed, experts = len(routing.groups.ends), len(weight.tensor)
    if experts != routed or x.shape[0] != rows:
        raise ValueError(
            f"{caller}: the routing has {rows} rows and {routed} experts of this rank, got "
            f"{x.shape[0]} rows and weights of {experts} experts; pass what was routed"
        )


def _groups(offs: Tensor, rows: int, experts: int) -> Groups:
    if not isinstance(offs, Tensor):
        raise TypeError(f"grouped_linear: offs must be a tensor, got {offs!r}")
    if offs.ndim != 1 or offs.dtype not in (torch.int32, torch.int64) or len(offs) != experts:
        raise ValueError(
            f"grouped_linear: offs must be int32 or int64 [{experts}], one for each expert; got "
            f"{offs.dtype} {tuple(offs.shape)}"
        )
    on_host = sizes_of_groups(offs, rows)
    sizes = offs.to(torch.int64, copy=True)
    sizes[1:] -= offs[:-1]
    total: Any = on_host.sum().item()  # torch.export can't trace int() of it
    return Groups.of(sizes, on_host, total)


@custom_op(
    "sizes_of_groups(Tensor offs, SymInt rows) -> Tensor",
    fake=lambda offs, rows: offs.new_empty(offs.shape[0], dtype=torch.int64, device="cpu"),
)
def sizes_of_groups(offs: Tensor, rows: int) -> Tensor:
    """Return the sizes of groups of rows that end at ``offs``, on the host.

    Raises:
        ValueError: there are no such groups of ``rows`` rows.
    """
    counts = torch.diff(offs.to("cpu", torch.int64), prepend=torch.zeros(1, dtype=torch.int64))
    if len(counts) and (counts.min() < 0 or counts.sum() > rows):
        raise ValueError(
            f"grouped_linear: offs must grow from 0 to at most {rows}, the number of rows; got "
            f"groups of {counts.tolist()} rows"
        )
    return counts
