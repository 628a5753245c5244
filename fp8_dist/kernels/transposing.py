"""Transposed copies of matrices, also of many at once.

A GPU's float8 GEMM reads a gathered weight transposed in the backward. A launch for each weight
costs more than most of the copies. FSDP2 gathers the weights of a block together, so that the first
of them that a backward asks for can bring those of the others.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import ReferenceType, WeakValueDictionary, ref

import torch

from fp8_dist.kernels.custom_op import custom_op
from fp8_dist.torch_internals import backward_id, is_captured, when_backward_ends


@custom_op("transposed_copy(Tensor x) -> Tensor")
def transposed_copy(x: torch.Tensor) -> torch.Tensor:
    """The transpose ``[K, M]`` of a contiguous matrix ``[M, K]``, contiguous too."""
    return x.t().contiguous()


transposed_copy.register_fake(lambda x: x.new_empty(x.shape[::-1]))


@custom_op("transposed_copies(Tensor first, Tensor[] others) -> Tensor[]")
def transposed_copies(first: torch.Tensor, others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """:func:`transposed_copy` of each of some matrices of one device."""
    return [transposed_copy(x) for x in (first, *others)]


transposed_copies.register_fake(
    lambda first, others: [x.new_empty(x.shape[::-1]) for x in (first, *others)]
)


# Matrices of one launch, whose arguments they are. It also bounds how many copies are kept at once,
# where FSDP2 gathers a whole model together.
MOST = 16


@dataclass(eq=False)
class _Member:
    """A matrix of a :class:`TransposedTogether`.

    Attributes:
        copy: its transposed copy, until it is asked for.
        stream: that the copy was made on; ``None`` on CPUs.
        copied_in: the backward in which the last copy was made; ``None``: of its values, none.
        is_asked_for: whether the last copy was.
    """

    matrix: torch.Tensor
    together: "ReferenceType[TransposedTogether]"
    copy: torch.Tensor | None = None
    stream: torch.Stream | None = None
    copied_in: int | None = None
    is_asked_for: bool = False


# By the storage of the matrix.
_members: WeakValueDictionary[int, _Member] = WeakValueDictionary()


class TransposedTogether:
    """Matrices that are refilled together, and transposed together in a backward.

    The first one that a backward asks for brings all that the backward before asked for. A copy
    waits until it is asked for, at most until the backward ends or the matrix is refilled.
    """

    def __init__(self) -> None:
        self._members: dict[Hashable, _Member] = {}
        self._backward: int | None = None  # the last one that asked

    def refilled(self, key: Hashable, matrix: torch.Tensor) -> None:
        """A matrix has new values: call this after each change, on the stream that made it.

        Args:
            key: the same for the same matrix.
            matrix: contiguous ``[M, K]`` with elements of one byte. It is kept.
        """
        storage = matrix.untyped_storage()._cdata
        member = self._members.get(key)
        if member is None or member.matrix.untyped_storage()._cdata != storage:
            member = self._members[key] = _Member(matrix, ref(self))
        member.matrix, member.copy, member.copied_in = matrix, None, None
        _members[storage] = member

    def take(self, member: _Member) -> torch.Tensor:
        """The transposed copy of a matrix, which the caller owns. Call it in a backward."""
        backward, stream = backward_id(), _stream_of(member.matrix)
        if backward != self._backward:
            self._drop()  # what a backward left that raised
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
    """:func:`transposed_copy`, of a :class:`TransposedTogether` where ``x`` is one of those.

    For eager code: it keeps tensors between calls.
    """
    member = _members.get(x.untyped_storage()._cdata)
    together = None if member is None else member.together()
    if member is None or together is None or backward_id() < 0 or is_captured(x):
        return transposed_copy(x)
    same = x.data_ptr() == member.matrix.data_ptr() and x.shape == member.matrix.shape
    return together.take(member) if same else transposed_copy(x)


def _stream_of(x: torch.Tensor) -> torch.Stream | None:
    return torch.cuda.current_stream(x.device) if x.is_cuda else None
