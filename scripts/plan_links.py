"""The alpha-beta model of the links: how long a collective takes if nothing else happens.

A collective of n ranks, of which L are on each of N nodes, with a buffer of S bytes (the output of
an all-gather, the input of a reduce-scatter, the tensor of an all-reduce) takes

    launch + hops + S (n - 1) / n / bandwidth

and an all-reduce the last two terms twice. Hops are those of a tree, or of recursive doubling,
ceil(log2 L) inside a node and ceil(log2 N) between nodes; with "ring" they are n - N and N - 1.
The bandwidth is that of the link inside a node where N is 1; otherwise, as every rank has a network
link of its own and rings use all of them, the smaller one of that and L times the network's.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from plan_step import Collectives

MICRO, GIGA = 1e-6, 1e9
TIMES_THROUGH = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass(frozen=True)
class Links:
    """The machine that is assumed. The defaults are assumptions about H100 nodes, not measured.

    Attributes:
        gpus_per_node: ranks on a node; consecutive ranks share one.
        launch_us: start of any collective, microseconds.
        intra_us, inter_us: a hop inside a node, between nodes.
        intra_gb, inter_gb: GB/s per rank and direction inside a node, between nodes.
        hops: "tree" or "ring".
    """

    gpus_per_node: int = 8
    launch_us: float = 7.0
    intra_us: float = 0.6
    inter_us: float = 5.0
    intra_gb: float = 360.0
    inter_gb: float = 45.0
    hops: str = "tree"

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.name != "hops"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (not value and not name.endswith("_us")):
                raise ValueError(f"{name}={value}: use a positive, finite number")
        if self.hops not in ("tree", "ring"):
            raise ValueError(f"hops={self.hops!r}: use 'tree' or 'ring'")


SOURCES = {
    "gpus_per_node": "DGX H100 and its like",
    "launch_us": "of the order of NCCL's own table (src/graph/tuning.cc): 6.6 and 6.8",
    "intra_us": "the same table: NVLink, low-latency protocol",
    "inter_us": "the same table: network, tree, low-latency protocol",
    "intra_gb": "NVLink 4: 450 GB/s per direction by data sheet; 80 % assumed",
    "inter_gb": "one 400 Gb/s network link per GPU, 50 GB/s; 90 % assumed",
    "hops": "hops of a tree or of recursive doubling",
}


def ranks_along(axis: str, axes: dict[str, int]) -> list[int]:
    """The ranks of rank 0's group over an axis of a mesh, over "a+b", or over the "world".

    Args:
        axis: as `comm_audit` names it.
        axes: sizes of the mesh's axes; the last one's ranks are consecutive.
    """
    wanted = list(axes) if axis == "world" else axis.split("+")
    unknown = [name for name in wanted if name not in axes]
    if unknown:
        raise ValueError(f"a collective over {axis!r}, which no axis of the mesh {axes} is")
    ranks, stride = [0], 1
    for name, size in reversed(axes.items()):
        if name in wanted:
            ranks = [start + i * stride for i in range(size) for start in ranks]
        stride *= size
    return ranks


def seconds_of(row: Collectives, axes: dict[str, int], links: Links) -> float:
    """How long the collectives of a row take, one after the other.

    Raises:
        ValueError: for an op, or an axis, that the model does not know.
    """
    if row.op not in TIMES_THROUGH:
        raise ValueError(f"the model of the links knows {list(TIMES_THROUGH)}, not {row.op}")
    ranks = ranks_along(row.axis, axes)
    if len(ranks) == 1:
        return 0.0
    nodes = len({rank // links.gpus_per_node for rank in ranks})
    local = -(-len(ranks) // nodes)
    if links.hops == "ring":
        near, far = len(ranks) - nodes, nodes - 1
    else:
        near, far = math.ceil(math.log2(local)), math.ceil(math.log2(nodes))
    bandwidth = links.intra_gb if nodes == 1 else min(links.intra_gb, local * links.inter_gb)
    latency = near * links.intra_us + far * links.inter_us
    moving = row.bytes * (len(ranks) - 1) / len(ranks) / (bandwidth * GIGA)
    times = TIMES_THROUGH[row.op]
    return row.count * (links.launch_us + times * latency) * MICRO + times * moving


def seconds_by_axis(
    rows: Iterable[Collectives], axes: dict[str, int], links: Links
) -> dict[str, dict[str, float]]:
    """By axis, then by op: the sum of what the collectives take."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        by_op = found.setdefault(row.axis, {})
        by_op[row.op] = by_op.get(row.op, 0.0) + seconds_of(row, axes, links)
    return found


def described(links: Links) -> list[list[Any]]:
    """A line per number of the model: what it is, its value, where it comes from."""
    defaults = Links()
    return [
        [f.name, value, SOURCES[f.name] if value == getattr(defaults, f.name) else "chosen"]
        for f in fields(links)
        for value in [getattr(links, f.name)]
    ]
