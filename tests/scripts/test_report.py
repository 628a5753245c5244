"""The report of a run: what it reads, also from damaged folders, and what a browser draws of it.

The browser is skipped where there is no Chromium or Chrome; with FP8_DIST_REQUIRE_BROWSER=1, which CI
sets, that is a failure.
"""

import html
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from scripts.train import report, report_data

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
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


def page_of(folder: Path) -> str:
    """The page that the command writes, without the library of the charts."""
    assert report.main([str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    return page.replace(report.get_plotlyjs(), "")


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1], parse_constant=pytest.fail)


def test_page_of_a_whole_run(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"))
    for text in (
        "<h1>run</h1>",
        f"{SPIKE}: underflow",
        "The norm of the gradients is not finite in 2 steps, first in 18.",
        f"for grad_input: {BROKEN} at step 16.",
        '<td>all_gather</td><td>dp</td><td>torch.bfloat16</td><td class="right">2</td>',
        '<td class="right">500.000</td>',
    ):
        assert text in page
    assert "could not be read" not in page
    data = data_of(page)
    assert data.keys() == {*("loss", "tokens_per_second", "grad_norm"), *report_data.MEASURES}
    assert data["loss"]["data"][0]["x"] == list(range(1, 21))
    assert data["grad_norm"]["data"][0]["y"][16:] == [1.0, None, None, 1.0]
    assert [shape["x0"] for shape in data["loss"]["layout"]["shapes"]] == [10]
    labels = [button["label"] for button in data["sqnr"]["layout"]["updatemenus"][0]["buttons"]]
    assert labels == [
        "input as float8_e4m3fn, scaled per tensor, for output and grad_weight",
        "grad_output as float8_e5m2, scaled per tensor, for grad_input",
        "result of the output GEMM",
    ]
    inputs, gradients, bad = data["amax"]["data"]
    assert (inputs["y"], inputs["x"]) == (LAYERS, list(range(2, 21, 2)))
    assert inputs["z"][LAYERS.index(SPIKE)] == [2.0] * 4 + [13.0] + [2.0] * 5
    assert gradients["z"][7] == [0.0] * 7 + [None] * 3
    assert bad["z"][7] == [None] * 7 + [1.0] * 3
    assert [trace["visible"] for trace in data["amax"]["data"]] == [True, False, False]
    assert data["amax"]["layout"]["updatemenus"][0]["buttons"][1]["args"] == [
        {"visible": [False, True, True]}
    ]
    # It needs nothing else.
    assert not re.search(r"\b(src|href)=|@import|url\(", page)
    assert "default-src 'none'; script-src 'sha256-" in html.unescape(page)


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
    shown = page_of(tmp_path)
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


def test_what_a_browser_draws(tmp_path: Path) -> None:
    """All charts; names are shown as they are, nothing else runs, nothing is asked for."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        required = os.environ.get("FP8_DIST_REQUIRE_BROWSER") == "1"
        (pytest.fail if required else pytest.skip)("no Chromium or Chrome is installed")
    bad = "</script><img src=x onerror=alert(1)><b>&amp;</b>"
    write_run(tmp_path, [bad, *LAYERS], recipe=bad, **{bad: bad})
    write_lines(tmp_path / "anomalies.jsonl", [ANOMALY | {"fqn": bad, "message": bad}])
    assert "<img" not in page_of(tmp_path)
    complaints, requests = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(150_000)  # beside ranks that compile, on few cores
        for event in ("console", "pageerror", "dialog"):
            page.on(event, lambda message: complaints.append(str(message)))  # type: ignore[call-overload]
        page.on("request", lambda request: requests.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        for name in ("loss", "tokens_per_second", "grad_norm"):
            box = page.locator(f"#{name} .scatterlayer path.js-line").first.bounding_box()
            assert box is not None
            assert box["width"] > 100, name
        for name in report_data.MEASURES:
            box = page.locator(f"#{name} .heatmaplayer image").first.bounding_box()
            assert box is not None
            assert box["width"] > 800, name
        assert bad in page.locator("#amax .yaxislayer-above text").all_text_contents()
        page.locator("#amax").scroll_into_view_if_needed()
        box = page.locator("#amax .heatmaplayer image").first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 5, box["y"] + 3)
        label = page.locator("#amax .hoverlayer .hovertext")
        label.wait_for()
        assert (label.text_content() or "") == f"{bad}step 2amax 2^0.0"
        assert page.locator("img, b").count() == 0
        browser.close()
    assert complaints == []
    assert {url.partition(":")[0] for url in requests} <= {"file", "data", "blob"}
