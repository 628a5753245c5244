"""An alpha-beta model of the links: how long a collective takes if nothing else happens.

docs/plan.md has the formula, and says where the default values are from.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple

TIMES_THROUGH = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


class Collectives(NamedTuple):
    """The collectives of one phase of a step that agree in op, axis and dtype.

    `count` is 0 for bytes that travel in the collectives of another dtype (FSDP2's mixed gathers).
    `bytes` are sizes of buffers, as in `comm_audit`.
    """

    phase: str
    op: str
    axis: str
    dtype: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Links:
    """The machine that is assumed."""

    gpus_per_node: int = 8  # consecutive ranks share a node
    launch_us: float = 7.0  # start of any collective, microseconds
    intra_us: float = 0.6  # a hop inside a node
    inter_us: float = 5.0  # a hop between nodes
    intra_gb: float = 360.0  # GB/s per rank and direction inside a node
    inter_gb: float = 45.0  # GB/s per rank and direction between nodes

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not math.isfinite(value) or value < 0 or (not value and not name.endswith("_us")):
                raise ValueError(f"{name}={value}: use a positive, finite number")


def ranks_along(axis: str, axes: dict[str, int]) -> list[int]:
    """The ranks of rank 0's group over an axis as `comm_audit` names it: "a", "a+b" or "world".

    axes: sizes of the mesh's axes; the ranks of the last one are consecutive.
    """
    wanted = list(axes) if axis == "world" else axis.split("+")
    if not set(wanted) <= set(axes):
        raise ValueError(f"a collective over {axis!r}, which is not an axis of the mesh {axes}")
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
    latency_us = math.ceil(math.log2(local)) * links.intra_us
    latency_us += math.ceil(math.log2(nodes)) * links.inter_us
    bandwidth = links.intra_gb if nodes == 1 else min(links.intra_gb, local * links.inter_gb)
    moving = row.bytes * (len(ranks) - 1) / len(ranks) / (bandwidth * 1e9)
    times = TIMES_THROUGH[row.op]
    return row.count * (links.launch_us + times * latency_us) * 1e-6 + times * moving


def total_seconds(rows: Iterable[Collectives], axes: dict[str, int], links: Links) -> float:
    """How long rows take, one after the other."""
    return sum(seconds_of(row, axes, links) for row in rows)
