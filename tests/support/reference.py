"""Independent references: the numerics of one cast in fp64, SQNR, and a recorder.

Nothing here calls the code under test; the recorders listen to it. Of the library's internals, only
its recording of GEMMs is used.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_dist import Float8Tensor, float8_layers
from fp8_dist.linear.recording import GemmRecord, record_gemms

# Largest finite values of the two encodings, and the number of mantissa bits.
FORMATS = {torch.float8_e4m3fn: (448.0, 3, -6), torch.float8_e5m2: (57344.0, 2, -14)}


def float8_grid(dtype: torch.dtype) -> list[float]:
    """Every finite non-negative value of a float8 format, ascending, from its definition."""
    largest, mantissa_bits, smallest_exponent = FORMATS[dtype]
    steps = 2**mantissa_bits
    values = [i / steps * 2.0**smallest_exponent for i in range(steps)]
    exponent = smallest_exponent
    while values[-1] < largest:
        values += [(1 + i / steps) * 2.0**exponent for i in range(steps)]
        exponent += 1
    return [v for v in values if v <= largest]


def reference_cast(
    x: torch.Tensor, dtype: torch.dtype, power_of_2: bool = False
) -> tuple[torch.Tensor, float]:
    """(rounded values of ``x * m`` as fp64, scale), computed value by value.

    Rounds to nearest, ties to the even code, by search in :func:`float8_grid`.
    """
    flat = x.double().flatten().tolist()
    largest = FORMATS[dtype][0]
    amax = max((abs(v) for v in flat), default=0.0)
    m = torch.tensor(largest / max(amax, 1e-12), dtype=torch.float64).float()
    if power_of_2:
        m = torch.tensor(2.0 ** math.floor(math.log2(m.item())))
    grid = float8_grid(dtype)
    scaled = (x.float() * m).double().flatten().tolist()
    out = [math.copysign(_nearest(min(abs(v), largest), grid), v) for v in scaled]
    return torch.tensor(out, dtype=torch.float64).view(x.shape), (1 / m).item()


def reference_blocks(
    x: torch.Tensor, dtype: torch.dtype, blocks: Sequence[int], rule: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(exponents as bytes, rounded values of ``x / scale`` as fp64), computed value by value.

    ``x``: ``[M, K]``. ``blocks``: rows, columns, and where in its first block it begins, by rows and
    by columns. ``rule``: as in :mod:`fp8_dist.kernels.blocks`. NaN for the values of a block that has others than
    finite ones.
    """
    rows, columns, first_row, first_column = blocks
    of_block: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            block = (first_row + i) // rows, (first_column + j) // columns
            of_block.setdefault(block, []).append((i, j))
    count = [max(axis, default=-1) + 1 for axis in zip(*of_block, strict=True)] or [0, 0]
    exponents, out = torch.zeros(count, dtype=torch.uint8), x.double().clone()
    values, grid = x.float().double().tolist(), float8_grid(dtype)
    for block, elements in of_block.items():
        byte = _exponent_byte([abs(values[i][j]) for i, j in elements], dtype, rule)
        exponents[block] = byte
        for i, j in elements:
            size = min(abs(values[i][j]) / 2.0 ** (byte - 127), grid[-1]) if byte else 0.0
            rounded = math.nan if byte == 255 else _nearest(size, grid)
            out[i, j] = math.copysign(rounded, values[i][j])
    return exponents, out


def _exponent_byte(values: list[float], dtype: torch.dtype, rule: str | None) -> int:
    """The byte of the scale of values: 255 is NaN."""
    if not all(map(math.isfinite, values)):
        return 255
    if rule is None:
        m = torch.tensor(FORMATS[dtype][0] / max(*values, 1e-12), dtype=torch.float64).float()
        return 127 - (math.frexp(m.item())[1] - 1)
    if not any(values):
        return 0
    if rule == "floor":
        return max(0, 127 + math.frexp(max(values))[1] - math.frexp(FORMATS[dtype][0])[1])
    fraction, exponent = math.frexp(max(values) / FORMATS[dtype][0])
    return max(0, 127 + exponent - (fraction == 0.5))


def _nearest(value: float, grid: list[float]) -> float:
    low, high = 0, len(grid) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if grid[middle] <= value else (low, middle)
    below, above = grid[low], grid[high]
    if value - below == above - value:
        return below if low % 2 == 0 else above
    return below if value - below < above - value else above


def sqnr(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Signal to quantization noise ratio in dB, in fp64; inf where the two are equal."""
    expected, actual = expected.detach().double(), actual.detach().double()
    noise = (expected - actual).norm()
    return math.inf if noise == 0 else (20 * torch.log10(expected.norm() / noise)).item()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors of one dtype and shape hold the same bytes (NaN equals NaN)."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
    )


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two tensors hold the same bits but for which NaN it is, wherever they are."""
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a_nan, b_nan = a.float().isnan(), b.float().isnan()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.itemsize]
    a_bits, b_bits = (
        t.contiguous().view(kind).masked_fill(n, 0) for t, n in ((a, a_nan), (b, b_nan))
    )
    return torch.equal(a_nan, b_nan) and torch.equal(a_bits, b_bits)


def scale_of_elements(x: Float8Tensor) -> torch.Tensor:
    """The scale of each element, fp32, of the shape of a tensor with scales of blocks."""
    rows, columns, *start = map(int, re.findall(r"\d+", x.granularity))
    first_row, first_column = start or (0, 0)
    j = (torch.arange(x.shape[-1]) + first_column).div(columns, rounding_mode="floor")
    exponents = x.scale[..., j]
    if rows > 1:
        i = (torch.arange(x.shape[-2]) + first_row).div(rows, rounding_mode="floor")
        exponents = exponents[..., i, :]
    return torch.where(exponents == 255, math.nan, torch.exp2(exponents.double() - 127)).float()


def same_cast(a: Float8Tensor, b: Float8Tensor) -> bool:
    """True if two float8 tensors have the same bytes and the same scale, bit for bit."""
    return same_bits(a.qdata, b.qdata) and same_bits(a.scale, b.scale)


def kinds(table: str) -> str:
    """The lines of `CommAudit.table()` without its totals."""
    return "\n".join(table.splitlines()[:-3])


def raised(kind: type[Exception], call: Callable[[], object]) -> str:
    """The text of the exception of exactly this kind that a call raises."""
    with pytest.raises(kind) as info:
        call()
    assert info.type is kind
    return str(info.value)


def saved_in(forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What a forward returns, and the tensors that autograd saves for its backward."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return forward(), saved


class Watching(TorchDispatchMode):
    """Sees every operator, and so keeps the library from taking short cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


# The left and the right operand of a float8 GEMM, as it takes them.
Product = tuple[Float8Tensor, Float8Tensor]


class Products(Sequence[Product]):
    """The operands in the records of a recording, as it grows."""

    def __init__(self, records: list[GemmRecord]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        chosen = self._records[i]
        return [(r.a, r.b) for r in chosen] if isinstance(i, slice) else (chosen.a, chosen.b)

    def clear(self) -> None:
        self._records.clear()


@contextmanager
def float8_gemms() -> Iterator[Products]:
    """Records copies of the operands of each float8 GEMM of a layer, in order."""
    with record_gemms() as records:
        yield Products(records)


@contextmanager
def weights_used(model: torch.nn.Module) -> Iterator[dict[str, Float8Tensor]]:
    """Per layer name, a copy of the local float8 weight that its forward multiplied."""
    names = {layer.fqn: name for name, layer in float8_layers(model).items()}
    used: dict[str, Float8Tensor] = {}
    with record_gemms() as records:
        yield used
    used |= {names[r.fqn]: r.b.t() for r in records if r.gemm == "output" and r.fqn in names}
