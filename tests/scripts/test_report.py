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
from expecttest import assert_expected_inline
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


def test_what_the_parts_of_a_new_run_are_made_by(tmp_path):
    (tmp_path / "config.json").write_text('{"recipe": "bf16", "steps": 9}')
    (tmp_path / "metrics.jsonl").write_text("")
    shown = own_part(page_of(tmp_path))
    for name in ("no-anomalies", "no-stats"):
        part = re.search(rf'id="{name}">(.*?)</p>', shown)
        assert part is not None
        assert "--stats-every N" in part[1]
    assert "There is no <code>comm.json</code>: the last step of a run writes it" in shown
    assert "There is no step in <code>metrics.jsonl</code>." in shown


def test_alerts_name_the_first_layer_and_step_of_each_operand(tmp_path):
    bad = CAST | {"amax": "NaN", "nonfinite": 1.0}
    rows = [bad | {"fqn": "b", "step": 3}, bad | {"step": 4}, CAST | {"fqn": "c"}]
    rows += [GEMM | {"sqnr": "NaN", "step": 2, "fqn": ""}]
    assert_expected_inline(
        "\n".join(report.alerts(stats_of(tmp_path, rows))),
        """\
The first values that are not finite in the result of the output GEMM: the model at step 2.
The first values that are not finite in the input as float8_e4m3fn, scaled per tensor, for output: b at step 3, and then or later in 1 other layer.""",
    )


def test_anomalies_of_all_ranks(tmp_path):
    write_lines(
        tmp_path / "anomalies.jsonl", [ANOMALY | {"ranks": []}, ANOMALY | {"ranks": [1, 3]}]
    )
    found = read_run(tmp_path).anomalies or []
    assert [row["ranks"] for row in found] == ["all", "1, 3"]


def test_a_run_in_bf16_has_no_casts_to_watch(tmp_path):
    (tmp_path / "config.json").write_text('{"recipe": "bf16", "float8_layers": []}')
    shown = own_part(page_of(tmp_path))
    assert shown.count("The run has no float8 layers.") == 2
    assert "--stats-every" not in shown


def test_milliseconds_of_collectives_that_were_timed(tmp_path):
    write_run(tmp_path)
    rows = json.loads((tmp_path / "comm.json").read_text())
    for row in rows:
        row["seconds"] = 0.002
    (tmp_path / "comm.json").write_text(json.dumps(rows))
    shown = own_part(page_of(tmp_path))
    assert '<th class="right">milliseconds</th>' in shown
    assert f'<td class="right">{2 * len(rows):.3f}</td>' in shown  # of all
    assert '<td class="right">56.000</td>' in shown  # of the 28 gathers of weights


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
    assert_expected_inline(
        notes.strip(),
        """\
note: config.json could not be read: Expecting value: line 1 column 12 (char 11)
note: metrics.jsonl: row 2 and 1 more were passed over: x is not a number
note: comm.json holds a dict, not a list.
note: float8_stats.jsonl: row 2 and 3 more were passed over: the kind a is unknown
note: anomalies.jsonl: row 2 was passed over: 'utf-8' codec can't decode byte 0xff in position 1: invalid start byte""",
    )
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


def test_a_config_that_is_missing_is_named(tmp_path):
    write_run(tmp_path, steps=4)
    (tmp_path / "config.json").unlink()
    assert read_run(tmp_path).notes == [
        "config.json is missing: the options of the run are unknown."
    ]
    assert "There is no <code>config.json</code>." in page_of(tmp_path)


def test_files_that_are_folders(tmp_path):
    for name in report_data.FILES:
        (tmp_path / name).mkdir()
    page_of(tmp_path)
    assert len(read_run(tmp_path).notes) == len(report_data.FILES)


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


def test_text_is_one_line_of_printable_characters():
    assert report_data.text("a\nb\u202ec\x00\ud800") == "a\ufffdb\ufffdc\ufffd\ufffd"
    assert report_data.text("x" * 301) == "x" * 300 + "…"


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


@given(
    config=st.dictionaries(
        st.sampled_from([*report.SHOWN_FIRST, "dp", "tp", "float8_layers", "memory", "x"]), JSON
    )
)
@settings(deadline=None, max_examples=50)
def test_configs_of_any_types_are_shown(config):
    run = Run("a", config, stats={})
    report.tiles(run)
    report.summary(config)
    assert all(isinstance(part, str) for row in report.config_rows(config) for part in row)
    assert report_charts.layers_in_order(run) is not None


def test_a_later_row_of_a_step_holds(tmp_path):
    run = stats_of(tmp_path, [CAST | {"amax": 1.0}, CAST | {"amax": 2.0}])
    (grid,) = grids(run)
    assert array(grid, "amax").tolist() == [[2.0]]


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


@pytest.mark.parametrize(
    ("layers", "steps", "columns"),
    [(1, 1, 1), (7, 500, 500), (200, 500, 500), (200, 10**6, 600), (900, 500, 133), (10**6, 9, 1)],
)
def test_heat_maps_are_small_enough_for_a_browser(layers, steps, columns):
    assert report_charts.columns_for(layers, steps) == columns


def test_lines_keep_their_extremes():
    values = np.sin(np.arange(10**5) / 50.0)
    values[[777, 54321]] = [9.0, -9.0]
    values[70000] = math.nan
    kept = report_charts.representative(values)
    assert len(kept) <= 3 * report_charts.MAX_PARTS
    assert {0, 777, 54321, 70000, 10**5 - 1} <= set(kept)
    assert kept == sorted(set(kept))


def test_layers_stand_in_the_order_of_the_model(tmp_path):
    (tmp_path / "config.json").write_text('{"float8_layers": ["b", 1, "a"]}')
    run = stats_of(tmp_path, [CAST | {"fqn": fqn} for fqn in "cab"])
    assert grids(run)[0]["layers"] == ["b", "a", "c"]


def test_labels_differ():
    long = "x" * 60
    assert report_charts.labels(["", "a", f"1{long}", f"2{long}"]) == [
        "(the model)",
        "a",
        f"…{long[:44]} (2)",
        f"…{long[:44]} (3)",
    ]
