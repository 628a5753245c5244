"""Filters that choose the linear layers to convert, and their reasons to leave layers out.

Rounding errors cost more in the logits, the output of the head (:mod:`fp8_dist.model.heads`), than
elsewhere. In a router (:mod:`fp8_dist.model.routers`) they change which experts compute. In a
low-rank adapter the inner dim is too small for a gain. In a small layer the casts cost more than
the GEMM saves. The float8 GEMM of a GPU refuses sizes that are not multiples of 16.

Shapes are ``(out_features, in_features)``. For experts, they are those of one expert.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from textwrap import indent
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parameter import is_lazy

from fp8_dist.config import Float8LinearConfig, Float8LinearRecipeName, ScalingGranularity
from fp8_dist.kernels.quantization import ALIGNMENT
from fp8_dist.model.break_even import tokens_to_gain
from fp8_dist.model.heads import (
    heads,
    is_adapter,
    is_called_head,
    outside_of_base_models,
    within_blocks_of,
)
from fp8_dist.model.routers import is_called_router, routers
from fp8_dist.moe.experts import expert_shapes
from fp8_dist.text import aligned, did_you_mean, is_part, without_wrappers

Shape = tuple[int, int]
Limits = tuple[int | None, int | None]  # the largest (out, in) that is too small; None: any size

# The limits of the auto filter of torchao 0.18, which were measured on H100.
_TENSORWISE: tuple[Limits, ...] = ((1024, 4096),)
_ROWWISE: tuple[Limits, ...] = ((2048, None), (None, 1024), (4096, 2048))


# The limits of other recipes are not measured. They are assumed to be those of similar GEMMs.
def _too_small(recipe: Float8LinearRecipeName) -> tuple[Limits, ...]:
    granularity = Float8LinearConfig.from_recipe_name(recipe).cast_config_input.scaling_granularity
    return _TENSORWISE if granularity is ScalingGranularity.TENSORWISE else _ROWWISE


TOO_SMALL = {recipe.value: _too_small(recipe) for recipe in Float8LinearRecipeName}

_IS_HEAD = "it is the model's head"
_IS_ROUTER = "it is a router"
_IS_OUTSIDE = "it stands outside of the base model"
# The reasons why conversions left out layers.
LEFT_OUT: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()


class LayerFilter:
    """A ``module_filter_fn`` that records its reasons; see :func:`skip_head`.

    Args:
        model: the model that will be converted.
        names: other modules to leave out: a full name, or else consecutive parts of names.
        named_by: the reason of layers that ``names`` leaves out, to which the name is added.

    Attributes:
        has_head: whether a layer of the model is recognized as its head.
        reasons: the reasons why layers are left out, by FQN; ``""`` for a layer that is converted.
    """

    def __init__(
        self, model: nn.Module | None = None, names: Iterable[str] = (), named_by: str = ""
    ) -> None:
        model = nn.Module() if model is None else model
        self._known = {module: without_wrappers(fqn) for fqn, module in model.named_modules()}
        self._never = dict.fromkeys(outside_of_base_models(model), _IS_OUTSIDE)
        self._never |= dict.fromkeys(routers(model), _IS_ROUTER)
        self._within_blocks = within_blocks_of(model)
        signs = heads(model, self._never)
        self._never |= {module: f"{_IS_HEAD}, {sign}" for module, sign in signs.items()}
        outside = [m for m, why in self._never.items() if why == _IS_OUTSIDE]
        self.has_head = any(isinstance(module, nn.Linear) for module in outside)
        self.has_head |= any(True for module in signs for _ in module.parameters())
        self._names, self._named_by = tuple(map(without_wrappers, names)), named_by
        self._full_names = {*self._names}.intersection(self._known.values())
        self.reasons: dict[str, str] = {}

    def __call__(self, module: nn.Module, fqn: str) -> bool:
        """Return whether to convert a layer or experts; False for any other module."""
        shapes = _shapes(module)
        if not shapes:
            return False
        fqn = without_wrappers(fqn)
        # A part of the model may be converted alone. Its layers have other names there.
        self.reasons[fqn] = self._why_not(module, self._known.get(module, fqn), shapes)
        return not self.reasons[fqn]

    def named(self, fqn: str) -> str:
        """Return the name given to the filter that a module has, or ``""``."""
        return next((name for name in self._names if self._has_name(fqn, name)), "")

    def names_head(self) -> bool:
        """Return whether a layer outside of repeated blocks has a name given to the filter."""
        layers = {m: fqn for m, fqn in self._known.items() if isinstance(m, nn.Linear)}
        return any(self.named(fqn) for m, fqn in layers.items() if m not in self._within_blocks)

    def _has_name(self, fqn: str, name: str) -> bool:
        is_full = name in self._full_names
        return f"{fqn}.".startswith(f"{name}.") if is_full else is_part(name, fqn)

    def check_names(self, caller: str) -> None:
        """Raise ValueError if no linear layer or experts of the model have one of the names."""
        fqns = [fqn for module, fqn in self._known.items() if _may_be_converted(module)]
        for name in self._names:
            if not any(self._has_name(fqn, name) for fqn in fqns):
                raise ValueError(
                    f"{caller}: no linear layer or experts of the model have the name {name!r}. "
                    "Take names, or consecutive parts of names, of model.named_modules()"
                    f"{did_you_mean(name, name_parts(fqns), 3)}"
                )

    def _why_not(self, module: nn.Module, fqn: str, shapes: dict[str, Shape]) -> str:
        if name := self.named(fqn):
            return f"{self._named_by}{name}"
        reasons = (why_misaligned(*shape) for shape in shapes.values())
        reason = self._why_never(module, fqn, shapes) or next(filter(None, reasons), "")
        return reason and f"skip_head: {reason}"

    def _why_never(self, module: nn.Module, fqn: str, shapes: dict[str, Shape]) -> str:
        """Return why a layer of any size is left out, or ``""``."""
        if module in self._never:
            return self._never[module]
        if is_called_head(fqn):
            return f"{_IS_HEAD}, by its name"
        if is_adapter(fqn):
            return "it belongs to a LoRA adapter"
        if module in self._known or not isinstance(module, nn.Linear):
            return ""
        return _IS_ROUTER if is_called_router(fqn, *shapes["weight"]) else ""


def name_parts(fqns: Iterable[str]) -> list[str]:
    """Return FQNs and each of their parts, as proposals in place of names that match nothing."""
    return list(dict.fromkeys(part for fqn in fqns for part in (fqn, *fqn.split("."))))


def _may_be_converted(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or has a 3-D parameter, as experts have."""
    parameters = module.parameters(recurse=False)
    return isinstance(module, nn.Linear) or any(not is_lazy(p) and p.ndim == 3 for p in parameters)


def _shapes(module: nn.Module) -> dict[str, Shape]:
    """Return the shapes of the weights of a linear layer or of experts, by name."""
    if isinstance(module, nn.Linear):
        return {"weight": (module.out_features, module.in_features)}
    return {name: (shape[-2], shape[-1]) for name, shape in expert_shapes(module).items()}


@dataclass(frozen=True)
class FilterDecision:
    """The decision about one linear layer or one weight of experts, and its reason."""

    fqn: str  # of the layer, "" if it is the model itself; of the weight of experts
    shape: Shape  # global (out_features, in_features), of one expert
    local_shape: Shape  # the smallest part on any tensor-parallel rank
    convert: bool  # whether the filter admits the layer
    reason: str


@dataclass(frozen=True)
class AutoFilterReport:
    """The decisions of an :class:`AutoFilter` so far; ``str()`` prints a table."""

    recipe: str
    tp_size: int
    rows: tuple[FilterDecision, ...]  # one for each weight, in the order of their first calls
    unmatched_fqns: tuple[str, ...]  # entries of filter_fqns that no layer's name contains

    def __str__(self) -> str:
        converted, n = sum(row.convert for row in self.rows), len(self.rows)
        lines = [
            f"auto_filter: {converted} of {n} weight{'s' * (n != 1)} to float8, recipe "
            f"{self.recipe} (thresholds: H100)"
        ]
        if self.tp_size > 1:
            lines.append(f"local: tp_size {self.tp_size}, out or in divided, whichever gains less")
        table = [("layer", "out x in", "local", "", "reason")]
        for row in self.rows:
            shape, local = (f"{out} x {in_}" for out, in_ in (row.shape, row.local_shape))
            if self.tp_size > 1 and local == shape:
                local = "not divided"
            verdict = "float8" if row.convert else "skip"
            table.append((row.fqn or "(the module itself)", shape, local, verdict, row.reason))
        lines.append(indent(aligned(table) if self.rows else "no layer was asked for yet", "  "))
        lines += [f"filter_fqns: {entry!r} matched no layer" for entry in self.unmatched_fqns]
        return "\n".join(lines)


class AutoFilter(LayerFilter):
    """A ``module_filter_fn`` for one model that also decides by size; see :func:`auto_filter`."""

    def __init__(
        self, recipe: str, filter_fqns: tuple[str, ...], tp_size: int, model: nn.Module | None
    ) -> None:
        super().__init__(model)
        self._recipe, self._filter_fqns, self._tp_size = recipe, filter_fqns, tp_size
        self._rows: dict[str, FilterDecision] = {}

    def named(self, fqn: str) -> str:
        """Return the entries of ``filter_fqns`` that a name contains, or ``""``."""
        return ", ".join(repr(entry) for entry in self._filter_fqns if entry in fqn)

    def _why_not(self, module: nn.Module, fqn: str, shapes: dict[str, Shape]) -> str:
        named = self.named(fqn)
        if not named and isinstance(module, nn.Linear) and is_lazy(module.weight):
            raise ValueError(
                f"auto_filter: {fqn or 'the module'} is lazy and has no shape yet: run it once "
                "before the conversion, or name it in filter_fqns"
            )
        reason = f"filter_fqns: {named}" if named else self._why_never(module, fqn, shapes)
        # Tensor parallelism leaves experts whole.
        ranks = self._tp_size if isinstance(module, nn.Linear) else 1
        local_shapes: dict[str, Shape] = {}
        for name, shape in shapes.items():
            # A division whose parts are skipped decides; otherwise, the one with the smaller side.
            parts = smallest_parts(self._recipe, shape, ranks)
            local_shapes[name], why = min(parts, key=lambda part: (not part[1], min(part[0])))
            # Experts are converted with all of their weights, or not at all.
            reason = reason or (f"{name}: {why}" if why and len(shapes) > 1 else why)
        for name, shape in shapes.items():
            row = fqn if name == "weight" else f"{fqn}.{name}".removeprefix(".")
            enough = "large enough"
            if isinstance(module, nn.Linear):
                enough += f", from about {tokens_to_gain([prod(local_shapes[name])]):,} tokens on"
            verdict = not reason, reason or enough
            self._rows[row] = FilterDecision(row, shape, local_shapes[name], *verdict)
        return reason and f"auto_filter: {reason}"

    @property
    def report(self) -> AutoFilterReport:
        """The decisions so far, with one row per weight."""
        unmatched = tuple(x for x in self._filter_fqns if not any(x in fqn for fqn in self.reasons))
        return AutoFilterReport(self._recipe, self._tp_size, tuple(self._rows.values()), unmatched)


def skip_head(model: nn.Module | None = None, *names: str) -> LayerFilter:
    """Make a filter that skips heads, routers, low-rank adapters and layers of misaligned sizes.

    ``Float8Callback`` and ``Fp8DistConfig`` leave out the same layers:

    * the head, by what it does: layers that share the weight of an embedding, and layers with as
      many outputs as an embedding has rows, if no other layer takes as many inputs. If others do
      (the model may be as wide as its vocabulary is large), the last such layer, unless a later one
      takes as many. The order is that of ``model.modules()``. Layers within repeated blocks (of an
      nn.ModuleList, for instance) do not count, because their width may be the number of positions,
      which have an embedding, too.
    * the head, by further signs: the result of ``get_output_embeddings()`` of the model, or of a
      model within it; layers of a transformers model outside of its base model, except for stacks
      of layers (a decoder in an nn.ModuleList); layers with the name ``lm_head``, or within a
      module of this name; the layer ``output`` of the model itself; and ``head``, ``score``,
      ``classifier``, ``classification_head``, ``qa_outputs``, ``embed_out`` and ``cls`` of the
      model itself, with all layers within them. A layer ``output`` or ``score`` of a module within
      the model, such as ``attention.output``, is not the head by its name. Names that wrappers add
      are ignored (``module``, ``model``, ``base_model``, ``_orig_mod``, ...).
    * layers that are named by the caller.
    * routers, which decide which experts compute: layers whose name, or the name of a module around
      them, contains ``router``. Also, beside experts (an nn.ModuleList or 3-D parameters): layers
      with as many outputs as there are experts, layers with the name ``gate`` or ``wg`` and few
      outputs, and small modules whose last layer is such a layer. The section "Routers" of
      ``docs/experts.md`` has the rule. The gate of a gated MLP is converted.
    * low-rank adapters: layers within a module whose name begins with ``lora_``.
    * layers whose in_features or out_features is not a multiple of 16, because a GPU's float8 GEMM
      refuses them. With ``pad_inner_dim=True`` such a layer would run, but without a gain. The same
      holds for experts, whose GEMMs are padded.

    ::

        convert_to_float8_training(model, module_filter_fn=skip_head(model))
        convert_to_float8_training(model, module_filter_fn=skip_head(model, "unembed"))

    :func:`fp8_dist.conversion_summary` says which layer was taken for the head, and by which sign.
    A warning is issued if none was, unless a name is given to a layer outside of repeated blocks.
    For a part of a model, such as a pipeline's stage, pass the whole model.

    The filter serves :func:`fp8_dist.moe.convert_experts_to_float8_training` too. To combine it
    with another filter, call both in a function of a module and its FQN.

    Args:
        model: the model that will be converted. Without it, heads and routers are recognized by
            their names alone, and a ``gate`` is a router if it has at most a quarter as many
            outputs as inputs. With it, this holds only beside experts that are not called so.
        *names: further layers to leave out. Each is the full name of a module, with all layers
            within it, or else consecutive parts of names (``"unembed"``, ``"mlp.up"``), without the
            parts that wrappers add.

    Returns:
        The filter.

    Raises:
        TypeError: ``model`` is not an nn.Module, or a name is not a string.
        ValueError: no linear layer or experts of ``model`` have one of the names.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"skip_head takes the model, got {model!r}; pass what it returns as module_filter_fn: "
            "module_filter_fn=skip_head(model), or skip_head(model, 'NAME') to name a layer"
        )
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"skip_head takes names of layers after the model, got {name!r}; write "
                "skip_head(model, 'NAME', 'OTHER')"
            )
    admits = LayerFilter(model, names, "skip_head: named ")
    if model is not None:
        admits.check_names("skip_head")
    if not admits.names_head():
        _warn_without_head(admits, model, "skip_head(model, {!r})", "skip_head()")
    return admits


def _warn_without_head(
    admits: LayerFilter, model: nn.Module | None, naming: str, unaware: str
) -> None:
    """Warn if no layer of a model is recognized as its head.

    Args:
        naming: the call that names a layer, with ``{!r}`` for its name.
        unaware: the call for a model without a head.
    """
    if model is None or admits.has_head:
        return
    modules = dict(model.named_modules())
    layers = {without_wrappers(fqn): m for fqn, m in modules.items() if isinstance(m, nn.Linear)}
    if layers:
        within_blocks = within_blocks_of(model)
        outside = [fqn for fqn, layer in layers.items() if layer not in within_blocks]
        is_last = f" ({naming.format(outside[-1])}, if it is the last one)" if outside else ""
        warnings.warn(
            f"{naming.partition('(')[0]}: no layer of the {type(model).__name__} was taken for its "
            "head: none has the name of a head, the weight of an embedding, or as many outputs as "
            "an embedding has rows (that no other layer takes as inputs). If a linear layer makes "
            f"the logits, name it{is_last}. If the model has no head, or takes the weight of an "
            f"embedding itself, {unaware} does not look for one",
            stacklevel=3,
        )


def auto_filter(
    recipe: Float8LinearRecipeName | str,
    filter_fqns: Iterable[str] = (),
    tp_size: int = 1,
    *,
    model: nn.Module | None = None,
) -> AutoFilter:
    """Make a filter for conversions of layers and of experts that skips small ones.

    ::

        admits = auto_filter("tensorwise", filter_fqns=["output"], tp_size=8)
        convert_to_float8_training(model, module_filter_fn=admits)
        print(admits.report)

    A layer is skipped in any of these cases: its name contains an entry of ``filter_fqns``; it is a
    head or a router or belongs to a low-rank adapter, as in :func:`fp8_dist.skip_head`; a local dim
    is not a multiple of 16, as a GPU's float8 GEMM requires; a rank has no part of it; or its
    smallest local part is within one of the limits of the recipe (``TOO_SMALL``).
    ``docs/support.md`` lists the limits, which do not consider the number of tokens or the savings
    in communication, and says how to measure a device. The report says with how many tokens per
    rank a layer gains if it is compiled.

    Experts are skipped if a linear layer of the size of one of their weights, ``[N, K]``, would be
    skipped. They are not divided: expert parallelism moves whole experts.

    Args:
        recipe: a :class:`Float8LinearRecipeName` or its value.
        filter_fqns: layers whose name contains one of these strings are skipped.
        tp_size: the number of tensor-parallel ranks. A layer may be divided by rows or by columns.
            The division with the smaller gain decides, by its smallest part. Parts may be uneven,
            as in torch.
        model: the model that will be converted, as for ``skip_head``. Without it, heads and
            routers are recognized by their names alone. With it, a warning is issued if no head is
            recognized and ``filter_fqns`` is empty.

    Returns:
        The filter, to be used for one model. Its ``report`` is an :class:`AutoFilterReport` of its
        decisions. The conversion warns about layers that the filter admits but that it can't
        convert.

    Raises:
        ValueError: ``recipe`` is not a recipe, or ``tp_size`` is not a positive int. The filter
            itself raises it for a lazy layer.
        TypeError: ``recipe`` is a module, or ``filter_fqns`` is not a list of non-empty strings.
    """
    if isinstance(recipe, nn.Module):
        raise TypeError(
            "auto_filter takes a recipe, got a module; pass what it returns as module_filter_fn: "
            "module_filter_fn=auto_filter(recipe)"
        )
    name = getattr(recipe, "value", recipe)  # of an enum, which may be torchao's
    if name not in list(TOO_SMALL):
        raise ValueError(
            f"auto_filter: recipe={recipe!r} is not one of {list(TOO_SMALL)}"
            f"{did_you_mean(name, TOO_SMALL)}"
        )
    fqns = tuple(filter_fqns)
    if isinstance(filter_fqns, str) or not all(isinstance(entry, str) and entry for entry in fqns):
        raise TypeError(
            f"auto_filter: filter_fqns={filter_fqns!r}: pass a list of parts of names, such as "
            "['output']"
        )
    if not isinstance(tp_size, int) or isinstance(tp_size, bool) or tp_size < 1:
        raise ValueError(f"auto_filter: tp_size={tp_size!r}: pass the number of ranks, 1 or more")
    admits = AutoFilter(name, tuple(dict.fromkeys(fqns)), tp_size, model)
    if not admits.names_head():
        naming = "auto_filter(recipe, filter_fqns=[{!r}], model=model)"
        _warn_without_head(admits, model, naming, "auto_filter(recipe)")
    return admits


def why_misaligned(out_features: int, in_features: int) -> str:
    """Name the size that a GPU's float8 GEMM refuses; an empty string if none."""
    for name, size in (("out", out_features), ("in", in_features)):
        if size % ALIGNMENT:
            return f"{name} = {size} is not a multiple of {ALIGNMENT}"
    return ""


def smallest_parts(recipe: str, shape: Shape, ranks: int) -> list[tuple[Shape, str]]:
    """Return the smallest parts of a layer that is divided by rows, and by columns.

    Each comes with the reason why such a layer is left out; ``""`` if all parts are large enough.
    """
    parts = []
    for largest, smallest in (_shards(shape, dim, ranks) for dim in (0, 1)):
        reason = why_misaligned(*smallest) or why_misaligned(*largest)
        if 0 in smallest:
            reason = "a rank holds nothing of it"
        for limits in () if reason else TOO_SMALL[recipe]:
            sizes = zip(("out", "in"), smallest, limits, strict=True)
            bounds = [(name, size, limit) for name, size, limit in sizes if limit]
            if all(size <= limit for _, size, limit in bounds):
                reason = " and ".join(f"{name} <= {limit}" for name, _, limit in bounds)
                break
        parts.append((smallest, reason))
    return parts


def _shards(shape: Shape, dim: int, ranks: int) -> tuple[Shape, Shape]:
    """Return the largest and the smallest part when torch divides ``dim`` over ranks."""
    largest = -(-shape[dim] // ranks)
    smallest = max(0, shape[dim] - largest * (ranks - 1))
    out, in_ = shape
    return ((largest, in_), (smallest, in_)) if dim == 0 else ((out, largest), (out, smallest))
