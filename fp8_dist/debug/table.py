"""The rows that a communication audit adds up, and their text as a table."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from fp8_dist.dtypes import is_float8


@dataclass(frozen=True)
class CommRow:
    """The collectives that agree in everything but their size.

    Attributes:
        op: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"``,
            ``"broadcast"``, ... A communication op whose arguments this library doesn't know is
            counted under its qualified name, such as ``"symm_mem::one_shot_all_reduce"``.
        axis: the mesh axis of the process group; ``"world"`` for the default group,
            ``"group NAME"`` for one that no mesh knows, ``"unknown"`` where an op names none.
        dtype: dtype of the payload: float8 that travels as uint8 is float8 here.
        module: FQN of the innermost module that was running, forward or backward; ``""`` for the
            outermost one and for code outside of modules.
        in_mixed_gather: these elements travelled in all-gathers of several dtypes (FSDP2's) that
            the row of another dtype counts.
        count: number of collectives; 0 where ``in_mixed_gather``.
        elements: number of elements of ``dtype`` in the buffers, summed over the collectives.
        bytes: size of the buffers in bytes, summed over the collectives. The buffer is the output
            of an all-gather, the input of a reduce-scatter, the tensor of an all-reduce, and the
            largest tensor argument of an op that is counted under its qualified name.
    """

    op: str
    axis: str
    dtype: torch.dtype
    module: str
    in_mixed_gather: bool
    count: int
    elements: int
    bytes: int

    @property
    def float8_bytes(self) -> int:
        """``bytes`` if the payload is float8, else 0."""
        return self.bytes if is_float8(self.dtype) else 0

    @property
    def other_bytes(self) -> int:
        """``bytes`` if the payload is not float8, else 0."""
        return self.bytes - self.float8_bytes


class CommTable:
    """Rows of collectives, and their sums."""

    def __init__(self, rows: Iterable[CommRow] = ()) -> None:
        self._rows: dict[tuple[str, str, torch.dtype, str, bool], CommRow] = {}
        for row in rows:
            self.add(row)

    @property
    def rows(self) -> list[CommRow]:
        """One row per (op, axis, dtype, module, in_mixed_gather), in order of first appearance."""
        return list(self._rows.values())

    @property
    def bytes(self) -> int:
        """Sum over all rows."""
        return sum(row.bytes for row in self.rows)

    def add(self, row: CommRow) -> None:
        """Add a row's count and sizes to those of the row with the same key."""
        key = (row.op, row.axis, row.dtype, row.module, row.in_mixed_gather)
        if known := self._rows.get(key):
            row = replace(
                known,
                count=known.count + row.count,
                elements=known.elements + row.elements,
                bytes=known.bytes + row.bytes,
            )
        self._rows[key] = row

    def count(
        self,
        op: str | None = None,
        axis: str | None = None,
        dtype: torch.dtype | None = None,
        module: str | None = None,
    ) -> int:
        """The number of collectives in the rows that match; ``None`` matches everything.

        A mixed gather counts for its float8 dtype (its first dtype, if it has no float8).
        """
        wanted = {"op": op, "axis": axis, "dtype": dtype, "module": module}
        return sum(
            row.count
            for row in self.rows
            if all(v is None or getattr(row, name) == v for name, v in wanted.items())
        )

    def without_modules(self) -> "CommTable":
        """The same collectives, summed over modules."""
        return CommTable(replace(row, module="") for row in self.rows)

    def table(self, by_module: bool = False) -> str:
        """The rows as text, with totals; ``by_module``: one line per module, instead of their sum.

        ``+`` in place of a count: this data travelled inside the collectives of another line of the
        same op and axis. FSDP2 gathers tensors of several dtypes in one message.
        """
        rows = self.rows if by_module else self.without_modules().rows
        if not rows:
            return "no collectives"
        lines = [["op", "axis", "dtype", "count", "elements", "bytes", "module"]]
        for row in rows:
            count = "+" if row.in_mixed_gather else f"{row.count:,}"
            dtype = str(row.dtype).removeprefix("torch.")
            sizes = [count, f"{row.elements:,}", f"{row.bytes:,}"]
            lines.append([row.op, row.axis, dtype, *sizes, row.module])
        float8 = sum(row.float8_bytes for row in rows)
        lines.append(["total", "", "", f"{self.count():,}", "", f"{self.bytes:,}", ""])
        lines.append(["  float8", "", "", "", "", f"{float8:,}", ""])
        lines.append(["  other", "", "", "", "", f"{self.bytes - float8:,}", ""])
        align = [str.ljust] * 3 + [str.rjust] * 3 + [str.ljust] * by_module
        columns = [
            [pad(cell, max(map(len, column))) for cell in column]
            for pad, column in zip(align, zip(*lines, strict=True), strict=False)
        ]
        return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))
