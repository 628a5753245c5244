"""The report of a run: what it reads, also from damaged folders, and what its charts are given."""

import base64
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import BROKEN, layers_of, write_lines, write_run

from scripts.train import report, report_charts, report_data
from scripts.train.report_charts import FINITE, MISSING, NOT_FINITE, grids
from scripts.train.report_data import Run, read_run

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
CAST = {
    "kind": "cast",
    "step": 1,
    "fqn": "a",
    "operand": "input",
    "gemms": ["output"],
    "granularity": "tensor",
    "dtype": "float8_e4m3fn",
    "amax": 1.0,
    "scale": 1.0,
    "scale_min": 1.0,
    "underflow": 0.0,
    "saturation": 0.0,
    "nonfinite": 0.0,
    "sqnr": 30.0,
}
GEMM = {"kind": "gemm", "step": 1, "fqn": "a", "gemm": "output", "sqnr": 30.0}
ANOMALY = {
    "step": 1,
    "fqn": "a",
    "operand": "input",
    "what": "underflow",
    "value": 9.0,
    "threshold": 5.0,
    "ranks": [0],
    "message": "a: underflow",
}
COMM = {
    "op": "all_gather",
    "axis": "dp",
    "dtype": "torch.bfloat16",
    "module": "",
    "in_mixed_gather": False,
    "count": 1,
    "elements": 2,
    "bytes": 4,
    "float8_bytes": 0,
}
METRICS = {"step": 1, "loss": 2.0, "tokens_per_second": 9.0, "grad_norm": 1.0}


def page_of(folder: Path) -> str:
    """The page that the command writes."""
    assert report.main([str(folder)]) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


def own_part(page: str) -> str:
    """The page without the library of the charts."""
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def data_of(page: str) -> Any:
    """What the page gives to its charts."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1], parse_constant=pytest.fail)


def array(grid: dict[str, Any], name: str) -> np.ndarray:
    """A decoded array of a grid, layers x columns."""
    dtype = np.uint8 if name == "state" else np.dtype("<f4")
    return np.frombuffer(base64.b64decode(grid[name]), dtype).reshape(-1, len(grid["last"]))


def stats_of(folder: Path, rows: list[dict[str, Any]]) -> Run:
    """A run of these rows of float8_stats.jsonl."""
    folder.mkdir(exist_ok=True)
    write_lines(folder / "float8_stats.jsonl", rows)
    return read_run(folder)


def test_page_of_a_whole_run(tmp_path):
    page = page_of(write_run(tmp_path / "run"))
    shown = own_part(page)
    assert "<h1>run</h1>" in shown
    assert "tensorwise, small, dp 2 x tp 2, torch 2.13.0" in shown
    assert "layers.1.feed_forward.w2: underflow in the input at step 50" in shown
    assert "The norm of the gradients is not finite in step 102 and 18 later." in shown
    assert 'id="collectives"' in shown
    assert "milliseconds" not in shown
    assert "could not be read" not in shown
    data = data_of(page)
    assert [grid["label"] for grid in data["grids"]] == [
        "input as float8_e4m3fn, scaled per tensor, for output and grad_weight",
        "weight as float8_e4m3fn, scaled per tensor, for output and grad_input",
        "grad_output as float8_e5m2, scaled per tensor, for grad_input and grad_weight",
        "result of the output GEMM",
    ]
    assert data["anomalies"] == [50, 104]
    for grid in data["grids"]:
        assert grid["layers"] == layers_of(4)
        assert grid["last"] == list(range(2, 121, 2))
    states = array(data["grids"][2], "state")
    broken = states[layers_of(4).index(BROKEN)]
    assert broken.tolist() == [FINITE] * 51 + [NOT_FINITE] * 9
    assert (states == NOT_FINITE).sum() == 9
    assert data["lines"]["loss"]["x"] == list(range(1, 121))
    assert data["lines"]["grad_norm"]["y"][101:] == [None] * 19


def test_the_page_needs_nothing_else(tmp_path):
    page = page_of(write_run(tmp_path / "run"))
    assert not re.search(r"\b(src|href)=|@import|url\(", own_part(page))
    assert "default-src 'none'; script-src 'sha256-" in html.unescape(own_part(page))


def test_what_is_said_of_a_damaged_folder(tmp_path, capsys):
    lines = {
        "config.json": '{"recipe": ',
        "metrics.jsonl": json.dumps(METRICS) + '\n{"step": 2, "loss": "x"}\n{"step": 3, "lo',
        "comm.json": "{}",
        "float8_stats.jsonl": "\n".join(
            json.dumps(row)
            for row in (CAST, CAST | {"kind": "a"}, CAST | {"step": "1"}, {"kind": "cast"}, [])
        ),
        "anomalies.jsonl": json.dumps(ANOMALY) + "\n\x00\xff\n",
    }
    for name, content in lines.items():
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    shown = own_part(page_of(tmp_path))
    notes = capsys.readouterr().err
    for name in lines:
        assert f"note: {name}" in notes
    assert shown.count("<li>") == notes.count("note: ")
    assert "a: underflow" in shown
    assert "2.0000" in shown


def test_folders_that_are_no_runs(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "run", steps=4)
    for arguments, message in (
        (["nowhere"], "nowhere is no folder"),
        (["empty"], "it has none of config.json, metrics.jsonl, comm.json"),
        (["run", "--out", str(tmp_path)], "is a folder: name a file"),
        (["run", "--out", str(tmp_path / "no" / "x.html")], "No such file or directory"),
    ):
        with pytest.raises(SystemExit) as error:
            report.main([str(tmp_path / arguments[0]), *arguments[1:]])
        assert error.value.code == 2
        assert message in capsys.readouterr().err


def test_names_are_data(tmp_path):
    bad = "</script><script>document.title='bad'</script><img src=x onerror=alert(1)>"
    write_run(tmp_path, steps=4, model=bad, **{bad: bad}, float8_layers=[bad])
    write_lines(tmp_path / "float8_stats.jsonl", [CAST | {"fqn": bad, "dtype": bad}])
    write_lines(tmp_path / "anomalies.jsonl", [ANOMALY | {"fqn": bad, "message": bad}])
    (tmp_path / "comm.json").write_text(json.dumps([COMM | {"module": bad, "op": bad}]))
    page = page_of(tmp_path)
    assert "<img" not in own_part(page)
    assert "document.title='bad'" not in page
    assert page.count("<script") - report.get_plotlyjs().count("<script") == 3
    assert data_of(page)["grids"][0]["layers"] == [bad]


@pytest.mark.parametrize(
    ("parse", "row"),
    [
        (report_data.metrics_row, METRICS),
        (report_data.comm_row, COMM),
        (report_data.stats_row, CAST),
        (report_data.stats_row, GEMM),
        (report_data.anomaly_row, ANOMALY),
    ],
    ids=["metrics", "comm", "cast", "gemm", "anomaly"],
)
@given(data=st.data())
@settings(deadline=None)
def test_rows_of_any_types_are_read_or_refused(parse, row, data):
    parse(row)
    changes = st.dictionaries(st.sampled_from(sorted(row)), JSON)
    for changed in (data.draw(JSON), row | data.draw(changes)):
        try:
            parse(changed)
        except (ValueError, KeyError, TypeError) as error:
            assert str(error)  # noqa: PT017


def test_columns_of_several_steps_show_the_worst(tmp_path, monkeypatch):
    monkeypatch.setattr(report_charts, "MAX_CELLS", 4)
    rows = [CAST | {"fqn": fqn, "step": step} for fqn in "ab" for step in range(1, 6)]
    rows[0] |= {"amax": 7.0, "sqnr": "Infinity"}
    rows[2] |= {"underflow": 3.0, "saturation": 2.0, "sqnr": 11.0}
    rows[4] |= {"amax": "NaN", "nonfinite": 50.0, "sqnr": "NaN"}
    del rows[5:8]
    (grid,) = grids(stats_of(tmp_path, rows))
    assert grid["steps"] == ["steps 1 to 3", "steps 4 to 5"]
    assert grid["last"] == [3, 5]
    assert array(grid, "amax").tolist()[0] == [7.0, 1.0]
    assert array(grid, "underflow").tolist()[0] == [3.0, 0.0]
    assert array(grid, "saturation").tolist()[0] == [2.0, 0.0]
    assert array(grid, "sqnr").tolist()[0] == [11.0, 30.0]
    assert array(grid, "state").tolist() == [[FINITE, NOT_FINITE], [MISSING, FINITE]]
    assert np.isnan(array(grid, "amax")[1, 0])


def test_lines_keep_their_extremes():
    values = np.sin(np.arange(10**5) / 50.0)
    values[[777, 54321]] = [9.0, -9.0]
    values[70000] = math.nan
    kept = report_charts.representative(values)
    assert len(kept) <= 3 * report_charts.MAX_PARTS
    assert {0, 777, 54321, 70000, 10**5 - 1} <= set(kept)
    assert kept == sorted(set(kept))
