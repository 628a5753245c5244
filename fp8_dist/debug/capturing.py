"""``capture``: files with the inputs and outputs of casts, by layer, operand, step and rank."""

import os
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fp8_dist.debug.captured_cast import CapturedCast, FileFormat, check_format, save_capture
from fp8_dist.debug.recorder import Patterns, Slot, StepRecorder, choose_slots, own_rank
from fp8_dist.linear.module import float8_layers
from fp8_dist.linear.observing import Owner
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import Quantized, Scales, Start

Numbers = int | Collection[int] | None


class _Copies(NamedTuple):
    """CPU copies of the input and output of a cast."""

    high: torch.Tensor
    qdata: torch.Tensor
    scales: Scales
    scheme: str
    start: Start


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
        model: nn.Module,
        slots: list[Slot],
        folder: Path,
        steps: Collection[int] | None,
        ranks: Collection[int] | None,
        max_bytes: int,
        format: FileFormat,
    ) -> None:
        super().__init__("capture")
        self.files: list[Path] = []
        self.bytes = 0
        self.left_out = 0
        self._folder, self._steps, self._ranks = folder, steps, ranks
        self._max_bytes, self._format = max_bytes, format
        self._slots = {slot.key: slot for slot in slots}
        self._inputs = {slot.owner: slot for slot in slots if slot.operand == "input"}
        # The names of prepared inputs that chosen layers take. Other ones are not copied.
        self._prepared_by = {
            name
            for layer in float8_layers(model).values()
            if layer.float8_weight in self._inputs
            for name in layer.prepared_by
        }
        self._calls: Counter[Slot] = Counter()
        self._full = ""  # the reason why nothing more is written, if so
        self._missing: list[Slot] = []  # the casts that were left out in this step

    def _is_recorded(self, step: int) -> bool:
        return self._steps is None or step in self._steps

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

    def on_casts(
        self,
        owner: Owner,
        operand: Operand,
        high: torch.Tensor,
        lows: Mapping[tuple[Gemm, ...], Quantized],
    ) -> None:
        """Save the casts of an operand."""
        for gemms, low in lows.items() if self._is_chosen_rank() else ():
            if slot := self._slots.get((owner, operand, gemms)):
                size = high.nbytes + low.qdata.nbytes + sum(s.nbytes for s in low.scales)
                if self._has_room(slot, size):
                    self._write(slot, _copies(high, low))

    def on_prepared_cast(self, owner: Owner, high: torch.Tensor, low: Quantized) -> _Copies | None:
        """Copy the cast of an input that several layers share."""
        if self._full or not self._is_chosen_rank() or owner.fqn not in self._prepared_by:
            return None
        # Copy now, because compiled code may reuse the memory before a layer takes the input.
        return _copies(high, low)

    def on_prepared_use(self, owner: Owner, kept: _Copies | None) -> None:
        """Save a prepared input for a layer that takes it."""
        slot = self._inputs.get(owner)
        if slot is None or not self._is_chosen_rank():
            return
        size = sum(t.nbytes for t in (*kept[:2], *kept.scales)) if kept else 0
        if self._has_room(slot, size) and kept:
            self._write(slot, kept)

    def __repr__(self) -> str:
        return (
            f"Capture(files: {len(self.files)}, bytes: {self.bytes:,}, left out: {self.left_out})"
        )

    def _is_chosen_rank(self) -> bool:
        return self._ranks is None or own_rank() in self._ranks

    def _has_room(self, slot: Slot, size: int) -> bool:
        if not self._full and self.bytes + size > self._max_bytes:
            self._full = (
                f"{self.bytes:,} bytes are written and the next cast has {size:,}, which is more "
                f"than max_bytes={self._max_bytes:,}. Raise it, or choose fewer layers, operands, "
                "steps or ranks"
            )
        if self._full:
            self._missing.append(slot)
        return not self._full

    def _write(self, slot: Slot, copies: _Copies) -> None:
        assert slot.operand is not None
        captured = CapturedCast(
            step=self.step,
            rank=own_rank(),
            fqn=slot.fqn,
            operand=slot.operand,
            gemms=slot.gemms,
            call=self._calls[slot],
            delayed=slot.delayed,
            **copies._asdict(),
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


def _copies(high: torch.Tensor, low: Quantized) -> _Copies:
    qdata = _on_cpu(low.qdata.reshape(high.shape))
    scales = tuple([_on_cpu(scale) for scale in low.scales])
    return _Copies(_on_cpu(high), qdata, scales, low.scheme.key, low.start)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU copy with its own storage, because files contain whole storages."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)


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
    cast is saved in a file of its own. The name of the file has the step, rank, layer, operand,
    GEMMs and call (the micro-batch, if a layer runs once in each). A forward that activation
    checkpointing repeats makes no files. Files are written atomically, and replace files of the
    same name. ``python -m fp8_dist.debug.show FILE`` shows the contents of a file, and
    :func:`load_capture` returns them.

    This works with every recipe, with FSDP2, tensor and sequence parallelism, in eager and compiled
    code. Compiled code is compiled once more when it is first recorded. The tensors are local to
    the rank, such as the shard of a weight that FSDP2 gathers in float8, or a part of the sequence.
    Outside of recorded blocks, neither eager code nor graphs have additional operators.

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
    slots = choose_slots("capture", model, fqn, operand, gemm)
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
    return Capture(model, slots, made, chosen_steps, chosen_ranks, max_bytes, format)


def _numbers(argument: str, given: Numbers) -> Collection[int] | None:
    """Check a choice of steps or ranks, and return it as a collection."""
    if given is None:
        return None
    several: Any = [given] if isinstance(given, int) else given
    if isinstance(several, range) and several:
        ends: Any = (several[0], several[-1])  # enough to check, as a range may be long
    else:
        ends = several
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
    return several if isinstance(several, range) else frozenset(several)
