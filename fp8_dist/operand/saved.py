"""Operands as autograd saves them: a flat list of plain tensors, and the rest of each operand."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class SavedOperand(NamedTuple):
    """An operand without its tensors."""

    places: Sequence[int]  # the indices of its tensors in a flat list
    kind: Callable[..., Any] | None  # its type; None for a plain tensor
    rest: tuple[Any, ...]  # the other fields

    def operand(self, flat: Sequence[torch.Tensor]) -> Any:
        """The operand, given the flat list."""
        first, *others = [flat[i] for i in self.places]
        return first if self.kind is None else self.kind(first, tuple(others), *self.rest)


def flattened(*operands: Any) -> tuple[list[torch.Tensor], list[SavedOperand | None]]:
    """List the tensors of operands, each once: dynamo refuses duplicates.

    An operand is a tensor, None, or a tuple of a tensor, a tuple of tensors, and other fields, such
    as a :class:`fp8_dist.scaling.Quantized`.
    """
    flat: list[torch.Tensor] = []
    specs: list[SavedOperand | None] = []
    for operand in operands:
        if operand is None:
            specs.append(None)
        elif isinstance(operand, torch.Tensor):
            specs.append(SavedOperand((_place(operand, flat),), None, ()))
        else:
            first, others, *rest = operand
            places = [_place(first, flat)]
            for tensor in others:
                places.append(_place(tensor, flat))
            specs.append(SavedOperand(tuple(places), type(operand), tuple(rest)))
    return flat, specs


def _place(tensor: torch.Tensor, flat: list[torch.Tensor]) -> int:
    """Return the index of a tensor in a list, after appending it if it is missing."""
    for i, listed in enumerate(flat):
        if listed is tensor:
            return i
    flat.append(tensor)
    return len(flat) - 1
