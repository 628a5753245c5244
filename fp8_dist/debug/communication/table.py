"""Rows of a communication audit, and their text as a table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from fp8_dist.dtypes import is_float8

RowKey = tuple[str, str, torch.dtype, str, bool]


@dataclass(frozen=True)
class CommRow:
    """Sum of the collectives that differ only in size.

    Attributes:
        op: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"``,
            ``"broadcast"``, ... A communication op whose arguments this library doesn't know is
            counted under its qualified name, such as ``"symm_mem::one_shot_all_reduce"``.
        axis: the mesh axis of the process group; ``"world"`` for the default group,
            ``"group NAME"`` for one that no mesh knows, ``"unknown"`` where an op names none.
        dtype: dtype of the payload: float8 that travels as uint8 is float8 here.
        module: FQN of the innermost module that was running, forward or backward; ``""`` for the
            outermost one and for code outside of modules. Submodules of a compiled module count as
            the compiled module.
        in_mixed_gather: these elements travelled in messages of several dtypes (FSDP2's gathers,
            encoded summands) that the row of another dtype counts.
        count: number of collectives; 0 where ``in_mixed_gather``.
        elements: number of elements of ``dtype`` in the buffers, summed over the collectives.
        bytes: size of the buffers in bytes, summed over the collectives. The buffer is the output
            of an all-gather, the input of a reduce-scatter, the tensor of an all-reduce, and the
            largest tensor argument of an op that is counted under its qualified name.
        seconds: the sum of the durations (see :func:`comm_audit`); None without ``timings``, where
            ``in_mixed_gather``, and where torch's profiler has no duration for one of them.
    """

    op: str
    axis: str
    dtype: torch.dtype
    module: str
    in_mixed_gather: bool
    count: int
    elements: int
    bytes: int
    seconds: float | None = None

    @property
    def key(self) -> RowKey:
        """Fields that the row's collectives have in common."""
        return self.op, self.axis, self.dtype, self.module, self.in_mixed_gather

    @property
    def float8_bytes(self) -> int:
        """``bytes`` if the payload is float8, else 0."""
        return self.bytes if is_float8(self.dtype) else 0

    @property
    def other_bytes(self) -> int:
        """``bytes`` if the payload is not float8, else 0."""
        return self.bytes - self.float8_bytes


class CommTable:
    """Rows of collectives, and their sums.

    Attributes:
        timings: whether the text has a column of milliseconds.
    """

    def __init__(self, rows: Iterable[CommRow] = (), timings: bool = False) -> None:
        self.timings = timings
        self._rows: dict[RowKey, CommRow] = {}
        for row in rows:
            self.add(row)

    @property
    def rows(self) -> list[CommRow]:
        """One row per (op, axis, dtype, module, in_mixed_gather), in order of first appearance."""
        return list(self._rows.values())

    @property
    def bytes(self) -> int:
        """Sum of the bytes of all rows."""
        return sum(row.bytes for row in self.rows)

    def add(self, row: CommRow) -> None:
        """Add a row's count and sizes to those of the row with the same key."""
        key = row.key
        if known := self._rows.get(key):
            row = replace(
                known,
                count=known.count + row.count,
                elements=known.elements + row.elements,
                bytes=known.bytes + row.bytes,
                seconds=total_seconds([known.seconds, row.seconds]),
            )
        self._rows[key] = row

    def count(
        self,
        op: str | None = None,
        axis: str | None = None,
        dtype: torch.dtype | None = None,
        module: str | None = None,
    ) -> int:
        """Return the number of collectives in the rows that match; ``None`` matches everything.

        A mixed gather counts under its float8 dtype, or under its first dtype if it has no float8.
        """
        wanted = {"op": op, "axis": axis, "dtype": dtype, "module": module}
        return sum(
            row.count
            for row in self.rows
            if all(v is None or getattr(row, name) == v for name, v in wanted.items())
        )

    def without_modules(self) -> "CommTable":
        """Return a table of the same collectives, summed over modules."""
        return CommTable((replace(row, module="") for row in self.rows), self.timings)

    def table(self, by_module: bool = False) -> str:
        """Return the rows as text, with totals; ``by_module`` gives one line per module.

        A ``+`` in place of a count marks data that travelled inside the collectives of another line
        of the same op and axis: FSDP2 gathers tensors of several dtypes in one message. With
        timings there is a column of milliseconds, with ``-`` where they are not known. The total
        adds those that are known. Collectives overlap each other and computation, so the total is
        not a share of the step's time.
        """
        rows = self.rows if by_module else self.without_modules().rows
        if not rows:
            return "no collectives"
        lines = [["op", "axis", "dtype", "count", "elements", "bytes", "ms", "module"]]
        for row in rows:
            count = "+" if row.in_mixed_gather else f"{row.count:,}"
            dtype = str(row.dtype).removeprefix("torch.")
            sizes = [count, f"{row.elements:,}", f"{row.bytes:,}"]
            ms = "+" if row.in_mixed_gather else _milliseconds(row.seconds)
            lines.append([row.op, row.axis, dtype, *sizes, ms, row.module])
        float8 = sum(row.float8_bytes for row in rows)
        ms = _milliseconds(total_seconds([s for row in rows if (s := row.seconds) is not None]))
        lines.append(["total", "", "", f"{self.count():,}", "", f"{self.bytes:,}", ms, ""])
        lines.append(["  float8", "", "", "", "", f"{float8:,}", "", ""])
        lines.append(["  other", "", "", "", "", f"{self.bytes - float8:,}", "", ""])
        if not self.timings:
            lines = [[*line[:6], line[7]] for line in lines]
        align = [str.ljust] * 3 + [str.rjust] * (3 + self.timings) + [str.ljust] * by_module
        columns = [
            [pad(cell, max(map(len, column))) for cell in column]
            for pad, column in zip(align, zip(*lines, strict=True), strict=False)
        ]
        return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))


def total_seconds(seconds: Sequence[float | None]) -> float | None:
    """Return the sum of durations; None if one of them is not known, or if there are none."""
    known = [each for each in seconds if each is not None]
    return sum(known) if known and len(known) == len(seconds) else None


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.3f}"
