"""scripts/measure/timeline.py: what it reads from a trace, and its verdicts."""

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from expecttest import assert_expected_inline
from ranks import RankPools, device_mesh

from fp8_dist.debug import comm_audit
from scripts.common.blocks import read_block
from scripts.common.llama import LlamaConfig
from scripts.measure import timeline, traced_step
from scripts.measure.trace import (
    FLOAT8_WEIGHTS,
    GRADIENTS,
    KINDS,
    OTHER_WEIGHTS,
    PRECOMPUTED,
    TP_AMAX,
    TP_GATHER,
    TP_REDUCE,
    TP_SCATTER,
    WAIT,
    Collective,
    Span,
    Timeline,
    read,
)
from scripts.measure.traced_step import PHASES, Training, events_of, trace_step

TINY = LlamaConfig(64, 2, 4, 4, 128, vocab_size=256, max_seq_len=16)
MESHES = [(2, 1), (2, 2)]
# Kinds of the timeline by comm_audit's op.
OPS = {
    "all_gather": (FLOAT8_WEIGHTS, OTHER_WEIGHTS, TP_GATHER),
    "reduce_scatter": (GRADIENTS, TP_SCATTER),
    "all_reduce": (PRECOMPUTED, TP_AMAX, TP_REDUCE),
}
Events = list[dict[str, Any]]


def traced(path: Path, mesh_sizes: tuple[int, int]) -> dict[str, int]:
    """Traces a step, and returns what comm_audit counts in another one, by op."""
    with mock.patch.multiple(traced_step, LATE=0.0, LOADING=0.0):
        trace_step(path, TINY, mesh_sizes, repeat=1)
    dp, tp = mesh_sizes
    mesh = device_mesh(dp=dp, tp=tp)
    training = Training(TINY, mesh)
    training.step()
    with comm_audit(mesh) as audit:
        training.step()
    counts = {op: audit.count(op) for op in OPS}
    float8 = (r for r in audit.rows if r.axis == "dp" and "float8" in str(r.dtype))
    return counts | {FLOAT8_WEIGHTS: sum(row.count for row in float8), "all": audit.count()}


@pytest.fixture(scope="module")
def traces(
    ranks: RankPools, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, int], tuple[Events, dict[str, int]]]:
    """By mesh: the events of a step, and what comm_audit counts."""
    found = {}
    for dp, tp in MESHES:
        path = tmp_path_factory.mktemp("traces") / "step.json"
        counts = ranks(dp * tp).run(traced, path, (dp, tp))[0]
        found[dp, tp] = events_of(path), counts
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_collectives_are_those_of_comm_audit(traces, mesh) -> None:
    events, counts = traces[mesh]
    found = read(events)
    for op, kinds in OPS.items():
        assert sum(len(found.of(kind)) for kind in kinds) == counts[op], op
    assert len(found.collectives) == counts["all"]
    assert len(found.of(FLOAT8_WEIGHTS)) == counts[FLOAT8_WEIGHTS] == 4


def test_kinds(traces) -> None:
    found = read(traces[2, 2][0])
    assert_expected_inline(
        "\n".join(f"{len(found.of(kind))} {kind}" for kind in KINDS),
        """\
1 amax all-reduce of precompute
4 weight all-gather, float8
1 weight all-gather, bf16
3 gradient reduce-scatter
11 TP all-gather
10 TP reduce-scatter
22 TP amax all-reduce
5 TP all-reduce""",
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_the_main_thread(traces, mesh) -> None:
    found = read(traces[mesh][0])
    phases = list(found.phases.values())
    assert tuple(found.phases) == PHASES
    for first, second in pairwise(phases):
        assert first.begin < first.end <= second.begin
    for first, second in pairwise(found.waits):
        assert first.end <= second.begin
    for collective in found.collectives:
        span = collective.under_way
        assert collective.issued.begin < span.end
        assert 0 <= found.overlapped(collective) <= span.end - span.begin


@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_asserted_holds(traces, mesh) -> None:
    assert all(check.holds for check in timeline.checks(read(traces[mesh][0])))


def wait_in_the_call(events: Events) -> None:
    (wait,) = (e for e in events if e["name"] == WAIT)
    issue = named(events, "_c10d_functional::all_reduce")
    wait["ts"], wait["dur"] = issue["ts"] + issue["dur"], 0.001


def issue_after_the_call(events: Events) -> None:
    issue, batch = named(events, "c10d::allreduce_"), named(events, "batch")
    issue["ts"], issue["dur"] = batch["ts"], 0.001
    named(events, "gloo:all_reduce")["dur"] = 1e6  # the first one to begin


def wait_twice(events: Events) -> None:
    events.append(dict(named(events, WAIT), ts=named(events, "loss")["ts"], dur=0.1))


def wait_too_early(events: Events) -> None:
    named(events, WAIT)["ts"] = named(events, "forward")["ts"] + 0.001


def named(events: Events, name: str) -> dict[str, Any]:
    """The first event of a name within the step."""
    (step,) = (e for e in events if e["name"] == "step")
    during = (e for e in events if e["name"] == name and e["ts"] >= step["ts"])
    return min(during, key=lambda e: e["ts"])


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (wait_in_the_call, [1, 2, 3]),
        (issue_after_the_call, [0, 2, 3]),
        (wait_twice, [2]),
        (wait_too_early, [3]),
    ],
)
def test_what_is_asserted_can_be_broken(
    traces, change: Callable[[Events], None], broken: list[int]
) -> None:
    events = copy.deepcopy(traces[2, 1][0])
    change(events)
    found = timeline.checks(read(events))
    assert [i for i, check in enumerate(found) if not check.holds] == broken


@pytest.mark.parametrize(
    ("lost", "message"),
    [("gloo:all_gather", "has no gloo:all_gather"), ("c10d::allreduce_", "did not issue gloo:all")],
)
def test_incomplete_trace(traces, lost: str, message: str) -> None:
    events = copy.deepcopy(traces[2, 1][0])
    events.remove(named(events, lost))
    with pytest.raises(ValueError, match=message):
        read(events)


def test_overlap_leaves_out_waits_and_the_issue() -> None:
    span = Span("gloo:all_gather", 10, 20)
    issue, within = Span("c10d::_allgather_base_", 9, 11), Span("FSDP::all_gather", 8, 12)
    collective = Collective(FLOAT8_WEIGHTS, issue, within, span)
    found = Timeline({}, [collective], [Span("wait", 12, 14), Span("wait", 19, 30)], [])
    assert found.overlapped(collective) == 6
    assert_expected_inline(
        timeline.collectives_table(found),
        """\
| collective                | count | under way, ms | beside work, ms | overlapped |
| ------------------------- | ----: | ------------: | --------------: | ---------: |
| weight all-gather, float8 |     1 |         10.00 |            6.00 |       60 % |""",
    )


def test_block_and_status(traces, documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = copy.deepcopy(traces[2, 1][0])
    monkeypatch.setattr(timeline, "PAGE", documents / "timeline.md")
    monkeypatch.setattr(timeline, "run_on_ranks", lambda *task: None)
    monkeypatch.setattr(timeline, "events_of", lambda path: events)
    assert timeline.main(["--assert", "--write"]) == 0
    block = read_block(documents / "timeline.md", "timeline")
    assert timeline.collectives_table(read(events)) in block
    assert block.count("- holds: ") == 4
    wait_twice(events)
    assert timeline.main([]) == 0
    assert timeline.main(["--assert"]) == 1


def test_refused_options(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"it is about FSDP2's gathers": "1", "does not divide the 4 rows of a batch": "3"}
    for message, ranks in wrong.items():
        with pytest.raises(SystemExit, match=r"^2$"):
            timeline.main(["--dp", ranks])
        assert message in capsys.readouterr().err
