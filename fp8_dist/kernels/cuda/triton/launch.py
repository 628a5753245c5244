"""Registration and launch of Triton kernels: block sizes, float8 formats, arguments."""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache, lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl

from fp8_dist.device import current_capture, rounds_to
from fp8_dist.kernels.custom_op import CustomOp
from fp8_dist.kernels.e2m1 import E2M1_X2, data_dtype
from fp8_dist.kernels.quantization import Tensors, as_matrix, empty_copies, rounded_up
from fp8_dist.torch_internals import tree_map_only

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

_IS_AMD = torch.version.hip is not None

# What Triton has compiled and loaded, and the values of its constants.
_Loaded = tuple[Any, list[Any]]
_MOST_KINDS = 256

Layouts = tuple[torch.Tensor | None, torch.Tensor | None]
# A matrix as an argument of a kernel: the data, M, K, and the strides.
Matrix = tuple[torch.Tensor, int, int, int, int]


def fused(
    op: CustomOp[..., _R], takes: Callable[..., bool]
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


# Block sizes of kernels in which each program instance casts one tile.
TILES = {"BM": 64, "BN": 64}

# Block sizes of kernels that compute amaxes of rows. Each program instance reads whole rows.
OF_ROWS = {"BM": 8, "BN": 256}
# Block sizes of kernels that compute amaxes of columns. Each program instance reads STEPS tiles,
# one below the other. A tile is so wide that no two threads share a column.
STRIPES = {"BM": 8, "BN": 1024}
STEPS = 8


class Kernel:
    """Triton kernel with fixed block sizes, which are ``tl.constexpr`` arguments.

    A launch through Triton takes the host several times as long as the launch of what Triton has
    compiled. So the compiled kernel is kept for each kind of call: the device, constants, dtypes,
    and what else Triton specializes code for (Note [Specialization]).
    """

    def __init__(self, kernel: Any, warps: int, blocks: dict[str, int]) -> None:
        self.kernel, self.blocks = kernel, blocks
        # No fused multiply-add, so that every operation rounds, as in torch.
        self.options = {**blocks, "num_warps": warps, "enable_fp_fusion": False}
        self._compiled: dict[Hashable, _Loaded] = {}
        self._repeated: dict[Hashable, _Loaded] = {}

    def repeat(
        self, kind: Hashable, grid: tuple[int, ...], *args: object, **constants: object
    ) -> None:
        """Launch what a call of the same kind has launched before; the first is as any other call.

        Args:
            kind: see :func:`kind_of_call`. In calls of one kind with the same constants, Triton
                specializes code for the same facts (Note [Specialization]).
            grid, args, constants: see :meth:`__call__`.
        """
        if kind is None:
            self(grid, *args, **constants)
            return

        kind = kind, *constants.values()
        known = self._repeated.get(kind)
        if known is not None:
            compiled, values = known
            compiled[(*grid, 1, 1)](*args, *values)
            return

        known = self(grid, *args, **constants)
        if known is not None:
            # Numbers of rows may differ in each call. Another thread may hold the old table.
            if len(self._repeated) >= _MOST_KINDS:
                self._repeated = {}
            self._repeated[kind] = known

    def __call__(self, grid: tuple[int, ...], *args: object, **constants: object) -> _Loaded | None:
        """Launch on the current stream of the device of the first tensor.

        Returns what can be launched again on the current device, if it was loaded before.

        Args:
            grid: the numbers of program instances.
            args: arguments of the kernel: tensors, integers, None, and tuples of these. The first
                one is a tensor, or begins with one.
            constants: its ``tl.constexpr`` arguments; they may replace block sizes, and may have
                another ``num_warps``.

        Raises:
            ValueError: a capture of a CUDA graph would load the kernel.
        """
        leaves: list[Any] = []
        for arg in args:
            if isinstance(arg, tuple):
                leaves += arg
            else:
                leaves.append(arg)

        device: torch.device = leaves[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(grid, *args, **constants)
            return None

        # Note [Specialization]
        # Triton compiles other code for pointers that are aligned to 16 bytes, for integers that
        # are 1, multiples of 16, or too large for int32, and on AMD for storages of less than 2 GB.
        facts: list[Hashable] = [device, *constants.values()]
        for leaf in leaves:
            if leaf is None or isinstance(leaf, int):
                facts.append(_specialized(leaf))
                continue
            facts.append(leaf.dtype)
            facts.append(leaf.data_ptr() % 16 == 0)
            if _IS_AMD:
                facts.append(leaf.untyped_storage().nbytes() >> 31)

        kind = tuple(facts)
        known = self._compiled.get(kind)
        if known is None:
            self._compiled[kind] = self._load(grid, args, constants)
            return None
        compiled, values = known
        if compiled is None:  # in the interpreter
            self._launch(grid, args, constants)
            return None
        compiled[(*grid, 1, 1)](*args, *values)
        return known

    def _load(
        self, grid: tuple[int, ...], args: tuple[object, ...], constants: dict[str, object]
    ) -> _Loaded:
        """Launch through Triton, which compiles and loads the kernel; return what it has loaded."""
        if current_capture():
            raise ValueError(
                f"a CUDA graph is being captured, and the kernel {self.kernel.__name__} has not "
                "run yet with such arguments; CUDA can't load a kernel in a capture. Run exactly "
                "this step once before it, its update of scales included"
            )
        compiled = self._launch(grid, args, constants)
        chosen = self.options | constants
        return compiled, [chosen[name] for name in self.kernel.arg_names if name in chosen]

    def _launch(
        self, grid: tuple[int, ...], args: tuple[object, ...], constants: dict[str, object]
    ) -> Any:
        """Launch through Triton, for which float8 data is bytes; return what it has compiled."""
        return self.kernel[grid](
            *tree_map_only(torch.Tensor, raw, args), **self.options | constants
        )

    def tiles(
        self, M: int, K: int = 1, *, steps: int = 1, at_least: Sequence[int] = (1, 1)
    ) -> tuple[int, int]:
        """Return a grid with one instance for each ``steps`` tiles, down a matrix.

        A tile is ``[BM, BN]``, and ``at_least`` as large as this.
        """
        rows, columns = map(max, (self.blocks["BM"], self.blocks["BN"]), at_least)
        return programs(M, rows * steps), programs(K, columns)


def kernel(warps: int = 4, **blocks: int) -> Callable[[Any], Kernel]:
    """Decorate a ``triton.jit`` function as a :class:`Kernel`."""
    return lambda function: Kernel(function, warps, blocks)


def kind_of_call(*arguments: Any) -> Hashable:
    """Return what tells apart calls whose kernels get other arguments, for :meth:`Kernel.repeat`.

    It is ``None``, so that nothing is repeated, if a tensor is not on the current device.

    Args:
        arguments: a tensor, other tensors, and values. All arguments of a kernel follow from their
            sizes, strides and dtypes, except for data. Data is theirs, or newly allocated memory,
            which is aligned.
    """
    if not arguments[0].is_cuda:
        return None
    device = torch.cuda.current_device()
    facts: list[Hashable] = [device]
    for argument in arguments:
        if not isinstance(argument, torch.Tensor):
            facts.append(argument)
            continue
        if argument.get_device() != device:
            return None
        facts += argument.dtype, argument.shape, argument.stride(), argument.data_ptr() % 16
        if _IS_AMD:
            facts.append(argument.untyped_storage().nbytes() >> 31)
    return tuple(facts)


@lru_cache(maxsize=4096)
def _specialized(argument: int | None) -> Hashable:
    """Return what of an integer decides for which code it is (Note [Specialization])."""
    if argument is None:
        return None
    return argument == 1 or (argument % 16 == 0, argument >> 31)


@cache
def float8_constants(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the constants of a kernel that converts to or from ``dtype``."""
    soft = INTERPRETED or not rounds_to(data_dtype(dtype), device)
    # Integer arithmetic takes so many registers that with fewer warps, threads spill them (4,800
    # bytes for an Ada, with Triton 3.6). The warps of AMD's GPUs are twice as wide.
    warps = {"num_warps": 8} if soft and not _IS_AMD else {}
    return {"BIAS": BIAS[dtype], "SOFT": soft, **warps}


def programs(size: int, block: int) -> int:
    """Return the number of program instances along a dim.

    For an empty dim it is 1, because there may still be scales to write.
    """
    return max(1, -(-size // block))  # triton.cdiv takes 2 us


def matrix(x: torch.Tensor) -> Matrix:
    """Return ``[..., K]`` as an argument of a kernel."""
    x = as_matrix(x)
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
    """Return copies as an argument of a kernel.

    The argument is the row-major and the transposed copy, or None for one that is missing.
    """
    layouts = dict(zip(transposed, copies, strict=True))
    assert len(layouts) == len(copies), "two copies are the same"
    return layouts.get(False), layouts.get(True)
