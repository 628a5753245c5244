"""Transposed copies of matrices, one or many at once.

In the backward pass, the float8 GEMM of a GPU reads a gathered weight transposed. One launch per
weight costs more time than most of the copies themselves. FSDP2 gathers the weights of a block
together. So when a backward pass requests the first of them, all of them are transposed together.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import ReferenceType, WeakValueDictionary, ref

import torch

from fp8_dist.device import current_stream, is_captured
from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.torch_internals import backward_id, storage_address, when_backward_ends


@custom_op("transposed_copy(Tensor x) -> Tensor", fake=lambda x: x.new_empty(x.shape[::-1]))
def transposed_copy(x: torch.Tensor) -> torch.Tensor:
    """Copy a contiguous matrix ``[M, K]`` to its contiguous transpose ``[K, M]``."""
    return x.t().contiguous()


@custom_op(
    "transposed_copies(Tensor first, Tensor[] others) -> Tensor[]",
    fake=lambda first, others: [x.new_empty(x.shape[::-1]) for x in (first, *others)],
)
def transposed_copies(first: torch.Tensor, others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Apply :func:`transposed_copy` to each of several matrices on one device."""
    return [transposed_copy(x) for x in (first, *others)]


# Matrices per launch, which takes their addresses as arguments. This also bounds the number of
# copies that are kept at once if FSDP2 gathers a whole model together.
MOST = 16


@dataclass(eq=False)
class _Member:
    """Matrix of a :class:`TransposedTogether`.

    Attributes:
        copy: the transposed copy, until it is taken.
        stream: the stream on which the copy was made; ``None`` on CPUs.
        copied_in: the id of the backward pass that made the last copy; ``None`` if the matrix has
            not been copied since it was refilled.
        is_asked_for: the last copy was taken.
    """

    matrix: torch.Tensor
    together: "ReferenceType[TransposedTogether]"
    copy: torch.Tensor | None = None
    stream: torch.Stream | None = None
    copied_in: int | None = None
    is_asked_for: bool = False


# Keyed by the storage of the matrix.
_members: WeakValueDictionary[int, _Member] = WeakValueDictionary()


class TransposedTogether:
    """Matrices that are refilled together, and transposed together in a backward pass.

    The first request in a backward pass also transposes the other matrices that the previous
    backward pass requested. A copy is kept until it is taken, until the backward pass ends or until
    the matrix is refilled.
    """

    def __init__(self) -> None:
        self._members: dict[Hashable, _Member] = {}
        self._backward: int | None = None  # the last backward pass that took a copy

    def refilled(self, key: Hashable, matrix: torch.Tensor) -> None:
        """Record new values of a matrix.

        Call this after each change of the values, on the stream that made it.

        Args:
            key: identifies the matrix across calls.
            matrix: contiguous ``[M, K]`` with elements of one byte. A reference to it is kept.
        """
        storage = storage_address(matrix)
        member = self._members.get(key)
        if member is None or storage_address(member.matrix) != storage:
            member = self._members[key] = _Member(matrix, ref(self))
        member.matrix, member.copy, member.copied_in = matrix, None, None
        _members[storage] = member

    def take(self, member: _Member) -> torch.Tensor:
        """Return the transposed copy of a matrix in a backward pass. The caller owns the copy."""
        backward, stream = backward_id(), current_stream(member.matrix.device)
        if backward != self._backward:
            self._drop()  # a backward pass that raised may have left copies
            self._backward = backward
        if member.copy is None or stream != member.stream:
            others = [
                other
                for other in self._members.values()
                if other is not member
                and other.is_asked_for
                and other.copied_in != backward
                and other.matrix.untyped_storage().nbytes()  # not resharded
            ][: MOST - 1]
            if others:
                when_backward_ends(self._drop)
            made = transposed_copies(member.matrix, [other.matrix for other in others])
            for each, copy in zip((member, *others), made, strict=True):
                each.copy, each.stream, each.copied_in = copy, stream, backward
                each.is_asked_for = False
        taken, member.copy, member.is_asked_for = member.copy, None, True
        assert taken is not None
        return taken

    def _drop(self) -> None:
        for member in self._members.values():
            member.copy = None


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Return a transposed copy of ``x``, from a :class:`TransposedTogether` if it belongs to one.

    This is for eager code only, because it keeps tensors between calls.
    """
    member = _members.get(storage_address(x))
    together = None if member is None else member.together()
    if member is None or together is None or backward_id() < 0 or is_captured(x):
        return transposed_copy(x)
    same = x.data_ptr() == member.matrix.data_ptr() and x.shape == member.matrix.shape
    return together.take(member) if same else transposed_copy(x)
