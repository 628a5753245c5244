"""A filter that leaves the head of a language model in high precision.

The head's outputs are the logits, in which rounding costs more than elsewhere. Its weight is often
tied to the embedding.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

# Names that wrappers give the module that they wrap.
_WRAPPED = {
    "module",
    "model",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
}


class HeadFilter:
    """A ``module_filter_fn`` that knows heads; see :func:`skip_head`."""

    def __init__(self, heads: frozenset[nn.Module]) -> None:
        self._heads = heads

    def __call__(self, module: nn.Module, fqn: str) -> bool:
        """Whether a layer is to be converted: it is not (part of) the head."""
        return module not in self._heads and not _has_name_of_head(fqn)

    def reason(self, fqn: str) -> str:
        """Why a layer is left out, for messages."""
        return "skip_head: it is the model's head"


def skip_head(model: nn.Module | None = None) -> HeadFilter:
    """A filter for ``convert_to_float8_training`` that leaves out the output head.

    These layers are taken for the head:

    * what ``get_output_embeddings()`` of the model, or of a model within it, returns, as in
      transformers;
    * layers with the name ``lm_head``, or within a module of this name;
    * the layer ``output`` of the model itself. A layer ``output`` of a module within it, such
      as ``attention.output``, is not the head. (Names that wrappers give are ignored: ``module``,
      ``model``, ``_orig_mod``, ``_fsdp_wrapped_module`` and ``_checkpoint_wrapped_module``.)

    ::

        convert_to_float8_training(model, module_filter_fn=skip_head(model))

    Args:
        model: the model that will be converted. Without it, only the names are known.

    Returns:
        ``(module, fqn) -> bool``. To combine it with another filter, call both:
        ``lambda m, fqn: not_head(m, fqn) and other(m, fqn)``.

    Raises:
        TypeError: ``model`` is no nn.Module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"skip_head takes the model, got {model!r}; pass what it returns as module_filter_fn: "
            "module_filter_fn=skip_head(model)"
        )
    return HeadFilter(frozenset(_output_embeddings(model)) if model is not None else frozenset())


def _output_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of what the model, or any module in it, calls its output embeddings."""
    for module in model.modules():
        get: Any = getattr(module, "get_output_embeddings", None)
        try:
            head = get() if callable(get) else None
        except NotImplementedError:  # a base class that leaves it to others
            continue
        for each in head if isinstance(head, list | tuple) else [head]:
            if isinstance(each, nn.Module):
                yield from each.modules()


def _has_name_of_head(fqn: str) -> bool:
    parts = [part for part in fqn.split(".") if part not in _WRAPPED]
    return "lm_head" in parts or parts == ["output"]
