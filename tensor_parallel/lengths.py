"""Check of the lengths of sequences that a plan divides between ranks as plain tensors.

A style that reads such parts (``input_layouts=Shard(1)``) can't know the lengths of other ranks'
parts, and assumes equal ones. Its gather of unequal parts aborts, or never ends. So the length is
checked where a tensor is divided: there the whole length is known, the same on all ranks.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard, parallel


def check_lengths(model: nn.Module, size: int, styles: dict[str, parallel.ParallelStyle]) -> None:
    """Make modules raise ValueError in the forward if ``size`` doesn't divide a length to shard.

    Only dims along which styles read plain parts are checked, and not the last dim: the layers know
    the number of features. Call this before the styles are applied, so that the check runs first.
    """
    parts = [(name, part) for name, style in styles.items() for part in styles_in(style)]
    layouts = (layout for _, style in parts for layout in layouts_read(style).values())
    dims = {layout.dim for layout in layouts if isinstance(layout, Shard)}
    if not dims or size == 1:
        return

    def check(name: str, tensors: Any, layouts: Iterable[Any], desired: Iterable[Any]) -> None:
        tensors = tensors if isinstance(tensors, tuple) else (tensors,)
        for x, layout, target in zip(tensors, layouts, desired, strict=False):
            if not isinstance(x, torch.Tensor) or not isinstance(target, Shard):
                continue
            ndim = x.ndim + (not x.is_floating_point())  # tokens get features later
            dim = target.dim % x.ndim
            is_whole = isinstance(x, DTensor) or layout != target
            is_read = dim in {read_dim % ndim for read_dim in dims} and dim != ndim - 1
            if is_whole and is_read and x.shape[dim] % size:
                raise ValueError(
                    f"{name or 'the model'}: the plan divides dim {dim} of a tensor of shape "
                    f"{tuple(x.shape)} into unequal plain tensors on {size} tensor-parallel ranks; "
                    f"pad the sequence to a multiple of {size}, or let the styles that divide it "
                    "return DTensors (use_local_output=False)"
                )

    for name, style in parts:
        _add_check(name, model.get_submodule(name), style, check)


def _add_check(name: str, module: nn.Module, style: Any, check: Any) -> None:
    if not getattr(style, "use_local_output", False):
        return
    if isinstance(style, parallel.PrepareModuleInput):
        pairs = style.input_layouts or (), style.desired_input_layouts or ()
        module.register_forward_pre_hook(lambda _, args: check(name, args, *pairs))
    elif isinstance(style, parallel.PrepareModuleOutput):
        pairs = style.output_layouts, style.desired_output_layouts
        module.register_forward_hook(lambda _, args, output: check(name, output, *pairs))
    elif isinstance(style, parallel.ColwiseParallel | parallel.RowwiseParallel):
        layouts: Any = style.output_layouts  # of a DTensor with any placement
        module.register_forward_hook(lambda _, args, output: check(name, output, (None,), layouts))


def styles_in(style: Any) -> list[Any]:
    """The styles that a style combines, or the style itself."""
    return [x for x in vars(style).values() if isinstance(x, parallel.ParallelStyle)] or [style]


def layouts_read(style: Any) -> dict[int | str, Placement | None]:
    """The placements that a style assumes for plain inputs, by their positions or names."""
    if isinstance(style, parallel.SequenceParallel):
        return dict(enumerate(style.sequence_sharding))
    if isinstance(style, parallel.PrepareModuleInput):
        return dict(enumerate(style.input_layouts or ())) | style.input_kwarg_layouts
    if isinstance(style, parallel.ColwiseParallel | parallel.RowwiseParallel):
        return dict(enumerate(style.input_layouts))
    return {}
