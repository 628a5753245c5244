"""A filter that skips linear layers that are too small to gain from float8.

The operands of a float8 GEMM must be cast first. The larger the layer, the more multiplications
share one cast; below some size the casts cost more than the GEMM saves. Shapes in this module are
``(out_features, in_features)``. A layer is judged by its part on one tensor-parallel rank.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.parameter import is_lazy

from fp8_dist.config import Float8LinearRecipeName
from fp8_dist.layer_filter import LayerFilter, skip_head, why_misaligned

Shape = tuple[int, int]
Limits = tuple[int | None, int | None]  # the largest (out, in) that is too small; None: any

# The limits of torchao 0.18's auto filter, which were measured on H100.
_TENSORWISE: tuple[Limits, ...] = ((1024, 4096),)
_ROWWISE: tuple[Limits, ...] = ((2048, None), (None, 1024), (4096, 2048))
# The limits of the other recipes are assumed, not measured: those of a recipe with the same or
# similar GEMMs.
TOO_SMALL: dict[str, tuple[Limits, ...]] = {
    "tensorwise": _TENSORWISE,
    "rowwise": _ROWWISE,
    "rowwise_with_gw_hp": _ROWWISE,
    "rowwise_folded": _ROWWISE,
    "delayed": _TENSORWISE,
    "blockwise": _ROWWISE,
    "mxfp8": _ROWWISE,
}


@dataclass(frozen=True)
class FilterDecision:
    """The decision about one linear layer, and its reason."""

    fqn: str  # "" for a model that is itself a linear layer
    shape: Shape  # global (out_features, in_features)
    local_shape: Shape  # the smallest part that a tensor-parallel rank holds
    convert: bool  # what the filter returned
    reason: str


@dataclass(frozen=True)
class AutoFilterReport:
    """The decisions of an :class:`AutoFilter` so far; ``str()`` prints a table."""

    recipe: str
    tp_size: int
    planned: bool  # whether a plan says how layers are divided
    rows: tuple[FilterDecision, ...]  # one for each layer, in the order of the first calls
    unmatched_fqns: tuple[str, ...]  # entries of filter_fqns that no layer's name contains
    unmatched_exclude: tuple[str, ...] = ()  # entries of exclude that are not a layer's name

    def __str__(self) -> str:
        converted = sum(row.convert for row in self.rows)
        layers = "linear layer" if len(self.rows) == 1 else "linear layers"
        lines = [
            f"auto_filter: {converted} of {len(self.rows)} {layers} to float8, recipe "
            f"{self.recipe} (thresholds: H100)"
        ]
        if self.planned or self.tp_size > 1:
            no_plan = "out or in divided, whichever gains less (no plan)"
            how = "divided as the plan says" if self.planned else no_plan
            lines.append(f"local: tp_size {self.tp_size}, {how}")
        lines += self._table() if self.rows else ["  no layer was asked for yet"]
        lines += [f"filter_fqns: {entry!r} matched no layer" for entry in self.unmatched_fqns]
        lines += [f"exclude: {entry!r} is no layer" for entry in self.unmatched_exclude]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        table = [("layer", "out x in", "local", "", "reason")]
        for row in self.rows:
            shape, local = (f"{out} x {in_}" for out, in_ in (row.shape, row.local_shape))
            if self.tp_size > 1 and local == shape:
                local = "not divided"
            verdict = "float8" if row.convert else "skip"
            table.append((row.fqn or "(the module itself)", shape, local, verdict, row.reason))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return ["  " + "  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]


@dataclass(eq=False)
class AutoFilter:
    """A ``module_filter_fn`` that decides by size, for one model; see :func:`auto_filter`."""

    _recipe: str
    _filter_fqns: tuple[str, ...]
    _tp_size: int
    _plan: Mapping[str, ParallelStyle] | None
    _exclude: tuple[str, ...] = ()
    _common: LayerFilter = field(default_factory=LayerFilter)
    _rows: dict[str, FilterDecision] = field(default_factory=dict)

    def __call__(self, module: nn.Module, fqn: str) -> bool:
        """Whether to convert a layer; False for any module that is not an nn.Linear."""
        if not isinstance(module, nn.Linear):
            return False
        named = [entry for entry in self._filter_fqns if entry in fqn]
        if is_lazy(module.weight) and not named and fqn not in self._exclude:
            raise ValueError(
                f"auto_filter: {fqn or 'the module'} is lazy and has no shape yet: run it once "
                "before the conversion, or name it in filter_fqns"
            )
        shape = (module.out_features, module.in_features)
        local, reason = self._judge(fqn, shape)
        if named:
            reason = f"filter_fqns: {', '.join(map(repr, named))}"
        elif fqn in self._exclude:
            reason = "named in exclude"
        else:
            reason = self._common.why_head_or_adapter(module, fqn) or reason
        self._rows[fqn] = FilterDecision(fqn, shape, local, not reason, reason or "large enough")
        return not reason

    def reason(self, fqn: str) -> str:
        """The reason why a layer is skipped, for messages."""
        return f"auto_filter: {self._rows[fqn].reason}"

    @property
    def report(self) -> AutoFilterReport:
        """The decisions so far, with one row per layer."""
        unmatched = [e for e in self._filter_fqns if not any(e in fqn for fqn in self._rows)]
        unknown = tuple(entry for entry in self._exclude if entry not in self._rows)
        planned, rows = self._plan is not None, tuple(self._rows.values())
        return AutoFilterReport(
            self._recipe, self._tp_size, planned, rows, tuple(unmatched), unknown
        )

    def _judge(self, fqn: str, shape: Shape) -> tuple[Shape, str]:
        """The local shape, and the reason why the layer is skipped (empty if it is converted)."""
        judged = []
        for dim in self._possible_divisions(fqn):
            largest, smallest = _shards(shape, dim, self._tp_size)
            judged.append((smallest, _why_skip(largest, smallest, TOO_SMALL[self._recipe])))
        # Skipped before converted; if both divisions agree, the one with the shorter side.
        return min(judged, key=lambda each: (not each[1], min(each[0])))

    def _possible_divisions(self, fqn: str) -> tuple[int | None, ...]:
        """The dims of the shape that may be divided over the ranks; None means no division."""
        if self._tp_size == 1:
            return (None,)
        if self._plan is None:
            return (0, 1)
        dims: dict[int | None, str] = {}
        for pattern, style in self._plan.items():
            if isinstance(style, ColwiseParallel | RowwiseParallel) and _matches(pattern, fqn):
                dims[0 if isinstance(style, ColwiseParallel) else 1] = pattern
        if len(dims) > 1:
            raise ValueError(
                f"auto_filter: the plan divides {fqn or 'the module'} both ways: {dims[0]!r} is a "
                f"ColwiseParallel and {dims[1]!r} a RowwiseParallel; leave one of them"
            )
        return tuple(dims) or (None,)


def auto_filter(
    recipe: Float8LinearRecipeName | str,
    filter_fqns: Iterable[str] = (),
    tp_size: int = 1,
    *,
    plan: Mapping[str, ParallelStyle] | None = None,
    exclude: Iterable[str] = (),
    model: nn.Module | None = None,
) -> AutoFilter:
    """Make a filter for :func:`fp8_dist.convert_to_float8_training` that skips small layers.

    ::

        admits = auto_filter("tensorwise", filter_fqns=["output"], tp_size=8)
        convert_to_float8_training(model, module_filter_fn=admits)
        print(admits.report)

    A layer is skipped if its name contains an entry of ``filter_fqns`` or is one of ``exclude``; if
    :func:`fp8_dist.skip_head` leaves it out (heads, low-rank adapters); if a local dim is not a
    multiple of 16 (a GPU's float8 GEMM needs that); if a rank holds nothing of it; or if its
    smallest local part is within one of its recipe's limits in ``TOO_SMALL``. The number of tokens
    and savings in communication are not considered. ``docs/support.md`` has the limits and
    says how to measure a device.

    Args:
        recipe: a :class:`Float8LinearRecipeName` or its value.
        filter_fqns: layers whose name contains one of these strings are skipped.
        tp_size: number of tensor-parallel ranks. A layer is judged by its smallest local part,
            with uneven parts as torch makes them. Without a plan a layer may be divided by rows or
            by columns, and the division that gains less decides.
        plan: a tensor-parallel plan that maps module names (``*`` for any one part) to styles. A
            ColwiseParallel divides out_features by ``tp_size``, a RowwiseParallel in_features;
            layers without either are not divided. The styles may be torch's, as in
            ``llama_tp_plan`` of a model that is not converted yet.
        exclude: layers with exactly these names are skipped, such as those that lose too much in
            float8: ``compare_recipes(...).layers_below(20, recipe)`` of ``fp8_dist.debug``.
        model: the model that will be converted, as for ``skip_head``. Without it, heads are
            recognized by their names alone.

    Returns:
        The filter, to be used for one model. Its ``report`` is an :class:`AutoFilterReport` of
        its decisions. The conversion warns about admitted layers that it can't convert.

    Raises:
        ValueError: ``recipe`` is not a recipe, ``tp_size`` is below 1, or an entry of
            ``filter_fqns`` is empty. The filter itself raises it for a lazy layer, and for one
            that the plan divides both ways.
        TypeError: an argument has another type.
    """
    name = recipe.value if isinstance(recipe, Float8LinearRecipeName) else recipe
    if name not in list(TOO_SMALL):
        raise ValueError(f"auto_filter: recipe={recipe!r} is not one of {list(TOO_SMALL)}")
    fqns, excluded = _checked("filter_fqns", filter_fqns), _checked("exclude", exclude)
    if "" in fqns:
        raise ValueError("auto_filter: filter_fqns holds '', which matches every layer")
    if not isinstance(tp_size, int) or isinstance(tp_size, bool):
        raise TypeError(f"auto_filter: tp_size={tp_size!r}: pass the number of ranks, an int")
    if tp_size < 1:
        raise ValueError(f"auto_filter: tp_size={tp_size} must be at least 1")
    if plan is not None and not isinstance(plan, Mapping):
        raise TypeError(f"auto_filter: plan must map module names to styles, got {plan!r}")
    for pattern, style in (plan or {}).items():
        if not isinstance(pattern, str) or not isinstance(style, ParallelStyle):
            raise TypeError(
                f"auto_filter: the plan's entry {pattern!r} is {style!r}: give a module name and "
                "the instance of a parallel style, such as ColwiseParallel()"
            )
    plan = None if plan is None else dict(plan)
    return AutoFilter(name, fqns, tp_size, plan, excluded, skip_head(model))


def _checked(argument: str, given: Iterable[str]) -> tuple[str, ...]:
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    fqns = tuple(given) if is_list else ()
    if not is_list or not all(isinstance(entry, str) for entry in fqns):
        raise TypeError(
            f"auto_filter: {argument}={given!r}: pass a list of strings, such as ['output']"
        )
    return tuple(dict.fromkeys(fqns))


def _matches(pattern: str, fqn: str) -> bool:
    """Match a name as ``parallelize_module`` does: part by part; an empty pattern is the root."""
    if not pattern or not fqn:
        return pattern == fqn
    patterns, parts = pattern.split("."), fqn.split(".")
    return len(patterns) == len(parts) and all(map(fnmatch, parts, patterns))


def _shards(shape: Shape, dim: int | None, ranks: int) -> tuple[Shape, Shape]:
    """The largest and the smallest part when ``dim`` is divided over ranks as torch does it."""
    if dim is None:
        return shape, shape
    largest = -(-shape[dim] // ranks)
    smallest = max(0, shape[dim] - largest * (ranks - 1))
    out, in_ = shape
    return ((largest, in_), (smallest, in_)) if dim == 0 else ((out, largest), (out, smallest))


def _why_skip(largest: Shape, smallest: Shape, too_small: tuple[Limits, ...]) -> str:
    """The reason why a layer with these local parts is skipped, or an empty string."""
    if 0 in smallest:
        return "a rank holds nothing of it"
    if misaligned := why_misaligned(*smallest) or why_misaligned(*largest):
        return misaligned
    for limits in too_small:
        bounds = list(zip(("out", "in"), smallest, limits, strict=True))
        if all(limit is None or size <= limit for _, size, limit in bounds):
            return " and ".join(f"{name} <= {limit}" for name, _, limit in bounds if limit)
    return ""
