"""Contexts for features that some supported releases of torch lack: they assert the error."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from packaging.version import Version
from ranks import RankError

RELEASE = Version(torch.__version__).release[:2]


def uneven_sequence_viewed() -> AbstractContextManager[Any]:
    """A context for modules that view a gathered sequence as a matrix, if ranks divide it unevenly.

    Before 2.13, a DTensor that was gathered along an uneven dim keeps the strides of the padding.
    torch's linear layer, its backward, and Mixtral's experts can't view it.
    """
    if RELEASE >= (2, 13):
        return nullcontext()
    return pytest.raises(RankError, match="view size is not compatible")


def pieces_that_torch_moves() -> AbstractContextManager[Any]:
    """A context for the redistribution of DTensors of which each rank has several pieces.

    Before 2.13, torch supports it only if FSDP2 has divided a tensor-parallel shard.
    """
    if RELEASE >= (2, 13):
        return nullcontext()
    return pytest.raises(RankError, match="is unable to be interpreted into a corresponding shard")


def rows_in_torchs_gemm(recipe: str) -> AbstractContextManager[Any]:
    """A context for GEMMs of a recipe by ``torch._scaled_mm`` on CPUs, which torchao calls.

    In 2.11 it supports only one scale per tensor.
    """
    if RELEASE >= (2, 12) or not recipe.startswith("rowwise"):
        return nullcontext()
    return pytest.raises(RuntimeError, match="only supports per-tensor scaling")
