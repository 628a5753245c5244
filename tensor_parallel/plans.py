"""The tensor-parallel plan of the reference Llama, and the styles that plans use.

The *readers* of a block are the linear layers that read the block's input: ``wq``, ``wk`` and
``wv`` of attention, ``w1`` and ``w3`` of feed-forward. The *writer* of a block is the layer whose
output is added to the residual stream.

Between blocks, the residual stream is a plain local tensor if ranks have equal parts of it, because
that is cheapest. Otherwise it is a DTensor, whose global shape gives later gathers the lengths of
the other ranks' shards.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, parallel

from fp8_dist.linear import Float8Linear, float8_layers
from fp8_dist.tensor_parallel import styles
from fp8_dist.tensor_parallel.inputs import ModuleInput, check_transport
from fp8_dist.text import alike_names
from fp8_dist.transport import Encoding


class ResidualRowwiseParallel(parallel.RowwiseParallel):
    """torch's ``RowwiseParallel`` for a layer that writes to the residual stream."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(_output_hook)
        return module


class Float8ResidualRowwiseParallel(ResidualRowwiseParallel, styles.Float8RowwiseParallel):
    """``Float8RowwiseParallel`` with the output of :class:`ResidualRowwiseParallel`."""


class EmbeddingRowwiseParallel(ResidualRowwiseParallel):
    """:class:`ResidualRowwiseParallel` for the embedding, which starts the residual stream.

    The forward waits for the reduction of the output. Blocks that read it are often compiled one by
    one, and torch (2.13) loses the gradient of a tensor that enters a compiled graph before its
    collective has finished (pytorch#191113).

    The gradient of the output may have any placement. With fewer tokens than ranks, torch
    replicates the output of some norms (2.13: layer_norm; 2.15: rms_norm). Their gradient is then
    Partial, and torch can't redistribute it to the placement of the output of an embedding with a
    sharded weight.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        outputs = outputs.redistribute(placements=output_layouts, async_op=False)
        # In the forward this is a no-op. In the backward it redistributes the gradient.
        return outputs.redistribute(placements=output_layouts)


def local_if_even(x: DTensor) -> torch.Tensor:
    """Return the local tensor if all shards are equally long, else the DTensor itself."""
    (placement,), size = x.placements, x.device_mesh.size()
    uneven = isinstance(placement, Shard) and x.shape[placement.dim] % size
    return x if uneven else x.to_local()


def _output_hook(module: nn.Module, inputs: Any, output: DTensor) -> torch.Tensor:
    x = local_if_even(output)
    # A shard that was padded for its reduction keeps the strides of the padded shard, while its
    # DTensor has other strides. Compiled blocks would be recompiled for it, or fail.
    return x.clone() if isinstance(x, DTensor) else x


def check_names(model: nn.Module, expected: Iterable[str], caller: str) -> dict[str, nn.Module]:
    """Return a model's modules by name; raise a ValueError that lists all missing names."""
    if any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        raise ValueError(
            f"{caller} does not know the module names of this {type(model).__name__}, a model of "
            "transformers: use fp8_dist.integrations.transformers.hf_tp_plan(model)"
        )
    modules = dict(model.named_modules())
    if missing := [name for name in expected if name not in modules]:
        raise ValueError(
            f"{caller} does not know this {type(model).__name__}: it has no module "
            f"{', '.join(alike_names(missing))}. Rename the modules, or write a plan of your own "
            "(a dict of module names to styles) and pass it to apply_tp_plan"
        )
    return modules


def colwise_style(
    layer: nn.Module, reduce_transport: Encoding = None, **arguments: Any
) -> parallel.ParallelStyle:
    """Return the column-parallel style of a layer: float8 if it is converted, else torch's."""
    if isinstance(layer, Float8Linear):
        return styles.Float8ColwiseParallel(reduce_transport=reduce_transport, **arguments)
    return parallel.ColwiseParallel(**arguments)


def head_style(
    layer: nn.Module, stream: Placement, loss_parallel: bool, reduce_transport: Encoding = None
) -> parallel.ParallelStyle:
    """Return the style of a head, whose logits are full, or a DTensor for ``loss_parallel``."""
    output = Shard(-1) if loss_parallel else Replicate()
    layouts = {"input_layouts": stream, "output_layouts": output}
    return colwise_style(layer, reduce_transport, use_local_output=not loss_parallel, **layouts)


def residual_style(
    layer: nn.Module, reduce_transport: Encoding = None, **layouts: Placement
) -> parallel.ParallelStyle:
    """Return the style of a layer that writes to the residual stream: float8 if converted."""
    if isinstance(layer, Float8Linear):
        return Float8ResidualRowwiseParallel(reduce_transport=reduce_transport, **layouts)
    return ResidualRowwiseParallel(**layouts)


def check_plan_transport(model: nn.Module, transport: Encoding, caller: str) -> None:
    """Raise ValueError if a transport is set, but no layer is converted."""
    check_transport(transport, caller)
    if transport is not None and not float8_layers(model):
        raise ValueError(
            f"{caller}: reduce_transport={transport!r} applies to the sums of converted layers, "
            "which this model doesn't have: convert it before"
        )


def prepare_style(
    layers: Mapping[str, nn.Module],
    layout: Placement,
    reduce_transport: Encoding = None,
    *,
    plain: type[parallel.PrepareModuleInput] | None = None,
    float8: type[styles.PrepareFloat8ModuleInput] = styles.PrepareFloat8ModuleInput,
    **arguments: Any,
) -> parallel.ParallelStyle:
    """Return the style of a module that gathers its first input for linear layers.

    Args:
        layers: the layers that read the input, by their names in the module. The input is gathered
            in float8 if a single float8 copy serves all of them, else in high precision.
        layout: the placement of the input.
        reduce_transport: applies to the input's gradient, if one of the layers is converted.
        plain: the style for a gather in high precision. None: ``PrepareModuleInput``, or
            ``ModuleInput`` if a transport is set.
        float8: the style for a gather in float8.
        arguments: further arguments of the style.
    """
    arguments |= {"input_layouts": (layout,), "desired_input_layouts": (Replicate(),)}
    casts = set(map(styles.input_cast, layers.values()))
    if reduce_transport is not None and any(isinstance(m, Float8Linear) for m in layers.values()):
        arguments["reduce_transport"] = reduce_transport
        plain = plain or ModuleInput
    if len(casts) == 1 and None not in casts:
        return float8(**arguments, fwd_config_submodule_fqn=next(iter(layers)))
    return (plain or parallel.PrepareModuleInput)(**arguments)


# The norm, the readers and the writer of each block of a layer.
_BLOCKS = {
    "attention": ("attention_norm", ("wq", "wk", "wv"), "wo"),
    "feed_forward": ("ffn_norm", ("w1", "w3"), "w2"),
}


def llama_tp_plan(
    model: nn.Module,
    *,
    sequence_parallel: bool = True,
    loss_parallel: bool = False,
    reduce_transport: Encoding = None,
) -> dict[str, parallel.ParallelStyle]:
    """Make the tensor-parallel plan of a Llama for ``apply_tp_plan``: module names to styles.

    A converted layer (``Float8Linear``) gets a float8 style, any other layer gets torch's style. If
    a single float8 copy of a block's input serves all of its readers, the input is cast and
    gathered in float8 once for all of them. Otherwise it is gathered once in high precision, and
    each converted reader casts it.

    Args:
        model: a model with the modules ``tok_embeddings``,
            ``layers.<i>.{attention_norm,attention,ffn_norm,feed_forward}`` (attention: ``wq``,
            ``wk``, ``wv``, ``wo``; feed_forward: ``w1``, ``w2``, ``w3``), ``norm`` and ``output``.
            Convert it before this call: the plan ignores later conversions.
        sequence_parallel: activations between blocks are sharded along dim 1 (the sequence), and
            norms run on shards. False: activations are replicated, and norms have no entry.
            Activations between blocks are plain local tensors, or DTensors for a sequence whose
            length is not a multiple of the number of ranks.
        loss_parallel: the head returns logits as a DTensor sharded along the vocabulary, for
            ``torch.distributed.tensor.parallel.loss_parallel``. False: full logits, as a plain
            tensor.
        reduce_transport: as in the styles, for the sums of converted layers over ranks: the outputs
            of ``wo`` and ``w2``, and the gradients of the inputs of blocks and of the head. The
            sums of the embedding and of unconverted layers stay in high precision.
            With a transport, results depend on the number of ranks.

    Returns:
        A style for each module name, as ``apply_tp_plan`` takes it.

    Raises:
        ValueError: modules are missing (all of them are listed), or ``reduce_transport`` is given
            for a model that was not converted.
    """
    check_plan_transport(model, reduce_transport, "llama_tp_plan")
    stack = model._modules.get("layers") or nn.Module()
    names = [f"layers.{name}" for name, _ in stack.named_children()]
    expected = ["tok_embeddings", "norm", "output"]
    for layer in names or ["layers.0"]:
        for block, (norm, readers, writer) in _BLOCKS.items():
            expected += [f"{layer}.{norm}", f"{layer}.{block}"]
            expected += [f"{layer}.{block}.{name}" for name in (*readers, writer)]
    modules = check_names(model, expected, "llama_tp_plan")
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, parallel.ParallelStyle] = {
        "tok_embeddings": EmbeddingRowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    }
    for layer in names:
        for block, (norm, readers, writer) in _BLOCKS.items():
            if sequence_parallel:
                plan[f"{layer}.{norm}"] = parallel.SequenceParallel()
            path = f"{layer}.{block}"
            layers = {name: modules[f"{path}.{name}"] for name in readers}
            plan[path] = prepare_style(layers, stream, reduce_transport)
            plan |= {f"{path}.{name}": colwise_style(layer) for name, layer in layers.items()}
            plan[f"{path}.{writer}"] = residual_style(
                modules[f"{path}.{writer}"], reduce_transport, output_layouts=stream
            )
    if sequence_parallel:
        plan["norm"] = parallel.SequenceParallel()
    plan["output"] = head_style(modules["output"], stream, loss_parallel, reduce_transport)
    return plan
