"""What some supported releases of torch refuse: there a test asserts that they do."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from packaging.version import Version
from ranks import RankError

RELEASE = Version(torch.__version__).release[:2]


def uneven_sequence_viewed() -> AbstractContextManager[Any]:
    """Around ranks that can't share a sequence evenly, and a module that views it as a matrix.

    Before 2.13, a DTensor that was gathered along such a dim keeps the strides of the padding that
    it was gathered with. torch's linear layer, its backward, and Mixtral's experts can't view it.
    """
    if RELEASE >= (2, 13):
        return nullcontext()
    return pytest.raises(RankError, match="view size is not compatible")


def pieces_that_torch_moves() -> AbstractContextManager[Any]:
    """Around ranks that let torch redistribute a DTensor of which each has several pieces.

    Before 2.13 it does so only where FSDP2 has made the pieces of a tensor-parallel shard.
    """
    if RELEASE >= (2, 13):
        return nullcontext()
    return pytest.raises(RankError, match="is unable to be interpreted into a corresponding shard")


def rows_in_torchs_gemm(recipe: str) -> AbstractContextManager[Any]:
    """Around GEMMs of a recipe by ``torch._scaled_mm``, which torchao calls, on CPUs.

    In 2.11 it takes one scale per tensor only.
    """
    if RELEASE >= (2, 12) or not recipe.startswith("rowwise"):
        return nullcontext()
    return pytest.raises(RuntimeError, match="only supports per-tensor scaling")
