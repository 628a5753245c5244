"""Styles that plans use, for converted and other layers and for the residual stream.

Between blocks, the residual stream is a plain local tensor if ranks have equal parts of it, because
that is cheapest. Otherwise it is a DTensor, from which later gathers know the lengths of the other
ranks' shards.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from fp8_dist.linear import Float8Linear, float8_layers
from fp8_dist.tensor_parallel.inputs import ModuleInput, check_transport
from fp8_dist.tensor_parallel.styles import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from fp8_dist.transport import Encoding


class ResidualRowwiseParallel(RowwiseParallel):
    """torch's ``RowwiseParallel`` for a layer that writes to the residual stream.

    The arguments are those of torch's style.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(_written)
        return module


class Float8ResidualRowwiseParallel(ResidualRowwiseParallel, Float8RowwiseParallel):
    """``Float8RowwiseParallel`` with the output of :class:`ResidualRowwiseParallel`."""


class EmbeddingRowwiseParallel(ResidualRowwiseParallel):
    """:class:`ResidualRowwiseParallel` for the embedding, which starts the residual stream.

    The forward waits for its output. Blocks that read it are often compiled one by one, and torch
    (2.13) loses the gradient of a tensor that is in flight when it enters a compiled graph
    (pytorch#191113).

    The gradient may have any placement. With fewer tokens than ranks, torch replicates the output
    of some norms (2.13: layer_norm; 2.15: rms_norm). Their gradient is then Partial, and torch
    can't redistribute it to the placement of the output of an embedding with a sharded weight.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        outputs = outputs.redistribute(placements=output_layouts, async_op=False)
        # This only redistributes the gradient; the output has these placements already.
        return outputs.redistribute(placements=output_layouts)


def local_if_even(x: DTensor) -> torch.Tensor:
    """Return the local tensor of a residual stream in equal parts; else the DTensor itself."""
    (placement,), size = x.placements, x.device_mesh.size()
    uneven = isinstance(placement, Shard) and x.shape[placement.dim] % size
    return x if uneven else x.to_local()


def _written(module: nn.Module, inputs: Any, output: DTensor) -> torch.Tensor:
    x = local_if_even(output)
    # A shard that was padded for its reduction keeps the strides of the padded shard, while its
    # DTensor has other strides. Compiled blocks would be recompiled for it, or fail.
    return x.clone() if isinstance(x, DTensor) else x


def check_names(model: nn.Module, expected: Iterable[str], caller: str) -> None:
    """Raise a ValueError that lists all expected modules that a model does not have."""
    if any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        raise ValueError(
            f"{caller} does not know the module names of this {type(model).__name__}, a model of "
            "transformers: use fp8_dist.integrations.transformers.hf_tp_plan(model)"
        )
    modules = dict(model.named_modules())
    missing = [name for name in expected if name not in modules]
    if missing:
        raise ValueError(
            f"{caller} does not know this {type(model).__name__}: it has no module "
            f"{', '.join(missing)}. Rename the modules, or write a plan of your own (a dict of "
            "module names to styles) and pass it to apply_tp_plan"
        )


def colwise_style(
    layer: nn.Module, reduce_transport: Encoding = None, **arguments: Any
) -> ParallelStyle:
    """Return the column-parallel style of a layer: float8 if it is converted, else torch's."""
    if isinstance(layer, Float8Linear):
        return Float8ColwiseParallel(reduce_transport=reduce_transport, **arguments)
    return ColwiseParallel(**arguments)


def residual_style(
    layer: nn.Module, reduce_transport: Encoding = None, **layouts: Placement
) -> ParallelStyle:
    """Return the style of a layer that writes to the residual stream: float8 if converted."""
    if isinstance(layer, Float8Linear):
        return Float8ResidualRowwiseParallel(reduce_transport=reduce_transport, **layouts)
    return ResidualRowwiseParallel(**layouts)


def check_plan_transport(
    model: nn.Module, transport: Encoding, sequence_parallel: bool, caller: str
) -> None:
    """Raise for a transport if the plan has no reduce-scatter that it applies to."""
    check_transport(transport, caller)
    if transport is not None and not (sequence_parallel and float8_layers(model)):
        raise ValueError(
            f"{caller}: reduce_transport={transport!r} applies to the reduce-scatters of converted "
            "layers, which this plan doesn't have: convert the model before, with "
            "sequence_parallel=True"
        )


def prepare_style(
    layers: Mapping[str, nn.Module],
    layout: Placement,
    reduce_transport: Encoding = None,
    *,
    plain: type[PrepareModuleInput] | None = None,
    float8: type[PrepareFloat8ModuleInput] = PrepareFloat8ModuleInput,
    **arguments: Any,
) -> ParallelStyle:
    """Return the style of a module that gathers its first input for linear layers.

    Args:
        layers: the layers that read the input, by their names in the module. The input is gathered
            in float8 if one and the same float8 copy serves all of them; else in high precision.
        layout: the placement of the input.
        reduce_transport: applies to the input's gradient, if one of the layers is converted.
        plain: the style for a gather in high precision; None: torch's, or ``ModuleInput`` with a
            transport.
        float8: the style for a gather in float8.
        arguments: further arguments of the style.
    """
    arguments |= {"input_layouts": (layout,), "desired_input_layouts": (Replicate(),)}
    recipes = [m.config.recipe if isinstance(m, Float8Linear) else None for m in layers.values()]
    casts = {r and (r.gather_scheme["input"], "input" in r.delayed) for r in recipes}
    if reduce_transport is not None and any(isinstance(m, Float8Linear) for m in layers.values()):
        arguments["reduce_transport"] = reduce_transport
        plain = plain or ModuleInput
    if len(casts) == 1 and not casts & {None, (None, False), (None, True)}:
        return float8(**arguments, fwd_config_submodule_fqn=next(iter(layers)))
    return (plain or PrepareModuleInput)(**arguments)
