"""Independent references: the numerics of one cast in fp64, SQNR, and a recorder.

References don't call the code under test; recorders only observe it. The only internals of the
library in use are observers, the cache of weights' statistics, and the list of given warnings.
"""

import io
import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gemm_records import GemmRecord, record_gemms
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_dist.text
from fp8_dist import Float8Tensor, float8_layers
from fp8_dist.mesh import local_tensor
from fp8_dist.weight.known import TRAINED, UNKNOWN, KnownWeight

# Largest finite values, numbers of mantissa bits, and smallest exponents of float8 formats.
FORMATS = {
    torch.float8_e4m3fn: (448.0, 3, -6),
    torch.float8_e5m2: (57344.0, 2, -14),
    torch.float4_e2m1fn_x2: (6.0, 1, 0),
}


def float8_grid(dtype: torch.dtype) -> list[float]:
    """All finite non-negative values of a float8 format in ascending order, by its definition."""
    largest, mantissa_bits, smallest_exponent = FORMATS[dtype]
    steps = 2**mantissa_bits
    values = [i / steps * 2.0**smallest_exponent for i in range(steps)]
    exponent = smallest_exponent
    while values[-1] < largest:
        values += [(1 + i / steps) * 2.0**exponent for i in range(steps)]
        exponent += 1
    return [v for v in values if v <= largest]


def nearest(scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp64 numbers to the nearest value of a float8 format, ties to even, saturating."""
    largest, bits, smallest = FORMATS[dtype]
    scaled = scaled.clamp(-largest, largest)
    exponent = (torch.frexp(scaled).exponent - 1).clamp(min=smallest)
    step = torch.ldexp(torch.ones_like(scaled), exponent - bits)
    return torch.round(scaled / step) * step


def reference_cast(
    x: torch.Tensor, dtype: torch.dtype, power_of_2: bool = False
) -> tuple[torch.Tensor, float]:
    """Cast ``x``: (rounded values of ``x * multiplier`` as fp64, scale)."""
    amax = x.double().abs().max().item() if x.numel() else 0.0
    m = torch.tensor(FORMATS[dtype][0] / max(amax, 1e-12), dtype=torch.float64).float()
    if power_of_2:
        m = torch.tensor(2.0 ** math.floor(math.log2(m.item())))
    return nearest((x.float() * m).double(), dtype), (1 / m).item()


def reference_blocks(
    x: torch.Tensor, dtype: torch.dtype, blocks: Sequence[int], rule: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast in blocks: (exponents as bytes, rounded values of ``x / scale`` as fp64).

    ``x``: ``[M, K]``. ``blocks``: rows and columns of a block, and the row and column in the first
    block at which ``x`` begins. ``rule``: as in :mod:`fp8_dist.kernels.blocks`. All values of a
    block are NaN if one of them is not finite.
    """
    x = x.detach().float().double()
    i, j = ((torch.arange(n) + blocks[2 + d]) // blocks[d] for d, n in enumerate(x.shape))
    count = [int(index.max()) + 1 if len(index) else 0 for index in (i, j)]
    amax = torch.zeros(count, dtype=torch.float64)
    for block in itertools.product(*map(range, count)):
        amax[block] = x[i == block[0]][:, j == block[1]].abs().max()
    exponents = _exponent_bytes(amax, dtype, rule)
    if not x.numel():
        return exponents, x
    byte = exponents[i][:, j].double()
    scaled = torch.where(byte == 0, x * 0, x / torch.exp2(byte - 127))
    return exponents, nearest(scaled, dtype).masked_fill(byte == 255, math.nan)


def _exponent_bytes(amax: torch.Tensor, dtype: torch.dtype, rule: str | None) -> torch.Tensor:
    """The exponent bytes of block scales; 255 is NaN."""
    largest = FORMATS[dtype][0]
    if rule is None:
        byte = 128 - torch.frexp((largest / amax.clamp(min=1e-12)).float()).exponent
    elif rule in ("floor", "even"):  # floor(log2(amax)) - floor(log2(largest))
        fraction, exponent = torch.frexp(amax)
        byte = 127 + exponent - math.frexp(largest)[1]
        if rule == "even":  # the amax is first rounded to two bits
            byte = byte + (fraction >= 0.875).int()
    else:  # ceil(log2(amax / largest))
        fraction, exponent = torch.frexp(amax / largest)
        byte = 127 + exponent - (fraction == 0.5).int()
    if rule is not None:
        byte = byte.masked_fill(amax == 0, 0)
    return byte.clamp(min=0).masked_fill(~amax.isfinite(), 255).to(torch.uint8)


def sqnr(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Signal to quantization noise ratio in dB, in fp64; inf if the two are equal."""
    expected, actual = expected.detach().double(), actual.detach().double()
    noise = (expected - actual).norm()
    return math.inf if noise == 0 else (20 * torch.log10(expected.norm() / noise)).item()


@contextmanager
def all_warnings() -> Iterator[list[str]]:
    """The texts of all warnings in the block, even repeated ones; filled when the block ends."""
    texts: list[str] = []
    with (
        patch.object(fp8_dist.text, "_warned", set()),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]


def reloaded(value: Any, weights_only: bool = True) -> Any:
    """Save a value by torch.save, and return what torch.load returns."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes (equal NaN bits are equal)."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
    )


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, where any NaN equals any other, on any devices."""
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a_nan, b_nan = a.float().isnan(), b.float().isnan()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    a_bits, b_bits = (
        t.contiguous().view(kind).masked_fill(n, 0) for t, n in ((a, a_nan), (b, b_nan))
    )
    return torch.equal(a_nan, b_nan) and torch.equal(a_bits, b_bits)


def scales_of(x: Float8Tensor) -> torch.Tensor:
    """The scale of each element."""
    scales = x.scheme.element_scales(x.scales, x.shape, x.start)
    return scales.expand(x.shape).contiguous()


def scale_of_elements(x: Float8Tensor) -> torch.Tensor:
    """As `scales_of`, for one level of blocks, by a formula independent of the library."""
    rows, columns = map(int, re.findall(r"\d+", x.scheme.covers))
    first_row, first_column = x.start
    j = (torch.arange(x.shape[-1]) + first_column).div(columns, rounding_mode="floor")
    exponents = x.scale[..., j]
    if rows > 1:
        i = (torch.arange(x.shape[-2]) + first_row).div(rows, rounding_mode="floor")
        exponents = exponents[..., i, :]
    return torch.where(exponents == 255, math.nan, torch.exp2(exponents.double() - 127)).float()


def same_cast(a: Float8Tensor, b: Float8Tensor) -> bool:
    """Whether two float8 tensors have the same bits of data and scale."""
    return same_bits(a.qdata, b.qdata) and same_bits(a.scale, b.scale)


def kinds(table: str) -> str:
    """The lines of `CommAudit.table()` without the totals."""
    return "\n".join(table.splitlines()[:-3])


def raised(kind: type[Exception], call: Callable[[], object]) -> str:
    """The text of the exception, of exactly this type, that a call raises."""
    with pytest.raises(kind) as info:
        call()
    assert info.type is kind
    return str(info.value)


def saved_in(forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result of a forward, and the tensors that autograd saves for its backward."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return forward(), saved


class Watching(TorchDispatchMode):
    """A mode that sees every operator, so that the library can't take shortcuts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


# The left and right operands of a float8 GEMM.
Product = tuple[Float8Tensor, Float8Tensor]


class Products(Sequence[Product]):
    """The operands in a growing list of records."""

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
    """Record copies of the operands of each float8 GEMM of layers, in order."""
    with record_gemms() as records:
        yield Products(records)


def validity(weight: Tensor) -> int:
    """The state of a weight's cached statistics: UNKNOWN, STALE, or a positive number."""
    local = local_tensor(weight)
    return int(local.check(weight).valid) if isinstance(local, KnownWeight) else UNKNOWN


def known(weight: Tensor) -> Tensor | None:
    """The packed statistics of a weight's current values, if they are cached."""
    local = local_tensor(weight)
    return local.known if isinstance(local, KnownWeight) and validity(weight) > TRAINED else None


@contextmanager
def weights_used(model: torch.nn.Module) -> Iterator[dict[str, Float8Tensor]]:
    """By layer name, a copy of the local float8 weight that the forward multiplied."""
    names = {layer.fqn: name for name, layer in float8_layers(model).items()}
    used: dict[str, Float8Tensor] = {}
    with record_gemms() as records:
        yield used
    used |= {names[r.fqn]: r.b.t() for r in records if r.gemm == "output" and r.fqn in names}
