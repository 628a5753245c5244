"""Tensor-parallel plan of a Llama with the reference model's module names.

The *consumers* of a block are the linear layers that read the block's input: ``wq``, ``wk`` and
``wv`` of attention, ``w1`` and ``w3`` of feed-forward. The *writer* of a block is the layer whose
output is added to the residual stream.
"""

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from fp8_dist.tensor_parallel.plan_styles import (
    EmbeddingRowwiseParallel,
    check_names,
    check_plan_transport,
    colwise_style,
    prepare_style,
    residual_style,
)
from fp8_dist.transport import Encoding

# The norm, the consumers and the writer of each block of a layer.
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
) -> dict[str, ParallelStyle]:
    """Make the tensor-parallel plan of a Llama for ``apply_tp_plan``: module names to styles.

    A converted layer (``Float8Linear``) gets a float8 style, any other layer torch's style. If one
    and the same float8 copy of a block's input serves all of its consumers, the input is cast and
    gathered in float8 once for all of them. Otherwise it is gathered once in high precision, and
    each converted consumer casts it.

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
        reduce_transport: as in the styles, for all reduce-scatters of converted layers: those of
            the outputs of ``wo`` and ``w2``, and of the input gradients of blocks and of the head.
            The reduce-scatters of the embedding and of unconverted layers stay in high precision.
            The result then depends on the number of ranks.

    Returns:
        A style for each module name, as ``apply_tp_plan`` takes it.

    Raises:
        ValueError: modules are missing (all of them are listed), or ``reduce_transport`` is given
            without sequence parallelism or for a model that was not converted.
    """
    check_plan_transport(model, reduce_transport, sequence_parallel, "llama_tp_plan")
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": EmbeddingRowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        )
    }
    for layer in _layer_names(model):
        for block, (norm, consumers, writer) in _BLOCKS.items():
            if sequence_parallel:
                plan[f"{layer}.{norm}"] = SequenceParallel()
            path = f"{layer}.{block}"
            module = model.get_submodule(path)
            layers = {name: module.get_submodule(name) for name in consumers}
            plan[path] = prepare_style(layers, between, reduce_transport)
            plan |= {f"{path}.{name}": colwise_style(layer) for name, layer in layers.items()}
            plan[f"{path}.{writer}"] = residual_style(
                module.get_submodule(writer), reduce_transport, output_layouts=between
            )
    if sequence_parallel:
        plan["norm"] = SequenceParallel()
    plan["output"] = colwise_style(
        model.get_submodule("output"),
        reduce_transport,
        input_layouts=between,
        output_layouts=Shard(-1) if loss_parallel else Replicate(),
        use_local_output=not loss_parallel,
    )
    return plan


def _layer_names(model: nn.Module) -> list[str]:
    """Return the names of the layers, after checking that all modules exist."""
    modules = dict(model.named_modules())
    layers = [f"layers.{name}" for name, _ in modules.get("layers", nn.Module()).named_children()]
    expected = ["tok_embeddings", "norm", "output"]
    for layer in layers or ["layers.0"]:
        for block, (norm, consumers, writer) in _BLOCKS.items():
            expected += [f"{layer}.{norm}", f"{layer}.{block}"]
            expected += [f"{layer}.{block}.{name}" for name in (*consumers, writer)]
    check_names(model, expected, "llama_tp_plan")
    return layers
