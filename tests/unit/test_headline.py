"""The headline of a report: which of a run's files saw the first bad thing, and what they can't know."""

import json
import math
import os
import re
import shlex
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Net
from torch import nn

from fp8_dist import convert_to_float8_training
from fp8_dist.debug import record, replay
from fp8_dist.report import RunWriter, data, headline
from fp8_dist.report import __main__ as command

NAN, STEPS = math.nan, 14
FIRST, SECOND = "layers.0.w3", "layers.1.w1"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("recordings"))


def recorded(folder: Path) -> Path:
    """Return the recording of step 9, in which the input of SECOND is NaN."""
    model = convert_to_float8_training(Net(layers=2))
    recorder = record(model, folder).at(7)

    def plant(_: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        return args[0].masked_fill(torch.arange(64) == (5 if recorder.step == 9 else -1), NAN)

    model.layers[1].w1.register_forward_pre_hook(plant)  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they name the recording
        for _ in range(3):
            with recorder:
                model(torch.ones(2, 8, 64)).sum().backward()
    return folder / "step000009"


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_metrics(run: Path, every: int = 1, **first_bad: int) -> None:
    """Write metrics of every n-th step, which are NaN from a step on."""
    rows = [
        {"step": s} | {name: "NaN" if s >= bad else 1.0 for name, bad in first_bad.items()}
        for s in range(0, STEPS, every)
    ]
    lines(run / "metrics.jsonl", rows)


def write_stats(run: Path, every: int, first_bad: int, rank: int = 1) -> None:
    """Write statistics of every n-th step: FIRST is bad from a step on, and SECOND after it."""
    cast = {"kind": "cast", "operand": "input", "gemms": ["output"], "granularity": "tensor"}
    cast |= {"dtype": "e4m3fn", "amax": 1.0, "underflow": 0.0, "saturation": 0.0, "sqnr": 30.0}
    bad = {"amax": "NaN", "nonfinite": 12.5, "sqnr": "NaN", "nonfinite_rank": rank}
    rows = [
        cast
        | {"step": s, "fqn": fqn, "position": at, "nonfinite": 0.0}
        | (bad if s >= first_bad else {})
        for s in range(0, STEPS, every)
        for fqn, at in ((SECOND, 8), (FIRST, 3))  # rows are in the order of layers, not of casts
    ]
    lines(run / "float8_stats.jsonl", rows)


def add(run: Path, recording: Path, name: str = "recordings/step000009") -> Path:
    return Path(shutil.copytree(recording, run / name))


def of(run: Path) -> headline.Headline | None:
    return headline.headline(data.read_run(run))


def shown(run: Path) -> tuple[str, str]:
    """The beginning of the headline, and its sentences."""
    found = of(run)
    assert found is not None
    return found.where, found.what


def test_a_recording_saw_it_first(recording: Path, tmp_path: Path) -> None:
    """Statistics of every second step see it in step 10, in another layer and on another rank."""
    run = tmp_path / "a run"
    write_metrics(run, loss=10, grad_norm=9)
    write_stats(run, every=2, first_bad=10)
    folder = add(run, recording)
    found = of(run)
    assert found is not None
    assert found.where == f"step 9, rank 0, {SECOND}"
    assert found.what.startswith("input (for output, grad_weight), element [0, 5]: NaN or infinite")
    assert "may have begun" not in found.what
    assert found.commands == [f"python -m fp8_dist.debug.replay '{folder}'"]
    assert replay.main(shlex.split(found.commands[0])[3:]) == 1


def test_the_page_and_the_command_begin_with_it(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_metrics(tmp_path / "bad", loss=9)
    write_stats(tmp_path / "bad", every=2, first_bad=10)
    folder = add(tmp_path / "bad", recording)
    write_metrics(tmp_path / "good", loss=99)
    anomaly = {"step": 10, "fqn": FIRST, "operand": "input", "what": "non-finite", "ranks": [1]}
    lines(tmp_path / "bad" / "anomalies.jsonl", [anomaly | {"message": "input: all"}])
    assert command.main([str(tmp_path / name) for name in ("bad", "good")]) == 0
    out, progress = capsys.readouterr()
    assert out.startswith(f"bad: step 9, rank 0, {SECOND}: input")
    assert f"\n  python -m fp8_dist.debug.replay {folder}\n" in out
    for doing in ("reading", "replaying", "drawing"):
        assert f"{doing} " in progress
    text = (tmp_path / "bad" / "report.html").read_text(encoding="utf-8")
    (verdict,) = re.findall('<div id="verdict">(.*?)<div id="summary"', text, re.S)
    assert (
        verdict.index("step 9, rank 0") < verdict.index("debug.replay") < verdict.index("<details")
    )
    assert verdict.count("alert") == 1  # of two runs
    # What lies behind it is folded away.
    (behind,) = re.findall("<details(.*?)</details>", verdict, re.S)
    assert "step 10" in behind
    assert '<details class="behind">\n<summary>What statistics show' in text
    assert "<td>NaN since step 9</td>" in text


def test_metrics_saw_it_first(recording: Path, tmp_path: Path) -> None:
    """The headline names no rank and layer for step 9, because no file knows them."""
    write_metrics(tmp_path, loss=11, grad_norm=9)
    assert shown(tmp_path) == (
        "step 9",
        "grad_norm is not finite. No casts of step 9 were recorded. There is no recording of it to "
        "replay: fp8_dist.debug.record makes one.",
    )
    write_stats(tmp_path, every=2, first_bad=10)
    where, what = shown(tmp_path)
    assert where == "step 9"
    assert (
        f"The first bad cast that was seen may be an effect: step 10, rank 1, {FIRST}: input (for"
        in what
    )
    write_stats(tmp_path, every=3, first_bad=12)
    assert "The casts of step 9 are finite: look at what is not in float8" in shown(tmp_path)[1]
    write_metrics(tmp_path, every=5, loss=6)
    assert shown(tmp_path) == (
        "step 10",
        "loss is not finite. It may have begun in step 6: metrics show nothing wrong up to step 5. "
        f"No casts of step 10 were recorded. The first bad cast that was seen may be an effect: step 12, rank 1, {FIRST}"
        ": input (for output): 12.5 % of the values are NaN or infinite. "
        "There is no recording of it to replay: fp8_dist.debug.record makes one.",
    )


def test_statistics_saw_it_first(recording: Path, tmp_path: Path) -> None:
    write_metrics(tmp_path, loss=9)
    write_stats(tmp_path, every=2, first_bad=8)
    folder = add(tmp_path, recording)
    found = of(tmp_path)
    assert found is not None
    assert found.where == f"step 8, rank 1, {FIRST}"
    assert found.what == (
        "input (for output): 12.5 % of the values are NaN or infinite. It may have begun in step 7: "
        "statistics show nothing wrong up to step 6."
    )
    assert found.commands == [f"python -m fp8_dist.debug.replay {folder}"]  # the nearest one


def test_metrics_that_recover_are_unusual(tmp_path: Path) -> None:
    """Metrics recover after a step that a scaler skips; a metric that stays NaN leads."""
    rows = [{"step": s, "grad_norm": "Infinity" if s == 2 else 1.0, "loss": 1.0} for s in range(12)]
    lines(tmp_path / "metrics.jsonl", rows)
    assert shown(tmp_path)[0] == "step 2"
    assert shown(tmp_path)[1].startswith("grad_norm is not finite.")
    lines(
        tmp_path / "metrics.jsonl", [r | ({"loss": "NaN"} if r["step"] > 8 else {}) for r in rows]
    )
    assert shown(tmp_path)[0] == "step 9"
    assert shown(tmp_path)[1].startswith("loss is not finite.")


def test_what_is_unusual_leads_where_nothing_is_wrong(tmp_path: Path) -> None:
    write_metrics(tmp_path, loss=99)
    write_stats(tmp_path, every=1, first_bad=99)
    assert of(tmp_path) is None
    row = {"step": 3, "fqn": FIRST, "operand": "input", "what": "jump", "ranks": []}
    lines(tmp_path / "anomalies.jsonl", [row | {"message": "input: the amax is high"}])
    assert shown(tmp_path) == (f"step 3, {FIRST}", "input: the amax is high.")
    write_metrics(tmp_path, loss=9)
    assert shown(tmp_path)[0] == "step 9"
    assert "The casts of step 9 are finite: look at" in shown(tmp_path)[1]


def test_recordings_without_a_replay(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is too large, and one has a damaged file; their statistics are still used."""
    write_stats(tmp_path, every=2, first_bad=10)
    folder = add(tmp_path, recording)
    for damage in (False, True):
        if damage:
            (folder / "rank00001.pt").write_bytes(b"PK")
        else:
            monkeypatch.setattr(headline, "MAX_REPLAYED", 1)
        run = data.read_run(tmp_path)
        found = headline.headline(run)
        assert found is not None
        assert found.where == f"step 9, rank 0, {SECOND}"
        assert found.what.startswith("input (for output, grad_weight): a scale that is not finite.")
        assert f"{folder} was not replayed: " in run.notes[0]
        monkeypatch.undo()
    (folder / "rank00000.pt").write_bytes(b"PK")
    run = data.read_run(tmp_path)
    found = headline.headline(run)
    assert found is not None
    assert found.where == f"step 10, rank 1, {FIRST}"
    assert f"{folder} can't be read" in run.notes[0]


def test_recordings_of_an_earlier_run_are_left_out(recording: Path, tmp_path: Path) -> None:
    add(tmp_path, recording)
    path = tmp_path / "recordings" / "step000009" / "rank00000.pt"
    os.utime(path, (time.time() - 60,) * 2)
    RunWriter(tmp_path)  # the same command, once more
    run = data.read_run(tmp_path)
    assert (headline.headline(run), run.recordings) == (None, [])
    assert "an earlier run wrote it" in run.notes[0]
    RunWriter(tmp_path, first=9)
    assert of(tmp_path) is None
    RunWriter(tmp_path, first=10)  # of a run that goes on, the steps before remain
    assert shown(tmp_path)[0] == f"step 9, rank 0, {SECOND}"
    (tmp_path / "config.json").unlink()
    RunWriter(tmp_path)
    path.touch()
    assert shown(tmp_path)[0] == f"step 9, rank 0, {SECOND}"


def test_delayed_scales_are_late(tmp_path: Path) -> None:
    """Without tensors, scales show that a step before may have been bad."""
    rows = [{"step": s, "nonfinite": s == 9, "delayed": True, "position": 1} for s in (7, 8, 9)]
    known = {"fqn": FIRST, "operand": "input", "gemms": ("output",), "folded": None}
    row = {"folder": tmp_path, "world": 2, "step": 9, "rows": [each | known for each in rows]}
    run = data.Run("run", recordings=[row])
    found = headline.headline(run)
    assert found is not None
    assert found.where == f"step 9, rank unknown, {FIRST}"
    assert "It may have begun in step 8: recordings show nothing wrong up to step 7." in found.what
    # Statistics of the same step may know the rank.
    run.stats = [known | {"step": 9, "kind": "cast", "finite": False, "nonfinite": 1.0}]
    run.stats[0] |= {"nonfinite_rank": 1, "position": 0}
    found = headline.headline(run)
    assert found is not None
    assert found.where == f"step 9, rank 1, {FIRST}"
    # Of a recorder that began in step 9, no step before is known.
    run.stats, row["rows"] = [], row["rows"][2:]
    run.metrics = [{"step": 8, "loss": 1.0}]
    found = headline.headline(run)
    assert found is not None
    assert "It may have begun before: recordings have no earlier step." in found.what
