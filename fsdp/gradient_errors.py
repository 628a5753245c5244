"""Error feedback: the encoding errors of gradients are added to the next gradients."""

from collections.abc import Iterator, Sequence

import torch

from fp8_dist.kernels.encoding import NEAREST, blocks_of, decode_float8, encode_float8
from fp8_dist.transport import Part


class GradientErrors:
    """Encoding errors of some parameters' gradients, one set for each stage of the exchange.

    They are kept in float8 with block exponents: 1.008 bytes for each value that this rank encodes,
    which are the values of the unsharded gradient.

    Args:
        rows: the leading dims of the rows of each stage. A stage of one rank encodes nothing.
        device: the device on which gradients are reduced.
    """

    def __init__(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self.parts: Sequence[Part] = ()  # the parts of the rows that are encoded next
        self.rows = {stage: shape for stage, shape in enumerate(rows) if shape[0] > 1}
        self.device = device
        self._kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def keep_for(self, parts: Sequence[Part]) -> None:
        """Keep errors for these parts only; new ones start at zero.

        Parameters may be frozen, and trained again, between two steps.
        """
        sizes = {part.number: part.size for part in parts if part.encoding is not None}
        self._kept = {
            (number, stage): self._kept.get((number, stage)) or self._none_yet(stage, size)
            for number, size in sizes.items()
            for stage in self.rows
        }

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Yield the number of a parameter, the name of one of its tensors, and the uint8 tensor."""
        for (number, stage), (codes, exponents) in self._kept.items():
            yield number, f"{stage}.codes", codes
            yield number, f"{stage}.exponents", exponents

    def added(self, stage: int, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows``, ``[..., S]``, plus the errors that are kept: fp32."""
        rows = rows.to(torch.float32, copy=True)
        for part, start in self._encoded():
            errors = self._kept[part.number, stage]
            rows.narrow(-1, start, part.size).add_(decode_float8(*errors))
        return rows

    def keep(self, stage: int, errors: torch.Tensor) -> None:
        """Replace the errors by those of rows ``[..., S]``, fp32 and finite."""
        for part, start in self._encoded():
            found = encode_float8(errors.narrow(-1, start, part.size), NEAREST)
            for old, new in zip(self._kept[part.number, stage], found, strict=True):
                old.copy_(new)

    def _encoded(self) -> Iterator[tuple[Part, int]]:
        """Yield the encoded parts, and their offsets in a row."""
        start = 0
        for part in self.parts:
            if part.encoding is not None:
                yield part, start
            start += part.size

    def _none_yet(self, stage: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = *self.rows[stage], size
        codes = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        return codes, codes.new_ones(*self.rows[stage], blocks_of(size))
