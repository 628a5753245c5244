"""scripts/timeline.py: what it reads from a trace, its verdicts, and its page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timeline
import timeline_trace
from expecttest import assert_expected_inline
from ranks import RankPools, device_mesh
from timeline_picture import lanes
from timeline_step import Training, trace_step, trimmed
from timeline_trace import (
    FLOAT8_WEIGHTS,
    GRADIENTS,
    OTHER_WEIGHTS,
    PRECOMPUTED,
    TP_AMAX,
    TP_GATHER,
    TP_REDUCE,
    TP_SCATTER,
    Collective,
    Span,
    Timeline,
    read,
)

from fp8_dist.debug import comm_audit
from scripts.common.llama import LlamaConfig

LAYERS = 2
TINY = LlamaConfig(64, LAYERS, 4, 4, 128, vocab_size=256, max_seq_len=16)
SIZES = (TINY, 2, 16)
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
    trace_step(path, mesh_sizes, *SIZES, late=0.0, loading=0.0, repeat=1)
    dp, tp = mesh_sizes
    mesh = device_mesh(dp=dp, tp=tp)
    training = Training(TINY, mesh, *SIZES[1:])
    training.step()
    with comm_audit(mesh) as audit:
        training.step()
    counts = {op: audit.count(op) for op in OPS}
    float8 = (r for r in audit.rows if r.axis == "dp" and "float8" in str(r.dtype))
    return counts | {FLOAT8_WEIGHTS: sum(row.count for row in float8), "all": audit.count()}


@pytest.fixture(scope="module")
def traces(
    ranks: RankPools, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, int], tuple[Path, dict[str, int]]]:
    """By mesh: the trace of a step, and what comm_audit counts."""
    found = {}
    for dp, tp in MESHES:
        path = tmp_path_factory.mktemp("traces") / "step.json"
        found[dp, tp] = path, ranks(dp * tp).run(traced, path, (dp, tp))[0]
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_collectives_are_those_of_comm_audit(traces, mesh) -> None:
    path, counts = traces[mesh]
    found = read(path)
    for op, kinds in OPS.items():
        assert sum(len(found.of(kind)) for kind in kinds) == counts[op], op
    assert len(found.collectives) == counts["all"]
    assert len(found.of(FLOAT8_WEIGHTS)) == counts[FLOAT8_WEIGHTS]
    assert path.stat().st_size < 2e6


def test_lanes(traces) -> None:
    counts = []
    for mesh in MESHES:
        found = read(traces[mesh][0])
        counts += [f"{mesh}", *(f"  {len(found.of(k))} {k}" for k in lanes(found)[1:])]
    assert_expected_inline(
        "\n".join(counts),
        """\
(2, 1)
  1 amax all-reduce of precompute
  4 weight all-gather, float8
  1 weight all-gather, bf16
  3 gradient reduce-scatter
(2, 2)
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
    names = "optimizer precompute batch forward loss backward"
    assert [phase.name for phase in found.phases] == names.split()
    layers = [f"layers.{i}" for i in range(LAYERS)]
    assert [block.name for block in found.blocks["forward"]] == layers
    assert [block.name for block in found.blocks["backward"]] == layers[::-1]
    ends = [0.0]
    for phase in found.phases:
        assert ends[-1] <= phase.begin < phase.end
        ends.append(phase.end)
    for way, blocks in found.blocks.items():
        assert all(found.phase(way).contains(block) for block in blocks)
    # Each block's gather begins before the block that comes first.
    gathers = found.of(FLOAT8_WEIGHTS)
    assert [gather.block for gather in gathers] == layers + layers[::-1]
    for gather, before in zip(gathers[1:LAYERS], found.blocks["forward"], strict=False):
        assert gather.issued.begin < before.end
    for first, second in zip(found.waits, found.waits[1:], strict=False):
        assert first.end <= second.begin
    for collective in found.collectives:
        assert collective.issued.begin < collective.under_way.end
        assert 0 <= found.overlapped(collective) <= collective.under_way.duration


@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_asserted_holds(traces, mesh) -> None:
    assert all(check.holds for check in timeline.checks(read(traces[mesh][0])))


def wait_in_the_call(events: Events) -> None:
    (wait,) = (e for e in events if e["name"] == timeline_trace.WAIT)
    issue = named(events, "_c10d_functional::all_reduce")
    wait["ts"], wait["dur"] = issue["ts"] + issue["dur"], 0.001


def issue_after_the_call(events: Events) -> None:
    issue, batch = named(events, "c10d::allreduce_"), named(events, "batch")
    issue["ts"], issue["dur"] = batch["ts"], 0.001
    named(events, "gloo:all_reduce")["dur"] = 1e6  # the first one to begin


def wait_twice(events: Events) -> None:
    events.append(dict(named(events, timeline_trace.WAIT), ts=named(events, "loss")["ts"], dur=0.1))


def wait_too_early(events: Events) -> None:
    named(events, timeline_trace.WAIT)["ts"] = named(events, "forward")["ts"] + 0.001


def named(events: Events, name: str) -> dict[str, Any]:
    """The first event of a name."""
    return min((e for e in events if e["name"] == name), key=lambda e: e["ts"])


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
    traces, tmp_path: Path, change: Callable[[Events], None], broken: list[int]
) -> None:
    whole = json.loads(traces[2, 1][0].read_text())
    change(whole["traceEvents"])
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(whole))
    found = timeline.checks(read(changed))
    assert [i for i, check in enumerate(found) if not check.holds] == broken


@pytest.mark.parametrize(
    ("lost", "message"),
    [("gloo:all_gather", "has no gloo:all_gather"), ("c10d::allreduce_", "did not issue gloo:all")],
)
def test_incomplete_trace(traces, tmp_path: Path, lost: str, message: str) -> None:
    whole = json.loads(traces[2, 1][0].read_text())
    whole["traceEvents"].remove(named([e for e in whole["traceEvents"] if e["ph"] == "X"], lost))
    path = tmp_path / "incomplete.json"
    path.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=message):
        read(path)


def test_overlap() -> None:
    """What of a collective is beside work: neither a wait nor its own issue."""
    issue, under_way = Span("issue", 0, 2), Span("gloo", 1, 11)
    collective = Collective(FLOAT8_WEIGHTS, issue, Span("FSDP::all_gather (a.b)", 0, 3), under_way)
    waits = [Span("", 0, 0.5), Span("", 4, 6), Span("", 10, 12)]
    found = Timeline([], {}, [collective], waits, [])
    assert collective.block == "a.b"
    assert found.overlapped(collective) == 10 - 1 - 2 - 1
    assert_expected_inline(
        timeline.table(found),
        """\
| collective                | count | under way, ms | beside work, ms | overlapped |
| ------------------------- | ----- | ------------- | --------------- | ---------- |
| weight all-gather, float8 | 1     | 10.00         | 6.00            | 60 %       |""",
    )


def test_trimming() -> None:
    def event(name: str, begin: int, end: int, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
        args = {"Input Dims": [[4]], "Ev Idx": 1}
        timed = {"ph": "X", "ts": begin, "dur": end - begin}
        return timed | {"name": name, "cat": cat, "tid": tid, "args": args}

    ranged = "user_annotation"
    events = [
        {"ph": "M", "name": "thread_name"},
        event("before", 0, 5),
        event("step", 10, 100, ranged),
        event("outer", 12, 40),
        event("inner", 13, 20),
        event("range in outer", 20, 30, ranged),
        event("in that range", 21, 25),
        event("c10d::in it", 22, 24),
        event("gloo:x", 22, 99, ranged, tid=2),
        event("elsewhere", 22, 99, tid=2),
        event("after", 100, 101),
    ]
    kept = {e["name"]: e.get("args") for e in trimmed(events)}
    assert_expected_inline(
        "\n".join(map(str, kept.items())),
        """\
('thread_name', None)
('step', {})
('outer', {})
('range in outer', {})
('in that range', {})
('gloo:x', {'Input Dims': [[4]]})
('c10d::in it', {'Input Dims': [[4]]})""",
    )


@pytest.fixture
def page(ranks: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where main writes to; its ranks are the tests' own, its model is tiny."""

    def run_on_ranks(world_size: int, args: Any, function: Any, *arguments: Any) -> Any:
        return ranks(world_size).run(function, *arguments)[0]

    monkeypatch.setattr(timeline, "run_on_ranks", run_on_ranks)
    monkeypatch.setitem(timeline.MODELS, "tiny", TINY)
    monkeypatch.setattr(timeline, "PAGE", tmp_path / "timeline.md")
    return tmp_path / "timeline.md"


def test_the_page(page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "step.json"
    options = (
        "--model tiny --batch-size 2 --seq-len 16 --repeat 2 --late 1 --loading 1 --assert --write"
    )
    assert timeline.main([*options.split(), "--trace", str(trace)]) == 0
    found = read(trace)
    text, shown = page.read_text(), capsys.readouterr().out
    assert timeline.table(found) in text
    assert timeline.table(found) in shown
    assert timeline.remarks(found) in text
    assert text.count("- holds: ") == 4
    assert f".py {options}\n" in text  # where the trace is kept doesn't matter
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_broken_order_fails(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        timeline, "checks", lambda found: [timeline.Check("pigs fly", bool(found.of("wings")))]
    )
    options = ["--model", "tiny", "--batch-size", "2", "--seq-len", "16", "--repeat", "1"]
    assert timeline.main(options) == 0
    assert timeline.main([*options, "--assert"]) == 1
    assert not page.exists()


def test_refused_options(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        "it is about FSDP2's gathers": ["--mesh", "tp=2"],
        "is no multiple of dp=3": ["--mesh", "dp=3"],
        "expected a number that is not negative": ["--late=-1"],
    }
    for message, options in wrong.items():
        with pytest.raises(SystemExit) as info:
            timeline.main(options)
        assert info.value.code == 2
        assert message in capsys.readouterr().err
