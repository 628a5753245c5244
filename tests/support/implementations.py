"""Compare the CUDA implementations of operators with the portable ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import same_values
from torch.utils._pytree import tree_map_only

from fp8_dist.kernels import cuda, custom_op
from fp8_dist.kernels.cuda.triton import launch

assert cuda.HAS_TRITON
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def matrix(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A matrix of values of all magnitudes that a float8 format has relative to its largest."""
    return (torch.randn(shape) * 4.0 ** (3 * torch.randn(shape)).clamp(-8, 5)).to(DEVICE, dtype)


def implementation(op: custom_op.CustomOp[..., Any]) -> Callable[..., Any]:
    """The implementation that is registered for CUDA devices."""
    return op.implementations["cuda"]


def check_operator(op: custom_op.CustomOp[..., Any], *args: Any, **kwargs: Any) -> None:
    """Check that an implementation has the bits, shapes and dtypes of the portable one on CPUs."""
    found = implementation(op)(*args, **kwargs)
    expected = op.portable(*tree_map_only(torch.Tensor, torch.Tensor.cpu, args), **kwargs)
    if isinstance(found, torch.Tensor):
        found, expected = [found], [expected]
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert same_values(mine, theirs)
        assert mine.is_contiguous() or mine.itemsize > 1  # float8 data may be transposed


def note_launches(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A set that collects the names of all kernels launched from now on."""
    names: set[str] = set()
    run = launch.Kernel.__call__

    def noted(kernel: launch.Kernel, *args: Any, **constants: Any) -> None:
        names.add(kernel.kernel.__name__)
        run(kernel, *args, **constants)

    monkeypatch.setattr(launch.Kernel, "__call__", noted)
    return names
