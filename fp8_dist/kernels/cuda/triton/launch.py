"""Launch of Triton kernels: block sizes, float8 formats, empty outputs."""

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
import triton

# Triton runs kernels on CPU tensors, in Python, if TRITON_INTERPRET=1 was set before its import.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Kernels identify a float8 format by the bias of its exponent.
BIAS = {
    torch.float8_e4m3fn: 7,
    torch.float8_e4m3fnuz: 8,
    torch.float8_e5m2: 15,
    torch.float8_e5m2fnuz: 16,
}

# Without fused multiply-add every operation rounds, as in torch.
_OPTIONS = {"enable_fp_fusion": False}

Blocks = dict[str, int]


def blocks(warps: int, **sizes: int) -> triton.Config:
    """A choice of block sizes, each a ``tl.constexpr`` argument of the kernel."""
    return triton.Config(sizes, num_warps=warps)


class Tuned:
    """A kernel with several choices of block sizes; the first call with a key finds the fastest.

    No choice changes the result. The first choice is used where nothing can be measured: in the
    interpreter, and while a CUDA graph is captured.
    """

    def __init__(self, kernel: Any, configs: tuple[triton.Config, ...]) -> None:
        self.kernel = kernel
        self.configs = configs
        self._fastest: dict[Hashable, dict[str, Any]] = {}

    def __call__(
        self,
        grid: Callable[[Blocks], tuple[int, ...]],
        key: Hashable,
        device: torch.device,
        *args: object,
        **constants: object,
    ) -> None:
        """Launch on the current stream of the device.

        Args:
            grid: the number of program instances for the chosen block sizes.
            key: value that the fastest choice depends on. Use few values, since each is measured.
        """
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(grid, key, device, *args, **constants)
        chosen = self._fastest.get(key)
        if chosen is None:
            if not INTERPRETED and not torch.cuda.is_current_stream_capturing():
                tuner = triton.autotune(list(self.configs), key=[], do_bench=measure)(self.kernel)
                tuner[grid](*args, **constants, **_OPTIONS)
                self._fastest[key] = tuner.best_config.all_kwargs() | _OPTIONS
                return
            chosen = self.configs[0].all_kwargs() | _OPTIONS
        self.kernel.run(*args, grid=grid, warmup=False, **constants, **chosen)


def tuned(*configs: triton.Config) -> Callable[[Any], Tuned]:
    """Decorate a ``triton.jit`` function as a :class:`Tuned` kernel."""
    return lambda kernel: Tuned(kernel, configs)


def measure(call: Callable[[], None], quantiles: list[float]) -> Any:
    """Quantiles of the time of a launch; waits for the device."""
    return triton.testing.do_bench(call, warmup=2, rep=10, quantiles=quantiles)


def size_class(*sizes: int) -> tuple[int, ...]:
    """Sizes up to a factor of two, as part of a key."""
    return tuple(map(int.bit_length, sizes))


@cache
def float8_constants(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Constants of a kernel that rounds to ``dtype``."""
    return {"BIAS": BIAS[dtype], "SOFT": not converts(dtype, device)}


def converts(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has an instruction from fp32 to ``dtype``, known to round as torch does.

    AMD's instructions are not used, because their formats and rounding differ between generations.
    """
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    known = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    return known and torch.cuda.get_device_capability(device) >= (8, 9)


def programs(size: int, block: int) -> int:
    """Number of instances along a dim; 1 for an empty dim, which may have scales to write."""
    return max(1, triton.cdiv(size, block))


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` as ``[M, K]``, a view if strides allow it; fewer dims become one row."""
    if x.ndim == 2:
        return x
    return x.flatten(0, -2) if x.ndim > 2 else x.reshape(1, -1)


def empty_bytes(wanted: bool, x: torch.Tensor, *shape: int) -> torch.Tensor | None:
    """Uninitialized bytes on the device of ``x``; ``None`` for a layout that is not wanted."""
    return torch.empty(shape, dtype=torch.uint8, device=x.device) if wanted else None


def as_float8(data: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """View bytes as a float8 dtype."""
    return None if data is None else data.view(dtype)
