"""Error feedback: what the encoding of gradients left out, added to the next ones."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fp8_dist.kernels.encoding import NEAREST, blocks_of, decode_float8, encode_float8
from fp8_dist.transport import Encoding


class Part(NamedTuple):
    """A parameter's piece in a row of gradients."""

    number: int  # of the parameter in its group
    size: int
    encoding: Encoding


class GradientErrors:
    """The errors of some parameters' gradients, one set for each stage of the exchange.

    Kept in float8 with exponents of blocks: 1.008 bytes for each value that this rank encodes,
    which are those of the unsharded gradient.

    Args:
        parts: of the rows, which have errors from the start: those of parameters that are trained.
            A part that is encoded without having been among them gets its errors then.
        rows: for each stage, the leading dims of its rows.
        device: where gradients are reduced.
    """

    def __init__(
        self, parts: Sequence[Part], rows: Sequence[tuple[int, ...]], device: torch.device
    ) -> None:
        self.parts = parts  # of the rows that are encoded next
        self.rows = rows
        self.device = device
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for stage in range(len(rows)):
            for part, _ in self._encoded():
                self._kept[part.number, stage] = self._none_yet(stage, part.size)

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """What is kept: the number of the parameter, a name that tells its tensors apart, uint8."""
        for (number, stage), (codes, exponents) in self._kept.items():
            yield number, f"{stage}.codes", codes
            yield number, f"{stage}.exponents", exponents

    def added(self, stage: int, rows: torch.Tensor) -> torch.Tensor:
        """``rows``, ``[..., S]``, with the errors of before: fp32."""
        rows = rows.to(torch.float32, copy=True)
        for part, start in self._encoded():
            errors = self._kept.get((part.number, stage))
            if errors is not None:
                rows.narrow(-1, start, part.size).add_(decode_float8(*errors))
        return rows

    def keep(self, stage: int, errors: torch.Tensor) -> None:
        """Take the errors of rows ``[..., S]``, fp32 and finite, in the place of those before."""
        for part, start in self._encoded():
            key = part.number, stage
            if key not in self._kept:
                self._kept[key] = self._none_yet(stage, part.size)
            found = encode_float8(errors.narrow(-1, start, part.size), NEAREST)
            for old, new in zip(self._kept[key], found, strict=True):
                old.copy_(new)

    def _encoded(self) -> Iterator[tuple[Part, int]]:
        """The encoded parts, and where in a row they begin."""
        start = 0
        for part in self.parts:
            if part.encoding is not None:
                yield part, start
            start += part.size

    def _none_yet(self, stage: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = *self.rows[stage], size
        codes = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        return codes, codes.new_ones(*self.rows[stage], blocks_of(size))
