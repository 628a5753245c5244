"""The report of runs: what it reads, also from damaged folders, and what it shows."""

import base64
import json
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from reference import json_lines, raised
from torch import nn

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist.debug import Anomaly, AnomalyLimits, GemmStats, float8_stats
from fp8_dist.report import RunWriter, data, figures, page, units
from fp8_dist.report import __main__ as command

LAYERS = [f"layers.{block}.{name}" for block in range(2) for name in ("wq", "w1", "w2")]
# A large input in step 10; NaN in the gradients of two layers from step 16 on. Casts of gradients
# are in the reverse order of layers.
SPIKE, EFFECT, BROKEN = LAYERS[2], LAYERS[3], LAYERS[4]
CAST = {
    "kind": "cast",
    "step": 1,
    "fqn": "a",
    "operand": "input",
    "gemms": ["output", "grad_weight"],
    "granularity": "tensor",
    "dtype": "float8_e4m3fn",
    "amax": 1.0,
    "underflow": 0.0,
    "saturation": 0.0,
    "nonfinite": 0.0,
    "sqnr": 30.0,
}
PARTIAL = {name: value for name, value in CAST.items() if name != "underflow"} | {"step": 10}
GRADIENT = CAST | {"operand": "grad_output", "gemms": ["grad_input"], "dtype": "float8_e5m2"}
GEMM = {"kind": "gemm", "step": 1, "fqn": "a", "gemm": "output", "sqnr": 30.0}
ANOMALY = {
    "step": 10,
    "fqn": SPIKE,
    "operand": "input",
    "what": "underflow",
    "ranks": [0],
    "message": f"step 10: {SPIKE}: input (for output): 61 % of the values become zero",
}
SIZES = {"count": 1, "elements": 2, "bytes": 4, "bf16_bytes": 4, "in_mixed_gather": False}
COMM = {"op": "all_gather", "axis": "dp", "dtype": "torch.bfloat16", "module": ""} | SIZES
METRICS = {"step": 1, "loss": 2.0, "tokens_per_second": 9.0, "grad_norm": 1.0}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder: Path, layers: list[str] = LAYERS, **config: Any) -> Path:
    """The folder of an invented run, with two planted faults."""
    folder.mkdir(exist_ok=True)
    units = {"loss": "nats per token"}
    config = {"recipe": "tensorwise", "steps": 20, "units": units} | config
    (folder / "config.json").write_text(json.dumps(config))
    metrics = [METRICS | {"step": step, "loss": 3 - step / 20} for step in range(1, 21)]
    metrics[17]["grad_norm"] = metrics[18]["grad_norm"] = math.nan
    write_lines(folder / "metrics.jsonl", metrics)
    rows: list[dict[str, Any]] = []
    for step in range(2, 21, 2):
        for index, fqn in enumerate(layers):
            where = {"step": step, "fqn": fqn, "position": index}
            rows.append(CAST | where | {"amax": 2.0**index, "sqnr": 30 - index / 7})
            if (fqn, step) == (SPIKE, 10):
                rows[-1] |= {"amax": 2.0**13, "underflow": 61.0, "sqnr": 9.5}
            rows.append(GRADIENT | where | {"position": 2 * len(layers) - index})
            if fqn in (EFFECT, BROKEN) and step >= 16:
                rows[-1] |= {"amax": "NaN", "nonfinite": 0.01, "sqnr": "NaN"}
            rows.append(GEMM | where)
    write_lines(folder / "float8_stats.jsonl", rows)
    write_lines(folder / "anomalies.jsonl", [ANOMALY])
    comm = [COMM, COMM | {"module": "norm"}, COMM | {"op": "all_to_all"}]
    (folder / "comm.json").write_text(json.dumps(comm))
    return folder


def page_of(*folders: Path) -> tuple[str, list[str]]:
    """The page that the command writes, and the pictures in it."""
    assert command.main([*map(str, folders)]) == 0
    page = (folders[0] / "report.html").read_text(encoding="utf-8")
    pictures = re.findall('<img [^>]*src="data:image/svg\\+xml;base64,([^"]*)">', page)
    return page, [base64.b64decode(picture).decode() for picture in pictures]


def test_page_of_a_whole_run(tmp_path: Path) -> None:
    page, pictures = page_of(write_run(tmp_path / "run"))
    for text in (
        "<h1>run</h1>",
        '<td class="short">input (for output)</td>',
        "<td>61 % of the values become zero</td>",
        "<th>logged steps</th>",
        # The first cast that is not finite leads, in the order of casts; unusual ones are folded.
        f"<strong>First fault: step 16, rank unknown, {BROKEN}.</strong> grad_output (for grad_input): ",
        "grad_norm is not finite in 2 steps, first in 18. 1 anomaly, the first in "
        f"step 10: {SPIKE}, input (for output): 61 % of the values become zero.</details>",
        "<td>20 of 20</td>",
        "<td>all_gather</td><td>dp</td><td>bfloat16</td><td>2</td><td>8 B</td><td>8 B</td>",
        "<summary>input as float8_e4m3fn, scaled per tensor, for output and grad_weight</summary>",
        "<summary>grad_output as float8_e5m2, scaled per tensor, for grad_input</summary>",
        "<summary>result of the output GEMM</summary>",
    ):
        assert text in page
    assert "are not shown" not in page
    # Three metrics; two layers; three measures of inputs, the SQNR of the others.
    assert len(pictures) == 3 + 2 + 3 + 1 + 1
    folded = re.findall("<details( open)?>\n<summary>", page)
    assert folded == [" open", " open", ""]  # the GEMMs are far from their limit
    assert "<figcaption>loss, nats per token</figcaption>" in page
    assert all(f">{SPIKE}</text>" in picture for picture in pictures[5:])
    # Links of anomalies lead to the pictures of their layers.
    (table,) = re.findall('<table id="anomalies".*?</table>', page, re.S)
    assert re.findall('href="#([^"]*)"', table) == ["layer-0-1"]
    assert page.count('id="layer-0-1"') == 1
    # It needs nothing else.
    assert not re.search(r"<script|\bhref=\"[^#]|@import|url\(", page)
    assert "default-src 'none'" in page


def test_runs_are_compared(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, **{"lr": n}) for n, name in enumerate(("first", "second"))]
    page, pictures = page_of(*runs)
    assert "<h1>first, second</h1>" in page
    captions = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert captions[0] == "loss minus first&#39;s (bold: median of the last 20 steps)"
    for name in ("first", "second"):
        assert sum(caption.startswith(f"{name}: SQNR: signal to") for caption in captions) == 3
    assert '<tr class="differs"><th>lr</th><td>0</td><td>1</td></tr>' in page
    assert "<div><dt>recipe</dt> <dd>tensorwise</dd></div>" in page
    # One legend above all charts, where it covers no curve; in the colors of the curves.
    (legend,) = re.findall('<p id="colors">(.*?)</p>', page)
    assert re.findall('"></span>(.*?)</span>', legend) == ["first", "second"]
    colors = re.findall("background: (#[0-9a-f]{6})", legend)
    assert len({*colors}) == 2
    for picture in pictures[:4]:
        assert all(f"stroke: {color}" in picture for color in colors)
        assert "legend" not in picture
    assert 'href="#layer-1-1"' in page
    (tmp_path / "a").mkdir()
    again = write_run(tmp_path / "a" / "first")
    assert [run.name for run in data.read_runs([runs[0], again])] == [str(runs[0]), str(again)]


@pytest.mark.filterwarnings("error")
def test_metrics_that_are_rare_or_never_positive(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", config={"steps": 600})
    for step in range(0, 600, 10):
        rare = {"eval_loss": 2.25} if step == 10 else {}
        writer.log(step, reward=-1.5 - step / 10, zero=0, nan=math.nan, **rare)
    page, pictures = page_of(tmp_path / "run")
    (table,) = re.findall('<div id="summary".*?</table>', page, re.S)
    assert "No casts were recorded." in page
    cells = re.findall("<t[hd]>(.*?)</t", table)
    seconds = cells.pop(-2)
    assert 0 < float(seconds) < 1
    assert cells == [
        *("run", "logged steps", "reward", "zero", "nan", "eval loss", "seconds per step"),
        "anomalies",
        *("run", "60, up to step 590 of 600", "-51", "0", "NaN since step 0", "2.25", "0"),
    ]
    assert len(pictures) == 5


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    bad = "</script><img src=x onerror=alert(1)><b>&amp;</b>$x$"
    write_run(tmp_path, [bad, SPIKE], recipe=bad, **{bad: bad})
    write_lines(tmp_path / "anomalies.jsonl", [ANOMALY | {"fqn": bad, "message": f"{bad}: {bad}"}])
    page, pictures = page_of(tmp_path)
    for text in (page, *pictures):
        assert "<img src=x" not in text
        assert "<b>" not in text
    assert "&lt;b&gt;&amp;amp;&lt;/b&gt;$x$</text>" in pictures[-1]


def test_damaged_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {
        "config.json": '{"recipe": ',
        "metrics.jsonl": json.dumps(METRICS) + '\n{"step": 2, "loss": "x"}\n{"step": 3, "lo',
        "comm.json": "{",
        "float8_stats.jsonl": "\n".join(
            json.dumps(row)
            for row in (CAST, CAST | {"kind": "a", "gemms": None}, {"kind": "b"}, [])
        ),
        "anomalies.jsonl": json.dumps(ANOMALY) + "\n\x00\xff\n",
    }
    lines["float8_stats.jsonl"] += "\n" + json.dumps(PARTIAL)
    for name, content in lines.items():
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    shown, _ = page_of(tmp_path)
    notes = capsys.readouterr().err
    for name in lines:
        assert f"note: {tmp_path / name}" in notes
    assert "float8_stats.jsonl: 3 passed over, the first of them row 2: " in notes
    assert "<td>61 % of the values become zero</td>" in shown
    assert "<td>2</td>" in shown
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        (["nowhere"], "has none of the files of a run"),
        (["empty"], "has none of the files of a run"),
        ([".", "--out", str(tmp_path / "no" / "x.html")], "No such file or directory"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main([str(tmp_path / arguments[0]), *arguments[1:]])
        assert message in capsys.readouterr().err


def test_a_writer_takes_numbers_and_statistics(tmp_path: Path) -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
    stats = float8_stats(model)
    writer = RunWriter(tmp_path / "run", stats, config={"lr": 0.1}, units={"loss": "nats"})
    for step in range(3):
        with stats:
            loss = model(torch.ones(4, 32)).square().mean()
        writer.log(step, loss=loss, grad_norm=math.inf)
    assert stats.rows == []
    assert [line.split()[0] for line in stats.table().splitlines()[1:]] == ["2", "2"]
    metrics = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0].keys() == {"step", "loss", "grad_norm"}
    seconds = metrics[2].pop("seconds_per_step")
    assert metrics[2] == {"step": 2, "loss": loss.item(), "grad_norm": "Infinity"}
    rows = json_lines(tmp_path / "run" / "float8_stats.jsonl")
    assert [row["step"] for row in rows] == [0, 0, 1, 1, 2, 2]
    run = data.read_run(tmp_path / "run")
    known = {"step": 2, "loss": loss.item(), "grad_norm": math.inf}
    assert run.metrics[2] == known | {"seconds_per_step": seconds}
    assert (run.config["lr"], run.config["units"]) == (0.1, {"loss": "nats"})
    error = raised(TypeError, lambda: RunWriter(tmp_path / "other", nn.Linear(2, 2)))  # type: ignore[arg-type]
    assert error == "RunWriter: stats must be what float8_stats returns, got a Linear"
    error = raised(TypeError, partial(writer.log, 2, loss="low"))
    assert "RunWriter.log: loss='low' must be a number" in error
    error = raised(TypeError, partial(writer.log, 2, loss=torch.ones(2)))
    assert "RunWriter.log: loss has the shape [2]; log one number, such as" in error
    assert len(json_lines(tmp_path / "run" / "metrics.jsonl")) == 3
    writer.log(2, loss=np.float32(0.5), tokens=np.int64(7))
    assert json_lines(tmp_path / "run" / "metrics.jsonl")[3] == {
        "step": 2,
        "loss": 0.5,
        "tokens": 7,
    }
    # The run is resumed, and the statistics go on counting steps.
    stats = float8_stats(model, every=2, limits=AnomalyLimits(sqnr=20.0, jump=None))
    writer = RunWriter(tmp_path / "run", stats, first=3)
    writer.log(2, eval_loss=0.5)
    for step in range(3, 6):
        with stats:
            model(torch.ones(4, 32))
        writer.log(step)
    rows = json_lines(tmp_path / "run" / "float8_stats.jsonl")
    assert [row["step"] for row in rows] == [0, 0, 1, 1, 2, 2, 4, 4]
    assert data.read_run(tmp_path / "run").config["anomaly_limits"] == stats.limits
    with stats:
        model(torch.ones(4, 32))
    assert "step=7, but the last block of the statistics was step 6; enter them with" in raised(
        ValueError, partial(writer.log, 7)
    )


def test_maps_are_loud_where_anomalies_are_near() -> None:
    """Colours end at the limits, whatever the values are."""
    own = AnomalyLimits(sqnr=20.0, underflow=8.0, jump=None)
    ends = {name: figures.colored(name, own) for name in figures.HEATS}
    assert ends == {
        "amax": (0.0, 7.0),
        "underflow": (0.0, 8.0),
        "saturation": (0.0, 8.0),
        "sqnr": (35.0, 20.0),
    }

    def drawn(changed: dict[str, Any], step: int = 30) -> tuple[int, bool]:
        rows = [CAST | {"step": s} | (changed if s == step else {}) for s in range(40)]
        run = data.Run("run", stats=[data.stats_row(row) for row in rows])
        ((_, pictures, is_loud),) = figures.heat_maps([run])
        return len(pictures), is_loud

    assert drawn({}) == (1, False)
    assert drawn({"underflow": 36.0}) == (2, False)
    assert drawn({"underflow": 38.0}) == (2, True)
    assert drawn({"sqnr": 19.0}) == (1, False)
    assert drawn({"sqnr": 18.0}) == (1, True)
    assert drawn({"amax": 2.0**5}) == (2, False)
    assert drawn({"amax": 2.0**6}) == (2, True)
    assert drawn({"amax": 2.0**-6}) == (1, False)  # lower for a step is not a jump after it
    assert drawn({"amax": 2.0**6}, step=0) == (1, False)
    assert drawn({"underflow": 0.9}) == (1, False)  # a map of it would be blank
    assert drawn({"amax": "NaN", "sqnr": "NaN", "nonfinite": 1.0}) == (1, True)


def test_the_worst_layers_are_named(tmp_path: Path) -> None:
    page, pictures = page_of(write_run(tmp_path / "run"))
    (table,) = re.findall('<table id="worst".*?</table>', page, re.S)
    rows = [re.findall("<td.*?>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    inputs = "input as float8_e4m3fn, scaled per tensor, for output and grad_weight"
    gradients = "grad_output as float8_e5m2, scaled per tensor, for grad_input"
    # In step 16 two layers become NaN at once; they stand in the order of layers.
    assert rows[:3] == [
        [f"<code>{EFFECT}</code>", "NaN or infinite", "16", gradients],
        [f"<code>{BROKEN}</code>", "NaN or infinite", "16", gradients],
        [f"<code>{SPIKE}</code>", "amax: 11 octaves up (limit: 7)", "10", inputs],
    ]
    assert rows[3] == [f"<code>{LAYERS[5]}</code>", "SQNR: 29.3 dB (limit: 15)", "2", inputs]
    assert len(rows) == len(LAYERS)
    assert f"Of {len(LAYERS)} layers, {len(LAYERS)} are shown." in page
    # The tick labels of logarithmic axes are text: no TeX, which the page does not typeset.
    assert not any("mathdefault" in picture for picture in pictures)


def test_faults_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fine, odd, wrong = (tmp_path / name for name in ("fine", "odd", "wrong"))
    write_run(wrong)
    for folder in (fine, odd):
        folder.mkdir()
        write_lines(folder / "metrics.jsonl", [METRICS])
        write_lines(folder / "float8_stats.jsonl", [CAST])
    write_lines(odd / "anomalies.jsonl", [ANOMALY])
    (fine / "comm.json").write_text(
        json.dumps([COMM | {"bytes": 5_100_000, "bf16_bytes": 6_700_000}])
    )
    page, _ = page_of(fine, odd, wrong)
    cards = re.findall(r'<div class="(\w+)">\n<p><b>(\w+)</b>(.*?)<strong>(.*?)[:.]', page)
    assert cards == [
        ("alert", "wrong", ": ", "First fault"),
        ("notice", "odd", ": ", "Unusual"),
        ("fine", "fine", ", the baseline: ", "No fault found"),
    ]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "fine: no fault found. No anomalies in the casts of 1 recorded steps."
    assert said[1].startswith(f"odd: step 10, rank 0, {SPIKE}: input (for output): 61 %")
    assert said[2].startswith(f"wrong: step 16, rank unknown, {BROKEN}: ")
    header = "<th>a step sends</th><th>in bf16 it would send</th>"
    assert header in page
    assert "<td>5.1 MB</td><td>6.7 MB</td>" in page
    assert "in bf16, the same collectives would carry two bytes in place of each float8" in page


def test_collectives_stand_side_by_side(tmp_path: Path) -> None:
    """A row for each kind, with the counts and sizes of each run that has it."""
    kinds = {
        "bf16": [COMM | {"count": 2, "bytes": 3_608_832, "bf16_bytes": 3_608_832}],
        "float8": [
            COMM | {"dtype": "torch.float8_e4m3fn", "bytes": 999_999, "bf16_bytes": 1_999_998},
            COMM | {"in_mixed_gather": True},
        ],
    }
    for name, rows in kinds.items():
        write_run(tmp_path / name)
        (tmp_path / name / "comm.json").write_text(json.dumps(rows))
    names, table = page.collectives(data.read_runs([tmp_path / name for name in kinds])) or ([], [])
    assert names == ["bf16", "float8"]
    assert_expected_inline(
        "\n".join(" | ".join([*kind, *(cell or "-" for cell in cells)]) for kind, cells in table),
        """\
all_gather | dp | bfloat16 | 2 | 3.61 MB | 3.61 MB | - | - | -
all_gather | dp | float8_e4m3fn | - | - | - | 1 | 1 MB | 2 MB
all_gather | dp | bfloat16 | - | - | - | + | 4 B | 4 B""",
    )


def test_numbers_are_readable() -> None:
    """Names in words, sizes with a unit, a few digits, and no power of ten over an axis."""
    rows = [{"step": 1, "memory_bytes": 340_322_304.0, "lr_bytes": math.nan}]
    runs = [data.Run("a", metrics=rows), data.Run("b", config={"units": {"io_bytes": "pages"}})]
    names = ("memory_bytes", "lr_bytes", "io_bytes", "tokens_per_second")
    assert [units.shown(name, runs) for name in names] == [
        units.Shown("memory, MB", 1e6),
        units.Shown("lr, B"),
        units.Shown("io bytes, pages"),
        units.Shown("tokens per second"),
    ]
    assert page.shown_metric(runs[0], "memory_bytes", 1e6) == "340.3"
    sizes = [units.size(count) for count in (0, 999, 4096, 999_999, 5_516_584, 3 * 10**12)]
    assert sizes == ["0 B", "999 B", "4.1 kB", "1 MB", "5.52 MB", "3 TB"]
    shown = [units.figure(x) for x in (2.40864, 1637.6, -51.25, 0.0001313, 1e16, math.inf)]
    assert shown == ["2.409", "1,638", "-51.25", "0.0001313", "1e+16", "inf"]
    ticks = [units.tick(x) for x in (0, 0.30000000000000004, 1500, -2.5e6, 3.4e8, 1e-5)]
    assert ticks == ["0", "0.3", "1,500", "-2.5M", "340M", "1e-05"]
    assert [page.columns(charts) for charts in range(1, 11)] == [2, 2, 3, 4, 3, 3, 4, 4, 3, 4]


def test_seconds_per_step(tmp_path: Path) -> None:
    """The time since the line before, over the steps between; nothing where no step is between."""
    writer = RunWriter(tmp_path, first=7)
    with mock.patch("time.perf_counter", side_effect=[100.0, 103.0, 104.0, 110.0, 111.0]):
        writer.log(7, loss=1.0)
        writer.log(9, loss=1.0)
        writer.log(9, eval_loss=1.0)  # an evaluation: the next step begins after it
        writer.log(12, loss=1.0)
        writer.log(13, loss=1.0, seconds_per_step=7.0)
    seconds = [line.get("seconds_per_step") for line in json_lines(tmp_path / "metrics.jsonl")]
    assert seconds == [None, 1.5, None, 2.0, 7.0]


def test_the_verdict_on_a_loss(tmp_path: Path) -> None:
    """The median of the differences: one high step changes it little."""

    def sentence(name: str, *extra: float) -> str:
        writer = RunWriter(tmp_path / name)
        for step in range(40):
            writer.log(step, loss=3 - step / 20 + extra[step % len(extra)])
        baseline = data.read_run(tmp_path / "base")
        run = baseline if name == "base" else data.read_run(tmp_path / name)
        return " ".join(page.verdict(run, baseline))

    assert sentence("base", 0.0) == "No casts were recorded."
    in_bf16 = data.Run("bf16", config={"float8_layers": []})
    assert [*page.verdict(in_bf16, in_bf16)] == ["It has no float8 layers."]
    over = "Over the last 20 common steps the loss minus base's is "
    assert sentence("above", 0.03, 0.01).startswith(f"{over}+0.02 (median).")
    assert sentence("below", 0.028, -0.032).startswith(f"{over}-0.002 (median).")
    assert sentence("a high step", *[0.5] * 19, 2000.0).startswith(f"{over}+0.5 (median).")
    assert sentence("nan", *[0.5] * 39, math.nan).startswith("loss is not finite in 1 steps")


def test_folded_casts_say_so() -> None:
    config = Float8LinearConfig.from_recipe_name("rowwise_folded")
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=config)
    with (stats := float8_stats(model)):
        model(torch.ones(4, 32, requires_grad=True)).sum().backward()
    assert [data.stats_row(row)["label"] for row in stats.to_dicts()] == [
        "input as e4m3fn, scaled per row, for output and grad_weight",
        "weight as e4m3fn, scaled per row, for output and grad_input",
        "grad_output times the scales of weight as e4m3fn, scaled per row, for grad_input",
        "grad_output times the scales of input as e4m3fn, scaled per column, for grad_weight",
    ]


def test_what_a_resumed_run_knows_and_syncs(tmp_path: Path) -> None:
    def tell(first: int | None, *told: tuple[int, str]) -> RunWriter:
        stats = float8_stats(convert_to_float8_training(nn.Sequential(nn.Linear(16, 16))))
        writer = RunWriter(tmp_path, stats, first=first)
        for step, fqn in told:
            row = GemmStats(step=step, fqn=fqn, gemm="output", sqnr=3.0)
            stats.anomalies.append(Anomaly("SQNR", 3.0, 15.0, row))
            writer.log(step, loss=1.0)
        return writer

    writer = tell(None, (1, "w1"), (5, "w2"))  # step 5 will be run again
    synced = set()
    with mock.patch("os.fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino)):
        writer.sync()
    assert synced == {path.stat().st_ino for path in tmp_path.glob("*.jsonl")}
    assert len(synced) == 3
    tell(4, (4, "w1"), (5, "w2"))
    told = [(line["step"], line["fqn"]) for line in json_lines(tmp_path / "anomalies.jsonl")]
    assert told == [(1, "w1"), (5, "w2")]
    assert [line["step"] for line in json_lines(tmp_path / "metrics.jsonl")] == [1, 4, 5]
    tell(None)  # a run that may have forgotten ``first`` has removed nothing before its first step
    assert len(list(tmp_path.glob("*.jsonl"))) == 3
    tell(None, (0, "w1"))
    assert [line["step"] for line in json_lines(tmp_path / "metrics.jsonl")] == [0]
