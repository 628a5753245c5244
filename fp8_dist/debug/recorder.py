"""The base of recorders of casts, and the casts and GEMMs that a model's layers make."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Self, get_args

import torch.distributed as dist
from torch import nn

from fp8_dist.linear.module import float8_layers
from fp8_dist.linear.observing import Observer, Owner, casts_of, observed_by
from fp8_dist.names import without_wrappers
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import Scheme

# One fnmatch pattern or several; None matches everything.
Patterns = str | Iterable[str] | None

_NEAR = 5  # the number of near names in an error message


class CastSlot(NamedTuple):
    """A cast that a layer makes in each step: the cast of ``operand`` for ``gemms``."""

    fqn: str
    owner: Owner
    operand: Operand
    gemms: tuple[Gemm, ...]
    scheme: Scheme
    delayed: bool


def cast_slots(model: nn.Module) -> list[CastSlot]:
    """Return the casts of all converted layers, in the order of the model's layers."""
    slots = []
    for name, layer in float8_layers(model).items():
        fqn, owner = without_wrappers(name) or layer.fqn, layer.float8_weight
        for operand in get_args(Operand):
            delayed = operand in layer.config.recipe.delayed
            for gemms, scheme in casts_of(layer.config, operand).items():
                slots.append(CastSlot(fqn, owner, operand, gemms, scheme, delayed))
    return slots


class GemmSlot(NamedTuple):
    """A float8 GEMM that a layer runs in each step, with the field names of :class:`CastSlot`."""

    fqn: str
    owner: Owner
    operand: None
    gemms: tuple[Gemm, ...]


def gemm_slots(model: nn.Module) -> list[GemmSlot]:
    """Return the float8 GEMMs of all converted layers, in the order of the model's layers."""
    return [
        GemmSlot(without_wrappers(name) or layer.fqn, layer.float8_weight, None, (gemm,))
        for name, layer in float8_layers(model).items()
        for gemm in get_args(Gemm)
        if layer.config.gemm_enabled(gemm)
    ]


def choose_slots(
    caller: str, model: nn.Module, fqn: Patterns, operand: Patterns, gemm: Patterns
) -> list[CastSlot]:
    """Return the casts whose layer and operand match, and at least one of whose GEMMs matches.

    Raises:
        TypeError: ``model`` is not a module, or patterns are neither a string nor several strings.
        ValueError: the model has no converted layer, a pattern matches nothing, or no layer has a
            cast that matches all three.
    """
    slots = cast_slots(model)
    if not slots:
        raise ValueError(
            f"{caller}: the model has no converted layer; call convert_to_float8_training first"
        )
    fqns = list(dict.fromkeys(slot.fqn for slot in slots))
    chosen_fqns = _matching(caller, "fqn", fqn, fqns, "converted layer")
    operands = _matching(caller, "operand", operand, get_args(Operand), "operand")
    gemms = _matching(caller, "gemm", gemm, get_args(Gemm), "GEMM")
    of_layers = [slot for slot in slots if slot.fqn in chosen_fqns]
    chosen = [s for s in of_layers if s.operand in operands and gemms & set(s.gemms)]
    if not chosen:
        there = dict.fromkeys(f"{s.operand} for {', '.join(s.gemms)}" for s in of_layers)
        raise ValueError(
            f"{caller}: no chosen layer casts {' or '.join(sorted(operands))} for "
            f"{' or '.join(sorted(gemms))}. Their casts are: {'; '.join(there)}"
        )
    return chosen


def _matching(
    caller: str, argument: str, patterns: Patterns, names: Sequence[str], what: str
) -> set[str]:
    """Return the names that match one of the patterns. Each pattern must match a name."""
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
            near = get_close_matches(pattern, names, n=_NEAR, cutoff=0.5) or names[:_NEAR]
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
    """A context manager that observes the casts of a step. It is entered once for each step.

    Attributes:
        step: the number of the last step that was entered.
    """

    def __init__(self, name: str) -> None:
        self.step = -1
        self._name = name  # for messages
        self._stack: ExitStack | None = None

    def at(self, step: int) -> Self:
        """Return this object, so that entering it begins the step with this number."""
        self.step = step - 1
        return self

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise RuntimeError(f"this {self._name} is already recording; leave its block first")
        self.step += 1
        self._stack = ExitStack()
        # Observe on all ranks, so that compiled code has the same operators on all of them.
        if self._is_recorded(self.step):
            self._begin(self._stack)
            self._stack.enter_context(observed_by(self))
        return self

    def __exit__(self, error: Any, *others: Any) -> None:
        stack, self._stack = self._stack, None
        assert stack is not None
        stack.close()
        self._end(failed=error is not None)

    @abstractmethod
    def _is_recorded(self, step: int) -> bool:
        """Return whether the casts of this step are recorded."""

    def _begin(self, stack: ExitStack) -> None:
        """Begin a recorded step. ``stack`` is closed when the step ends."""

    @abstractmethod
    def _end(self, failed: bool) -> None:
        """End a block. ``failed`` says whether it raised an error."""
