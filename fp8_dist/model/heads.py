"""Heads: the layers that make a model's logits, in which rounding errors cost more than elsewhere.

A head is recognized by what it does. Its weight is that of an embedding (it is tied), or it has as
many outputs as an embedding has rows, one for each token of the vocabulary. Names, and methods of
transformers models, are further signs.

An embedding may also be of positions or types, whose number may be the width of a layer by chance.
So the number of outputs alone is no sign for layers within repeated blocks, nor where other layers
take as many inputs. In the latter case, as in a model that is as wide as its vocabulary is large,
it is one for the last such layer, unless a later one takes as many inputs.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from fp8_dist.text import without_wrappers

# The name of a head at any depth, and the names of heads that are direct children of the model.
_HEAD = "lm_head"
_HEADS = {"classification_head", "classifier", "cls", "embed_out", "head", "qa_outputs", "score"}
# Names under which wrappers hold the wrapped module.
_WRAPPED = {"module", "model", "base_model"}


class _Table(NamedTuple):
    """An embedding: a matrix whose rows are looked up."""

    name: str
    module: nn.Module
    weight: nn.Parameter | None
    rows: int


def is_called_head(fqn: str) -> bool:
    """Return whether a module has the name of a head, or is within one that does."""
    parts = [part for part in fqn.split(".") if part not in _WRAPPED]
    return _HEAD in parts or parts == ["output"] or bool(_HEADS & set(parts[:1]))


def is_adapter(fqn: str) -> bool:
    """Return whether a layer belongs to a low-rank adapter."""
    return any(part.startswith("lora_") for part in fqn.split("."))


def heads(model: nn.Module, others: Collection[nn.Module]) -> dict[nn.Module, str]:
    """Return the heads of a model, and the modules in them, each with the sign that decided.

    Args:
        model: the model.
        others: modules that are known to be something else, such as routers.
    """
    names = {module: without_wrappers(fqn) for fqn, module in model.named_modules()}
    found = {module: "by its name" for module, fqn in names.items() if is_called_head(fqn)}
    found = dict.fromkeys(_output_embeddings(model), "by get_output_embeddings()") | found
    layers = [m for m in names if isinstance(m, nn.Linear) and not is_adapter(names[m])]
    tables = [*_tables(names)]
    weights = [table for table in tables if table.weight is not None]
    tied = {id(table.weight): table.name for table in reversed(weights)}
    for layer in layers:
        if name := tied.get(id(layer._parameters.get("weight"))):
            found[layer] = f"tied to {name}"
    within_blocks = within_blocks_of(model)
    outside = [table for table in tables if table.module not in within_blocks]
    rows = {table.rows: table.name for table in reversed(outside)}
    layers = [layer for layer in layers if layer not in others]
    for layer in _with_outputs(layers, rows, found, within_blocks):
        found[layer] = f"with as many outputs as {rows[layer.out_features]} has rows"
    return found


def _with_outputs(
    layers: Sequence[nn.Linear],
    numbers: Collection[int],
    known: Collection[nn.Module],
    within_blocks: Collection[nn.Module],
) -> Iterator[nn.Linear]:
    """Yield the layers that are heads by their numbers of outputs.

    Args:
        layers: the linear layers, in the order of the model's modules.
        numbers: the numbers of rows of embeddings.
        known: heads that are known by other signs.
        within_blocks: modules within repeated blocks.
    """
    others = [layer for layer in layers if layer not in known]
    taken = {layer.in_features for layer in others}
    last = None
    for layer in others:
        if layer.out_features in numbers and layer not in within_blocks:
            if layer.out_features not in taken:
                yield layer
            else:
                last = layer
    if last is not None:
        later = others[others.index(last) + 1 :]
        is_read = any(layer.in_features == last.out_features for layer in later)
        known_layers = [layer for layer in known if isinstance(layer, nn.Linear)]
        is_known = any(layer.out_features == last.out_features for layer in known_layers)
        if not (is_read or is_known):
            yield last


def _tables(names: dict[nn.Module, str]) -> Iterator[_Table]:
    """Yield the embeddings of a model.

    An embedding has the attribute ``num_embeddings``, as torch's have, or is a matrix that is
    called one, by its own name or by the class of its module.
    """
    for module, fqn in names.items():
        rows = getattr(module, "num_embeddings", None)
        if isinstance(rows, int):
            yield _Table(fqn or "the model", module, module._parameters.get("weight"), rows)
        elif not isinstance(module, nn.Linear):
            for attribute, parameter in module.named_parameters(recurse=False):
                called = type(module).__name__ if attribute == "weight" else attribute
                if not is_lazy(parameter) and parameter.ndim == 2 and "embed" in called.lower():
                    name = f"{fqn}.{attribute}".strip(".")
                    yield _Table(name, module, parameter, len(parameter))


def within_blocks_of(model: nn.Module) -> set[nn.Module]:
    """Return the modules within repeated blocks, which are numbered children.

    The children of an nn.Sequential may be parts of one model, unless several have one class.
    """
    within: set[nn.Module] = set()
    for container in model.modules():
        kinds = Counter(map(type, container.children()))
        for name, block in container.named_children():
            is_part = isinstance(container, nn.Sequential) and (
                kinds[type(block)] == 1 or isinstance(block, nn.Sequential)
            )
            if name.isdigit() and not is_part:
                within |= {*block.modules()} - {block}
    return within


def _output_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in the output embeddings of the model and of any module in it."""
    for module in model.modules():
        get: Any = getattr(module, "get_output_embeddings", None)
        try:
            head = get() if callable(get) else None
        except NotImplementedError:  # a base class without an implementation
            continue
        for part in head if isinstance(head, list | tuple) else [head]:
            if isinstance(part, nn.Module):
                yield from part.modules()


def outside_of_base_models(model: nn.Module) -> Iterator[nn.Module]:
    """Yield modules of transformers models outside of the base model, except stacks of layers."""
    stacks = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    stacked = {module for stack in stacks for module in stack.modules()}
    for module in model.modules():
        # Look at the class, because wrappers such as PEFT's forward the attributes of instances.
        prefix = getattr(type(module), "base_model_prefix", None)
        base = getattr(module, prefix, None) if isinstance(prefix, str) and prefix else None
        if isinstance(base, nn.Module):
            yield from set(module.modules()) - set(base.modules()) - {module} - stacked
