"""Tensor-parallel plans for transformers models, based on the plans that the models declare.

Terms: the *stream* is the residual stream, which passes from layer to layer. A *block* is a module
of a layer, such as its attention or its MLP, not the layer itself. The *readers* of a block are the
column-parallel linear layers that read its input. Its *writers* are the row-parallel linear layers
whose output is added to the stream.
"""

import re
import warnings
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel

from fp8_dist.integrations.transformers import tp_styles
from fp8_dist.tensor_parallel import plans
from fp8_dist.text import kind_of, with_article
from fp8_dist.transport import Encoding

# The names of declared styles in transformers 5 and in transformers 4.
_READERS = {"colwise", "colwise_gather_output", "colwise_rep"}
_WRITERS = {"rowwise", "rowwise_split_input", "rowwise_rep"}
_HEAD_NORM = "replicated_with_grad_allreduce"
_EMBEDDING = "embedding_rowwise"
# The styles in a block whose activations are sharded. In other blocks, readers gather their outputs
# and writers slice their inputs.
_SHARDED = {"colwise", "rowwise", _HEAD_NORM}
_GATHERED = (_READERS | _WRITERS) - _SHARDED
# The classes of modules with these styles.
_CLASSES: dict[str, type[nn.Module]] = dict.fromkeys(_READERS | _WRITERS, nn.Linear)
_CLASSES |= {_EMBEDDING: nn.Embedding, _HEAD_NORM: nn.Module}
_EXPERTS = "experts"


def declared_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan that a model, its class or its config declares: style names by pattern."""
    prefix = getattr(model, "base_model_prefix", "")
    config = getattr(model, "config", None)
    base_plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if prefix in model._modules:
        base_plan = {f"{prefix}.{name}": style for name, style in base_plan.items()}
    model_plan: dict[str, str] = getattr(model, "_tp_plan", None) or base_plan
    # In transformers 4, the model's plan lacks the entries of the class, such as the head.
    return (getattr(type(model), "_tp_plan", None) or {}) | model_plan


def without_numbers(names: str) -> str:
    """Replace the layer numbers in names of modules with ``*``."""
    return re.sub(r"\.\d+\b", ".*", names)


class Structure:
    """The roles of a model's modules in a plan. All modules are given by their full names.

    Attributes:
        blocks: maps each sharded block in the layers to the declared styles of its readers, writers
            and per-head norms, by their names relative to the block.
        norms: the norms in the layers, outside of blocks.
        routed: the blocks that have routed experts, which every rank computes in full.
        embedding: the embedding before the layers; ``""`` if unknown.
        last_norm: the norm after the layers; ``""`` if unknown.
        head: the sharded head; None if there is none.
        problems: maps a description of each unknown part of the model, without layer numbers, to
            True if the problem affects only sequence parallelism.
    """

    def __init__(self, model: nn.Module, sequence_parallel: bool) -> None:
        self.model = model
        self.sequence_parallel = sequence_parallel
        self.modules = dict(model.named_modules())
        self.problems: dict[str, bool] = {}
        self.routed = [n.rpartition(".")[0] for n in self.modules if n.endswith(f".{_EXPERTS}")]
        styles = self.matched_styles()
        self.raise_problems()
        lists = [name for name, m in self.modules.items() if isinstance(m, nn.ModuleList)]
        outermost = [s for s in lists if not any(s.startswith(f"{outer}.") for outer in lists)]
        stacks = [s for s in outermost if any(name.startswith(f"{s}.") for name in styles)]
        if not stacks:
            self.add_problem("it declares no plan for its layers")
        elif len(stacks) > 1:
            self.add_problem(f"its plan divides layers of {len(stacks)} lists: {', '.join(stacks)}")
        self.raise_problems()
        (stack,) = stacks
        self.layers = [f"{stack}.{i}" for i in self.modules[stack]._modules]
        self.blocks = self.read_blocks(styles, stack)
        self.norms = self.check_layers()
        self.embedding, self.last_norm = self.check_ends(stack, styles)
        self.head = self.find_head(styles, stack)
        self.raise_problems()
        self.routed = [name for name in self.routed if name.startswith(f"{stack}.")]

    def raise_problems(self) -> None:
        if self.problems:
            listing = "\n".join(f"  - {problem}" for problem in self.problems)
            only_sequences = all(self.problems.values())
            raise NotImplementedError(
                f"hf_tp_plan does not know all of this {type(self.model).__name__}:\n{listing}\n"
                + ("Try sequence_parallel=False, or write" if only_sequences else "Write")
                + " a plan of your own (a dict of module names to styles) for apply_tp_plan"
            )

    def add_problem(self, problem: str, *, only_sequences: bool = False) -> None:
        if self.sequence_parallel or not only_sequences:
            self.problems[without_numbers(problem)] = only_sequences

    def matched_styles(self) -> dict[str, str]:
        """Return the styles by module name, without routed experts and their routers."""
        declared = declared_plan(self.model)
        if not declared:
            self.add_problem(
                "it declares no plan: neither _tp_plan nor base_model_tp_plan of its config"
            )
        names = sorted({*self.modules, *dict(self.model.named_parameters())})
        matches: dict[str, str] = {}
        for pattern, style in declared.items():
            matches |= {name: style for name in names if without_numbers(name) == pattern}
        if declared and not matches:
            self.add_problem(f"no module has a name of its plan: {', '.join(declared)}")
        styles = {name: style for name, style in matches.items() if not self.is_routed(name)}
        for name, style in styles.items():
            module = self.modules.get(name)
            if not isinstance(module, _CLASSES.get(style, ())):
                kind = type(module).__name__ if module is not None else "parameter"
                of = f" of {with_article(kind)}" if style in _CLASSES else ""
                self.add_problem(f"{name}: the style {style!r}{of}")
        return styles

    def is_routed(self, name: str) -> bool:
        """Return whether a module belongs to routed experts, or is the router beside them."""
        parent, _, last = name.rpartition(".")
        router = parent in self.routed and not self.modules.get(name, nn.Module())._modules
        return last == _EXPERTS or f".{_EXPERTS}." in name or router

    def read_blocks(self, styles: dict[str, str], stack: str) -> dict[str, dict[str, str]]:
        blocks: dict[str, dict[str, str]] = {}
        for name, style in styles.items():
            if name.startswith(f"{stack}."):
                block, _, child = name.rpartition(".")
                blocks.setdefault(block, {})[child] = style
        for block, block_styles in blocks.items():
            self.check_block(block, block_styles)
        return blocks

    def check_block(self, block: str, styles: dict[str, str]) -> None:
        """Check the modules of a block, and add the norms of its heads to the styles."""
        kinds = set(styles.values())
        gathers = bool(kinds & _GATHERED)
        allowed = _GATHERED if gathers else _SHARDED
        if not kinds <= allowed or not kinds & _READERS or not kinds & _WRITERS:
            self.add_problem(
                f"{block}: the styles {', '.join(sorted(kinds))} do not make a block, of "
                "layers that read its input and layers that write its output"
            )
        module = self.modules[block]
        for name, child in module.named_modules():
            # Where activations in the block are gathered, a norm needs no style.
            if not child._parameters or name in styles or (gathers and _is_norm(child)):
                continue
            if _is_norm(child, getattr(module, "head_dim", 0)):
                styles[name] = _HEAD_NORM
            else:
                where = f"{block}.{name}" if name else block
                self.add_problem(f"{where}: {kind_of(child)} in a divided block, without a style")

    def check_layers(self) -> list[str]:
        """Return the norms in the layers. Other modules outside of blocks are added to problems."""
        norms = []
        for layer in self.layers:
            if layer in self.blocks:
                self.add_problem(f"{layer}: linear layers of its plan are not in a block")
            if parameters := [*self.modules[layer]._parameters]:
                self.add_problem(
                    f"{layer}: parameters of its own: {parameters}", only_sequences=True
                )
            for child, module in self.modules[layer].named_children():
                name = f"{layer}.{child}"
                if name in self.blocks or name in self.routed or not [*module.parameters()]:
                    continue
                if _is_norm(module):
                    norms.append(name)
                else:
                    kind = kind_of(module)
                    self.add_problem(f"{name}: {kind} without a style", only_sequences=True)
        return norms

    def check_ends(self, stack: str, styles: dict[str, str]) -> tuple[str, str]:
        """Return the names of the embedding before the layers and of the norm after them."""
        base = stack.rpartition(".")[0]
        children = self.modules[base].named_children()
        siblings = {f"{base}.{child}".removeprefix("."): module for child, module in children}
        declared = getattr(self.model, "get_input_embeddings", lambda: None)()
        embeddings = [
            name
            for name, module in siblings.items()
            if isinstance(module, nn.Embedding)
            and (module is declared or styles.get(name) == _EMBEDDING)
        ]
        norms = [name for name, module in siblings.items() if _is_norm(module)]
        if len(embeddings) != 1:
            self.add_problem(
                f"{base}: {len(embeddings)} embeddings before the layers: {embeddings}"
            )
        if len(norms) != 1:
            self.add_problem(
                f"{base}: {len(norms)} norms beside the layers: {norms}", only_sequences=True
            )
        for name, module in siblings.items():
            if name not in (stack, *embeddings, *norms) and [*module.parameters()]:
                kind = kind_of(module)
                self.add_problem(f"{name}: {kind} beside the layers", only_sequences=True)
        return next(iter(embeddings), ""), next(iter(norms), "")

    def find_head(self, styles: dict[str, str], stack: str) -> str | None:
        """Return the name of the sharded head, if any. A tied head counts as sharded."""
        table = self.modules[self.embedding]._parameters.get("weight") if self.embedding else None
        heads = [
            name
            for name, module in self.modules.items()
            if isinstance(module, nn.Linear) and module.weight is table
        ]
        for name, style in styles.items():
            if name.startswith(f"{stack}.") or name in (self.embedding, *heads):
                continue
            if style in _READERS and not heads:
                heads.append(name)
            else:
                self.add_problem(f"{name}: the style {style!r} outside of the layers")
        return heads[0] if heads else None


def _is_norm(module: nn.Module, size: int | None = None) -> bool:
    """Return whether all parameters of a module are vectors, of the given size if any."""
    sizes = {tuple(p.shape) for p in module._parameters.values() if p is not None}
    if module._modules or not sizes:
        return False
    return all(len(shape) == 1 for shape in sizes) and (size is None or sizes == {(size,)})


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
    gate, up) share one gather, in float8 if one float8 copy serves all of them, else in high
    precision.

    Shapes for B sequences of S tokens and hidden size D on ``tp`` ranks:

    * ``input_ids``, ``attention_mask``, ``position_ids``, ``labels`` and rotary tables: replicated
      over the axis.
    * between blocks: ``[B, S / tp, D]`` with sequence parallelism, else ``[B, S, D]``. If ``tp``
      does not divide S, the parts are DTensors, which ``Shard(1)`` splits like ``torch.chunk``: the
      last ranks may have fewer tokens or none, as in ``generate``, where S is 1.
    * in a block: the input is ``[B, S, D]``; heads and features are sharded over ``tp``.
    * ``logits``: replicated, or with ``loss_parallel`` a DTensor sharded along the vocabulary.

    Embeddings are sharded along the vocabulary, even if the declared plan leaves them out. The
    gradients of query and key norms are summed over all heads.

    Routed experts of MoE blocks are not sharded: every rank has all of them and computes all
    tokens, which is correct but saves nothing. A warning names these blocks. Add entries with
    :class:`fp8_dist.tensor_parallel.Float8ExpertTensorParallel` to divide converted experts. The
    linear layers of shared experts are sharded if the model declares a style for them.

    Args:
        model: a ``PreTrainedModel`` that is not parallelized. Convert it before this call.
        sequence_parallel: shard the stream between blocks along the sequence, and run norms on the
            shards. Otherwise, the stream is replicated.
        loss_parallel: return logits from the head for
            ``torch.distributed.tensor.parallel.loss_parallel``.
        reduce_transport: as in the float8 styles. It applies to all sums of converted layers over
            ranks: of the outputs of blocks, and of the input gradients of blocks and of the head.
            The sums of the embedding and of unconverted layers stay in high precision.

    Returns:
        The plan, which maps module names to styles.

    Collectives: with sequence parallelism, for each block, an all-gather of the input and a
    reduce-scatter of the output, and their counterparts in the backward; gathers of converted
    layers take 1 byte per element (see the float8 styles for amaxes). Without sequence parallelism,
    for each block, an all-reduce of the output and one of the input's gradient. In both cases, one
    collective of the same kind for the embedding and one for the head, and one all-gather of the
    logits without ``loss_parallel``. Layers with the declared style ``colwise_gather_output``
    (``colwise_rep`` in transformers 4) also gather their outputs, and layers with
    ``rowwise_split_input`` (``rowwise_rep``) the gradients of their inputs, in high precision.

    Raises:
        NotImplementedError: the model declares no plan or an unknown style, or it has parameters
            whose role in the model is unknown. The message names all of them.
        ValueError: ``sequence_parallel`` is set for a model that merges other inputs (images,
            sound) into its embeddings, ``loss_parallel`` for a model without a sharded head, or
            ``reduce_transport`` for a model that was not converted. ``apply_tp_plan`` raises it,
            before it changes the model, if the ranks cannot share the heads evenly.
    """
    plans.check_plan_transport(model, reduce_transport, "hf_tp_plan")
    structure = Structure(model, sequence_parallel)
    config: Any = getattr(model, "config", None)
    # The config of a multimodal model contains the config of its text decoder.
    if sequence_parallel and getattr(config, "get_text_config", lambda: config)() is not config:
        raise ValueError(
            f"hf_tp_plan: {type(model).__name__} merges other inputs, such as images, into its "
            "embeddings, which needs the whole sequence: give sequence_parallel=False"
        )
    if loss_parallel and structure.head is None:
        raise ValueError(
            f"hf_tp_plan: loss_parallel=True needs a head, and the plan of this "
            f"{type(model).__name__} has none: leave it out"
        )
    if blocks := dict.fromkeys(map(without_numbers, structure.routed)):
        warnings.warn(
            "hf_tp_plan leaves routed experts as they are: every tensor-parallel rank keeps all of "
            f"those in {', '.join(blocks)}, and computes all tokens",
            stacklevel=2,
        )
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    embedding = tp_styles.SequenceEmbedding if sequence_parallel else plans.EmbeddingRowwiseParallel
    plan: dict[str, ParallelStyle] = {
        structure.embedding: embedding(input_layouts=Replicate(), output_layouts=stream)
    }
    if sequence_parallel:
        plan[structure.layers[0]] = tp_styles.StreamInput()
        plan |= {name: tp_styles.StreamNorm(plans.local_if_even) for name in structure.norms}
        plan |= {name: tp_styles.ReplicatedBlock() for name in structure.routed}
        # A sharded head takes a DTensor. Without one, the output of the last norm is gathered.
        plan[structure.last_norm] = (
            SequenceParallel() if structure.head else tp_styles.StreamNorm(DTensor.full_tensor)
        )
    for block in structure.blocks:
        plan |= _block_styles(structure, block, stream, reduce_transport)
    if structure.head is not None:
        head = model.get_submodule(structure.head)
        plan[structure.head] = plans.head_style(head, stream, loss_parallel, reduce_transport)
    return plan


def _block_styles(
    structure: Structure, block: str, stream: Placement, transport: Encoding
) -> dict[str, ParallelStyle]:
    """Make the styles of a block and of its layers. ``stream``: the placement of the stream."""
    module: Any = structure.modules[block]
    styles = structure.blocks[block]
    # Llama 4 adds the output of routed experts to that of shared ones, in place.
    in_routed = block.rpartition(".")[0] in structure.routed
    if in_routed:
        stream = Replicate()
    readers = {n: module.get_submodule(n) for n, style in styles.items() if style in _READERS}
    gathers = not _GATHERED.isdisjoint(styles.values())
    # The number of heads in the output of each reader (of features if the block has no head_dim).
    size = int(getattr(module, "head_dim", 1))
    parts = {name: layer.out_features // size for name, layer in readers.items()}
    plan: dict[str, ParallelStyle] = {
        block: plans.prepare_style(
            readers,
            stream,
            transport,
            plain=tp_styles.BlockInput,
            float8=tp_styles.Float8BlockInput,
            parts={} if gathers else parts,
            may_change_output=in_routed,
        )
    }
    inner_layout = Replicate() if gathers else Shard(-1)
    for name, style in styles.items():
        layer = module.get_submodule(name)
        path = f"{block}.{name}"
        if style in _READERS:
            plan[path] = plans.colwise_style(layer, output_layouts=inner_layout)
        elif style in _WRITERS:
            plan[path] = plans.residual_style(
                layer, transport, input_layouts=inner_layout, output_layouts=stream
            )
        else:
            # Heads are assumed to be dim 2. If they are dim 1, norms still see full rows.
            plan[path] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan
