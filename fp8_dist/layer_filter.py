"""Filter for linear layers that stay in high precision: heads, adapters, misaligned layers.

Rounding costs more in a head's outputs, the logits, than elsewhere, and its weight is often tied to
the embedding. The inner dim of a low-rank adapter is too small to gain. A GPU's float8 GEMM refuses
sizes that are not multiples of 16.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from fp8_dist.kernels import ALIGNMENT

# The name of heads at any depth, and the names of heads directly in the model.
_HEAD = "lm_head"
_HEADS_OF_A_MODEL = frozenset(
    ["classification_head", "classifier", "cls", "embed_out", "qa_outputs", "score"]
)
# Names that wrappers give the module that they wrap.
_WRAPPED = frozenset(
    [
        "module",
        "model",
        "base_model",
        "_orig_mod",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
    ]
)


class LayerFilter:
    """A ``module_filter_fn`` that applies the rule of this module; see :func:`skip_head`.

    Args:
        model: the model that will be converted. Without it, heads are recognized by their names
            alone.
        names: further modules to leave out: whole names or consecutive parts of them.
    """

    def __init__(self, model: nn.Module | None = None, names: Iterable[str] = ()) -> None:
        self._heads = set() if model is None else set(_output_embeddings(model))
        self._outside = set() if model is None else set(_outside_of_base_models(model))
        self._names = tuple(names)
        self._reasons: dict[str, str] = {}

    def __call__(self, module: nn.Module, fqn: str) -> bool:
        """Whether to convert a layer."""
        named = [f"modules_to_not_convert: {name}" for name in self._names if is_part(name, fqn)]
        reason = self.why_head_or_adapter(module, fqn)
        if not reason and isinstance(module, nn.Linear):
            reason = why_misaligned(module.out_features, module.in_features)
        self._reasons[fqn] = named[0] if named else f"skip_head: {reason}"
        return not named and not reason

    def reason(self, fqn: str) -> str:
        """The reason why a layer was left out, for messages."""
        return self._reasons[fqn]

    def why_head_or_adapter(self, module: nn.Module, fqn: str) -> str:
        """The reason, other than size, why a layer is left out, or an empty string."""
        if module in self._heads or _has_name_of_head(fqn):
            return "it is the model's head"
        if module in self._outside:
            return "it stands outside of the base model"
        if any(part.startswith("lora_") for part in fqn.split(".")):
            return "it belongs to a LoRA adapter"
        return ""


def skip_head(model: nn.Module | None = None) -> LayerFilter:
    """Make a filter for ``convert_to_float8_training`` that skips heads and small layers.

    The filter leaves out the same layers as ``Float8Callback`` and ``Fp8DistConfig``:

    * the head: the result of ``get_output_embeddings()`` of the model, or of a model within it;
      layers of a transformers model outside of its base model, except for stacks of layers (a
      decoder in an nn.ModuleList); layers with the name ``lm_head``, or within a module of this
      name; the layer ``output`` of the model itself; and ``score``, ``classifier``,
      ``classification_head``, ``qa_outputs``, ``embed_out`` and ``cls`` of the model itself, with
      all layers within. A layer ``output`` or ``score`` of a module within the model, such as
      ``attention.output``, is not the head. Names that wrappers add are ignored: ``module``,
      ``model``, ``base_model``, ``_orig_mod``, ``_fsdp_wrapped_module`` and
      ``_checkpoint_wrapped_module``.
    * low-rank adapters: layers within a module whose name begins with ``lora_``
    * layers whose in_features or out_features is not a multiple of 16, which a GPU's float8 GEMM
      refuses. With ``pad_inner_dim=True`` such a layer would run, but not gain.

    ::

        convert_to_float8_training(model, module_filter_fn=skip_head(model))

    Args:
        model: the model that will be converted. Without it, heads are recognized by their names
            alone.

    Returns:
        The filter, a function of a module and its name. Combine it with another one by
        ``lambda m, fqn: not_head(m, fqn) and other(m, fqn)``.

    Raises:
        TypeError: ``model`` is not an nn.Module.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"skip_head takes the model, got {model!r}; pass what it returns as module_filter_fn: "
            "module_filter_fn=skip_head(model)"
        )
    return LayerFilter(model)


def why_misaligned(out_features: int, in_features: int) -> str:
    """Text of the size that a GPU's float8 GEMM refuses; an empty string if there is none."""
    for name, size in (("out", out_features), ("in", in_features)):
        if size % ALIGNMENT:
            return f"{name} = {size} is not a multiple of {ALIGNMENT}"
    return ""


def is_part(name: str, fqn: str) -> bool:
    """Whether ``fqn`` contains the parts of ``name`` one after the other."""
    return f".{name}." in f".{fqn}."


def _output_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """The modules in the output embeddings of the model or of any module in it."""
    for module in model.modules():
        get: Any = getattr(module, "get_output_embeddings", None)
        try:
            head = get() if callable(get) else None
        except NotImplementedError:  # a base class without an implementation
            continue
        for each in head if isinstance(head, list | tuple) else [head]:
            if isinstance(each, nn.Module):
                yield from each.modules()


def _outside_of_base_models(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of transformers models outside of base models, except for stacks of layers."""
    stacks = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    stacked = {module for stack in stacks for module in stack.modules()}
    for module in model.modules():
        # transformers sets it on the class; wrappers such as PEFT's only forward the attribute.
        prefix = getattr(type(module), "base_model_prefix", None)
        base = getattr(module, prefix, None) if isinstance(prefix, str) and prefix else None
        if isinstance(base, nn.Module):
            yield from set(module.modules()) - set(base.modules()) - {module} - stacked


def _has_name_of_head(fqn: str) -> bool:
    parts = [part for part in fqn.split(".") if part not in _WRAPPED]
    return _HEAD in parts or parts == ["output"] or bool(_HEADS_OF_A_MODEL & set(parts[:1]))
