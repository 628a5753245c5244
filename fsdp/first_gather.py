"""Comparison of layers between ranks before FSDP2 first gathers the parameters of a model."""

from typing import Any

from fp8_dist.linear.agreement import (
    check_layers,
    is_part_of_converted,
    mark_compared,
    needs_comparison,
)
from fp8_dist.linear.module import float8_layers
from fp8_dist.torch_internals import before_fsdp_gathers, fsdp_roots_of


def _compare(group: Any) -> None:
    """Compare the layers of the model that a parameter group belongs to, once.

    This includes layers whose weights FSDP2 gathers in high precision: their forward reduces
    amaxes.
    """
    if not any(needs_comparison(module) for module in group.modules):
        return
    for module in filter(needs_comparison, fsdp_roots_of(group)):
        layers = float8_layers(module)
        # Ranks that have converted another part of the model take part too.
        if layers or is_part_of_converted(module):
            check_layers(module, layers, "FSDP2's first gather")
        else:
            mark_compared(module)


before_fsdp_gathers(_compare, "layers are not compared between ranks before FSDP2's first gather")
