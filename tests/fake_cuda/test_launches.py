"""Launches of kernels that Triton has compiled before, beside Triton's own."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from fake_cuda.device import fake_tensors
from fake_cuda.process import FakeCudaProcess
from fake_cuda.triton_kernels import _IdleLauncher, intercept_launches, launch_nothing

from fp8_dist.kernels.cuda.triton import launch


@launch.kernel(warps=2, BM=8, BN=16)
@triton.jit
def _copy(
    x: tl.tuple,
    out: tl.tensor | None,
    size: tl.tensor,
    NEGATE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    v = tl.load(x[0] + n * x[1], mask=n < size)
    if out is not None:
        tl.store(out + n, -v if NEGATE else v, mask=n < size)


def arguments() -> Iterator[tuple[Any, ...]]:
    """Arguments of `_copy`. Two that follow each other differ in one fact."""
    x = torch.zeros(64)
    for size in (16, 1, 3, 48, 2**31, 2**31 + 1, 2**40, 16):
        yield (x, 16), x, size, True
    yield (x, 16), x, 16, False
    yield (x, 16), None, 16, False
    yield (x.bfloat16(), 16), None, 16, False
    yield (x.bfloat16()[1:], 16), None, 16, False
    yield (x.bfloat16()[1:], 7), None, 16, False
    yield (x.bfloat16()[8:], 7), None, 16, False


@contextmanager
def noted_launches() -> Iterator[list[tuple[Any, ...]]]:
    """Let Triton launch kernels that do nothing; yield the launchers and what they are given."""
    noted: list[tuple[Any, ...]] = []
    launch_nothing()
    try:
        with patch.object(_IdleLauncher, "__call__", lambda *args: noted.append(args)):
            yield noted
    finally:
        intercept_launches()


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    return a is b or (type(a) is type(b) and not isinstance(a, dict | torch.Tensor) and a == b)


def launch_all() -> tuple[int, int]:
    """Compare all launches with Triton's; return their number, and that of compiled kernels."""
    grid, count = (3, 2), 0
    with noted_launches() as noted, patch.object(_copy, "_compiled", {}):
        for _ in range(2):
            for x, out, size, negate in arguments():
                _copy(grid, x, out, size, NEGATE=negate)
                _copy.kernel[grid](x, out, size, **_copy.options, NEGATE=negate)
                ours, tritons = (args[:7] + args[10:] for args in noted)  # without launch hooks
                assert is_same(ours, tritons), (size, ours, tritons)
                count += 1
                noted.clear()
        return count, len(_copy._compiled)


def test_a_direct_launch_is_the_launch_of_triton(fake_cuda: FakeCudaProcess) -> None:
    count, compiled = fake_cuda.run(launch_all)
    assert (count, compiled) == (28, 12)


def launch_repeated() -> list[int]:
    """How many kinds are known after calls of as many; compares their launches with Triton's."""
    found, grid = [], (3, 2)
    with (
        noted_launches() as noted,
        patch.object(_copy, "_compiled", {}),
        patch.object(_copy, "_repeated", {}),
        patch.object(launch, "_MOST_KINDS", 10),
    ):
        for _ in range(4):
            for kind, (x, out, size, negate) in enumerate(arguments()):
                _copy.repeat((kind,), grid, x, out, size, NEGATE=negate)
                _copy.kernel[grid](x, out, size, **_copy.options, NEGATE=negate)
                ours, tritons = (args[:7] + args[10:] for args in noted)  # without launch hooks
                assert is_same(ours, tritons), (size, ours, tritons)
                noted.clear()
            found.append(len(_copy._repeated))
    return found


def test_a_repeated_launch_is_the_launch_of_triton(fake_cuda: FakeCudaProcess) -> None:
    found = fake_cuda.run(launch_repeated)
    assert found[0] < found[1]
    assert max(found) <= 10


def number_of_kinds() -> int:
    """The number of different kinds among calls that differ in one fact each."""
    kinds = set()
    with fake_tensors():
        x = torch.empty(64, 64, device="cuda")
        flat = x.view(-1)
        for view in (x, x[:32], x[:, :32], x.t(), x.view(torch.int32), flat[:-1], flat[1:]):
            for other in (None, True, x, x.t()):
                kinds.add(launch.kind_of_call(view, other))
        assert launch.kind_of_call(x, torch.zeros(())) is None
    assert None not in kinds
    return len(kinds)


def test_kinds_differ_in_sizes_strides_dtypes_and_alignment(fake_cuda: FakeCudaProcess) -> None:
    assert fake_cuda.run(number_of_kinds) == 7 * 4


def launch_replaced() -> list[tuple[Any, ...]]:
    """The grid and constants of launches with other block sizes."""
    x = torch.zeros(64)
    with noted_launches() as noted, patch.object(_copy, "_compiled", {}):
        for _ in range(2):
            for columns in (32, 64):
                _copy((2,), (x, 1), x, 64, NEGATE=False, BN=columns)
    return [(*args[1:4], *args[-3:]) for args in noted]


def test_constants_replace_block_sizes(fake_cuda: FakeCudaProcess) -> None:
    found = [(2, 1, 1, False, 8, columns) for columns in (32, 64)]
    assert fake_cuda.run(launch_replaced) == found * 2


def test_grids_cover_a_matrix() -> None:
    assert _copy.tiles(17, 33) == (3, 3)
    assert _copy.tiles(0) == (1, 1)
    assert _copy.tiles(17, 33, steps=2) == (2, 3)
    assert _copy.tiles(17, 33, at_least=(4, 32)) == (3, 2)
    assert math.prod(_copy.tiles(16, 16)) == 2
