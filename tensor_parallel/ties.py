"""Tied parameters under a tensor-parallel plan.

torch's styles give each module a new parameter, so modules would no longer share one. If all of
them shard it in the same way, they share the first module's parameter again. Otherwise the plan is
an error.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

_OF_ACTIVATIONS = (PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput)


class Use(NamedTuple):
    """Use of a parameter: a module, its name, and the name of the parameter in it."""

    fqn: str
    module: nn.Module
    name: str

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter, as it is registered now."""
        return self.module._parameters[self.name]

    def __str__(self) -> str:
        return f"{self.fqn}.{self.name}" if self.fqn else self.name


def find_ties(model: nn.Module) -> list[list[Use]]:
    """Return the uses of each parameter that several modules, or several names in one, share."""
    uses: dict[int, list[Use]] = {}
    for fqn, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(id(parameter), []).append(Use(fqn, module, name))
    return [shared for shared in uses.values() if len(shared) > 1]


def untied_by(ties: list[list[Use]], styles: dict[str, ParallelStyle]) -> Iterator[str]:
    """Yield an error for each parameter that the styles, by module name, would untie."""
    for uses in ties:
        places = [_place(use, styles) for use in uses]
        known = [place for place in places if place is not None]
        if len(set(known)) > 1:
            yield _refusal(uses, places)


def tie_again(ties: list[list[Use]]) -> None:
    """Let the uses share one parameter again, after the styles were applied.

    Raises:
        ValueError: styles that do not derive from torch's placed the parameter in several ways.
    """
    for uses in ties:
        places = [_place_now(use) for use in uses]
        if len(set(places)) > 1:
            raise ValueError(f"apply_tp_plan: {_refusal(uses, places)}")
        for use in uses[1:]:
            if use.parameter is not uses[0].parameter:
                setattr(use.module, use.name, uses[0].parameter)


_Place = Placement | str  # a parameter's placement on the mesh, or "whole" for a plain tensor


def _place(use: Use, styles: dict[str, ParallelStyle]) -> _Place | None:
    """Return the placement of a parameter under the styles; None if it is not known."""
    style = styles.get(use.fqn)
    if style is None or isinstance(style, _OF_ACTIVATIONS):
        return _place_now(use)
    if isinstance(style, SequenceParallel):
        return Replicate()
    is_embedding = isinstance(use.module, nn.Embedding)
    if isinstance(style, ColwiseParallel):
        return Shard(1) if is_embedding else Shard(0)
    if isinstance(style, RowwiseParallel):
        if use.name != "weight":
            return Replicate()
        return Shard(0) if is_embedding else Shard(1)
    return None


def _place_now(use: Use) -> _Place:
    parameter = use.parameter
    return parameter.placements[-1] if isinstance(parameter, DTensor) else "whole"


def _refusal(uses: Sequence[Use], places: Sequence[_Place | None]) -> str:
    found = ", ".join(
        f"{use} {place or 'unknown'}" for use, place in zip(uses, places, strict=True)
    )
    return (
        f"{' and '.join(repr(str(use)) for use in uses)} are one parameter (tied), which the plan "
        f"would untie: {found}. Give its modules entries that divide it alike, such as "
        "RowwiseParallel for an nn.Embedding and ColwiseParallel for an nn.Linear (both Shard(0)), "
        "or give them parameters of their own before"
    )
