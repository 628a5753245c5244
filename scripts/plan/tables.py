"""The tables of a plan, as Markdown."""

from collections.abc import Sequence

from scripts.common.markdown import table
from scripts.common.options import mesh_text
from scripts.plan.step import ERRORS, LOCAL, NODE, PHASES, Collectives, Plan, Step

OPS = ("all_gather", "reduce_scatter", "all_reduce")
Runs = Sequence[tuple[Plan, Step]]


def collectives_table(runs: Runs) -> str:
    """Count and bytes by phase, axis, op and dtype; a column per variant."""
    by_key = [
        {(r.phase, r.axis, r.op, r.dtype, not r.count): r for r in step.collectives}
        for _, step in runs
    ]
    keys = sorted({key for each in by_key for key in each}, key=lambda k: (PHASES.index(k[0]), *k))
    lines = [[*key[:4], *(_cell([e[key]] if key in e else []) for e in by_key)] for key in keys]
    for phase in PHASES:
        inside = [[r for r in step.collectives if r.phase == phase] for _, step in runs]
        if any(inside):
            lines.append([f"all of {phase}", "", "", "", *map(_cell, inside)])
    lines.append(["all", "", "", "", *(_cell(step.collectives) for _, step in runs)])
    return table(["phase", "axis", "op", "dtype", *_variants(runs)], lines, "llllr")


def memory_table(runs: Runs) -> str:
    """Bytes by kind; a column per variant."""
    kinds = runs[0][1].memory
    lines = [[kind, *(f"{step.memory[kind]:,}" for _, step in runs)] for kind in kinds]
    return table(["bytes on rank 0", *_variants(runs)], lines, "lr")


def growth_table(runs: Runs) -> str:
    """Counts and bytes; a line per world and variant."""
    lines = []
    for plan, step in runs:
        rows = step.collectives
        float8 = sum(r.bytes for r in rows if r.dtype.startswith("float8"))
        first = [r for r in rows if r.phase == "precompute"]
        lines.append(
            [
                f"{plan.ranks:,}",
                mesh_text(plan.axes),
                plan.variant,
                *(f"{sum(r.count for r in rows if r.op == op):,}" for op in OPS),
                f"{sum(r.count for r in first):,}",
                f"{float8 / 1e9:.1f}",
                f"{sum(r.bytes for r in rows) / 1e9:.1f}",
                f"{sum(r.bytes for r in first):,}",
            ]
        )
    head = ["ranks", "mesh", "variant", *OPS, "of them precompute", "float8 GB", "all GB"]
    return table([*head, "precompute bytes"], lines, "lllr")


def differences_table(runs: Runs) -> str:
    """What differs from the first plan, and what in the first is not in others; a line per plan."""
    first = runs[0][1].collectives
    others = [{*step.collectives} for _, step in runs[1:]]
    total = sum(r.bytes for r in first)
    lines = []
    for plan, step in runs:
        own = [r for r in step.collectives if r not in first]
        if step is runs[0][1]:
            own = [r for r in first if any(r not in other for other in others)]
        # (A message may have numbers of several dtypes.)
        kinds = dict.fromkeys((r.op, r.axis) for r in own)
        alike = [[r for r in own if (r.op, r.axis) == kind] for kind in kinds]
        nbytes = sum(r.bytes for r in step.collectives)
        lines.append(
            [
                plan.name,
                "; ".join(f"{_kind(rows)}: {_cell(rows)}" for rows in alike),
                "; ".join(f"{_mean(rows, plan):,.0f}" for rows in alike),
                f"{nbytes:,}",
                f"{nbytes / total:.3f}",
                f"{step.memory.get(ERRORS, 0):,}",
            ]
        )
    head = ["variant", "its own collectives", "mean bytes for a rank", "bytes of all collectives"]
    return table([*head, "of the first", "errors kept, B"], lines, "llr")


def _kind(rows: Sequence[Collectives]) -> str:
    """The op, the axis and the dtypes of collectives that agree in the first two."""
    by_size = sorted(rows, key=lambda row: -row.bytes)
    dtypes = " + ".join(dict.fromkeys(row.dtype for row in by_size))
    return f"{rows[0].op} {rows[0].axis} {dtypes}"


def _mean(rows: Sequence[Collectives], plan: Plan) -> float:
    """Of a message over one axis: its bytes for one of the ranks there."""
    nodes = plan.gradients.nodes if plan.gradients else 1
    sizes = {**plan.axes, NODE: nodes, LOCAL: plan.axes["dp"] // nodes}
    return sum(r.bytes for r in rows) / sum(r.count for r in rows) / sizes[rows[0].axis]


def _variants(runs: Runs) -> list[str]:
    return [plan.name for plan, _ in runs]


def _cell(rows: Sequence[Collectives]) -> str:
    if not rows:
        return ""
    count = sum(row.count for row in rows)
    return f"{f'{count:,}' if count else '+'} ({sum(row.bytes for row in rows):,} B)"
