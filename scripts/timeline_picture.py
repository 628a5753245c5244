"""Draws a timeline: the main thread, and a lane for each kind of collective."""

from pathlib import Path

from compare import plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from timeline_step import BACKWARD, BATCH, FORWARD, LOSS, OPTIMIZER, PRECOMPUTE
from timeline_trace import KINDS, PRECOMPUTED, Span, Timeline

MAIN = "main thread"
# The parts of the step that are not blocks, and the blocks' two passes.
COLORS = {
    OPTIMIZER: "C4",
    PRECOMPUTE: "C1",
    BATCH: "C8",
    FORWARD: "C0",
    LOSS: "C7",
    BACKWARD: "C9",
}
WAITING, ISSUED = "0.15", "C3"
COLLECTIVE, OF_PRECOMPUTE = "C2", "C1"
HEIGHT = 0.8


def lanes(timeline: Timeline) -> list[str]:
    """From top to bottom."""
    return [MAIN, *(kind for kind in KINDS if timeline.of(kind))]


def draw(timeline: Timeline, path: Path) -> None:
    """The whole step, and below it the time until precompute's result has been waited for."""
    names = lanes(timeline)
    figure, (whole, start) = plt.subplots(
        2, figsize=(10, 0.9 * len(names) + 2.2), layout="constrained"
    )
    for axes in (whole, start):
        _draw_lanes(axes, timeline, names)
    whole.set_xlim(0, timeline.phases[-1].end)
    whole.set_title("The step")
    begin = timeline.phase(PRECOMPUTE).begin
    waited = max([timeline.phase(BATCH).end, *(op.end for op, _ in timeline.precompute_waits)])
    start.set_xlim(begin, waited + 0.25 * (waited - begin))
    start.set_title("A part of it: precompute's all-reduce, from its issue to its first use")
    start.set_xlabel("ms since the step began")
    for collective in timeline.of(PRECOMPUTED):
        _mark(start, names, collective.issued.begin, "issued")
    for wait, _ in timeline.precompute_waits:
        _mark(start, names, wait.begin, "waited for")
    meanings = [(color, name) for name, color in COLORS.items()]
    meanings += [(WAITING, "main thread waits"), (COLLECTIVE, "collective under way")]
    handles = [Patch(color=color, label=label) for color, label in meanings]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _draw_lanes(axes: Axes, timeline: Timeline, names: list[str]) -> None:
    for phase in timeline.phases:
        # Around the blocks: the embedding, the head.
        alpha = 0.35 if phase.name in timeline.blocks else 1.0
        _box(axes, 0, phase, COLORS[phase.name], alpha=alpha)
    for way, blocks in timeline.blocks.items():
        for block in blocks:
            _box(axes, 0, block, COLORS[way], label=_number(block.name))
    for wait in timeline.waits:
        axes.barh(0.25, wait.duration, left=wait.begin, height=0.3, color=WAITING)
    for collective in timeline.collectives:
        lane = names.index(collective.kind)
        color = OF_PRECOMPUTE if collective.kind == PRECOMPUTED else COLLECTIVE
        _box(axes, lane, collective.under_way, color, label=_number(collective.block))
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)


def _box(
    axes: Axes, lane: int, span: Span, color: str, *, label: str = "", alpha: float = 1.0
) -> None:
    axes.barh(
        lane,
        span.duration,
        left=span.begin,
        height=HEIGHT,
        color=color,
        alpha=alpha,
        edgecolor="white",
        linewidth=0.3,
    )
    if label:
        middle = (span.begin + span.end) / 2
        axes.text(middle, lane - 0.15, label, ha="center", va="center", fontsize=7, clip_on=True)


def _mark(axes: Axes, names: list[str], at: float, label: str) -> None:
    """A line through the lane of precompute's all-reduce."""
    lane = names.index(PRECOMPUTED)
    axes.vlines(at, lane - 0.5, lane + 0.5, color=ISSUED, linewidth=1.2)
    axes.text(at, lane + 0.3, f" {label}", color=ISSUED, fontsize=7, va="center", clip_on=True)


def _number(block: str) -> str:
    """The number of a block of that name; "" for the rest of the model."""
    return block.rpartition(".")[2]
