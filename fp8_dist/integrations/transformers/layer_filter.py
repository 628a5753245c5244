"""Which layers of a transformers model are converted, unless the user says otherwise."""

from collections.abc import Iterable

import torch.nn as nn
from transformers import PreTrainedModel

from fp8_dist.head_filter import skip_head


class LayerFilter:
    """A ``module_filter_fn`` that leaves out heads, adapters, and modules by name.

    Heads are what :func:`fp8_dist.skip_head` knows, and everything that a transformers model has
    besides its ``base_model``: ``score``, ``classifier``, ``qa_outputs``. Adapters are PEFT's
    ``lora_...`` layers, whose inner dims are too small for float8.

    Args:
        model: the model that will be converted.
        names: of modules to leave out: whole names or consecutive parts of them.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] = ()) -> None:
        self._names = tuple(names)
        self._output_head = skip_head(model)
        self._heads = _besides_base_models(model)

    def __call__(self, module: nn.Module, fqn: str) -> bool:
        """Whether a layer is to be converted."""
        if module in self._heads or not self._output_head(module, fqn):
            return False
        return not _is_adapter(fqn) and not any(is_part(name, fqn) for name in self._names)

    def reason(self, fqn: str) -> str:
        """Why a layer is left out, for messages."""
        if _is_adapter(fqn):
            return "it belongs to a LoRA adapter"
        named = [name for name in self._names if is_part(name, fqn)]
        return f"modules_to_not_convert: {named[0]}" if named else "it belongs to the model's head"


def is_part(name: str, fqn: str) -> bool:
    """Whether the parts of a name stand next to each other in that of a module."""
    return f".{name}." in f".{fqn}."


def _is_adapter(fqn: str) -> bool:
    return any(part.startswith("lora_") for part in fqn.split("."))


def _besides_base_models(model: nn.Module) -> set[nn.Module]:
    heads: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.base_model is not module:
            heads |= set(module.modules()) - set(module.base_model.modules())
    return heads - {model}
