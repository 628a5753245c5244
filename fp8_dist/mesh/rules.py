"""Placements of the operands and results of a linear layer.

The rules are pure functions of placements, applied to one mesh axis at a time, so all ranks get the
same result.

===========  ============  ==========  ===========  ================  ===================
weight       input needed  output      grad_output  grad_input        grad_weight
===========  ============  ==========  ===========  ================  ===================
Replicate    Replicate     Replicate   Replicate    Replicate         Replicate
Replicate    Shard(d)      Shard(d)    Shard(d)     Shard(d)          Partial
Shard(0)     Replicate     Shard(-1)   Shard(-1)    Partial           Shard(0)
Shard(1)     Shard(-1)     Partial     Replicate    Shard(-1)         Shard(1)
===========  ============  ==========  ===========  ================  ===================

``d`` is any dim of the input but the last. A float8 operand with other placements is redistributed
as float8.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from fp8_dist.mesh.layout import Placements, sharded_dim


class LinearLayouts(NamedTuple):
    """Placements of every operand and result of a linear layer, one per mesh axis."""

    input: Placements
    output: Placements
    grad_output: Placements
    grad_input: Placements
    grad_weight: Placements


def linear_layouts(
    input: Sequence[Placement], weight: Sequence[Placement], input_ndim: int, fqn: str = ""
) -> LinearLayouts:
    """Apply the table at the top of this module to each mesh axis.

    The input may be Partial: it will be reduced. ``fqn`` is the layer's name, for messages.

    Raises:
        ValueError: a weight placement is not in the table.
    """
    last = input_ndim - 1
    rows: list[Placements] = []
    for p_input, p_weight in zip(input, weight, strict=True):
        if p_weight.is_replicate():
            dim = sharded_dim(p_input, input_ndim)
            if dim is None or dim == last:
                rows.append((Replicate(),) * 5)
            else:
                rows.append((*(Shard(dim),) * 4, Partial()))
        elif p_weight == Shard(0):
            rows.append((Replicate(), Shard(last), Shard(last), Partial(), Shard(0)))
        elif p_weight == Shard(1):
            rows.append((Shard(last), Partial(), Replicate(), Shard(last), Shard(1)))
        else:
            raise ValueError(
                f"{fqn or 'Float8Linear'}: a weight placed as {p_weight} can't be multiplied; "
                "distribute it as Replicate(), Shard(0) (column-parallel) or Shard(1) "
                "(row-parallel)"
            )
    return LinearLayouts(*(tuple(column) for column in zip(*rows, strict=True)))


@register_sharding(torch.ops.aten.dequantize.self)
def _dequantize_rule(x: Any) -> list[tuple[list[Placement], list[Placement]]]:
    """Pairs of (output placements, input placements) on one axis, for an elementwise operator."""
    return [([p], [p]) for p in (Replicate(), *map(Shard, range(len(x.shape))))]
