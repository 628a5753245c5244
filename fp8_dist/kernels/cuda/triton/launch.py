"""Registration and launch of Triton kernels: block sizes, float8 formats, arguments."""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl

from fp8_dist.device import rounds_to
from fp8_dist.kernels.custom_op import CustomOp
from fp8_dist.kernels.e2m1 import E2M1_X2, data_dtype
from fp8_dist.kernels.quantization import Tensors, as_matrix, empty_copies, rounded_up

_P = ParamSpec("_P")
_R = TypeVar("_R")

# With TRITON_INTERPRET=1, set before its import, Triton runs kernels in Python on CPU tensors.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Input dtypes of the kernels. Other dtypes are left to the portable implementations.
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# Kernels identify a format by the bias of its exponent.
BIAS = {
    E2M1_X2: 1,
    torch.float8_e4m3fn: 7,
    torch.float8_e4m3fnuz: 8,
    torch.float8_e5m2: 15,
    torch.float8_e5m2fnuz: 16,
}

# No fused multiply-add, so that every operation rounds, as in torch.
_OPTIONS = {"enable_fp_fusion": False}

BlockSizes = dict[str, int]
Layouts = tuple[torch.Tensor | None, torch.Tensor | None]


def fused(
    op: CustomOp[_P, _R], takes: Callable[..., bool]
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function as the implementation of an operator on CUDA devices.

    Args:
        takes: returns whether the kernels support the operator's arguments. If they don't, the
            portable implementation runs.
    """

    def register(run: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(run)
        def implementation(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if takes(*args, **kwargs):
                return run(*args, **kwargs)
            return op.portable(*args, **kwargs)

        op.register("cuda", implementation)
        return implementation

    return register


def blocks(warps: int, **sizes: int) -> triton.Config:
    """Return a config with these block sizes, which are ``tl.constexpr`` arguments of a kernel."""
    return triton.Config(sizes, num_warps=warps)


# Configs for kernels in which each program instance casts one tile.
TILES = (blocks(4, BM=64, BN=64), blocks(8, BM=128, BN=64))

# Configs for kernels that compute amaxes of rows. Each program instance reads whole rows.
OF_ROWS = (blocks(4, BM=8, BN=256), blocks(4, BM=4, BN=1024))
# Configs for kernels that compute amaxes of columns. Each program instance reads STEPS tiles, one
# below the other. A tile is so wide that no two threads share a column.
STRIPES = (blocks(4, BM=8, BN=1024), blocks(2, BM=8, BN=512))
STEPS = 8


class Tuned:
    """Kernel that is autotuned over a few configs, on the first call of each kind.

    The config does not change the result. Two calls are of the same kind if they have equal
    constants and dtypes, and their grids and element counts have equal bit lengths.
    """

    def __init__(self, kernel: Any, configs: tuple[triton.Config, ...]) -> None:
        self.kernel = kernel
        self.configs = configs
        self._fastest: dict[Hashable, dict[str, Any]] = {}

    def __call__(
        self, grid: Callable[[BlockSizes], tuple[int, ...]], *args: object, **constants: object
    ) -> None:
        """Launch on the current stream of the device of the first tensor.

        ``grid`` returns the numbers of program instances for the chosen block sizes.
        """
        leaves = [leaf for arg in args for leaf in (arg if isinstance(arg, tuple) else (arg,))]
        device = next(leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(grid, *args, **constants)
        sizes = map(int.bit_length, grid(self.configs[0].kwargs))
        kind = device, *sizes, *map(_kind, leaves), *constants.values()
        chosen = self._fastest.get(kind)
        if chosen is None:
            tuner = triton.autotune(list(self.configs), key=[], do_bench=time_launches)(self.kernel)
            tuner[grid](*args, **constants, **_OPTIONS)
            self._fastest[kind] = tuner.best_config.all_kwargs()
        else:
            self.kernel[grid](*args, **constants, **chosen, **_OPTIONS)
        return None


def _kind(argument: object) -> Hashable:
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.numel().bit_length()
    return argument is None


def tuned(*configs: triton.Config) -> Callable[[Any], Tuned]:
    """Decorate a ``triton.jit`` function as a :class:`Tuned` kernel."""
    return lambda kernel: Tuned(kernel, configs)


def time_launches(call: Callable[[], None], quantiles: list[float]) -> Any:
    """Measure quantiles of the time of a launch, with device synchronization.

    Nothing can be measured in the interpreter, while a CUDA graph is captured, or if there is no
    memory for the 256 MB buffer with which Triton clears the cache. Then the times of all configs
    are 0, and Triton takes the first config.
    """
    if not INTERPRETED and not torch.cuda.is_current_stream_capturing():
        try:
            return triton.testing.do_bench(call, warmup=2, rep=10, quantiles=quantiles)
        except torch.OutOfMemoryError:
            pass
    return [0.0] * len(quantiles)


@cache
def float8_constants(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the constants of a kernel that converts to or from ``dtype``."""
    soft = INTERPRETED or not rounds_to(data_dtype(dtype), device)
    return {"BIAS": BIAS[dtype], "SOFT": soft}


def programs(size: int, block: int) -> int:
    """Return the number of program instances along a dim.

    For an empty dim it is 1, because there may still be scales to write.
    """
    return max(1, -(-size // block))  # triton.cdiv takes 2 us


def tiles(M: int, K: int = 1, steps: int = 1) -> Callable[[BlockSizes], tuple[int, int]]:
    """Return a grid with one instance for each ``steps`` tiles ``[BM, BN]``, down a matrix."""
    return lambda chosen: (programs(M, chosen["BM"] * steps), programs(K, chosen["BN"]))


def matrix(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int, int]:
    """Return ``[..., K]`` as an argument of a kernel: the data, M, K, and the strides."""
    x = raw(as_matrix(x))
    return (x, *x.shape, *x.stride())


def raw(x: torch.Tensor) -> torch.Tensor:
    """View float8 data as uint8; return other tensors unchanged."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def empty_layouts(x: torch.Tensor, dtype: torch.dtype, transposed: Sequence[bool]) -> Tensors:
    """Allocate float8 copies of a tensor, uninitialized.

    The allocation of a row-major copy is padded to a multiple of ``ALIGNMENT`` rows, because a GEMM
    with scales of blocks may read that many rows of its left operand.
    """
    rows, columns = rounded_up(math.prod(x.shape[:-1])), x.shape[-1]
    if x.numel() == rows * columns:
        return empty_copies(x, dtype, transposed)
    storages = [x.new_empty(rows * columns, dtype=dtype) for _ in transposed]
    return [
        storage.view(columns, rows) if is_transposed else storage[: x.numel()].view(x.shape)
        for storage, is_transposed in zip(storages, transposed, strict=True)
    ]


def as_layouts(copies: Sequence[torch.Tensor], transposed: Sequence[bool]) -> Layouts:
    """Return the bytes of copies as an argument of a kernel.

    The argument is the row-major and the transposed copy, or None for one that is missing.
    """
    layouts = dict(zip(transposed, map(raw, copies), strict=True))
    assert len(layouts) == len(copies), "two copies are the same"
    return layouts.get(False), layouts.get(True)
