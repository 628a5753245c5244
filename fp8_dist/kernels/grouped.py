"""Groups of rows: ``[R, ...]``, the rows of one group after those of the other."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Groups(NamedTuple):
    """The rows of each group, among rows that are sorted by group.

    Attributes:
        counts: the number of rows of each group, on the host.
        of_row: the group of each row, int64 ``[R]``.
        ends: the end of each group's rows, int32 ``[E]``.
    """

    counts: list[int]
    of_row: Tensor
    ends: Tensor

    @staticmethod
    def of(sizes: Tensor, counts: list[int]) -> "Groups":
        """The groups of given sizes, int64 ``[E]``, which are on the host too."""
        indices = torch.arange(len(sizes), device=sizes.device)
        of_row = torch.repeat_interleave(indices, sizes, output_size=sum(counts))
        return Groups(counts, of_row, sizes.cumsum(0, dtype=torch.int32))

    def slices(self) -> Iterator[tuple[int, int, int]]:
        """Yield each group that has rows, their begin, and their number."""
        begin = 0
        for group, count in enumerate(self.counts):
            if count:
                yield group, begin, count
            begin += count
