"""The tensor-parallel plan of a Llama with the reference model's module names.

The *consumers* of a block are the linear layers that read the block's input: ``wq``, ``wk``, ``wv``
of attention, ``w1``, ``w3`` of feed-forward. Its *writer* adds to the residual stream.
"""

from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from fp8_dist.linear.module import Float8Linear
from fp8_dist.tensor_parallel.residual import (
    EmbeddingRowwiseParallel,
    Float8ResidualRowwiseParallel,
    ResidualRowwiseParallel,
)
from fp8_dist.tensor_parallel.styles import (
    Float8ColwiseParallel,
    PrepareFloat8ModuleInput,
    shared_input_cast,
)

# Each block of a layer: its norm, its consumers, its writer.
_BLOCKS = {
    "attention": ("attention_norm", ("wq", "wk", "wv"), "wo"),
    "feed_forward": ("ffn_norm", ("w1", "w3"), "w2"),
}


def llama_tp_plan(
    model: nn.Module, *, sequence_parallel: bool = True, loss_parallel: bool = False
) -> dict[str, ParallelStyle]:
    """The tensor-parallel plan of a Llama: module names to styles, for ``apply_tp_plan``.

    The plan reads the model: a converted layer (``Float8Linear``) gets a float8 style, any other
    layer torch's style. If all consumers of a block cast their input alike, in one float8 copy,
    the block's input is cast and gathered in float8 once for all of them. Otherwise it is gathered
    once in high precision, and each converted consumer casts it.

    Args:
        model: has ``tok_embeddings``, ``layers.<i>.{attention_norm,attention,ffn_norm,
            feed_forward}`` (attention: ``wq``, ``wk``, ``wv``, ``wo``; feed_forward: ``w1``,
            ``w2``, ``w3``), ``norm``, ``output``. Convert it before: the plan doesn't know of
            layers that are converted later.
        sequence_parallel: activations between blocks are sharded along dim 1 (the sequence) and
            the norms run on shards. False: activations are replicated, and norms have no entry.
            Activations between blocks are plain local tensors, or DTensors for a sequence whose
            length is not a multiple of the number of ranks.
        loss_parallel: the head returns logits as a DTensor sharded along the vocabulary, for
            ``torch.distributed.tensor.parallel.loss_parallel``. False: full logits, as a plain
            tensor.

    Raises:
        ValueError: modules are missing; all of them are listed.
    """
    layer_names = _check_names(model)
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": EmbeddingRowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        )
    }
    for layer in layer_names:
        for block, (norm, consumers, writer) in _BLOCKS.items():
            if sequence_parallel:
                plan[f"{layer}.{norm}"] = SequenceParallel()
            path = f"{layer}.{block}"
            module = model.get_submodule(path)
            plan[path] = _prepare_style(module, consumers, between)
            for name in consumers:
                plan[f"{path}.{name}"] = _colwise_style(module.get_submodule(name))
            plan[f"{path}.{writer}"] = _residual_style(module.get_submodule(writer), between)
    if sequence_parallel:
        plan["norm"] = SequenceParallel()
    plan["output"] = _colwise_style(
        model.get_submodule("output"),
        input_layouts=between,
        output_layouts=Shard(-1) if loss_parallel else Replicate(),
        use_local_output=not loss_parallel,
    )
    return plan


def _check_names(model: nn.Module) -> list[str]:
    """The names of the layers; a ValueError that lists every module that is missing."""
    modules = dict(model.named_modules())
    layers = [f"layers.{name}" for name, _ in modules.get("layers", nn.Module()).named_children()]
    expected = ["tok_embeddings", "norm", "output"]
    for layer in layers or ["layers.0"]:
        for block, (norm, consumers, writer) in _BLOCKS.items():
            expected += [f"{layer}.{norm}", f"{layer}.{block}"]
            expected += [f"{layer}.{block}.{name}" for name in (*consumers, writer)]
    missing = [name for name in expected if name not in modules]
    if missing:
        raise ValueError(
            f"llama_tp_plan does not know this {type(model).__name__}: it has no module "
            f"{', '.join(missing)}. Rename the modules, or write a plan of your own (a dict of "
            f"module names to styles) and pass it to apply_tp_plan"
        )
    return layers


def _colwise_style(layer: nn.Module, **arguments: Any) -> ParallelStyle:
    converted = isinstance(layer, Float8Linear)
    return (Float8ColwiseParallel if converted else ColwiseParallel)(**arguments)


def _residual_style(layer: nn.Module, output: Placement) -> ParallelStyle:
    converted = isinstance(layer, Float8Linear)
    style = Float8ResidualRowwiseParallel if converted else ResidualRowwiseParallel
    return style(output_layouts=output)


def _prepare_style(
    block: nn.Module, consumers: tuple[str, ...], layout: Placement
) -> ParallelStyle:
    at: dict[str, Any] = {"input_layouts": (layout,), "desired_input_layouts": (Replicate(),)}
    layers = [block.get_submodule(name) for name in consumers]
    casts = {
        shared_input_cast(layer) if isinstance(layer, Float8Linear) else None for layer in layers
    }
    # One consumer that needs the input in high precision, or another cast of it, decides.
    if len(casts) > 1 or None in casts:
        return PrepareModuleInput(**at)
    return PrepareFloat8ModuleInput(**at, fwd_config_submodule_fqn=consumers[0])
