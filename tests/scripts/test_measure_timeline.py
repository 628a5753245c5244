"""scripts/measure/timeline.py: what it reads from a trace, and its verdicts."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline
from ranks import RankPools, device_mesh

from fp8_dist.debug import comm_audit
from scripts.common.blocks import read_block
from scripts.common.llama import LlamaConfig
from scripts.measure import timeline
from scripts.measure.timeline import WAIT, make_step, read, traced_step

TINY = LlamaConfig(64, 2, 4, 4, 128, vocab_size=256, max_seq_len=16)
Events = list[dict[str, Any]]


def collectives_of_a_step() -> int:
    """What comm_audit counts."""
    mesh = device_mesh(dp=2, tp=1)
    step = make_step(TINY, mesh)
    step()
    with comm_audit(mesh) as audit:
        step()
    return audit.count()


@pytest.fixture(scope="module")
def traced(ranks: RankPools) -> Events:
    return ranks(2).run(traced_step, TINY)[0]


def test_the_collectives_are_those_of_comm_audit(ranks: RankPools, traced: Events) -> None:
    found = read(traced)
    assert len(found.collectives()) == ranks(2).run(collectives_of_a_step)[0]
    assert_expected_inline(
        timeline.collectives_table(found),
        """\
| collective                    | count | with work before its result is used |
| ----------------------------- | ----: | ----------------------------------: |
| amax all-reduce of precompute |     1 |                                   1 |
| weight all-gather, float8     |     4 |                                   4 |
| weight all-gather, bf16       |     1 |                                   0 |
| gradient reduce-scatter       |     3 |                                   0 |""",
    )
    assert all(check.holds for check in timeline.checks(found))


def wait_in_the_call(events: Events) -> None:
    issue = named(events, "_c10d_functional::all_reduce")
    named(events, WAIT).update(ts=issue["ts"] + issue["dur"], dur=0.001)


def issue_after_the_call(events: Events) -> None:
    named(events, "c10d::allreduce_").update(ts=named(events, "forward")["ts"], dur=0.001)


def wait_twice(events: Events) -> None:
    forward = named(events, "forward")
    events.append(dict(named(events, WAIT), ts=forward["ts"] + forward["dur"] - 0.2, dur=0.1))


def wait_too_early(events: Events) -> None:
    named(events, WAIT)["ts"] = named(events, "forward")["ts"] + 0.001


def use_at_once(events: Events) -> None:
    gather = named(events, "FSDP::all_gather (layers.1)")
    named(events, "FSDP::all_gather_copy_out (layers.1)")["ts"] = (
        gather["ts"] + gather["dur"] + 0.001
    )


def named(events: Events, name: str) -> dict[str, Any]:
    """The first event of a name within the step."""
    (step,) = (e for e in events if e["name"] == "step")
    during = (e for e in events if e["name"] == name and e["ts"] >= step["ts"])
    return min(during, key=lambda e: e["ts"])


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (wait_in_the_call, [1, 2, 3]),
        (issue_after_the_call, [0]),
        (wait_twice, [2]),
        (wait_too_early, [3]),
        (use_at_once, [4]),
    ],
)
def test_what_is_asserted_can_be_broken(
    traced: Events, change: Callable[[Events], None], broken: list[int]
) -> None:
    events = copy.deepcopy(traced)
    change(events)
    found = timeline.checks(read(events))
    assert [i for i, check in enumerate(found) if not check.holds] == broken


def test_block_and_status(traced: Events, documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = copy.deepcopy(traced)
    monkeypatch.setattr(timeline, "run_on_ranks", lambda *task, threads: [events])
    assert timeline.main(["--assert", "--write"]) == 0
    block = read_block(documents / "timeline.md", "timeline")
    assert timeline.collectives_table(read(events)) in block
    wait_twice(events)
    assert timeline.main([]) == 0
    assert timeline.main(["--assert"]) == 1
