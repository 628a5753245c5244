"""The tables of a plan, as Markdown."""

from collections.abc import Sequence

from scripts.common.markdown import table
from scripts.plan.step import PHASES, Collectives, Plan, Step

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
# Bytes of a communicator (nccl#964), and of an all-to-all's channels to a rank (nccl#1685).
COMMUNICATOR, PEER = 700_000_000, 470_000_000
Runs = Sequence[tuple[Plan, Step]]


def collectives_table(runs: Runs) -> str:
    """A table of counts and bytes by phase, axis, op and dtype, with a column per variant."""
    by_key = [
        {(r.phase, r.axis, r.op, r.dtype, not r.count): r for r in step.collectives}
        for _, step in runs
    ]
    keys = sorted({key for row in by_key for key in row}, key=lambda k: (PHASES.index(k[0]), *k))
    lines = [[*key[:4], *(_cell([e[key]] if key in e else []) for e in by_key)] for key in keys]
    for phase in PHASES:
        inside = [[r for r in step.collectives if r.phase == phase] for _, step in runs]
        if any(inside):
            lines.append([f"all of {phase}", "", "", "", *map(_cell, inside)])
    lines.append(["all", "", "", "", *(_cell(step.collectives) for _, step in runs)])
    return table(["phase", "axis", "op", "dtype", *_variants(runs)], lines, "llllr")


def axes_table(runs: Runs) -> str:
    """A table of communicated bytes by axis, with a column per variant."""
    axes = sorted({row.axis for _, step in runs for row in step.collectives})
    sizes = {"": "bytes"}
    if runs[0][0].gpus_per_node is not None:
        sizes |= {", sent within nodes": "within", ", sent between nodes": "between"}
    lines = [
        [f"{axis}{what}", *(f"{_sum(s, size, axis):,}" for _, s in runs)]
        for axis in axes
        for what, size in sizes.items()
    ]
    return table(["bytes over", *_variants(runs)], lines, "lr")


def memory_table(runs: Runs) -> str:
    """A table of memory in bytes by kind, with a column per variant."""
    kinds = dict.fromkeys(kind for _, step in runs for kind in step.memory)
    lines = [[kind, *(f"{step.memory.get(kind, 0):,}" for _, step in runs)] for kind in kinds]
    lines.append(["all", *(f"{sum(step.memory.values()):,}" for _, step in runs)])
    lines.append(["besides, about: NCCL", *(f"{_nccl_bytes(*run):,}" for run in runs)])
    return table(["bytes on rank 0", *_variants(runs)], lines, "lr")


def _nccl_bytes(plan: Plan, step: Step) -> int:
    """An estimate of the memory of NCCL, which torch's allocator does not see."""
    per_node, inner = plan.gpus_per_node or 8, 1
    in_node = {}  # the ranks of a node that an axis joins
    for axis, size in reversed(plan.axes.items()):
        in_node[axis] = min(size, max(per_node // inner, 1))
        inner *= size
    exchanging = {r.axis for r in step.collectives if r.op == "all_to_all"}
    peers = sum(in_node.get(axis, min(plan.ranks, per_node)) - 1 for axis in exchanging)
    return COMMUNICATOR * len({r.axis for r in step.collectives}) + PEER * peers


def summary_table(runs: Runs) -> str:
    """A table of counts and bytes, with a line per variant."""
    lines = []
    for plan, step in runs:
        rows = step.collectives
        float8 = sum(r.bytes for r in rows if r.dtype.startswith(("float8", "float4")))
        first = [r for r in rows if r.phase == "precompute"]
        lines.append(
            [
                plan.name,
                *(f"{sum(r.count for r in rows if r.op == op):,}" for op in OPS),
                f"{sum(r.count for r in first):,}",
                _rounded(float8 / 1e9),
                _rounded(sum(r.bytes for r in rows) / 1e9),
                f"{sum(r.bytes for r in first):,}",
            ]
        )
        within, between = _sum(step, "within") / 1e9, _sum(step, "between") / 1e9
        times = within / plan.gbps_within, between / plan.gbps_between, step.seconds
        numbers = [_rounded(n) for n in (within, between, *(1e3 * time for time in times))]
        lines[-1] += [""] * 5 if plan.gpus_per_node is None else numbers  # empty: left out
    head = ["variant", *OPS, "of them precompute", "float8 and mxfp4 GB", "all GB"]
    head += ["precompute bytes", "GB within nodes", "GB between", "ms within", "ms between"]
    return table([*head, "ms in all"], lines, "lr")


def _rounded(number: float) -> str:
    """A number with one decimal place, or with two significant digits if it is below 1."""
    return f"{number:.1f}" if number >= 1 or not number else f"{number:.2g}"


def _sum(step: Step, field: str, axis: str | None = None) -> int:
    return sum(getattr(r, field) for r in step.collectives if axis in (None, r.axis))


def _variants(runs: Runs) -> list[str]:
    return [plan.name for plan, _ in runs]


def _cell(rows: Sequence[Collectives]) -> str:
    if not rows:
        return ""
    count = sum(row.count for row in rows)
    return f"{f'{count:,}' if count else '+'} ({sum(row.bytes for row in rows):,} B)"
