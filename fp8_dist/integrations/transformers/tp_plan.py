"""Tensor-parallel plans for transformers' models, from the plans that the models declare."""

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
    """Make the tensor-parallel plan of a transformers model for ``apply_tp_plan``: names to styles.

    The model declares which layers are sharded, and how (``_tp_plan``, ``base_model_tp_plan``).
    This function adds the redistribution of activations. A converted layer (``Float8Linear``) gets
    a float8 style, any other layer torch's style. Layers that read the same input (q, k, v; gate,
    up) share one gather. It is in float8 if one copy serves all of them, else in high precision.

    Shapes, for B sequences of S tokens, hidden size D, on ``tp`` ranks:

    * ``input_ids``, ``attention_mask``, ``position_ids``, ``labels`` and rotary tables: replicated
      over the axis.
    * between blocks: ``[B, S / tp, D]`` with sequence parallelism, else ``[B, S, D]``. If ``tp``
      does not divide S, the parts are DTensors. The first ranks then have one more token, and the
      last ones may have none, as in ``generate``, where S is 1.
    * in a block: ``[B, S, D]`` in, heads and features sharded over ``tp``.
    * ``logits``: replicated, or with ``loss_parallel`` a DTensor sharded along the vocabulary.

    Embeddings are sharded along the vocabulary, also where the declared plan leaves them out. Norms
    of queries and keys get the sum of all heads' gradients.

    Routed experts of MoE blocks are not sharded: every rank has all of them and computes all
    tokens, which is correct but saves nothing. A warning names these blocks. Linear layers that are
    shared experts are sharded if the model declares it.

    Args:
        model: a ``PreTrainedModel`` that is not parallelized. Convert it before this call.
        sequence_parallel: shard the stream between blocks along the sequence, and run norms on the
            shards. False: the stream is replicated.
        loss_parallel: the head returns logits for
            ``torch.distributed.tensor.parallel.loss_parallel``.
        reduce_transport: as in the float8 styles, for all reduce-scatters of converted layers: of
            block outputs, of the input gradients of blocks and of the head. Those of the embedding
            and of unconverted layers stay in high precision.

    Collectives: with sequence parallelism, per block, an all-gather of the input and a
    reduce-scatter of the output, and their counterparts in the backward; gathers of converted
    layers take 1 byte per element (see the float8 styles for amaxes). Without sequence parallelism,
    an all-reduce of the output and of the input's gradient per block. One of either kind for the
    embedding and the head; one all-gather of logits without ``loss_parallel``. In high precision,
    layers with the declared style ``colwise_gather_output`` (``colwise_rep`` in transformers 4)
    gather their outputs, and those with ``rowwise_split_input`` (``rowwise_rep``) gather the
    gradient of their inputs.

    Raises:
        NotImplementedError: the model declares no plan or an unknown style, or it has parameters
            whose place in the model is unknown. All of them are named.
        ValueError: ``sequence_parallel`` for a model that merges other inputs (images, sound) into
            its embeddings; ``loss_parallel`` for a model without a sharded head;
            ``reduce_transport`` without sequence parallelism, or for a model that was not
            converted. From ``apply_tp_plan``, before it changes the model: heads that the ranks
            cannot share evenly.
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
        if block.in_replicated:  # nothing is reduce-scattered
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
    """Make the styles of a sequence-parallel stream, outside of the sharded blocks."""
    plan: dict[str, ParallelStyle] = {structure.layers[0]: tp_styles.StreamInput()}
    plan |= {name: tp_styles.StreamNorm(local_if_even) for name in structure.norms}
    plan |= {name: tp_styles.ReplicatedBlock() for name in structure.replicated}
    # A sharded head takes the DTensor.
    plan[structure.last_norm] = (
        SequenceParallel() if structure.head else tp_styles.StreamNorm(DTensor.full_tensor)
    )
    return plan


def _block_styles(
    model: nn.Module, block: Block, stream: Placement, transport: Encoding
) -> dict[str, ParallelStyle]:
    """Make the styles of a block that reads from and writes to a stream, and of its layers."""
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
        # Dim 2 stands for the heads. These norms see whole rows, whatever the order of the dims.
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
