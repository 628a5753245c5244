"""A captured cast: its file, its statistics, and the histogram of its magnitudes.

A file holds the tensors ``high``, ``qdata`` and ``scale0``, ``scale1``, ... (one for each level of
the scheme), and the other fields as a JSON string. With ``torch.save``, the string is an entry of
the same dictionary as the tensors. With safetensors, it is in the metadata.
"""

import hashlib
import importlib
import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote
from zipfile import ZipFile

import torch

from fp8_dist.debug.measures import Measures, measure, saturation_limit
from fp8_dist.debug.rows import CastStats
from fp8_dist.dtypes import is_float8
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import Quantized, Scales, Start, as_matrix, scheme_named
from fp8_dist.tensor.ops import as_bytes

FileFormat = Literal["torch", "safetensors"]
SUFFIXES: dict[FileFormat, str] = {"torch": ".pt", "safetensors": ".safetensors"}

_KEY = "fp8_dist_capture"  # key of the JSON string
_TENSORS = ("high", "qdata")  # besides "scale0", "scale1", ...
_LONGEST = 120  # characters of the layer's name in a file name, which may have 255 in all


@dataclass(frozen=True, eq=False)
class CapturedCast:
    """The input and output of one cast on one rank.

    Attributes:
        step: the number of the step.
        rank: the rank of the process that made the cast.
        fqn: the layer.
        operand: ``"input"``, ``"weight"`` or ``"grad_output"``.
        gemms: the GEMMs that multiply this float8 copy.
        call: the number of earlier casts of this operand for these GEMMs in the step, on this rank.
            It is the index of the micro-batch if the layer runs once in each.
        delayed: whether the scale is computed from the amaxes of earlier steps.
        high: the local tensor before the cast, ``[..., K]``.
        qdata: the float8 copy, in the same shape.
        scales: the dequantization scales, one tensor for each level of the scheme.
        scheme: the key of the scaling scheme.
        start: the (row, column) in its first block where this rank's part of the operand begins.
    """

    step: int
    rank: int
    fqn: str
    operand: Operand
    gemms: tuple[Gemm, ...]
    call: int
    delayed: bool
    high: torch.Tensor
    qdata: torch.Tensor
    scales: Scales
    scheme: str
    start: Start = (0, 0)

    @property
    def low(self) -> Quantized:
        """The float8 copy with its scales."""
        return Quantized(self.qdata, self.scales, scheme_named(self.scheme), self.start)

    @property
    def scale(self) -> torch.Tensor:
        """The scales of the first level of the scheme."""
        return self.scales[0]

    @property
    def granularity(self) -> str:
        """The part that one scale covers, such as ``"tensor"``, ``"row"`` or ``"column"``."""
        return self.low.scheme.covers

    @property
    def nbytes(self) -> int:
        """The size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in (self.high, self.qdata, *self.scales))

    def stats(self) -> CastStats:
        """Return the statistics that ``float8_stats`` would report for this cast alone."""
        found = Measures(*measure(self.high, self.low, self.rank).tolist())
        of = self.step, self.fqn, self.operand, self.gemms
        return CastStats.of(found, *of, self.low.scheme, self.delayed)

    def file_name(self, format: FileFormat) -> str:
        """Return the name of the file.

        Special characters in the layer's name are percent-encoded. If the name is too long, a hash
        of it replaces its end.
        """
        layer, gemms = quote(self.fqn, safe=""), "+".join(self.gemms)
        if len(layer) > _LONGEST:
            digest = hashlib.sha256(self.fqn.encode()).hexdigest()[:16]
            layer = f"{layer[: _LONGEST - 17]}~{digest}"
        where = f"step{self.step:06d}-rank{self.rank:03d}"
        return f"{where}-{layer}-{self.operand}-{gemms}-{self.call}{SUFFIXES[format]}"


def check_format(caller: str, format: str) -> None:
    """Raise an error if a format is unknown or its package is not installed."""
    if format not in SUFFIXES:
        raise ValueError(f"{caller}: format={format!r} must be one of {list(SUFFIXES)}")
    if format == "safetensors" and find_spec("safetensors") is None:
        raise ImportError(
            f"{caller}: format='safetensors' needs the package safetensors: pip install "
            "safetensors, or leave the default, format='torch'"
        )


def save_capture(captured: CapturedCast, folder: Path, format: FileFormat) -> Path:
    """Write a file atomically and return its path. A file with the final name is always complete.

    Raises:
        OSError: the file can't be written. No partial file is left.
    """
    path = folder / captured.file_name(format)
    tensors = {name: getattr(captured, name) for name in _TENSORS}
    tensors |= {f"scale{i}": scale for i, scale in enumerate(captured.scales)}
    others = {k: v for k, v in vars(captured).items() if k not in (*_TENSORS, "scales")}
    text = json.dumps(others)
    buffer = io.BytesIO()
    if format == "torch":
        torch.save({_KEY: text, **tensors}, buffer)
    else:
        buffer.write(_safetensors("safetensors.torch").save(tensors, {_KEY: text}))
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(buffer.getbuffer())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def load_capture(path: str | Path) -> CapturedCast:
    """Load a file that :func:`capture` wrote, onto the CPU. No code in the file is executed.

    Raises:
        OSError: the file can't be read.
        ValueError: the file holds something else, or is damaged. Safetensors files have no
            checksums, so changed tensor values in them are not detected.
        ImportError: the file is a safetensors file, and the package is not installed.
    """
    path = Path(path)
    content, read = path.read_bytes(), _read_torch
    if path.suffix == SUFFIXES["safetensors"]:
        check_format("load_capture", "safetensors")
        read = _read_safetensors
    try:
        text, tensors = read(content)
        return _checked(json.loads(text), tensors)
    except Exception as error:  # reading unknown bytes may raise anything
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path} holds no cast that fp8_dist.debug.capture saved, or is damaged: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _read_torch(content: bytes) -> tuple[str, dict[str, Any]]:
    with ZipFile(io.BytesIO(content)) as file:  # because torch.load ignores the checksums
        if damaged := file.testzip():
            raise ValueError(f"the checksum of a part is wrong: {damaged}")
    found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return found.pop(_KEY), found


def _read_safetensors(content: bytes) -> tuple[str, dict[str, Any]]:
    found = _safetensors("safetensors.torch").load(content)
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    return metadata[_KEY], found


def _safetensors(module: str) -> Any:
    """Import a module of the optional package only when it is used."""
    return importlib.import_module(module)


# The checks of the values in the JSON string.
_VALUES: dict[str, Callable[[Any], bool]] = {
    "step": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "rank": lambda v: _is_count(v),
    "fqn": lambda v: isinstance(v, str),
    "operand": lambda v: v in get_args(Operand),
    "gemms": lambda v: v in [[*some] for n in (1, 2) for some in permutations(get_args(Gemm), n)],
    "call": lambda v: _is_count(v),
    "delayed": lambda v: isinstance(v, bool),
    "scheme": lambda v: isinstance(v, str),
    "start": lambda v: isinstance(v, list) and len(v) == 2 and all(map(_is_count, v)),
}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _checked(others: dict[str, Any], tensors: dict[str, Any]) -> CapturedCast:
    for name, is_valid in _VALUES.items():
        if not is_valid(others[name]):
            raise ValueError(f"{name}={others[name]!r} is not what a capture holds")
    for name, tensor in tensors.items():
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not plain or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{name} is not a plain, contiguous tensor with data")
    high, qdata = (tensors[name] for name in _TENSORS)
    scheme, start = scheme_named(others["scheme"]), tuple(others["start"])
    scales = tuple(tensors[f"scale{i}"] for i in range(len(scheme.levels)))
    if not high.dtype.is_floating_point or not is_float8(qdata.dtype) or high.shape != qdata.shape:
        raise ValueError(
            f"qdata, {qdata.dtype} {list(qdata.shape)}, is no float8 copy of high, {high.dtype} "
            f"{list(high.shape)}"
        )
    shapes = scheme.scale_shapes(high.shape, start)
    for level, shape, scale in zip(scheme.levels, shapes, scales, strict=True):
        if scale.dtype != level.scale or list(scale.shape) != shape:
            raise ValueError(
                f"the scales are {scale.dtype} {list(scale.shape)}, not {level.scale} {shape}"
            )
    elements = scheme.element_scales(scales, high.shape, start)
    if (elements <= 0).any():
        raise ValueError(f"a scale is {elements.min().item():g}; all of them must be positive")
    known = {name: others[name] for name in _VALUES}
    known |= {"gemms": tuple(others["gemms"]), "start": start}
    return CapturedCast(**known, high=high, qdata=qdata, scales=scales)


@dataclass(frozen=True)
class Float8Range:
    """The bounds of the magnitudes that a float8 format represents, for a given scale.

    Attributes:
        largest: the largest number.
        normal: the smallest normal number.
        subnormal: the smallest nonzero number.
        zero: half of ``subnormal``; magnitudes up to this one are rounded to zero.
        saturation: half a step above ``largest``; magnitudes above this one saturate.
    """

    largest: float
    normal: float
    subnormal: float
    zero: float
    saturation: float

    @staticmethod
    def of(dtype: torch.dtype, scale: float = 1.0) -> "Float8Range":
        """Return the range of a format whose numbers are multiplied by ``scale``."""
        info = torch.finfo(dtype)
        subnormal = info.smallest_normal * info.eps
        numbers = info.max, info.smallest_normal, subnormal, subnormal / 2, saturation_limit(dtype)
        return Float8Range(*(number * scale for number in numbers))


@dataclass(frozen=True)
class Octave:
    """The counts of the values in ``[2^exponent, 2^(exponent + 1))``, by the effect of the cast."""

    exponent: int
    kept: int = 0
    to_zero: int = 0
    saturated: int = 0

    @property
    def values(self) -> int:
        """The total number of values."""
        return self.kept + self.to_zero + self.saturated


@dataclass(frozen=True)
class Histogram:
    """The counts of a tensor's magnitudes, by octave.

    Attributes:
        octaves: all octaves from the smallest magnitude to the largest, including empty ones.
        values: the number of values in the octaves. Zeros, NaN and infinities are not counted. If
            ``relative``, values whose scale is not finite are not counted either.
        zeros: the number of zeros.
        relative: whether each value is divided by its own scale, because there are several scales.
        range: the range of float8 in the same unit; None if the only scale is not finite.
    """

    octaves: tuple[Octave, ...]
    values: int
    zeros: int
    relative: bool
    range: Float8Range | None


def histogram(cast: CapturedCast) -> Histogram:
    """Return the histogram of the values before a cast.

    With one scale, the histogram counts the magnitudes of the values themselves. With several
    scales, no single range of float8 applies to all values. Then each value is divided by its own
    scale, and the range is that of the format.
    """
    dtype, relative = cast.qdata.dtype, any(scale.ndim for scale in cast.scales)
    columns = cast.high.shape[-1] if cast.high.ndim else 1
    shape = math.prod(cast.high.shape[:-1]), columns
    matrix = as_matrix(cast.low)
    scale = matrix.scheme.element_scales(matrix.scales, shape, matrix.start).double()
    high = cast.high.reshape(shape).double()
    units = high / scale
    counted = units.isfinite() & (units != 0)
    if not relative and not scale.isfinite():
        counted = high.isfinite() & (high != 0)
    magnitudes = (units if relative else high)[counted].abs()
    low = as_bytes(cast.qdata.reshape(high.shape))[counted]
    to_zero = (low & 0x7F) == 0
    saturated = units[counted].abs() > Float8Range.of(dtype).saturation
    exponents = torch.frexp(magnitudes).exponent - 1  # its mantissa is in [1/2, 1)
    first, last = (int(exponents.min()), int(exponents.max())) if len(exponents) else (0, -1)
    effects = to_zero + 2 * saturated  # indices of kept, to_zero and saturated
    cells = torch.bincount(3 * (exponents - first) + effects, minlength=3 * (last - first + 1))
    octaves = [Octave(first + i, *counts) for i, counts in enumerate(cells.view(-1, 3).tolist())]
    known = relative or bool(scale.isfinite())
    return Histogram(
        tuple(octaves),
        len(magnitudes),
        int((high == 0).sum()),
        relative,
        Float8Range.of(dtype, 1.0 if relative else scale.item()) if known else None,
    )
