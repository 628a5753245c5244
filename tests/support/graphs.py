"""What a training step computes and communicates in compiled graphs, and beside them.

A step is counted in two ways that don't know of each other: :class:`Graphs` is the backend that is
handed the graphs, reads them once, and adds up what it read whenever one runs; :class:`Ops` and
:func:`comm_audit` watch ops as they run, in eager code and in graphs (but for what inductor
fuses).
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_dist.debug import comm_audit
from fp8_dist.debug.audit import CommRow, CommTable
from fp8_dist.debug.collectives import read_collective
from fp8_dist.kernels import cast_and_measure, cast_copies, cast_rows, quantize
from fp8_dist.kernels.blocks import cast_blocks, quantize_block_copies
from fp8_dist.linear.amax_history import history_copies
from fp8_dist.linear.runtime_ops import QUERIES
from fp8_dist.linear.weight import gather_statistics
from fp8_dist.scaling.operators import cast_operator

# The queries of scales, passes over tensors, GEMMs, and collectives.
OPS = ("scale_query", "amax", "quantize", "reblock", "scaled_mm", "mm")
OPS += ("all_gather", "reduce_scatter", "all_reduce")

# Each is one cast of a tensor, to one copy or to several. The last two ask for the scale, too; a graph
# has the first of them.
CASTS = {
    each.overload
    for each in (
        cast_operator,
        quantize,
        cast_and_measure,
        cast_blocks,
        cast_copies,
        cast_rows,
        quantize_block_copies,
        history_copies,
    )
}


# Operators of blocks, and of graphs, by the ones whose work they do.
ALIKE = {
    "block_exponents": "amax",
    "measure": "amax",
    "row_amaxes": "amax",
    "block_scaled_mm": "scaled_mm",
    "multiply": "scaled_mm",
}


def counted(func: Any) -> str | None:
    """The name in ``OPS`` of an operator, whatever its variant; None for all others."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    if func in CASTS:
        return "quantize"
    if func in QUERIES:
        return None if func is gather_statistics.overload else "scale_query"
    name = func._schema.name.partition("::")[2]
    name = ALIKE.get(name, name)
    names = ((op, (op, f"{op}es", f"{op}_into_tensor", f"{op}_tensor")) for op in OPS)
    return next((op for op, every in names if name in every), None)


class Ops(TorchDispatchMode):
    """Counts the ops that matter, as they run, by their names; those without a name are left out."""

    def __init__(self, name_of: Callable[[Any], str | None] = counted) -> None:
        super().__init__()
        self.name_of = name_of
        self.counts: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled graphs run below it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if (op := self.name_of(func)) is not None:
            self.counts[op] += 1
        return func(*args, **(kwargs or {}))


class Graphs:
    """A backend of torch.compile that runs AOT graphs as they are, and counts.

    They are divided into forward and backward as for inductor. (torch's other way, aot_eager's,
    leaves unused ops in the backward: what computes the inputs of the forward's collectives.)

    Attributes:
        backend: for ``torch.compile(backend=...)``.
        made: how many "forward" and "backward" graphs were made.
        ran: how many of them ran.
        ops: what ran in them: by direction, and op of ``OPS``.
        collectives: those that ran in them. Sizes and dtypes are of the buffers in the graph, where
            float8 travels as uint8.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._axis = comm_audit(mesh)._axis
        self.made: Counter[str] = Counter()
        self.forget_runs()
        self.backend = aot_autograd(
            fw_compiler=self._compiler("forward"),
            bw_compiler=self._compiler("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )

    def forget_runs(self) -> None:
        """Count anew what runs."""
        self.ran: Counter[str] = Counter()
        self.ops: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
        self.collectives = CommTable()

    @property
    def bytes(self) -> int:
        """The bytes of all collectives that ran."""
        return self.collectives.bytes

    def _compiler(self, direction: str) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            self.made[direction] += 1
            ops, rows = self._read(graph)

            def run(args: list[Any]) -> Any:
                self.ran[direction] += 1
                self.ops[direction] += ops
                for row in rows:
                    self.collectives.add(row)
                return graph(*args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compiler

    def _read(self, graph: torch.fx.GraphModule) -> tuple[Counter[str], list[CommRow]]:
        ops: Counter[str] = Counter()
        rows = []
        for node in graph.graph.nodes:
            if not isinstance(node.target, torch._ops.OpOverload):
                continue
            if (op := counted(node.target)) is not None:
                ops[op] += 1
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            collective = read_collective(node.target, args, kwargs)
            if collective is not None:
                (buffer,) = collective.tensors
                elements = buffer.numel() * collective.factor
                size = elements * buffer.dtype.itemsize
                axis = self._axis(collective.group)
                row = CommRow(collective.op, axis, buffer.dtype, "", False, 1, elements, size, size)
                rows.append(row)
        return ops, rows


class Compilations:
    """What dynamo has done since this object was made."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()

    @property
    def graphs(self) -> int:
        """How many graphs it captured: one for each frame, and for each recompilation of it."""
        return counters["stats"]["unique_graphs"]

    @property
    def breaks(self) -> int:
        """How often a graph broke."""
        return sum(counters["graph_break"].values())
