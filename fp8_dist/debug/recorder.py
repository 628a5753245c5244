"""The base of recorders of casts, and the casts and GEMMs that a model's layers make."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Self, get_args

import torch.distributed as dist
from torch import nn

from fp8_dist.linear.observing import Observer, Owner, observed_by
from fp8_dist.linear.weights import weights_by_layer
from fp8_dist.recipe import GEMM_OPERANDS, Gemm, Operand
from fp8_dist.scaling import Scheme
from fp8_dist.text import without_wrappers

# One fnmatch pattern or several; None matches everything.
Patterns = str | Iterable[str] | None


class Slot(NamedTuple):
    """A cast that a layer makes in each step, or a float8 GEMM, whose ``operand`` is None.

    The ``fqn`` is that of the layer, or of the weight ``[E, N, K]`` of experts.
    """

    fqn: str
    owner: Owner
    operand: Operand | None
    gemms: tuple[Gemm, ...]
    scheme: Scheme | None = None  # of a cast
    delayed: bool = False
    folded: Operand | None = None  # whose scales multiply it before the cast

    @property
    def key(self) -> tuple[Owner, Operand | None, tuple[Gemm, ...]]:
        """The fields that identify the cast or GEMM to observers."""
        return self.owner, self.operand, self.gemms


def slots_of(model: nn.Module, gemms: bool = False) -> Iterator[Slot]:
    """Yield the casts, and with ``gemms`` the float8 GEMMs, of each converted layer in order."""
    for name, weight in weights_by_layer(model).items():
        of, config = (without_wrappers(name) or weight.fqn, weight), weight.config
        for operand in get_args(Operand):
            for taken_by, scheme in weight.casts_of(operand).items():
                is_delayed, folded = operand in config.recipe.delayed, None
                if config.recipe.folds and operand == "grad_output" and len(taken_by) == 1:
                    # (Experts fold scales into the float8 copy instead, of which there is one.)
                    folded = next(o for o in GEMM_OPERANDS[taken_by[0]] if o != operand)
                yield Slot(*of, operand, taken_by, scheme, is_delayed, folded)
        for gemm in get_args(Gemm):
            if gemms and config.gemm_enabled(gemm):
                yield Slot(*of, None, (gemm,))


def matching(
    caller: str, argument: str, patterns: Patterns, names: Sequence[str], what: str
) -> set[str]:
    """Return the names that match one of the patterns. Each pattern must match a name.

    Raises:
        TypeError: the patterns are neither a string nor several strings.
        ValueError: a pattern matches no name.
    """
    if patterns is None:
        return set(names)
    several = [patterns] if isinstance(patterns, str) else patterns
    several = list(several) if isinstance(several, Iterable) else []
    if not several or not all(isinstance(pattern, str) for pattern in several):
        raise TypeError(
            f"{caller}: {argument}={patterns!r} must be a string or a list of strings; leave it "
            "out to take all"
        )
    chosen: set[str] = set()
    for pattern in several:
        found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            near = get_close_matches(pattern, names, n=5, cutoff=0.5) or names[:5]
            raise ValueError(
                f"{caller}: {argument}={pattern!r} matches no {what}. Near names: "
                f"{', '.join(near)} (in patterns, * stands for any characters)"
            )
        chosen |= found
    return chosen


def own_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


class StepRecorder(Observer, ABC):
    """A context manager that observes the casts of a step. It is entered once for each step."""

    def __init__(self, name: str, gemms: bool = False) -> None:
        self.step = -1  # the last one that was entered
        self._name = name  # for messages
        self._gemms = gemms
        self._block: AbstractContextManager[None] | None = None

    def at(self, step: int) -> Self:
        """Return this object, so that entering it begins the step with this number."""
        self.step = step - 1
        return self

    def __enter__(self) -> Self:
        if self._block is not None:
            raise RuntimeError(f"this {self._name} is already recording; leave its block first")
        self.step += 1
        # Observe on all ranks, because a graph may order collectives unlike eager code.
        is_recorded = self._begin()
        self._block = observed_by(self, self._gemms) if is_recorded else nullcontext()
        self._block.__enter__()
        return self

    def __exit__(self, error: Any, *others: Any) -> None:
        block, self._block = self._block, None
        assert block is not None
        block.__exit__(None, None, None)
        self._end(failed=error is not None)

    @abstractmethod
    def _begin(self) -> bool:
        """Begin a step, and return whether its casts are recorded."""

    @abstractmethod
    def _end(self, failed: bool) -> None:
        """End a block. ``failed`` says whether it raised an error."""
