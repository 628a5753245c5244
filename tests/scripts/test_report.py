"""The report of a run: what it reads, also from damaged folders, and what it shows."""

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.train import report, report_data, report_figures

LAYERS = [f"layers.{block}.{name}" for block in range(4) for name in ("wq", "w1", "w2")]
SPIKE, BROKEN = LAYERS[2], LAYERS[7]  # a large input in step 10, NaN in gradients from step 16 on
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
GRADIENT = CAST | {"operand": "grad_output", "gemms": ["grad_input"], "dtype": "float8_e5m2"}
GEMM = {"kind": "gemm", "step": 1, "fqn": "a", "gemm": "output", "sqnr": 30.0}
ANOMALY = {
    "step": 10,
    "fqn": SPIKE,
    "operand": "input",
    "what": "underflow",
    "ranks": [0],
    "message": f"{SPIKE}: underflow",
}
SIZES = {"count": 1, "elements": 2, "bytes": 4, "float8_bytes": 0, "in_mixed_gather": False}
COMM = {"op": "all_gather", "axis": "dp", "dtype": "torch.bfloat16", "module": ""} | SIZES
METRICS = {"step": 1, "loss": 2.0, "tokens_per_second": 9.0, "grad_norm": 1.0}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder: Path, layers: list[str] = LAYERS, **config: Any) -> Path:
    """The folder of a run that never was, with two faults planted."""
    folder.mkdir(exist_ok=True)
    config = {"recipe": "tensorwise", "steps": 20, "float8_layers": layers} | config
    (folder / "config.json").write_text(json.dumps(config))
    metrics = [METRICS | {"step": step, "loss": 3 - step / 20} for step in range(1, 21)]
    metrics[17]["grad_norm"] = metrics[18]["grad_norm"] = math.nan
    write_lines(folder / "metrics.jsonl", metrics)
    rows: list[dict[str, Any]] = []
    for step in range(2, 21, 2):
        for index, fqn in enumerate(layers):
            where = {"step": step, "fqn": fqn}
            rows.append(CAST | where | {"amax": 2.0**index})
            if (fqn, step) == (SPIKE, 10):
                rows[-1] |= {"amax": 2.0**13, "underflow": 61.0, "sqnr": 9.5}
            rows.append(GRADIENT | where)
            if fqn == BROKEN and step >= 16:
                rows[-1] |= {"amax": "NaN", "nonfinite": 0.01, "sqnr": "NaN"}
            rows.append(GEMM | where)
    write_lines(folder / "float8_stats.jsonl", rows)
    write_lines(folder / "anomalies.jsonl", [ANOMALY])
    comm = [COMM, COMM | {"module": "norm"}, COMM | {"op": "all_to_all", "seconds": 0.5}]
    (folder / "comm.json").write_text(json.dumps(comm))
    return folder


def page_of(folder: Path) -> tuple[str, list[str]]:
    """The page that the command writes, and the pictures in it."""
    assert report.main([str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    pictures = re.findall('<img alt="" src="data:image/svg\\+xml;base64,([^"]*)">', page)
    return page, [base64.b64decode(picture).decode() for picture in pictures]


def test_page_of_a_whole_run(tmp_path: Path) -> None:
    page, pictures = page_of(write_run(tmp_path / "run"))
    for text in (
        "<h1>run</h1>",
        f"{SPIKE}: underflow",
        "The norm of the gradients is not finite in 2 steps, first in 18.",
        f"for grad_input: {BROKEN} at step 16.",
        '<td>all_gather</td><td>dp</td><td>torch.bfloat16</td><td class="right">2</td>',
        '<td class="right">500.000</td>',
        "<h3>input as float8_e4m3fn, scaled per tensor, for output and grad_weight</h3>",
        "<h3>grad_output as float8_e5m2, scaled per tensor, for grad_input</h3>",
        "<h3>result of the output GEMM</h3>",
    ):
        assert text in page
    assert "could not be read" not in page
    # Three metrics, four measures of each of two casts, one of a GEMM.
    assert len(pictures) == 3 + 2 * 4 + 1
    assert "loss, nats per byte" in pictures[0]
    assert all(f">{SPIKE}</text>" in picture for picture in pictures[3:])
    # It needs nothing else.
    assert not re.search(r"<script|\bhref=|@import|url\(", page)
    assert "default-src 'none'" in page


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    bad = "</script><img src=x onerror=alert(1)><b>&amp;</b>$x$"
    write_run(tmp_path, [bad, *LAYERS], recipe=bad, **{bad: bad})
    write_lines(tmp_path / "anomalies.jsonl", [ANOMALY | {"fqn": bad, "message": bad}])
    page, pictures = page_of(tmp_path)
    for text in (page, *pictures):
        assert "<img src=x" not in text
        assert "<b>" not in text
    assert "&lt;b&gt;&amp;amp;&lt;/b&gt;$x$</text>" in pictures[-1]


def test_cells_of_a_heat_map() -> None:
    rows = [CAST | {"fqn": fqn, "step": step} for fqn in "ab" for step in range(1, 4)]
    rows[0] |= {"amax": 8.0, "sqnr": "Infinity"}
    rows[1] |= {"underflow": 3.0, "sqnr": 11.0}
    rows[2] |= {"amax": "NaN", "nonfinite": 50.0, "sqnr": "NaN"}
    del rows[4]
    parsed = [report_data.stats_row(row) for row in [*rows, rows[0] | {"amax": 9.0, "sqnr": 12.0}]]
    layers, steps, values, bad = report_figures.grid(parsed, "amax")
    assert (layers, steps) == (["a", "b"], [1, 2, 3])
    assert bad.tolist() == [[False, False, True], [False] * 3]
    np.testing.assert_array_equal(values, [[9.0, 1.0, math.nan], [1.0, math.nan, 1.0]])
    assert report_figures.grid(parsed, "underflow")[2].tolist()[0] == [0.0, 3.0, 0.0]
    assert report_figures.grid(parsed, "sqnr")[2].tolist()[0][:2] == [12.0, 11.0]


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
    for name, content in lines.items():
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    shown, _ = page_of(tmp_path)
    notes = capsys.readouterr().err
    for name in lines:
        assert f"note: {name}" in notes
    assert "float8_stats.jsonl: 3 passed over, the first of them row 2: " in notes
    assert f"{SPIKE}: underflow" in shown
    assert "2.0000" in shown
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        (["nowhere"], "has none of the files of a run"),
        (["empty"], "has none of the files of a run"),
        ([".", "--out", str(tmp_path / "no" / "x.html")], "No such file or directory"),
    ):
        with pytest.raises(SystemExit, match="2"):
            report.main([str(tmp_path / arguments[0]), *arguments[1:]])
        assert message in capsys.readouterr().err
