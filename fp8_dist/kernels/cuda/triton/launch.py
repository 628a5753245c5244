"""Registration and launch of Triton kernels: block sizes, float8 formats, arguments, zeros."""

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl

from fp8_dist.kernels.custom_op import CustomOp
from fp8_dist.kernels.quantization import as_matrix, empty_copies

P = ParamSpec("P")
R = TypeVar("R")

# Triton runs kernels on CPU tensors, in Python, if TRITON_INTERPRET=1 was set before its import.
INTERPRETED: bool = triton.knobs.runtime.interpret

# Input dtypes of the kernels. Other dtypes are left to the portable implementations.
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

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


def fused(
    op: CustomOp[P, R], takes: Callable[..., bool] | None = None, *, zeros: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that registers an implementation of an operator on CUDA devices.

    Args:
        takes: whether the kernels support the operator's arguments. The portable implementation
            processes the others.
        zeros: whether the implementation calls :func:`zero`.
    """

    def register(run: Callable[P, R]) -> Callable[P, R]:
        @wraps(run)
        def implementation(*args: P.args, **kwargs: P.kwargs) -> R:
            if takes is None or takes(*args, **kwargs):
                return run(*args, **kwargs)
            return op.portable(*args, **kwargs)

        op.register("cuda", implementation, direct=pooled(implementation) if zeros else None)
        return implementation

    return register


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


def tiles(M: int, K: int) -> Callable[[Blocks], tuple[int, int]]:
    """Grid with one instance for each tile ``[BM, BN]`` of a matrix."""
    return lambda chosen: (programs(M, chosen["BM"]), programs(K, chosen["BN"]))


def matrix(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int, int]:
    """``[..., K]`` as an argument of a kernel: the data, M, K, and the strides."""
    x = as_bytes(as_matrix(x))
    return (x, *x.shape, *x.stride())


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Float8 data as uint8; other tensors as they are."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


class Layouts:
    """Uninitialized float8 copies of a tensor, one in each requested layout.

    Attributes:
        wanted: whether a kernel writes the row-major and the column-major copy.
        argument: the bytes of both as an argument of a kernel, None for one that is not wanted.
    """

    def __init__(self, x: torch.Tensor, dtype: torch.dtype, transposed: Sequence[bool]) -> None:
        self.wanted = (False in transposed, True in transposed)
        self._copies = [
            empty_copies(x, dtype, [turned])[0] if self.wanted[turned] else None
            for turned in (False, True)
        ]
        self.argument = tuple(None if t is None else as_bytes(t) for t in self._copies)

    def copies(self, transposed: Sequence[bool]) -> list[torch.Tensor]:
        """The copies in the given layouts."""
        return [t for turned in transposed if (t := self._copies[turned]) is not None]


class _Zeros(threading.local):
    """Zeros that a thread has left, by device and stream."""

    def __init__(self) -> None:
        self.left: dict[Hashable, list[torch.Tensor]] = {}
        self.pooled = False


_zeros = _Zeros()


def zero(device: torch.device) -> torch.Tensor:
    """Return a new 0-dim fp32 zero to reduce into, aligned to 16 bytes, for the current stream.

    One launch fills 256 zeros on the default stream, and on any stream in :func:`pooled` functions.
    Elsewhere, and while a CUDA graph is captured, each zero is allocated separately. Inductor warms
    up and captures its CUDA graphs on another stream, in memory that must hold nothing else.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros((), dtype=torch.float32, device=device)
    stream = torch.cuda.current_stream(device)
    if not _zeros.pooled and stream != torch.cuda.default_stream(device):
        return torch.zeros((), dtype=torch.float32, device=device)
    left = _zeros.left.setdefault((device, stream.stream_id), [])
    if not left:
        with torch.inference_mode(False):
            # Graphs assume that their inputs are aligned.
            left += torch.zeros(256, 4, dtype=torch.float32, device=device)[:, 0].unbind()
    return left.pop()


def pooled(run: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function for eager code, outside of CUDA graphs, to use the pool on every stream."""

    @wraps(run)
    def with_pool(*args: P.args, **kwargs: P.kwargs) -> R:
        before, _zeros.pooled = _zeros.pooled, True
        try:
            return run(*args, **kwargs)
        finally:
            _zeros.pooled = before

    return with_pool
