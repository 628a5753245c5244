"""Count what a training step computes and communicates in compiled graphs, and outside of them.

A step is counted in two independent ways. :class:`Graphs` is a backend that counts the ops of each
graph once, and adds these counts whenever the graph runs. :class:`Ops` and :func:`comm_audit` watch
ops as they run, in eager code and in graphs (except those that Inductor fuses).
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
from fp8_dist.debug.audit import CommRow, CommTable, _axis_name
from fp8_dist.debug.collectives import read_collective
from fp8_dist.kernels.blocks import cast_blocks, quantize_block_copies
from fp8_dist.kernels.quantization import cast_and_measure, cast_copies, cast_fresh, quantize
from fp8_dist.operand.state import QUERIES, look_up
from fp8_dist.scaling.operators import cast_operator

# The names of ops that are counted: queries of scales, casts, GEMMs, and collectives.
OPS = ("scale_query", "amax", "quantize", "reblock", "scaled_mm", "mm")
OPS += ("all_gather", "reduce_scatter", "all_reduce")

# Each op is one cast of a tensor, to one or more copies.
CASTS = {
    each.overload
    for each in (
        cast_operator,
        quantize,
        cast_and_measure,
        cast_blocks,
        cast_copies,
        cast_fresh,
        quantize_block_copies,
    )
}


# Operators for blocks and for graphs, and the names under which they are counted.
ALIKE = {
    "block_exponents": "amax",
    "measure": "amax",
    "row_amaxes": "amax",
    "block_scaled_mm": "scaled_mm",
    "multiply": "scaled_mm",
}


def counted(func: Any) -> str | None:
    """The name in ``OPS`` under which an operator counts, or None."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    if func in CASTS:
        return "quantize"
    if func in QUERIES:
        return "scale_query"
    name = func._schema.name.partition("::")[2]
    name = ALIKE.get(name, name)
    names = ((op, (op, f"{op}es", f"{op}_into_tensor", f"{op}_tensor")) for op in OPS)
    return next((op for op, every in names if name in every), None)


def looked_up(args: Any) -> str | None:
    """The name under which a look-up with these arguments counts: it may cast, too."""
    *_, is_gather, of, _ = args
    return None if is_gather else "quantize" if of else "scale_query"


class Ops(TorchDispatchMode):
    """A mode that counts ops as they run, by the names that ``name_of`` gives them, if any."""

    def __init__(self, name_of: Callable[[Any], str | None] = counted) -> None:
        super().__init__()
        self.name_of = name_of
        self.counts: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # so that compiled graphs run under this mode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        op = looked_up(args) if func is look_up.overload else self.name_of(func)
        if op is not None:
            self.counts[op] += 1
        return func(*args, **(kwargs or {}))


class Graphs:
    """A backend of torch.compile that runs AOT graphs unchanged, and counts their ops.

    Graphs are partitioned into forward and backward as for Inductor. (The partitioner of aot_eager
    leaves unused ops in the backward, which recompute inputs of the forward's collectives.)

    Attributes:
        backend: the argument for ``torch.compile(backend=...)``.
        made: the number of "forward" and "backward" graphs that were made.
        ran: the number of runs of such graphs.
        ops: the number of ops that ran in them, by direction and name in ``OPS``.
        collectives: the collectives that ran in them. Sizes and dtypes are those of the buffers in
            the graph, where float8 is sent as uint8.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._axes = comm_audit(mesh)._axes
        self.made: Counter[str] = Counter()
        self.forget_runs()
        self.backend = aot_autograd(
            fw_compiler=self._compiler("forward"),
            bw_compiler=self._compiler("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )

    def forget_runs(self) -> None:
        """Reset the counts of what ran."""
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
            op = counted(node.target)
            op = looked_up(node.args) if node.target is look_up.overload else op
            if op is not None:
                ops[op] += 1
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            collective = read_collective(node.target, args, kwargs)
            if collective is not None:
                (buffer,) = collective.tensors
                elements = buffer.numel() * collective.factor
                size = elements * buffer.dtype.itemsize
                axis = _axis_name(collective.group, self._axes)
                row = CommRow(collective.op, axis, buffer.dtype, "", False, 1, elements, size, size)
                rows.append(row)
        return ops, rows


class Compilations:
    """The work of dynamo since this object was made."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()

    @property
    def graphs(self) -> int:
        """The number of captured graphs: one per frame, and one per recompilation."""
        return counters["stats"]["unique_graphs"]

    @property
    def breaks(self) -> int:
        """The number of graph breaks."""
        return sum(counters["graph_break"].values())
