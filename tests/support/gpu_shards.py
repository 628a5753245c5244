"""CPUs that treat shards as GPUs do."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from fp8_dist.fsdp import gathers
from fp8_dist.mesh import AmaxReduction


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The scales are there when precompute returns, and shards are cast together."""
    no_block = patch.object(AmaxReduction, "blocks_host", False)
    several = patch.object(gathers, "LARGEST_BUFFER", 7000)  # two or three shards
    with no_block, several, patch.object(gathers, "fuses_casts", lambda x: True):
        yield
