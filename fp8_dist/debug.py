"""Seeing what is communicated: `comm_audit` records every collective of eager code.

Vocabulary: *collective* and *buffer* as in `collectives`; a *part* is what a buffer holds of
one dtype. Most buffers are one part. FSDP2 copies parameters of several dtypes into one uint8
buffer: such a *mixed* gather has one part per dtype. The *meaning* of a uint8 tensor is the
dtype of what it is a view of: float8 travels as uint8.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_dist.collectives import Collective, read_collective
from fp8_dist.dtypes import is_float8
from fp8_dist.module_path import ModulePath
from fp8_dist.tensor import Float8Tensor

# FSDP2's copy of all its inputs into the buffer that the next all-gather moves.
FSDP_COPY_IN = "fsdp::all_gather_copy_in"
# torch's own descriptions of groups: a mesh axis, and the default group.
AXIS_PREFIX = "mesh_"
DEFAULT_GROUP = "default_pg"

# The audits that record now, outermost first.
_active: list["CommAudit"] = []


@dataclass(frozen=True)
class CommRow:
    """The collectives of one kind.

    op: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", ...
    axis: the mesh axis of the process group; "world" for the default group, "group NAME" for
        one that no mesh knows.
    dtype: what the bytes mean: float8 that travels as uint8 is float8 here.
    module: FQN of the innermost module that was running, forward or backward; "" for the
        outermost one and for code outside of modules.
    rides: these bytes are parts of mixed gathers that another row counts.
    count: collectives; 0 where `rides`.
    elements, bytes: size of the buffers (or of their parts of this dtype), summed.
    """

    op: str
    axis: str
    dtype: torch.dtype
    module: str
    rides: bool
    count: int
    elements: int
    bytes: int

    @property
    def float8_bytes(self) -> int:
        return self.bytes if is_float8(self.dtype) else 0

    @property
    def other_bytes(self) -> int:
        return self.bytes - self.float8_bytes


class CommAudit:
    """What `comm_audit` gives; see there."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._axes = {} if mesh is None else _axes_by_group_name(mesh)
        self._path = ModulePath()
        self._recorder = _Recorder(self)
        self._rows: dict[tuple[str, str, torch.dtype, str, bool], CommRow] = {}
        # What storages hold that were seen under a uint8 view, by their address.
        self._meanings: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}
        # What FSDP2's hooks said about the group whose inputs are being collected.
        self._payloads: list[tuple[int, torch.dtype]] = []
        # Bytes per dtype of one rank's share of a buffer that FSDP2 has filled, by its address.
        self._filled: dict[int, dict[torch.dtype, int]] = {}

    @property
    def rows(self) -> list[CommRow]:
        """One row per (op, axis, dtype, module, rides), in order of first appearance."""
        return list(self._rows.values())

    def count(
        self,
        op: str | None = None,
        axis: str | None = None,
        dtype: torch.dtype | None = None,
        module: str | None = None,
    ) -> int:
        """How many collectives match; None matches everything.

        A mixed gather counts for its float8 dtype (its first one, if it has no float8).
        """
        wanted = {"op": op, "axis": axis, "dtype": dtype, "module": module}
        return sum(
            row.count
            for row in self._rows.values()
            if all(v is None or getattr(row, name) == v for name, v in wanted.items())
        )

    def table(self, by_module: bool = False) -> str:
        """The rows as text, with totals; summed over modules unless `by_module`.

        "+" instead of a count: the bytes of this line travelled inside the collectives of
        another line of the same op and axis, FSDP2's mixed gathers.
        """
        rows = self.rows if by_module else _summed_over_modules(self._rows.values())
        if not rows:
            return "no collectives"
        lines = [["op", "axis", "dtype", "count", "elements", "bytes"]]
        for row in rows:
            count = "+" if row.rides else f"{row.count:,}"
            dtype = str(row.dtype).removeprefix("torch.")
            lines.append([row.op, row.axis, dtype, count, f"{row.elements:,}", f"{row.bytes:,}"])
        total = sum(row.bytes for row in rows)
        float8 = sum(row.float8_bytes for row in rows)
        lines.append(["total", "", "", f"{self.count():,}", "", f"{total:,}"])
        lines.append(["  float8", "", "", "", "", f"{float8:,}"])
        lines.append(["  other", "", "", "", "", f"{total - float8:,}"])
        if by_module:
            names = ["module", *(row.module for row in rows), "", "", ""]
            lines = [[*line, name] for line, name in zip(lines, names, strict=True)]
        return _aligned(lines, left=(0, 1, 2, 6))

    def __enter__(self) -> Self:
        if self in _active:
            raise RuntimeError(
                "this comm_audit is already recording; use a new one for a nested block"
            )
        self._path.__enter__()
        self._recorder.__enter__()
        _active.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _active.remove(self)
        self._recorder.__exit__(kind, value, trace)
        self._path.__exit__(kind, value, trace)
        self._meanings.clear()
        self._payloads.clear()
        self._filled.clear()

    def __repr__(self) -> str:
        total = sum(row.bytes for row in self._rows.values())
        return f"CommAudit({self.count()} collectives, {total:,} bytes)"

    def _note_view(self, source: torch.Tensor) -> None:
        """`source` is about to be viewed as uint8."""
        # The weak reference keeps the storage's address from being given to another.
        reference = StorageWeakRef(source.untyped_storage())
        self._meanings[_storage(source)] = (reference, source.dtype)

    def _note_copy_in(self, inputs: list[torch.Tensor], output: torch.Tensor) -> None:
        """Remembers what FSDP2 puts into the buffer that it gathers next."""
        share = self._parts(inputs)
        for nbytes, dtype in reversed(self._payloads):
            # Newest first: hooks whose gather never happened (a group of one rank) may have
            # left notes before those of this group; they find no bytes and are dropped. So
            # are notes on bytes that are known for float8 already.
            if share.get(torch.uint8, 0) >= nbytes:
                share[torch.uint8] -= nbytes
                share[dtype] = share.get(dtype, 0) + nbytes
        self._payloads.clear()
        self._filled[_storage(output)] = share

    def _note_collective(self, collective: Collective) -> None:
        share = self._filled_share(collective) or self._parts(collective.tensors)
        # The part that stands for the whole: float8 where there is any.
        parts = sorted(share.items(), key=lambda part: not is_float8(part[0]))
        axis, rides = self._axis(collective.group), False
        for dtype, nbytes in [part for part in parts if part[1]] or parts[:1]:
            self._add(collective.op, axis, dtype, rides, nbytes * collective.factor)
            rides = True

    def _filled_share(self, collective: Collective) -> dict[torch.dtype, int] | None:
        if not self._filled or collective.op != "all_gather":
            return None
        first = collective.tensors[0]
        if isinstance(first, Float8Tensor):
            return None
        return self._filled.pop(_storage(first), None)

    def _parts(self, tensors: Iterable[torch.Tensor]) -> dict[torch.dtype, int]:
        """Bytes by meaning, in order of first appearance."""
        parts: dict[torch.dtype, int] = {}
        for tensor in tensors:
            dtype = self._meaning(tensor)
            parts[dtype] = parts.get(dtype, 0) + tensor.numel() * _travels_as(tensor).itemsize
        return parts

    def _meaning(self, tensor: torch.Tensor) -> torch.dtype:
        dtype = _travels_as(tensor)
        if dtype != torch.uint8:
            return dtype
        return self._meanings.get(_storage(tensor), (None, dtype))[1]

    def _add(self, op: str, axis: str, dtype: torch.dtype, rides: bool, nbytes: int) -> None:
        row = CommRow(
            op,
            axis,
            dtype,
            self._path.current,
            rides,
            count=0 if rides else 1,
            elements=nbytes // dtype.itemsize,
            bytes=nbytes,
        )
        key = (op, axis, dtype, row.module, rides)
        self._rows[key] = _sum(self._rows[key], row) if key in self._rows else row

    def _axis(self, group: dist.ProcessGroup) -> str:
        if group.group_name in self._axes:
            return self._axes[group.group_name]
        description = group.group_desc
        if description == DEFAULT_GROUP:
            return "world"
        if description and description != "undefined":
            return description.removeprefix(AXIS_PREFIX)
        return f"group {group.group_name}"


def comm_audit(mesh: DeviceMesh | None = None) -> CommAudit:
    """Records every collective that eager code runs inside the block, FSDP2's included.

        with comm_audit(mesh) as audit:
            loss = model(x); loss.backward(); optimizer.step()
        print(audit.table())

    mesh: gives axes their names where a process group doesn't tell its own: the default group
        is also the only axis of a mesh over all ranks.

    The result has `.rows` (list of CommRow), `.count(...)` and `.table()`; they stay after the
    block, also when it raised, and a later `with` on the same object adds to them. Compiled
    graphs are not seen. Without a process group nothing is recorded.
    """
    return CommAudit(mesh)


def note_float8_payload(nbytes: int, dtype: torch.dtype) -> None:
    """FSDP2's pre-all-gather hooks say: `nbytes` of what I just returned as uint8 are float8.

    nbytes: of this rank's share. Does nothing while no audit is active.
    """
    for audit in _active:
        audit._payloads.append((nbytes, dtype))


class _Recorder(TorchDispatchMode):
    """Sees every op, tells its audit about those that communicate."""

    def __init__(self, audit: CommAudit) -> None:
        super().__init__()
        self._audit = audit

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        call = None
        if isinstance(func, torch._ops.OpOverload):
            call = read_collective(func, args, kwargs)
        # Float8Tensor is recorded as it is, float8; what its own handler then sends (uint8) is
        # the same message, and unseen: this mode is off inside its own handler. Every other
        # subclass goes first, and is seen through what it does.
        if any(_goes_first(kind) and not (call and kind is Float8Tensor) for kind in types):
            return NotImplemented
        if call is not None:
            self._audit._note_collective(call)
        elif func is torch.ops.aten.view.dtype and args[1] == torch.uint8 != args[0].dtype:
            self._audit._note_view(args[0])
        elif _is_fsdp_copy_in(func):
            self._audit._note_copy_in(inputs=args[0], output=args[1])
        return func(*args, **kwargs)


def _goes_first(kind: Any) -> bool:
    """Whether a tensor type turns an op into others (nn.Parameter, for one, does not).

    Fake tensors do not either: their mode, not their type, handles ops.
    """
    handled = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return handled and not issubclass(kind, (FakeTensor, FunctionalTensor))


def _is_fsdp_copy_in(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func._schema.name == FSDP_COPY_IN


def _storage(tensor: torch.Tensor) -> int:
    """The address of the storage object, the same for all views."""
    return tensor.untyped_storage()._cdata


def _travels_as(tensor: torch.Tensor) -> torch.dtype:
    return tensor.qdata.dtype if isinstance(tensor, Float8Tensor) else tensor.dtype


def _axes_by_group_name(mesh: DeviceMesh) -> dict[str, str]:
    axes: dict[str, str] = {}
    for position, group in enumerate(mesh.get_all_groups()):
        name = mesh.mesh_dim_names[position] if mesh.mesh_dim_names else f"axis {position}"
        axes.setdefault(group.group_name, name)
    return axes


def _sum(a: CommRow, b: CommRow) -> CommRow:
    return replace(
        a, count=a.count + b.count, elements=a.elements + b.elements, bytes=a.bytes + b.bytes
    )


def _summed_over_modules(rows: Iterable[CommRow]) -> list[CommRow]:
    sums: dict[tuple[str, str, torch.dtype, bool], CommRow] = {}
    for row in rows:
        key = (row.op, row.axis, row.dtype, row.rides)
        row = replace(row, module="")
        sums[key] = _sum(sums[key], row) if key in sums else row
    return list(sums.values())


def _aligned(lines: list[list[str]], left: tuple[int, ...]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for line in lines:
        cells = (
            cell.ljust(width) if position in left else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)
