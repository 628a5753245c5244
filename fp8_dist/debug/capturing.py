"""``capture``: files with the inputs and outputs of casts, by layer, operand, step and rank.

A file holds the tensors ``high``, ``qdata`` and ``scale0``, ``scale1``, ... (one for each level of
the scheme), and the other fields of a :class:`CapturedCast` as a JSON string. With ``torch.save``,
the string is an entry of the same dictionary as the tensors. With safetensors, it is in the
metadata.
"""

import hashlib
import importlib
import io
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote
from zipfile import ZipFile

import torch
import torch.distributed as dist
from torch import nn

from fp8_dist.debug.measures import Measures, measure
from fp8_dist.debug.recorder import Patterns, Slot, StepRecorder, matching, own_rank, slots_of
from fp8_dist.debug.rows import CastStats
from fp8_dist.device import is_float8
from fp8_dist.linear.observing import Casts, Owner
from fp8_dist.linear.weights import weights_of_model
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import Quantized, Scales, Start, scheme_named

FileFormat = Literal["torch", "safetensors"]
SUFFIXES: dict[FileFormat, str] = {"torch": ".pt", "safetensors": ".safetensors"}

Numbers = int | Collection[int] | None

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
        folded: the operand whose scales multiply this one before it is cast; see
            :class:`CastStats`.
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
    folded: Operand | None
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
        fields = ("step", "fqn", "operand", "gemms", "delayed", "folded")
        cast = {name: getattr(self, name) for name in fields}
        return CastStats.of(found, self.low.scheme, **cast)

    def file_name(self, format: FileFormat) -> str:
        """Return the name of the file, with the layer's name percent-encoded.

        If that is too long, a hash of the name replaces its end.
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
    """Write a file atomically, so that one with the final name is complete, and return its path."""
    path = folder / captured.file_name(format)
    tensors = {name: getattr(captured, name) for name in _TENSORS}
    tensors |= {f"scale{i}": scale for i, scale in enumerate(captured.scales)}
    others = {k: v for k, v in vars(captured).items() if k not in (*_TENSORS, "scales")}
    text = json.dumps(others)
    buffer = io.BytesIO()
    if format == "torch":
        torch.save({_KEY: text, **tensors}, buffer)
    else:
        buffer.write(importlib.import_module("safetensors.torch").save(tensors, {_KEY: text}))
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
    found = importlib.import_module("safetensors.torch").load(content)
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    return metadata[_KEY], found


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


# The checks of the values in the JSON string.
_VALUES: dict[str, Callable[[Any], bool]] = {
    "step": lambda v: type(v) is int,
    "rank": _is_count,
    "fqn": lambda v: isinstance(v, str),
    "operand": lambda v: v in get_args(Operand),
    "gemms": lambda v: v in [[*some] for n in (1, 2) for some in permutations(get_args(Gemm), n)],
    "call": _is_count,
    "delayed": lambda v: isinstance(v, bool),
    "folded": lambda v: v in (None, *get_args(Operand)),
    "scheme": lambda v: isinstance(v, str),
    "start": lambda v: isinstance(v, list) and len(v) == 2 and all(map(_is_count, v)),
}


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


class Capture(StepRecorder):
    """The context manager that :func:`capture` returns.

    Attributes:
        files: the files that this rank wrote, in order.
        bytes: the total size of these files.
        left_out: the number of casts that this rank left out because of ``max_bytes``, or because
            a file could not be written.
        step: the number of the last step that was entered.
    """

    def __init__(
        self,
        slots: list[Slot],
        folder: Path,
        steps: Collection[int] | None,
        max_bytes: int,
        format: FileFormat,
    ) -> None:
        super().__init__("capture")
        self.files: list[Path] = []
        self.bytes = 0
        self.left_out = 0
        self._folder, self._steps = folder, steps
        self._max_bytes, self._format = max_bytes, format
        self._slots = {slot.key: slot for slot in slots}
        self._calls: Counter[Slot] = Counter()
        self._full = ""  # the reason why nothing more is written, if so
        self._missing: list[Slot] = []  # the casts that were left out in this step

    def _begin(self) -> bool:
        return self._steps is None or self.step in self._steps

    def _end(self, failed: bool) -> None:
        self._calls.clear()
        missing, self._missing = self._missing, []
        if missing:
            self.left_out += len(missing)
            first = f"{missing[0].fqn} {missing[0].operand}"
            warnings.warn(
                f"capture: casts of step {self.step} were left out on rank {own_rank()}, from "
                f"{first} on ({len(missing)} in all): {self._full}",
                stacklevel=3,
            )

    def on_casts(self, owner: Owner, operand: Operand, high: torch.Tensor, lows: Casts) -> None:
        for gemms, low in lows.items():
            if slot := self._slots.get((owner, operand, gemms)):
                self._save(slot, high, low)

    def __repr__(self) -> str:
        return (
            f"Capture(files: {len(self.files)}, bytes: {self.bytes:,}, left out: {self.left_out})"
        )

    def _save(self, slot: Slot, high: torch.Tensor, low: Quantized) -> None:
        size = sum(tensor.nbytes for tensor in (high, low.qdata, *low.scales))
        if not self._full and self.bytes + size > self._max_bytes:
            self._full = (
                f"{self.bytes:,} bytes are written and the next cast has {size:,}, which is more "
                f"than max_bytes={self._max_bytes:,}. Raise it, or choose fewer layers, operands, "
                "steps or ranks"
            )
        if self._full:
            self._missing.append(slot)
            return
        assert slot.operand is not None
        high, low = _copies(high, low)
        captured = CapturedCast(
            step=self.step,
            rank=own_rank(),
            fqn=slot.fqn,
            operand=slot.operand,
            gemms=slot.gemms,
            call=self._calls[slot],
            delayed=slot.delayed,
            folded=slot.folded,
            high=high,
            qdata=low.qdata,
            scales=low.scales,
            scheme=low.scheme.key,
            start=low.start,
        )
        self._calls[slot] += 1
        try:
            path = save_capture(captured, self._folder, self._format)
        except OSError as error:
            # A full disk must not end a training run.
            self._full = f"a file could not be written: {error}"
            self._missing.append(slot)
            return
        self.files.append(path)
        self.bytes += path.stat().st_size


def _copies(high: torch.Tensor, low: Quantized) -> tuple[torch.Tensor, Quantized]:
    """Return contiguous CPU copies with their own storages, because files hold whole storages."""
    copies = [
        torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
        for tensor in (high, low.qdata.reshape(high.shape), *low.scales)
    ]
    return copies[0], low._replace(qdata=copies[1], scales=tuple(copies[2:]))


def capture(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    fqn: Patterns = None,
    operand: Patterns = None,
    gemm: Patterns = None,
    steps: Numbers = None,
    ranks: Numbers = None,
    max_bytes: int = 2**30,
    format: FileFormat = "torch",
) -> Capture:
    """Save local tensors before their casts, with their float8 copies and scales, to files.

    ::

        captured = capture(model, "captured", fqn="layers.3.*.wq", operand="input", steps=[0, 100])
        for step in range(steps):
            with captured:
                loss = model(x); loss.backward()
            optimizer.step()

    Entering the block begins a step; ``with captured.at(step):`` sets the number of the step. Each
    cast is saved in a file of its own, whose name has the step, rank, layer, operand, GEMMs and
    call (the micro-batch, if a layer runs once in each). A forward that activation checkpointing
    repeats makes no files. Files are written atomically, and replace files of the same name.
    ``python -m fp8_dist.debug.show FILE`` shows a file, and :func:`load_capture` loads it.

    This works wherever ``float8_stats`` does, and costs nothing outside of recorded blocks. The
    tensors are local to the rank, such as the shard of a weight that FSDP2 gathers in float8, or a
    part of the sequence.

    Args:
        model: a model that is already converted and parallelized.
        folder: the folder for the files. It is created if necessary. Ranks may share it.
        fqn: an ``fnmatch`` pattern of layer names, or several patterns; None: all layers.
        operand: likewise for ``"input"``, ``"weight"`` and ``"grad_output"``.
        gemm: likewise for ``"output"``, ``"grad_input"`` and ``"grad_weight"``. It selects the
            float8 copies that one of these GEMMs multiplies.
        steps: the number of a step, or a collection of numbers such as ``range(0, 1000, 100)``;
            None: all steps. The first step is 0.
        ranks: a rank, or a collection of ranks; None: all ranks.
        max_bytes: the largest number of bytes that one rank writes. The first cast that would
            exceed it is left out, as are all casts after it, and a warning at the end of each block
            reports this. The same happens if a file can't be written.
        format: ``"torch"`` (``torch.save``), or ``"safetensors"`` (needs that package).

    Returns:
        A context manager with ``files``, ``bytes`` and ``left_out`` of this rank.

    Collectives: none.

    Raises:
        TypeError: ``model`` is not a module, or an argument has the wrong type.
        ValueError: the model has no converted layer, nothing matches (the message lists near
            names), a step is negative, a rank doesn't exist, or ``max_bytes`` is below 1.
        ImportError: ``format="safetensors"`` without the package.
        OSError: the folder can't be created.
        RuntimeError: the context manager is entered again inside its own block.
    """
    slots = _chosen(model, fqn, operand, gemm)
    check_format("capture", format)
    chosen_steps, chosen_ranks = _numbers("steps", steps), _numbers("ranks", ranks)
    world = dist.get_world_size() if dist.is_initialized() else 1
    unknown = [rank for rank in chosen_ranks or () if rank >= world]
    if unknown:
        raise ValueError(f"capture: ranks={ranks!r}: there are ranks 0 to {world - 1} only")
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise ValueError(f"capture: max_bytes={max_bytes!r} must be a positive integer")
    made = Path(folder)
    made.mkdir(parents=True, exist_ok=True)
    if chosen_ranks is not None and own_rank() not in chosen_ranks:
        slots = []
    return Capture(slots, made, chosen_steps, max_bytes, format)


def _chosen(model: nn.Module, fqn: Patterns, operand: Patterns, gemm: Patterns) -> list[Slot]:
    """Return the casts whose layer and operand match, and at least one of whose GEMMs matches."""
    weights_of_model(model, "capture")
    slots = [*slots_of(model)]
    fqns = list(dict.fromkeys(slot.fqn for slot in slots))
    chosen_fqns = matching("capture", "fqn", fqn, fqns, "converted layer")
    operands = matching("capture", "operand", operand, get_args(Operand), "operand")
    gemms = matching("capture", "gemm", gemm, get_args(Gemm), "GEMM")
    of_layers = [slot for slot in slots if slot.fqn in chosen_fqns]
    chosen = [s for s in of_layers if s.operand in operands and gemms.intersection(s.gemms)]
    if not chosen:
        there = dict.fromkeys(f"{s.operand} for {', '.join(s.gemms)}" for s in of_layers)
        raise ValueError(
            f"capture: no chosen layer casts {' or '.join(sorted(operands))} for "
            f"{' or '.join(sorted(gemms))}. Their casts are: {'; '.join(there)}"
        )
    return chosen


def _numbers(argument: str, given: Numbers) -> Collection[int] | None:
    """Check a choice of steps or ranks, and return it as a collection."""
    if given is None:
        return None
    several: Any = [given] if isinstance(given, int) else given
    # The ends of a range, which may be long, are enough to check.
    ends: Any = several[:: max(1, len(several) - 1)] if isinstance(several, range) else several
    is_list = isinstance(ends, Collection) and not isinstance(ends, str | bytes)
    if not is_list or any(isinstance(n, bool) or not isinstance(n, int) for n in ends):
        raise TypeError(
            f"capture: {argument}={given!r} must be an integer or a collection of integers, such "
            "as range(0, 1000, 100)"
        )
    if not ends or min(ends) < 0:
        raise ValueError(
            f"capture: {argument}={given!r} must hold at least one number, and none below 0"
        )
    return several
