"""Tensor-parallel plans for transformers models, based on the plans that the models declare."""

import warnings
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from fp8_dist.integrations.transformers import tp_styles
from fp8_dist.integrations.transformers.tp_structure import (
    Block,
    Structure,
    StructureReader,
    merges_embeddings,
    without_numbers,
)
from fp8_dist.tensor_parallel.plan_styles import (
    EmbeddingRowwiseParallel,
    check_plan_transport,
    colwise_style,
    local_if_even,
    prepare_style,
    residual_style,
)
from fp8_dist.transport import Encoding


def hf_tp_plan(
    model: nn.Module,
    *,
    sequence_parallel: bool = True,
    loss_parallel: bool = False,
    reduce_transport: Encoding = None,
) -> dict[str, ParallelStyle]:
    """Make the tensor-parallel plan of a transformers model, for ``apply_tp_plan``.

    The model declares which layers are sharded, and how (``_tp_plan``, ``base_model_tp_plan``).
    This function adds the redistribution of activations. Converted layers (``Float8Linear``) get
    float8 styles, and other layers get torch's styles. Layers that read the same input (q, k, v;
    gate, up) share one gather. The gather is in float8 if one float8 copy serves all of them, else
    in high precision.

    Shapes for B sequences of S tokens and hidden size D on ``tp`` ranks:

    * ``input_ids``, ``attention_mask``, ``position_ids``, ``labels`` and rotary tables: replicated
      over the axis.
    * between blocks: ``[B, S / tp, D]`` with sequence parallelism, else ``[B, S, D]``. If ``tp``
      does not divide S, the parts are DTensors. Then the first ranks have one more token, and the
      last ranks may have none, as in ``generate``, where S is 1.
    * in a block: the input is ``[B, S, D]``; heads and features are sharded over ``tp``.
    * ``logits``: replicated, or with ``loss_parallel`` a DTensor sharded along the vocabulary.

    Embeddings are sharded along the vocabulary, even if the declared plan leaves them out. The
    gradients of query and key norms are summed over all heads.

    Routed experts of MoE blocks are not sharded: every rank has all of them and computes all
    tokens, which is correct but saves nothing. A warning names these blocks. Linear layers that are
    shared experts are sharded if the model declares it.

    Args:
        model: a ``PreTrainedModel`` that is not parallelized. Convert it before this call.
        sequence_parallel: shard the stream between blocks along the sequence, and run norms on the
            shards. False: the stream is replicated.
        loss_parallel: return logits from the head for
            ``torch.distributed.tensor.parallel.loss_parallel``.
        reduce_transport: as in the float8 styles. It applies to all reduce-scatters of converted
            layers, which reduce the outputs of blocks, and the input gradients of blocks and of the
            head. The reduce-scatters of the embedding and of unconverted layers stay in high
            precision.

    Returns:
        The plan, which maps module names to styles.

    Collectives: with sequence parallelism, for each block, an all-gather of the input and a
    reduce-scatter of the output, and their counterparts in the backward; gathers of converted
    layers take 1 byte per element (see the float8 styles for amaxes). Without sequence parallelism,
    for each block, an all-reduce of the output and one of the input's gradient. In both cases, one
    collective of the same kind for the embedding and one for the head, and one all-gather of the
    logits without ``loss_parallel``. In high precision, layers with the declared style
    ``colwise_gather_output`` (``colwise_rep`` in transformers 4) gather their outputs, and layers
    with ``rowwise_split_input`` (``rowwise_rep``) gather the gradients of their inputs.

    Raises:
        NotImplementedError: the model declares no plan or an unknown style, or it has parameters
            whose role in the model is unknown. The message names all of them.
        ValueError: ``sequence_parallel`` is set for a model that merges other inputs (images,
            sound) into its embeddings, ``loss_parallel`` for a model without a sharded head, or
            ``reduce_transport`` without sequence parallelism or for a model that was not converted.
            ``apply_tp_plan`` raises it, before it changes the model, if the ranks cannot share the
            heads evenly.
    """
    check_plan_transport(model, reduce_transport, sequence_parallel, "hf_tp_plan")
    structure = StructureReader(model, sequence_parallel).read()
    if sequence_parallel and merges_embeddings(model):
        raise ValueError(
            f"hf_tp_plan: {type(model).__name__} merges other inputs, such as images, into its "
            "embeddings, which needs the whole sequence: give sequence_parallel=False"
        )
    if loss_parallel and structure.head is None:
        raise ValueError(
            f"hf_tp_plan: loss_parallel=True needs a head, and the plan of this "
            f"{type(model).__name__} has none: leave it out"
        )
    _warn_of_replicated(structure)
    return _styles(model, structure, sequence_parallel, loss_parallel, reduce_transport)


def _styles(
    model: nn.Module,
    structure: Structure,
    sequence_parallel: bool,
    loss_parallel: bool,
    transport: Encoding,
) -> dict[str, ParallelStyle]:
    """Make the plan of a model with a known structure."""
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    embedding = tp_styles.SequenceEmbedding if sequence_parallel else EmbeddingRowwiseParallel
    plan: dict[str, ParallelStyle] = {
        structure.embedding: embedding(input_layouts=Replicate(), output_layouts=stream)
    }
    if sequence_parallel:
        plan |= _stream_styles(structure)
    for block in structure.blocks:
        if block.in_replicated:  # the block reduce-scatters nothing
            plan |= _block_styles(model, block, Replicate(), None)
        else:
            plan |= _block_styles(model, block, stream, transport)
    if structure.head is not None:
        plan[structure.head] = colwise_style(
            model.get_submodule(structure.head),
            transport,
            input_layouts=stream,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        )
    return plan


def _stream_styles(structure: Structure) -> dict[str, ParallelStyle]:
    """Make the styles of a sequence-parallel stream outside of the sharded blocks."""
    plan: dict[str, ParallelStyle] = {structure.layers[0]: tp_styles.StreamInput()}
    plan |= {name: tp_styles.StreamNorm(local_if_even) for name in structure.norms}
    plan |= {name: tp_styles.ReplicatedBlock() for name in structure.replicated}
    # A sharded head takes a DTensor. Without one, the output of the last norm is gathered.
    plan[structure.last_norm] = (
        SequenceParallel() if structure.head else tp_styles.StreamNorm(DTensor.full_tensor)
    )
    return plan


def _block_styles(
    model: nn.Module, block: Block, stream: Placement, transport: Encoding
) -> dict[str, ParallelStyle]:
    """Make the styles of a block, which reads and writes a stream, and of its layers."""
    module = model.get_submodule(block.name)
    readers = {name: module.get_submodule(name) for name in block.readers}
    style = prepare_style(
        readers,
        stream,
        transport,
        plain=tp_styles.BlockInput,
        float8=tp_styles.Float8BlockInput,
        parts={} if block.gathers_outputs else _parts(module, readers),
        # Llama 4 adds the output of routed experts to that of shared ones, in place.
        may_change_output=block.in_replicated,
    )
    plan: dict[str, ParallelStyle] = {block.name: style}
    inside = Replicate() if block.gathers_outputs else Shard(-1)
    for name, layer in readers.items():
        plan[f"{block.name}.{name}"] = colwise_style(layer, output_layouts=inside)
    for name in block.writers:
        plan[f"{block.name}.{name}"] = residual_style(
            module.get_submodule(name), transport, input_layouts=inside, output_layouts=stream
        )
    for name in block.head_norms:
        # Dim 2 stands for the heads. These norms see full rows, whatever the order of the dims is.
        plan[f"{block.name}.{name}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def _parts(block: nn.Module, readers: dict[str, Any]) -> dict[str, int]:
    """Return the number of heads (or features) in the output of each reader of a block."""
    head_dim = int(getattr(block, "head_dim", 1))
    return {name: layer.out_features // head_dim for name, layer in readers.items()}


def _warn_of_replicated(structure: Structure) -> None:
    blocks = dict.fromkeys(map(without_numbers, structure.replicated))
    if blocks:
        warnings.warn(
            "hf_tp_plan leaves routed experts as they are: every tensor-parallel rank keeps all of "
            f"those in {', '.join(blocks)}, and computes all tokens",
            stacklevel=3,
        )
