"""A filter that leaves linear layers in high precision that are too small to gain from float8.

A float8 GEMM is faster than a bf16 one, but its operands must be cast first. The larger the layer,
the more multiplications share one cast; below some size the casts cost more than the GEMMs save.
What counts is the part of the layer that one rank multiplies, so shapes are local ones, after
tensor parallelism. A report says what was decided about each layer, and why.

A shape is ``(out_features, in_features)`` everywhere in this module, ``out x in`` in texts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.parameter import is_lazy

from fp8_dist.config import Float8LinearRecipeName

Shape = tuple[int, int]
# The largest (out, in) that is too small; None: however large.
Limits = tuple[int | None, int | None]

DIMS = ("out", "in")
MULTIPLE = 16  # what a GPU's float8 GEMM needs out and in to be multiples of

# The figures of torchao 0.18's auto filter, from its measurements on H100.
_TENSORWISE: tuple[Limits, ...] = ((1024, 4096),)
_ROWWISE: tuple[Limits, ...] = ((2048, None), (None, 1024), (4096, 2048))
# Recipes that torchao has no figures for inherit those of the recipe with the same GEMMs.
TOO_SMALL: dict[str, tuple[Limits, ...]] = {
    "tensorwise": _TENSORWISE,
    "rowwise": _ROWWISE,
    # The same casts for two of the three GEMMs; the third gains nothing and costs no cast.
    "rowwise_with_gw_hp": _ROWWISE,
    # The same scaled GEMMs; fewer casts, so it gains where rowwise does.
    "rowwise_folded": _ROWWISE,
    # The same GEMMs; its casts don't wait for an amax, so it gains where tensorwise does.
    "delayed": _TENSORWISE,
}


@dataclass(frozen=True)
class FilterDecision:
    """What was decided about one linear layer.

    Attributes:
        fqn: the layer's name; ``""`` for a model that is itself a linear layer.
        shape: global ``(out_features, in_features)``.
        local_shape: the smallest part that a tensor-parallel rank holds.
        convert: what the filter returned.
        reason: why.
    """

    fqn: str
    shape: Shape
    local_shape: Shape
    convert: bool
    reason: str


@dataclass(frozen=True)
class AutoFilterReport:
    """What an :class:`AutoFilter` decided so far; ``str()`` of it is a table.

    Attributes:
        recipe: the recipe's name.
        tp_size: tensor-parallel ranks.
        planned: whether a plan says how layers are divided.
        rows: one decision for each layer, in the order in which they were first asked for.
        unmatched_fqns: entries of ``filter_fqns`` that no layer's name contains.
    """

    recipe: str
    tp_size: int
    planned: bool
    rows: tuple[FilterDecision, ...]
    unmatched_fqns: tuple[str, ...]

    def __str__(self) -> str:
        converted = sum(row.convert for row in self.rows)
        layers = "linear layer" if len(self.rows) == 1 else "linear layers"
        lines = [
            f"auto_filter: {converted} of {len(self.rows)} {layers} to float8, recipe "
            f"{self.recipe} (thresholds: H100)"
        ]
        if self.planned:
            lines.append(f"local: tp_size {self.tp_size}, divided as the plan says")
        elif self.tp_size > 1:
            lines.append(
                f"local: tp_size {self.tp_size}, out or in divided, whichever gains less (no plan)"
            )
        table: list[tuple[str, ...]] = [("layer", "out x in", "local", "", "reason")]
        for row in self.rows:
            shape, local = (f"{out} x {in_}" for out, in_ in (row.shape, row.local_shape))
            if self.tp_size > 1 and local == shape:
                local = "not divided"
            verdict = "float8" if row.convert else "skip"
            table.append((row.fqn or "(the module itself)", shape, local, verdict, row.reason))
        if self.rows:
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            for cells in table:
                padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
                lines.append("  " + "  ".join(padded).rstrip())
        else:
            lines.append("  no layer was asked for yet")
        lines += [f"filter_fqns: {entry!r} matched no layer" for entry in self.unmatched_fqns]
        return "\n".join(lines)


class AutoFilter:
    """A ``module_filter_fn`` that decides by size; :func:`auto_filter` makes and describes it.

    Use one for each model: layers are told apart by their names.
    """

    def __init__(
        self,
        recipe: Float8LinearRecipeName | str,
        filter_fqns: Iterable[str] = (),
        tp_size: int = 1,
        *,
        plan: Mapping[str, ParallelStyle] | None = None,
    ) -> None:
        self._recipe = _recipe_name(recipe)
        self._filter_fqns = _checked_fqns(filter_fqns)
        self._tp_size = _checked_tp_size(tp_size)
        self._plan = None if plan is None else _checked_plan(plan)
        self._rows: dict[str, FilterDecision] = {}

    def __call__(self, module: nn.Module, fqn: str) -> bool:
        """Returns whether the layer is to be converted, and notes it in the report.

        Args:
            module: anything but an nn.Linear is False, and not in the report.
            fqn: its name in the model.

        Raises:
            ValueError: the layer is lazy and has no shape yet, or the plan has both a
                ColwiseParallel and a RowwiseParallel for it.
        """
        if not isinstance(module, nn.Linear):
            return False
        named = [entry for entry in self._filter_fqns if entry in fqn]
        weight = module.weight
        if is_lazy(weight):
            if not named:
                raise ValueError(
                    f"auto_filter: {fqn or 'the module'} is lazy and has no shape yet: run it "
                    "once before the conversion, or name it in filter_fqns"
                )
            shape = local = (module.out_features, module.in_features)
            reason = ""
        else:
            shape = (weight.shape[0], weight.shape[1])
            local, reason = self._judge(fqn, shape)
        if named:
            reason = f"filter_fqns: {', '.join(map(repr, named))}"
        decision = FilterDecision(fqn, shape, local, not reason, reason or "large enough")
        self._rows[fqn] = decision
        return decision.convert

    @property
    def report(self) -> AutoFilterReport:
        """What was decided up to now. A layer that is asked for again keeps one row."""
        return AutoFilterReport(
            recipe=self._recipe,
            tp_size=self._tp_size,
            planned=self._plan is not None,
            rows=tuple(self._rows.values()),
            unmatched_fqns=tuple(
                entry for entry in self._filter_fqns if not any(entry in fqn for fqn in self._rows)
            ),
        )

    def _judge(self, fqn: str, shape: Shape) -> tuple[Shape, str]:
        """The local shape, and why it is skipped (an empty string: it is converted)."""
        judged = []
        for dim in self._possible_divisions(fqn):
            largest, smallest = _shards(shape, dim, self._tp_size)
            judged.append((smallest, _why_skip(largest, smallest, TOO_SMALL[self._recipe])))
        # Skipped before converted; where both are alike, the one with the shorter side.
        return min(judged, key=lambda each: (not each[1], min(each[0])))

    def _possible_divisions(self, fqn: str) -> tuple[int | None, ...]:
        """Which dim of the shape may be divided over the ranks; None: none of them."""
        if self._tp_size == 1:
            return (None,)
        if self._plan is None:
            return (0, 1)
        dims = {
            dim: pattern
            for pattern, style in self._plan.items()
            if (dim := _divided_dim(style)) is not None and _matches(pattern, fqn)
        }
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
) -> AutoFilter:
    """A filter for :func:`fp8_dist.convert_to_float8_training` that skips layers too small to gain.

    ::

        admits = auto_filter("tensorwise", filter_fqns=["output"], tp_size=8)
        convert_to_float8_training(model, module_filter_fn=admits)
        print(admits.report)

    A layer is skipped if its name contains an entry of ``filter_fqns``, if a local dim is no
    multiple of 16 (a GPU's float8 GEMM needs that), if a rank holds nothing of it, or if its
    smallest local part is within one of these limits:

    ===================================  =======================================================
    recipe                               too small
    ===================================  =======================================================
    tensorwise, delayed                  out <= 1024 and in <= 4096
    rowwise, rowwise_with_gw_hp,         out <= 2048, or in <= 1024, or out <= 4096 and in <= 2048
    rowwise_folded
    ===================================  =======================================================

    The figures are those of torchao 0.18's own auto filter, for tensorwise and rowwise, measured on
    H100 GPUs without tensor parallelism; other devices differ. That the other three recipes gain
    where the one beside them does is an assumption (same GEMMs, no more casts), not a measurement.
    ``python -m scripts.bench.auto_filter`` measures a device. The number of tokens isn't looked at,
    nor what float8 communication saves.

    Args:
        recipe: a :class:`Float8LinearRecipeName` or its value.
        filter_fqns: layers whose name contains one of these strings are skipped.
        tp_size: number of tensor-parallel ranks. A layer is judged by its smallest local part.
            Without a plan it may be divided by rows or by columns, and the division that gains
            less decides. Where a dim is no multiple of ``tp_size``, parts are as in torch:
            ceil(dim / tp_size) on the first ranks, what remains, perhaps nothing, on the last.
        plan: a tensor-parallel plan (module names, ``*`` for any one part, to styles). Layers with
            a ColwiseParallel have their out_features divided by ``tp_size``, with a
            RowwiseParallel their in_features; layers without either are not divided. The styles
            may be torch's: ``llama_tp_plan`` of a model that is not converted yet will do.

    Returns:
        The filter. Its ``report`` has ``rows`` (fqn, shape, local_shape, convert, reason), the
        entries that matched nothing, and a text that shows it all. ``convert`` means that the
        filter admitted the layer: :func:`fp8_dist.convert_to_float8_training` warns of those that
        it can't convert.

    Raises:
        ValueError: ``recipe`` is no recipe, ``tp_size`` is below 1, or an entry of
            ``filter_fqns`` is empty. The filter itself raises it for a lazy layer, and for one
            that the plan divides both ways.
        TypeError: ``filter_fqns`` is a string, or not strings; ``tp_size`` is no int; ``plan`` is
            no mapping of names to styles.
    """
    return AutoFilter(recipe, filter_fqns, tp_size, plan=plan)


def _recipe_name(recipe: Float8LinearRecipeName | str) -> str:
    name = recipe.value if isinstance(recipe, Float8LinearRecipeName) else recipe
    if name not in list(TOO_SMALL):
        raise ValueError(f"auto_filter: recipe={recipe!r} is not one of {list(TOO_SMALL)}")
    return name


def _checked_fqns(filter_fqns: Iterable[str]) -> tuple[str, ...]:
    if isinstance(filter_fqns, str):
        raise TypeError(
            f"auto_filter: filter_fqns={filter_fqns!r} is one string, and would be read letter by "
            f"letter: pass a list, filter_fqns=[{filter_fqns!r}]"
        )
    if not isinstance(filter_fqns, Iterable):
        raise TypeError(
            f"auto_filter: filter_fqns must be a list of strings, got {filter_fqns!r}; () names "
            "no layer"
        )
    entries = tuple(filter_fqns)
    for entry in entries:
        if not isinstance(entry, str):
            raise TypeError(f"auto_filter: filter_fqns holds {entry!r}, which is not a string")
        if not entry:
            raise ValueError(
                "auto_filter: filter_fqns holds an empty string, which every layer's name "
                "contains: leave it out"
            )
    return tuple(dict.fromkeys(entries))


def _checked_tp_size(tp_size: int) -> int:
    if not isinstance(tp_size, int) or isinstance(tp_size, bool):
        raise TypeError(
            f"auto_filter: tp_size must be the number of tensor-parallel ranks, an int, got "
            f"{tp_size!r}"
        )
    if tp_size < 1:
        raise ValueError(
            f"auto_filter: tp_size={tp_size} must be at least 1 (1: no tensor parallelism)"
        )
    return tp_size


def _checked_plan(plan: Mapping[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    if not isinstance(plan, Mapping):
        raise TypeError(
            f"auto_filter: plan must be a dict of module names to parallel styles, got {plan!r}"
        )
    for pattern, style in plan.items():
        if not isinstance(pattern, str) or not isinstance(style, ParallelStyle):
            raise TypeError(
                f"auto_filter: the plan's entry {pattern!r} is {style!r}: give a module name and "
                "the instance of a parallel style, such as ColwiseParallel()"
            )
    return dict(plan)


def _divided_dim(style: ParallelStyle) -> int | None:
    if isinstance(style, ColwiseParallel):
        return 0
    return 1 if isinstance(style, RowwiseParallel) else None


def _matches(pattern: str, fqn: str) -> bool:
    """As ``parallelize_module`` matches: part by part, and an empty pattern is the root."""
    if not pattern or not fqn:
        return pattern == fqn
    patterns, parts = pattern.split("."), fqn.split(".")
    return len(patterns) == len(parts) and all(map(fnmatch, parts, patterns))


def _shards(shape: Shape, dim: int | None, ranks: int) -> tuple[Shape, Shape]:
    """The largest and the smallest part when ``dim`` is divided over ranks as torch does it."""
    if dim is None:
        return shape, shape
    largest, smallest = list(shape), list(shape)
    largest[dim] = -(-shape[dim] // ranks)
    smallest[dim] = max(0, shape[dim] - largest[dim] * (ranks - 1))
    return (largest[0], largest[1]), (smallest[0], smallest[1])


def _why_skip(largest: Shape, smallest: Shape, too_small: tuple[Limits, ...]) -> str:
    """Why a layer with these local parts is skipped, or an empty string."""
    if 0 in smallest:
        return "a rank holds nothing of it"
    for shape in (smallest, largest):
        for name, size in zip(DIMS, shape, strict=True):
            if size % MULTIPLE:
                return f"{name} = {size} is no multiple of {MULTIPLE}"
    for limits in too_small:
        bounds = list(zip(DIMS, smallest, limits, strict=True))
        if all(limit is None or size <= limit for _, size, limit in bounds):
            return " and ".join(f"{name} <= {limit}" for name, _, limit in bounds if limit)
    return ""
