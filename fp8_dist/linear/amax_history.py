"""Delayed scaling: the scale of an operand from the amaxes of earlier steps.

A cast then needs no all-reduce. What a step saw is recorded on each rank, and
:func:`fp8_dist.sync_float8_amax_and_scale_history` reduces the amaxes of all operands of a model at
once and takes the next scales from their histories.

Until a history holds a value (before the first sync, and as long as an operand was all zeros) the
scale is that of the tensor itself. Between two syncs an operand's scale does not change, and a
recorded amax is the maximum over all of its casts: micro-batches add up, and a forward that
activation checkpointing repeats changes nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from fp8_dist.cast import (
    Copies,
    amax_groups,
    as_copies,
    copies_by,
    flat_copies,
)
from fp8_dist.config import CastSpec, CopySpec
from fp8_dist.kernels import Scaling, amax, cast_and_record, empty_copies, scaling_from_amax
from fp8_dist.linear.scale_query import copies, must_query, owner_of, query, register_handle
from fp8_dist.linear.streams import keep_for_current_stream
from fp8_dist.mesh import all_reduce_max, local_tensor, reduce_amax
from fp8_dist.torch_internals import is_captured, is_selectively_checkpointed


class AmaxHistory:
    """The amaxes of one operand of one layer, and the scale that follows from them.

    Attributes:
        cast_as: how the operand is cast.
        length: how many amaxes are kept.
        power_of_2: round the quantization multiplier down to a power of two.
        history: fp32, the newest first, at most ``length`` of them; ``None`` before the first.
        scaling: (multiplier, scale) that follow from the history; ``None`` without one.
        current: fp32, 0-dim, the local amax since the last sync; ``None`` if there was no cast.
        mesh: where the operand is a DTensor whatever the layer's weight is; else ``None``.
    """

    def __init__(
        self, cast: CastSpec, length: int, power_of_2: bool, mesh: DeviceMesh | None = None
    ) -> None:
        self.cast_as = cast
        self.length = length
        self.power_of_2 = power_of_2
        self.history: torch.Tensor | None = None
        self.current: torch.Tensor | None = None
        self.scaling: Scaling | None = None
        self.mesh = mesh
        self._last: torch.Tensor | None = None
        self._handle = register_handle(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._handle = register_handle(self)  # a copy is another history

    def scaling_of(self, tensor: torch.Tensor, record: bool = True) -> Scaling:
        """The (multiplier, scale) to cast a tensor with; both NaN if it holds a non-finite value.

        With ``record`` the amax of the tensor is recorded; else :meth:`recorded` may do so later.

        Collectives: none, but while there is no history those of a dynamic cast.
        """
        groups = amax_groups(tensor)
        local = local_tensor(tensor)
        if must_query():
            return history_scaling.overload(local, self._handle, record, list(groups))
        return self._scaling_of_local(local, record, groups)

    def copies_of(self, tensor: torch.Tensor, copies: Sequence[CopySpec], record: bool) -> Copies:
        """Float8 copies of a tensor's local part; as :meth:`scaling_of`."""
        if torch.compiler.is_compiling():
            x, transposed = local_tensor(tensor), [copy.transposed for copy in copies]
            scale, *data = history_copies.overload(
                x, self._handle, self.cast_as.dtype, transposed, record, list(amax_groups(tensor))
            )
            return as_copies(x, copies, data, [scale])
        return self.scaled_copies_of(tensor, copies, record)[1]

    def scaled_copies_of(
        self, tensor: torch.Tensor, copies: Sequence[CopySpec], record: bool
    ) -> tuple[Scaling, Copies]:
        """:meth:`copies_of` outside of graphs, with the scaling."""
        x = local_tensor(tensor)
        if is_selectively_checkpointed():
            scaling = self.scaling_of(tensor, record)
            return scaling, copies_by(x, copies, {self.cast_as: scaling})
        return self._copies_of_local(x, copies, record, amax_groups(tensor))

    def _copies_of_local(
        self, x: torch.Tensor, copies: Sequence[CopySpec], record: bool, groups: Sequence[str]
    ) -> tuple[Scaling, Copies]:
        if self.scaling is None or is_captured(x):
            scaling = self._scaling_of_local(x, record, groups)
            return scaling, copies_by(x, copies, {self.cast_as: scaling})
        multiplier, scale = (number.to(x.device) for number in self.scaling)
        transposed = [copy.transposed for copy in copies]
        recorded = self.current.to(x.device) if record and self.current is not None else None
        dtype = self.cast_as.dtype
        value, scale, largest, *data = cast_and_record(
            x, multiplier, scale, dtype, transposed, recorded
        )
        self._last = None if record else value
        if record:
            self.current = largest
        return (multiplier, scale), as_copies(x, copies, data, [scale])

    def recorded(self, scale: torch.Tensor) -> torch.Tensor:
        """Record the amax of the last cast, if it was not recorded yet; returns its scale."""
        if must_query():
            return record_amax.overload(scale, self._handle)
        self.record_later()
        return scale

    def _scaling_of_local(self, x: torch.Tensor, record: bool, groups: Sequence[str]) -> Scaling:
        if is_captured(x):
            raise NotImplementedError(
                "a CUDA graph is being captured, and would replay one step of a DELAYED scale: its "
                "amax history is kept by Python. Use ScalingType.DYNAMIC, or torch.compile"
            )
        value = amax(x)
        if self.scaling is None:
            value = all_reduce_max(value, groups)
        self._last = value
        if record:
            self._record_last()
        if self.scaling is None:
            return scaling_from_amax(value, self.cast_as.dtype, self.power_of_2)
        multiplier, scale = (t.to(value.device) for t in self.scaling)
        poison = value * 0  # 0, or NaN
        return multiplier + poison, scale + poison

    def _record_last(self) -> None:
        value, self._last = self._last, None
        if value is not None:
            # The same op the first time too: selective activation checkpointing counts them.
            current = value if self.current is None else self.current.to(value.device)
            self.current = torch.maximum(current, value)

    def record_later(self) -> None:
        """:meth:`_record_last`, perhaps on another stream than the cast."""
        if self._last is not None:
            keep_for_current_stream([self._last])
        self._record_last()

    def load(self, history: torch.Tensor) -> None:
        """Continue from a saved history, cut to this one's length; without values: anew."""
        self.current = self.history = self.scaling = self._last = None
        history = history.detach()[: self.length]
        if len(history):
            advance_to([self], history.to(torch.float32).clone().unsqueeze(0))


@query(
    "history_copies(Tensor x, Tensor handle, ScalarType dtype, bool[] transposed, bool record, "
    "str[] groups) -> Tensor[]"
)
def history_copies(
    x: torch.Tensor,
    handle: torch.Tensor,
    dtype: torch.dtype,
    transposed: Sequence[bool],
    record: bool,
    groups: list[str],
) -> list[torch.Tensor]:
    """The scale and the copies of :meth:`AmaxHistory.copies_of` a local tensor."""
    history = owner_of(handle)
    copies = [CopySpec(history.cast_as, turned) for turned in transposed]
    return flat_copies(history._copies_of_local(x, copies, record, groups)[1])


@history_copies.register_fake
def _history_copies_fake(
    x: torch.Tensor,
    handle: torch.Tensor,
    dtype: torch.dtype,
    transposed: Sequence[bool],
    record: bool,
    groups: list[str],
) -> list[torch.Tensor]:
    return [x.new_empty((), dtype=torch.float32), *empty_copies(x, dtype, transposed)]


@query("history_scaling(Tensor x, Tensor handle, bool record, str[] groups) -> (Tensor, Tensor)")
def history_scaling(
    x: torch.Tensor, handle: torch.Tensor, record: bool, groups: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """:meth:`AmaxHistory.scaling_of` of a local tensor."""
    m, scale = copies([owner_of(handle)._scaling_of_local(x, record, groups)], x.device)
    return m, scale


@query("record_amax(Tensor scale, Tensor handle) -> Tensor")
def record_amax(scale: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """:meth:`AmaxHistory.recorded`."""
    owner_of(handle).record_later()
    return scale.clone()


history_scaling.register_fake(
    lambda x, *_: (x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float32))
)
record_amax.register_fake(lambda scale, handle: torch.empty_like(scale))


def load_histories(
    histories: Mapping[str, AmaxHistory],
    saved: Mapping[str, torch.Tensor] | None,
    meshes: Iterable[DeviceMesh],
) -> bool:
    """Continue the histories of a layer from saved ones; those that were not saved start anew.

    Args:
        histories: by name.
        saved: by name, fp32 ``[amaxes]``, the newest first. ``None``: this rank was not told.
        meshes: where the layer's operands are distributed. Ranks that were not told (a checkpoint
            that rank 0 broadcasts comes without histories) take those of the others.

    Returns:
        Whether any rank was told. If none was, the histories stay as they are.

    Collectives: an all-reduce of 4 bytes per amax that histories can hold, and 4 more per history,
    over each mesh.
    """
    none, told = torch.zeros(0, device="cpu"), saved is not None
    rows = [(saved or {}).get(name, none) for name in histories]
    meshes = list(dict.fromkeys(meshes))
    if meshes:
        length = max(history.length for history in histories.values())
        padded = [pad(row.float().cpu(), (0, length - len(row))) for row in rows]
        merged = torch.stack([pad(row, (0, 1), value=float(told)) for row in padded])
        for mesh in meshes:
            merged = reduce_amax(merged.to(mesh.device_type), mesh, range(mesh.ndim))
        told = bool(merged[0, -1] > 0)
        # What was padded is 0, and an amax in a history is not.
        rows = [row[row > 0] for row in merged[:, :-1]]
    if told:
        for history, row in zip(histories.values(), rows, strict=True):
            history.load(row)
    return told


def advance(histories: Sequence[AmaxHistory], values: torch.Tensor) -> None:
    """End a step in which the operands had the given global amaxes (fp32, one for each).

    A non-finite amax is left out: it has been seen in the step itself, whose update may have been
    skipped for that reason. So is 0, which is also what a rank without a cast reports.
    """
    same_size: dict[Any, list[int]] = {}
    on_host: list[float] = []
    for i, history in enumerate(histories):
        history.current = None
        filled = 0 if history.history is None else len(history.history)
        if not filled:
            # The one moment at which values decide on the host; they are the same on all ranks.
            on_host = on_host or values.tolist()
            if not 0 < on_host[i] < math.inf:
                continue
        same_size.setdefault((history.length, filled), []).append(i)
    for members in same_size.values():
        group = [histories[i] for i in members]
        new = values
        if len(members) < len(histories):
            # (A tensor of indices would be copied to a GPU, and the host would wait for that.)
            each = values.unbind()
            new = torch.stack([each[i] for i in members])
        new = new.unsqueeze(1)
        before = [history.history for history in group if history.history is not None]
        if before:
            old, length = torch.stack(before).to(values.device), group[0].length
            longer = torch.cat([new, old], dim=1)[:, :length]
            same = torch.cat([old, old[:, -1:]], dim=1)[:, :length]
            new = torch.where((new > 0) & (new < math.inf), longer, same)
        advance_to(group, new)


def advance_to(histories: Sequence[AmaxHistory], rows: torch.Tensor) -> None:
    """Give histories their new amaxes ``[histories, amaxes]``, and the scales that follow."""
    largest = rows.amax(dim=1)
    kinds = {(history.cast_as.dtype, history.power_of_2) for history in histories}
    # For every kind those of all: a launch more costs less than to pick the amaxes of a kind.
    scalings = {kind: scaling_from_amax(largest, *kind) for kind in kinds}
    for i, history in enumerate(histories):
        multipliers, scales = scalings[history.cast_as.dtype, history.power_of_2]
        history.history = rows[i]
        history.scaling = (multipliers[i], scales[i])
