"""The casts and float8 GEMMs that a model's layers make in each step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, get_args

from fp8_dist.operand.observers import Owner
from fp8_dist.recipe import GEMM_OPERANDS, Gemm, Operand
from fp8_dist.scaling import Scheme
from fp8_dist.text import without_wrappers
from fp8_dist.weight.float8_weight import Float8Weight

# One fnmatch pattern or several.
Patterns = str | Iterable[str]


class Slot(NamedTuple):
    """A cast that a layer makes in each step, or a float8 GEMM (``operand`` is None).

    ``fqn`` names the layer, or the weight ``[E, N, K]`` of experts.
    """

    fqn: str
    owner: Owner
    operand: Operand | None
    gemms: tuple[Gemm, ...]
    scheme: Scheme | None = None  # None for a GEMM
    delayed: bool = False
    folded: Operand | None = None  # the operand whose scales multiply this one before the cast

    @property
    def key(self) -> tuple[Owner, Operand | None, tuple[Gemm, ...]]:
        """The fields that identify the cast or GEMM to observers."""
        return self.owner, self.operand, self.gemms


def slots_of(weights: Mapping[str, Float8Weight], gemms: bool = False) -> Iterator[Slot]:
    """Yield the casts, and with ``gemms`` the float8 GEMMs, of each layer in order."""
    for name, weight in weights.items():
        fqn = without_wrappers(name) or weight.fqn
        config = weight.config
        for operand in get_args(Operand):
            for cast_for, scheme in weight.casts_of(operand).items():
                folded = None
                if config.recipe.folds and operand == "grad_output" and len(cast_for) == 1:
                    # Not for experts: their one cast serves both GEMMs, and is folded afterwards.
                    folded = next(o for o in GEMM_OPERANDS[cast_for[0]] if o != operand)
                yield Slot(
                    fqn=fqn,
                    owner=weight,
                    operand=operand,
                    gemms=cast_for,
                    scheme=scheme,
                    delayed=operand in config.recipe.delayed,
                    folded=folded,
                )
        if gemms:
            for gemm in filter(config.gemm_enabled, get_args(Gemm)):
                yield Slot(fqn=fqn, owner=weight, operand=None, gemms=(gemm,))


def matching(caller: str, patterns: Patterns, names: Sequence[str]) -> set[str]:
    """Return the names that match any of the patterns. Each pattern must match at least one.

    Raises:
        TypeError: the patterns are neither a string nor several strings.
        ValueError: a pattern matches no layer.
    """
    is_one = isinstance(patterns, str) or not isinstance(patterns, Iterable)
    listed: list[Any] = [patterns] if is_one else [*patterns]
    if not all(isinstance(pattern, str) for pattern in listed):
        raise TypeError(f"{caller}: layers={patterns!r} must be a string or a list of strings")
    chosen: set[str] = set()
    for pattern in listed:
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            near = get_close_matches(pattern, names, n=5, cutoff=0.5) or names[:5]
            raise ValueError(
                f"{caller}: layers={pattern!r} matches no converted layer. Near names: "
                f"{', '.join(near)} (in patterns, * stands for any characters)"
            )
        chosen |= matches
    return chosen
