"""``comm_audit``: a recorder of every collective.

Terms: ``collectives.py`` defines *collective* and *buffer*. In a *mixed gather*, FSDP2 copies
parameters of several dtypes into one uint8 buffer, and gathers the buffer. Float8 is sent as uint8:
the *payload dtype* of a uint8 tensor is the dtype of the tensor that it is a view of.

The parts of a message, such as float8 rows and their scales (``pack_rows``), count under their own
dtypes.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from fp8_dist.debug.collectives import Collective, read_collective
from fp8_dist.debug.module_path import ModulePath
from fp8_dist.device import is_float8
from fp8_dist.kernels.e2m1 import E2M1_X2
from fp8_dist.kernels.encoding import encode_float8, pack_rows
from fp8_dist.operand.state import QUERIES
from fp8_dist.tensor.float8_tensor import Float8Tensor
from fp8_dist.text import aligned
from fp8_dist.torch_internals import STAND_INS, OpOverload, TorchDispatchMode


@dataclass(frozen=True)
class CommRow:
    """Sum of the collectives that differ only in size.

    Attributes:
        op: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"``, ...; the
            qualified name of an op whose arguments this library doesn't know, such as
            ``"symm_mem::one_shot_all_reduce"``.
        axis: the mesh axis of the process group; ``"world"`` for the default group,
            ``"group NAME"`` for a group of no mesh, ``"unknown"`` if the op does not name a group.
        dtype: the payload dtype; float4_e2m1fn_x2 for packed values of MXFP4.
        module: the FQN of the innermost module that was running, in forward or backward; ``""`` for
            the outermost module and for code outside of modules. Submodules of a compiled module
            count as the compiled module.
        in_mixed_gather: whether the messages with these elements (FSDP2's gathers, packed rows,
            encoded summands) are counted in the row of another dtype.
        count: the number of collectives; 0 if ``in_mixed_gather``.
        elements: the number of elements in the buffers, summed over the collectives. Packed values
            count one by one.
        bytes: the size of these elements in bytes. The buffer is the output of an all-gather, the
            input of a reduce-scatter, the tensor of an all-reduce, or the largest tensor argument
            of an op that this library doesn't know.
        bf16_bytes: the size without float8. An element of float8 or MXFP4 counts 2 bytes, even in
            gradients, which might otherwise be reduced in fp32. Amaxes (all-reduces of int32 or
            uint8) and scales of blocks (uint8 in a message with float8) count 0. Everything else
            counts its size, even fp32 scales of rows: they can't be told from fp32 parameters.
    """

    op: str
    axis: str
    dtype: torch.dtype
    module: str
    in_mixed_gather: bool
    count: int
    elements: int
    bytes: int
    bf16_bytes: int
    bytes_within: int = 0
    bytes_between: int = 0

    @property
    def float8_bytes(self) -> int:
        """``bytes`` if the payload is float8, or packed values of four bits, else 0."""
        return self.bytes if _is_low(self.dtype) else 0

    @property
    def other_bytes(self) -> int:
        """``bytes`` if the payload is in high precision, else 0."""
        return self.bytes - self.float8_bytes


# The fields of a CommRow with what is sent, and their headings; all fields that are summed.
_SENT = {"bytes_within": "within nodes", "bytes_between": "between nodes"}
_NUMBERS: dict[str, Any] = dict.fromkeys(("count", "elements", "bytes", "bf16_bytes", *_SENT), 0)


class CommTable:
    """The rows of collectives, and their totals."""

    def __init__(self, rows: Iterable[CommRow] = (), gpus_per_node: int | None = None) -> None:
        self.gpus_per_node = gpus_per_node
        self._rows: dict[CommRow, CommRow] = {}  # keyed by the row with its numbers set to 0
        for row in rows:
            self.add(row)

    @property
    def rows(self) -> list[CommRow]:
        """One row per (op, axis, dtype, module, in_mixed_gather), in the order of appearance."""
        return list(self._rows.values())

    @property
    def bytes(self) -> int:
        """The sum of the bytes of all rows."""
        return sum(row.bytes for row in self.rows)

    def add(self, row: CommRow) -> None:
        """Add a row to the table, or its numbers to the row with the same key if there is one."""
        key = replace(row, **_NUMBERS)
        total = self._rows.get(key, key)
        sums = {name: getattr(total, name) + getattr(row, name) for name in _NUMBERS}
        self._rows[key] = replace(row, **sums)

    def count(
        self,
        op: str | None = None,
        axis: str | None = None,
        dtype: torch.dtype | None = None,
        module: str | None = None,
    ) -> int:
        """Return the number of collectives in the rows that match; ``None`` matches everything.

        A mixed gather is counted under its float8 dtype, or under its first dtype if it has no
        float8.
        """
        return sum(
            row.count
            for row in self.rows
            if op in (None, row.op)
            and axis in (None, row.axis)
            and dtype in (None, row.dtype)
            and module in (None, row.module)
        )

    def without_modules(self) -> "CommTable":
        """Return a table of the same collectives, summed over modules."""
        return CommTable((replace(row, module="") for row in self.rows), self.gpus_per_node)

    def table(self, by_module: bool = False, baseline: bool = False) -> str:
        """Return the rows as text, with totals.

        A ``+`` in place of a count marks data whose messages another line, of the same op and axis,
        counts. With ``gpus_per_node``, two columns have ``bytes_within`` and ``bytes_between`` of
        :class:`CommRow`.

        Args:
            by_module: return one line per module.
            baseline: add a column ``in bf16``: what the same collectives would send without float8
                (``bf16_bytes`` of :class:`CommRow`).
        """
        rows = self.rows if by_module else self.without_modules().rows
        if not rows:
            return "no collectives"
        numbers = {"bytes": "bytes"}
        if baseline:
            numbers["bf16_bytes"] = "in bf16"
        if self.gpus_per_node is not None:
            numbers |= _SENT
        lines = [["op", "axis", "dtype", "count", "elements", *numbers.values(), "module"]]
        for row in rows:
            count = "+" if row.in_mixed_gather else f"{row.count:,}"
            dtype = str(row.dtype).removeprefix("torch.")
            sizes = [f"{getattr(row, name):,}" for name in ("elements", *numbers)]
            lines.append([row.op, row.axis, dtype, count, *sizes, row.module])
        float8 = [row for row in rows if _is_low(row.dtype)]
        other = [row for row in rows if not _is_low(row.dtype)]
        for name, part in (("total", rows), ("  float8", float8), ("  other", other)):
            count = f"{self.count():,}" if part is rows else ""
            sizes = [f"{sum(getattr(row, number) for row in part):,}" for number in numbers]
            lines.append([name, "", "", count, "", *sizes, ""])
        end = 5 + len(numbers)
        return aligned([line[: end + by_module] for line in lines], right=range(3, end))


class CommAudit(CommTable):
    """The context manager that :func:`comm_audit` returns, with the rows that it recorded."""

    def __init__(self, mesh: DeviceMesh | None, gpus_per_node: int | None = None) -> None:
        super().__init__(gpus_per_node=gpus_per_node)
        self._axes = {} if mesh is None else _axes_by_group_name(mesh)
        self._block: ExitStack | None = None

    def __enter__(self) -> Self:
        if self._block is not None:
            raise RuntimeError(
                "this comm_audit is already recording; use a new one for a nested block"
            )
        self._block = ExitStack()
        path = self._block.enter_context(ModulePath())
        self._block.enter_context(_Recorder(self, self._axes, path))
        return self

    def __exit__(self, *error: Any) -> None:
        block, self._block = self._block, None
        assert block is not None
        block.close()

    def __repr__(self) -> str:
        return f"CommAudit({self.count()} collectives, {self.bytes:,} bytes)"


def comm_audit(mesh: DeviceMesh | None = None, *, gpus_per_node: int | None = None) -> CommAudit:
    """Record every collective that runs inside the block, FSDP2's included.

    ::

        with comm_audit(mesh) as audit:
            loss = model(x); loss.backward(); optimizer.step()
        print(audit.table())

    Every call of an op of torch's communication namespaces is recorded, with two exceptions:
    barriers, waits and signals, which move no data, and the comparison of a model's layers between
    ranks (16 bytes per axis, when a plan is applied and at the first update of scales).

    Compiled code is not recompiled. Its collectives, including those of submodules, are recorded
    under the compiled module. Float8 that this library sends is shown as float8. Float8 that other
    code sends as uint8 is shown as uint8 if inductor fuses the view into a kernel. Three things are
    not recorded: communication inside the kernel of a custom op, graphs that run without Python
    (CUDA graphs, AOTInductor), and direct reads of symmetric memory.

    The bytes are the sizes of buffers (see :class:`CommRow`). With ``gpus_per_node`` each row also
    has the bytes that this GPU sends within its node and between nodes: what NCCL's rings and flat
    all-to-alls send, by the formulas of docs/communication.md. They are not measured.

    ``torch.profiler`` measures the durations of collectives.

    Args:
        mesh: a mesh whose axis names are reported for the process groups of its axes. For example,
            the only axis of a one-dimensional mesh over all ranks is the default group.
        gpus_per_node: the number of ranks on each node. Global rank r is on node
            ``r // gpus_per_node``, as torchrun numbers ranks.

    Returns:
        A context manager with ``.rows`` (a list of :class:`CommRow`), ``.count(...)`` and
        ``.table()``. They stay valid after the block, even if the block raised an error. Another
        ``with`` block on the same object adds to them.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: ``gpus_per_node`` is not a positive integer.
        RuntimeError: the context manager is entered again inside its own block.
    """
    if not isinstance(mesh, DeviceMesh | None):
        raise TypeError(
            f"comm_audit takes a DeviceMesh, got {mesh!r}; pass the mesh whose axes name the "
            "groups, or None"
        )
    if gpus_per_node is not None and (type(gpus_per_node) is not int or gpus_per_node < 1):
        raise ValueError(f"comm_audit: gpus_per_node={gpus_per_node!r} must be a positive integer")
    return CommAudit(mesh, gpus_per_node)


def _is_low(dtype: torch.dtype) -> bool:
    """Return whether a dtype is float8, or that of packed values of four bits."""
    return is_float8(dtype) or dtype is E2M1_X2


def _bf16_bytes(op: str, dtype: torch.dtype, elements: int, nbytes: int, first: torch.dtype) -> int:
    """Return ``bf16_bytes`` of the part of a message in ``dtype``. ``first``: its first dtype."""
    if _is_low(dtype):
        return elements * torch.bfloat16.itemsize
    is_amax = op == "all_reduce" and dtype in (torch.int32, torch.uint8)
    is_scale = _is_low(first) and dtype == torch.uint8
    return 0 if is_amax or is_scale else nbytes


def _part(sent: int, begin: int, end: int, whole: int) -> int:
    """Return what bytes ``begin`` to ``end`` have of what is sent, rounded so that parts add up."""
    whole = max(1, whole)
    return sent * end // whole - sent * begin // whole


def _axes_by_group_name(mesh: DeviceMesh) -> dict[str, str]:
    names = mesh.mesh_dim_names or [f"axis {i}" for i in range(mesh.ndim)]
    groups = [group.group_name for group in mesh.get_all_groups()]
    # If several axes have the same group, the first one names it.
    return dict(reversed(list(zip(groups, names, strict=True))))


class _Recorder(TorchDispatchMode):
    """Dispatch mode that adds the collectives of a block to a table."""

    def __init__(self, table: CommTable, axes: dict[str, str], path: ModulePath) -> None:
        super().__init__()
        self._table = table
        self._axes = axes
        self._path = path
        # The payload dtypes of storages that were viewed as uint8. Weak references to one storage
        # are equal, and keep its address from being reused.
        self._payload_dtypes: dict[StorageWeakRef, torch.dtype] = {}
        # The bytes of each payload dtype in messages of several tensors (such as the inputs of
        # FSDP2's all-gathers), keyed by the message's storage.
        self._messages: dict[StorageWeakRef, dict[torch.dtype, int]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile still compiles code inside the block."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = read_collective(func, args, kwargs) if isinstance(func, OpOverload) else None
        # A Float8Tensor is recorded here, as float8: this mode is off while its handler sends the
        # message as uint8. For other subclasses, the ops that their handlers call are recorded.
        if any(_rewrites_ops(kind) and not (call and kind is Float8Tensor) for kind in types):
            return NotImplemented
        if call is not None:
            self._record(call)
        elif func in QUERIES and not any(issubclass(kind, STAND_INS) for kind in types):
            with self:  # the query may communicate
                return QUERIES[func](*args, **kwargs)
        result = func(*args, **kwargs)
        if func is torch.ops.aten.view.dtype and args[1] == torch.uint8 != args[0].dtype:
            self._payload_dtypes[_storage(args[0])] = args[0].dtype
        elif str(func) == "fsdp.all_gather_copy_in.default":
            # FSDP2 copies all its inputs into the buffer of the next all-gather.
            self._register_message(message=args[1], parts=args[0])
        elif func is pack_rows.overload:
            self._register_message(result, [args[0], *args[1]], result.nbytes)
        elif func is encode_float8.overload:
            self._payload_dtypes[_storage(result[0])] = torch.float8_e4m3fn
        return result

    def _register_message(
        self, message: torch.Tensor, parts: Iterable[torch.Tensor], nbytes: int = 0
    ) -> None:
        """Register the payload dtypes of a message of ``parts`` that is padded to ``nbytes``."""
        sizes = self._bytes_by_dtype(parts)
        if sizes.keys() - {torch.uint8}:
            # Padding counts as the first dtype.
            sizes[next(iter(sizes))] += max(0, nbytes - sum(sizes.values()))
            self._messages[_storage(message)] = sizes

    def _record(self, collective: Collective) -> None:
        """Add the rows of a collective to the table."""
        shares = self._bytes_by_dtype(collective.tensors).items()
        # The row of the first dtype counts the collective, so float8 comes first.
        by_dtype = sorted(shares, key=lambda item: not _is_low(item[0]))
        # Collectives without bytes, or without tensors, are counted too.
        by_dtype = [item for item in by_dtype if item[1]] or by_dtype[:1] or [(torch.uint8, 0)]
        first_dtype = by_dtype[0][0]

        whole = sum(share for _, share in by_dtype) * collective.factor
        gpus_per_node = self._table.gpus_per_node
        within, between = 0, 0
        if gpus_per_node is not None:
            within, between = collective.sent(whole, gpus_per_node)

        done = 0
        for position, (dtype, share) in enumerate(by_dtype):
            nbytes = share * collective.factor
            values_per_element = 2 if dtype is E2M1_X2 else 1
            elements = nbytes * values_per_element // dtype.itemsize
            before = done
            done += nbytes

            row = CommRow(
                op=collective.op,
                axis=_axis_name(collective.group, self._axes),
                dtype=dtype,
                module=self._path.current,
                in_mixed_gather=position > 0,
                count=1 if position == 0 else 0,
                elements=elements,
                bytes=nbytes,
                bf16_bytes=_bf16_bytes(collective.op, dtype, elements, nbytes, first_dtype),
                bytes_within=_part(within, before, done, whole),
                bytes_between=_part(between, before, done, whole),
            )
            self._table.add(row)

    def _bytes_by_dtype(self, tensors: Iterable[torch.Tensor]) -> dict[torch.dtype, int]:
        """Return the bytes by payload dtype, in the order of first appearance."""
        sizes: Counter[torch.dtype] = Counter()
        for tensor in tensors:
            parts = [tensor]
            if isinstance(tensor, Float8Tensor):  # the scales of rows are sent in the same message
                parts = [tensor.qdata, *[scale for scale in tensor.scales if scale.ndim]]
            for part in parts:
                storage = _storage(part)
                viewed = self._payload_dtypes.get(storage, part.dtype)
                if storage in self._messages:
                    # Remove the entry, because a graph may reuse the memory for another message.
                    sizes.update(self._messages.pop(storage))
                else:
                    sizes[viewed if part.dtype == torch.uint8 else part.dtype] += part.nbytes
        return sizes


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _axis_name(group: dist.ProcessGroup | None, axes: dict[str, str]) -> str:
    if group is None:
        return "unknown"
    # torch describes the default group as default_pg, and the group of an axis as mesh_AXIS.
    nameless, described = f"group {group.group_name}", group.group_desc
    known = {"default_pg": "world", "": nameless, "undefined": nameless}
    return axes.get(group.group_name, known.get(described, described.removeprefix("mesh_")))


def _rewrites_ops(kind: Any) -> bool:
    """Return whether a tensor type turns an op into other ops. Fake tensors leave it to a mode."""
    has_handler = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return has_handler and not issubclass(kind, STAND_INS)
