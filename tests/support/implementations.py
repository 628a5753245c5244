"""The operators' implementations for CUDA devices, beside the portable ones."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from reference import same_values
from torch.utils._pytree import tree_map_only

from fp8_dist.kernels import CustomOp, cuda
from fp8_dist.kernels.cuda import block_registration, registration


def implementation(op: CustomOp[..., Any]) -> Callable[..., Any]:
    """What is registered for CUDA devices."""
    name = f"_{op.overload._schema.name.partition('::')[2]}"
    found = getattr(registration, name, None) or getattr(block_registration, name)
    return found  # type: ignore[no-any-return]


def check_operator(op: CustomOp[..., Any], *args: Any, **kwargs: Any) -> None:
    """An implementation gives the bits, shapes and dtypes of the portable one on CPUs."""
    found = implementation(op)(*args, **kwargs)
    expected = op.portable(*tree_map_only(torch.Tensor, torch.Tensor.cpu, args), **kwargs)
    if isinstance(found, torch.Tensor):
        found, expected = [found], [expected]
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert same_values(mine, theirs)
        assert mine.is_contiguous() or mine.itemsize > 1  # float8 data is


def note_calls(monkeypatch: pytest.MonkeyPatch, route: ModuleType) -> set[str]:
    """Makes all functions of kernels those of one route; the names of those that are called."""
    names: set[str] = set()

    def noted(name: str) -> Callable[..., Any]:
        run = getattr(route, name)
        return lambda *args, **kwargs: names.add(name) or run(*args, **kwargs)

    for name in cuda.__all__:
        if name.islower() and hasattr(route, name):
            monkeypatch.setattr(cuda, name, noted(name))
    return names
