"""``record``: a record of the last steps' casts and GEMMs, written when something goes wrong.

A rank writes one dictionary with ``torch.save``. Its ``"records"`` are dictionaries, too: a cast
has the tensor before the cast (``"high"``), and a GEMM has a ``"result"``. A float8 tensor is a
dictionary with the entries of a :class:`Quantized`, the ``"ranks"`` of its mesh, its global
``"shape"``, and the ``"pieces"`` of this rank: for each dim, their (begin, end).
"""

import atexit
import math
import os
import re
import shutil
import signal
import sys
import threading
import warnings
from collections import Counter, deque
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp8_dist.debug.measures import nothing, set_
from fp8_dist.debug.rows import Anomaly, AnomalyLimits
from fp8_dist.debug.slots import Patterns, Slot, matching
from fp8_dist.debug.statistics import StepObserver
from fp8_dist.kernels.blocks import fp32_scales
from fp8_dist.mesh import Layout, local_pieces, this_rank
from fp8_dist.operand.observers import Casts, Original, Owner, Product
from fp8_dist.recipe import Operand
from fp8_dist.scaling import Quantized, Scales
from fp8_dist.torch_internals import in_backward, tree_map_only, version_of, when_backward_ends

VERSION = 2
ON_CPU = 128  # on CPU, passing casts take at most 1/128 of max_bytes: allocation is slow
MOST = 16  # the largest number of recordings that anomalies cause

Record = dict[str, Any]
_State = tuple[int | None, int]  # the version of a tensor, and the size of its storage


class _Passing(NamedTuple):
    """A cast of this step in a layer that is not recorded. It is not copied."""

    slot: Slot
    original: Original
    low: Quantized
    call: int
    states: list[tuple[Tensor, _State]]
    bytes: int


class Recorder(StepObserver):
    """A recorder of the last steps' casts, which :func:`record` makes.

    Attributes:
        step: the number of the last step that began.
        rows: statistics of the last steps, which are computed from the scales alone.
        anomalies: the first anomaly of each kind in each layer.
        dropped: the number of casts and GEMMs of recorded layers that this rank has dropped to stay
            within ``max_bytes``.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        steps: int,
        layers: Patterns,
        max_bytes: int,
        mesh: DeviceMesh | None,
    ) -> None:
        super().__init__(model, mesh, AnomalyLimits())
        self.dropped = 0
        self._kept_bytes = 0
        self._passing_bytes = 0
        self._layers = matching("record", layers, [*dict.fromkeys(self._names.values())])
        self._folder = folder
        self._steps = steps
        self._max = max_bytes  # for all tensors
        self._window = max_bytes  # for passing casts
        # The layers that are recorded in this step, and in the next one, with the reason.
        self._armed: dict[str, str] = {}
        self._next: dict[str, str] = {}
        self._kept: deque[Record] = deque()  # copies, of recorded layers
        self._passing: deque[_Passing] = deque()
        # The largest scale of each call of each cast of this step, in the order of the casts.
        self._scales: dict[Any, list[Tensor]] = {}
        self._positions: dict[Any, float] = {}  # of recorded GEMMs among the casts
        self._written = Counter[int]()  # recordings of each step
        # Read now, because the process group may be gone when the program ends.
        self._rank = this_rank()
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._left = MOST
        self._undo = ExitStack()
        folder.mkdir(parents=True, exist_ok=True)
        # Remove files that a killed run has left: those of this rank, and of ranks that are gone.
        for path in folder.glob("*.incomplete/rank*.pt"):
            if path.name == _file_name(self._rank) or path.name >= _file_name(self._world):
                path.unlink(missing_ok=True)

    @property
    def bytes(self) -> int:
        """The size of the tensors that are kept now."""
        return self._kept_bytes + self._passing_bytes

    def start(self) -> None:
        """Begin to record, like entering a ``with`` block."""
        self.__enter__()

    def stop(self) -> None:
        """End the step, and stop recording, like leaving a ``with`` block.

        Raises:
            RuntimeError: the recorder is not recording.
        """
        if self._block is None:
            raise RuntimeError("this Recorder is not recording; start it first")
        self.__exit__(None)

    def __enter__(self) -> Self:
        super().__enter__()
        ends = partial(self.write, "the program ended")
        atexit.register(ends)
        self._undo.callback(atexit.unregister, ends)
        self._undo.callback(register_optimizer_step_pre_hook(self._before_optimizer).remove)
        is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if is_free and threading.current_thread() is threading.main_thread():
            # SystemExit leaves the block, or ends the program, in which case atexit writes.
            signal.signal(signal.SIGTERM, _exit)
            self._undo.callback(_free_signal)
        return self

    def __exit__(self, error: Any, *others: Any) -> None:
        self._undo.close()
        try:
            super().__exit__(error, *others)
        except Exception as raised:  # another rank may have failed
            self.write(f"{type(raised).__name__}: {raised}")
            raise
        else:
            if error is not None and (error is not SystemExit or others[0].code):
                self.write(f"{error.__name__}: {others[0]}")
        finally:
            self._forget()

    def follow(self, anomaly: Anomaly) -> None:
        """Record the layer of an anomaly in the next step, and write that step.

        ``float8_stats(model, on_anomaly=recorder.follow)`` finds anomalies that scales do not show.
        """
        armed = self._next if self._scales else self._armed
        armed[anomaly.row.fqn] = str(anomaly)

    def write(self, reason: str = "on demand") -> Path:
        """Write the records that are kept, and return the folder of the recording.

        Until all ranks have written, the folder's name ends in ``.incomplete``. All ranks should
        write equally often in a step. A folder that an earlier run left under this name is
        replaced. If the files can't be written, a warning says so. Collectives: none.
        """
        self._written[self.step] += 1  # the same on all ranks, without communication
        again = f"-{self._written[self.step]}" if self._written[self.step] > 1 else ""
        folder = self._folder / f"step{self.step:06d}{again}"
        unfinished = folder.with_suffix(".incomplete")
        name = _file_name(self._rank)
        new = unfinished / f".{name}"
        try:
            content = self._content(reason)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.mkdir(parents=True, exist_ok=True)
            torch.save(content, new)
            new.replace(unfinished / name)
            if all((unfinished / _file_name(rank)).exists() for rank in range(self._world)):
                with suppress(FileNotFoundError):  # another rank has renamed it
                    unfinished.rename(folder)
                    command = f"python -m fp8_dist.debug.replay {folder}"
                    warnings.warn(f"record: {reason}; see {command}", stacklevel=2)
        except (OSError, RuntimeError) as error:  # such as a full disk
            new.unlink(missing_ok=True)
            warnings.warn(f"record: {reason}, but it can't be written: {error}", stacklevel=2)
        return folder

    def _content(self, reason: str) -> Record:
        """Return what a rank writes."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # other streams may cast, too
        records = [*self._kept]
        for cast in self._passing:
            is_unchanged = all(_state_of(tensor) == state for tensor, state in cast.states)
            if is_unchanged:
                records.append(self._record_of(cast.slot, cast.original, cast.low, cast.call))
        return {
            "version": VERSION,
            "rank": self._rank,
            "world": self._world,
            "step": self.step,
            "reason": reason,
            "threads": torch.get_num_threads(),
            "limits": asdict(self.limits),
            "rows": [asdict(row) for row in self.rows],
            "records": [_copied(record, "cpu") for record in records],
        }

    def __repr__(self) -> str:
        return f"Recorder(step {self.step}, {self.bytes:,} bytes, {self.dropped} dropped)"

    def on_casts(self, owner: Owner, operand: Operand, original: Original, lows: Casts) -> None:
        high = original.high
        for gemms, low in lows.items():
            key = owner, operand, gemms
            slot = self._slots.get(key)
            if slot is None or high.is_meta:
                continue
            calls = self._scales.setdefault(key, [])
            call = len(calls)
            calls.append(_largest(low.scales))
            if self._is_recorded(slot.fqn):
                self._keep(self._record_of(slot, original, low, call))
            else:
                self._pass(slot, original, low, call)

    def _pass(self, slot: Slot, original: Original, low: Quantized, call: int) -> None:
        """Keep a cast of a layer that is not recorded, without a copy, as long as there is room."""
        high = original.high
        tensors = [high, low.qdata, *low.scales]
        if original.folds is not None:
            folds = original.folds.clone()  # FSDP2 frees the scales that it has gathered
            original = original._replace(folds=folds)
            tensors.append(folds)
        states = [(tensor, _state_of(tensor)) for tensor in tensors]
        size = sum([nbytes for _, (_, nbytes) in states])
        self._passing.append(_Passing(slot, original, low, call, states, size))
        self._passing_bytes += size
        self._window = self._max // ON_CPU if high.is_cpu else self._max
        self._make_room()

    def on_multiply(self, owner: Owner, product: Product) -> None:
        fqn = self._names.get(owner, "")
        if self._is_recorded(fqn):
            left_layout, right_layout = product.layouts
            # A GEMM comes after the casts of its operands.
            after_casts = len(self._scales) - 0.5
            record = {
                "rank": self._rank,
                "step": self.step,
                "position": self._positions.setdefault((owner, product.gemm), after_casts),
                "fqn": fqn,
                "gemm": product.gemm,
                "result": product.result,
                "options": [*product.options],
                "left": _low(product.left, left_layout, self._rank),
                "right": _low(product.right, right_layout, self._rank),
                "groups": product.groups and product.groups.on_host,
            }
            self._keep(record)

    def _record_of(self, slot: Slot, original: Original, low: Quantized, call: int) -> Record:
        """Return the record of a cast of this step, which is call number ``call`` of its slot."""
        return {
            "rank": self._rank,
            "step": self.step,
            "position": [*self._scales].index(slot.key),
            "fqn": slot.fqn,
            "operand": slot.operand,
            "gemms": [*slot.gemms],
            "call": call,
            "delayed": slot.delayed,
            "folded": slot.folded,
            "folds": original.folds,
            "dispatch": original.dispatch and [*original.dispatch],
            "high": original.high,
            "low": _low(low, original.layout, self._rank),
        }

    def _is_recorded(self, fqn: str) -> bool:
        return fqn in self._layers or fqn in self._armed

    def _keep(self, record: Record) -> None:
        record = _copied(record)
        self._kept.append(record)
        self._kept_bytes += record["bytes"]
        self._make_room()

    def _make_room(self) -> None:
        while self._passing and (self._passing_bytes > self._window or self.bytes > self._max):
            self._passing_bytes -= self._passing.popleft().bytes
        while self.bytes > self._max:
            self._drop_oldest()
            self.dropped += 1

    def _drop_oldest(self) -> None:
        self._kept_bytes -= self._kept.popleft()["bytes"]

    def _before_optimizer(self, *_: Any) -> None:
        # Optimizers that step within one backward end one step together.
        when_backward_ends(self._next_step) if in_backward() else self._next_step()

    def _next_step(self) -> None:
        if self._scales:
            self._end_step()
            self.step += 1
            self._forget()

    def _forget(self) -> None:
        """Clear the state of the step that ended, except for the copied records."""
        self._passing_bytes = 0
        self._passing.clear()
        self._scales.clear()
        self._positions.clear()

    def _end_step(self) -> None:
        armed = self._armed
        count = len(self.anomalies)
        self._measured = self._measures_of_scales()
        super()._end_step()
        if not self._last:
            self.step -= 1  # no rank has cast anything since an optimizer ended the last step
            return
        new: dict[str, str] = {}
        for anomaly in self.anomalies[count:]:
            fqn = anomaly.row.fqn
            new.setdefault(fqn, f"step {self.step}: {fqn}: {text_of(anomaly)}")
        self._armed = self._next | new
        self._next = {}
        oldest = self.step - self._steps
        self.rows = [row for row in self.rows if row.step > oldest]
        while self._kept and self._kept[0]["step"] <= oldest:
            self._drop_oldest()
        reasons = [*new.values(), *armed.values()]
        if reasons and self._left:
            self._left -= 1
            self.write(reasons[0])

    def _measures_of_scales(self) -> dict[Any, Tensor]:
        """Compute measures of this step's casts from scales alone, fp64 ``[11]`` each."""
        if not self._scales:
            return {}
        largest = [reduce(torch.maximum, calls) for calls in self._scales.values()]
        scale = torch.stack(largest).to(torch.float64)
        schemes = [self._slots[key].scheme for key in self._scales]
        limits = [scheme.largest for scheme in schemes if scheme is not None]
        is_known = scale != -math.inf  # casts without values have no scale
        is_bad = is_known & ~scale.isfinite()
        table = nothing(scale.device).repeat(len(scale), 1)
        set_(
            table,
            amax=scale * scale.new_tensor(limits),
            scale=scale,
            minus_scale=-scale.abs(),
            minus_rank=torch.where(is_bad, -float(self._rank), -math.inf),
            # As if each cast had one value.
            values=is_known,
            nonfinite=is_bad,
            signal=math.nan,  # the SQNR is not known
        )
        return dict(zip(self._scales, table, strict=True))


def recordings_in(folder: Path) -> list[Path]:
    """Return the recordings in a folder and its subfolders, by step; also incomplete ones."""
    files = [path for depth in ("", "*/") for path in folder.glob(f"{depth}step*/rank*.pt")]
    folders = {path.parent for path in files}
    return sorted(folders, key=lambda path: ([*map(int, re.findall(r"\d+", path.name))], path))


def text_of(anomaly: Anomaly) -> str:
    """Return the text of an anomaly of a scale, without the step, the layer and the operand."""
    if anomaly.what == "non-finite":
        return "a scale that is not finite"
    return str(anomaly).split(": ", 3)[3]


def _largest(scales: Scales) -> Tensor:
    levels = [fp32_scales(scale) for scale in scales]
    if not all(scale.numel() for scale in levels):
        return levels[0].new_full((), -math.inf)
    return reduce(torch.mul, [scale.max() if scale.ndim else scale for scale in levels])


def _state_of(tensor: Tensor) -> _State:
    """Version and storage size of a tensor; a write or a freed storage changes them."""
    return version_of(tensor), tensor.untyped_storage().nbytes()


def _exit(number: int, _: Any) -> None:
    sys.exit(128 + number)


def _free_signal() -> None:
    if signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _file_name(rank: int) -> str:
    return f"rank{rank:05d}.pt"


def _low(low: Quantized, layout: Layout | None, rank: int) -> Record:
    whole = low.qdata if layout is None else layout
    shape = [*whole.shape]
    pieces = [[[*piece] for piece in dim] for dim in local_pieces(whole)]
    if len(shape) > low.qdata.ndim:  # a matrix of all rows, which was cast again by rows
        rows = len(low.qdata)
        shape = [rows, shape[-1]]
        pieces = [[[0, rows]], pieces[-1]]
    return {
        "ranks": [rank] if layout is None else layout.mesh.mesh.flatten().tolist(),
        "shape": shape,
        "pieces": pieces,
        "start": [*low.start],
        "qdata": low.qdata,
        "scales": [*low.scales],
        "scheme": low.scheme.key,
    }


def _copied(record: Record, device: str | None = None) -> Record:
    """Return a copy of a record, whose tensors have their own storages and the same strides."""
    sizes: list[int] = []

    def copy(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor.detach().clone(memory_format=torch.preserve_format).to(device)

    return {**tree_map_only(Tensor, copy, record), "bytes": sum(sizes)}


def record(
    model: nn.Module,
    folder: str | os.PathLike[str],
    steps: int = 8,
    layers: Patterns = (),
    *,
    max_bytes: int = 2**30,
    mesh: DeviceMesh | None = None,
) -> Recorder:
    """Record the last steps' casts, and write them when something goes wrong.

    ::

        with record(model, "recordings"):
            for batch in batches:
                loss = model(batch); loss.backward()
                optimizer.step(); optimizer.zero_grad()

    ``python -m fp8_dist.debug.replay recordings`` then repeats the casts and GEMMs on one CPU, and
    reports the first error.

    A step ends when an optimizer steps (before it calls a closure), and when the block ends, so a
    block may have one step or many. If several models train in turn, give each its own block in
    each step. ``recorder.at(step)`` sets the number of the next block's first step. Where a block
    does not fit, call ``recorder.start()`` and ``recorder.stop()``.

    For the last ``steps`` steps, the recorder keeps the largest scale of every cast. In the layers
    that ``layers`` names, it also copies the tensors: each operand before its cast, its float8 copy
    and scales, and the operands and the result of each float8 GEMM. In other layers, it keeps the
    casts of the current step without a copy, as far as ``max_bytes`` allows. If the scales of such
    a layer show an anomaly (values that are not finite, or a jump of the amax, see
    :class:`AnomalyLimits`), its tensors are copied in the next step.

    All ranks write at the end of a step with the first anomaly of its kind in a layer, and at the
    end of the next step, at most 16 times. A rank writes alone when an exception leaves the block,
    when the program ends while it records (by SIGTERM, for example), and in ``recorder.write()``. A
    rank that waits in a collective handles SIGTERM when the collective ends or fails. A recording
    is a folder such as ``folder/step000012``, or ``step000012-2`` for the second one of a step. It
    gets this name when all ranks have written, so ranks on several machines need a shared
    ``folder``. Each recorder needs its own. Recordings of earlier runs stay.

    Recorded steps run eagerly, even compiled code. While the recorder is off, there is no overhead.
    A model without converted layers has nothing to record.

    Args:
        model: a model that is already converted and parallelized.
        folder: the folder of the recordings. It is created if necessary.
        steps: the number of steps to keep.
        layers: an ``fnmatch`` pattern of the layers whose tensors are recorded in each step, or
            several patterns; ``"*"`` means all.
        max_bytes: the largest size of the tensors that this rank keeps, on their device. Casts of
            layers that are not named are dropped first, then the oldest records. On a CPU, these
            casts take at most 1/128 of it, because steps are slower while memory is kept.
        mesh: as in :func:`float8_stats`.

    Collectives: those of :func:`float8_stats` at the end of each step. None to write.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``steps`` or ``max_bytes`` is not a positive integer, or a pattern matches no
            layer. When the first step ends: as :func:`float8_stats`.
        OSError: the folder can't be created.
    """
    for name, value in (("steps", steps), ("max_bytes", max_bytes)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"record: {name}={value!r} must be a positive integer")
    if not isinstance(mesh, DeviceMesh | None):
        raise TypeError(f"record: mesh={mesh!r} must be a DeviceMesh")
    return Recorder(model, Path(folder).absolute(), steps, layers, max_bytes, mesh)
