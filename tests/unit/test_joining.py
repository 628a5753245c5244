"""One vector of many numbers."""

import pytest
import torch

from fp8_dist.fsdp.joining import joined

NUMBERS = torch.arange(12.0)


@pytest.mark.parametrize(
    ("vectors", "is_view"),
    [
        (NUMBERS.split([3, 0, 4, 5]), True),
        (NUMBERS.split([3, 0, 4, 5])[1:3], True),
        (NUMBERS[5:].split(7), True),
        (NUMBERS.split(4)[::2], False),
        (NUMBERS.split(4)[::-1], False),
        ((NUMBERS[:4], NUMBERS.clone()[4:]), False),
        ((NUMBERS[:4], NUMBERS[:4]), False),
    ],
)
def test_joined(vectors: tuple[torch.Tensor, ...], is_view: bool) -> None:
    found = joined(vectors)
    assert torch.equal(found, torch.cat(vectors))
    assert (found.untyped_storage()._cdata == NUMBERS.untyped_storage()._cdata) is is_view
