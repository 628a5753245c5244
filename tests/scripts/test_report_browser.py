"""The report of a run in a browser without a window: what is drawn, and what answers to the mouse.

Skipped where there is no Chromium or Chrome; with FP8_DIST_REQUIRE_BROWSER=1, which CI sets, that is
a failure.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from synthetic_run import BROKEN, SPIKE, layers_of, write_lines, write_run

from scripts.train import report

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# No requests of its own.
FLAGS = [
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LINES = ("loss", "learning_rate", "tokens_per_second", "memory_bytes", "grad_norm", "amax-lines")
INPUT, GRAD_OUTPUT, GEMM = "0", "2", "3"  # of the selection of operands
SIZE = {"width": 1400, "height": 900}
# A page of 5 MB beside ranks that compile, on few cores.
TIMEOUT_MS = 150_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser with an empty profile."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        why = f"none of {', '.join(NAMES)} is installed"
        required = os.environ.get("FP8_DIST_REQUIRE_BROWSER") == "1"
        (pytest.fail if required else pytest.skip)(why)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


class Reports:
    """Makes and opens reports; collects what the browser complains of, and what it asks for."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.pages: list[Page] = []
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def __call__(self, folder: Path, place: str = "", scheme: str = "light") -> Page:
        """The open report of a run's folder; place: the end of its address, from "#" on."""
        assert report.main([str(folder)]) == 0
        page = self.browser.new_page(viewport=SIZE, color_scheme=scheme)
        page.set_default_timeout(TIMEOUT_MS)
        self.pages.append(page)
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto((folder / "report.html").as_uri() + place)
        return page


@pytest.fixture
def opened(browser: Browser) -> Iterator[Reports]:
    """Opens reports; the test fails on any message of the browser and any request."""
    reports = Reports(browser)
    yield reports
    for page in reports.pages:
        page.close()
    assert reports.complaints == []
    assert {url.partition(":")[0] for url in reports.requests} <= {"file", "data"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with planted faults."""
    return write_run(tmp_path_factory.mktemp("runs") / "run")


def cell(page: Page, chart: str, layer: str, step: int) -> tuple[float, float]:
    """Where a cell of a heat map is, in pixels of the window."""
    page.locator(f"#{chart}").scroll_into_view_if_needed()
    x, y = page.evaluate(
        """([chart, layer, step]) => {
            const element = document.getElementById(chart);
            const { xaxis, yaxis } = element._fullLayout;
            const box = element.querySelector(".nsewdrag").getBoundingClientRect();
            return [box.x + xaxis.d2p(step), box.y + yaxis.d2p(layer)];
        }""",
        [chart, layer, step],
    )
    return x, y


def hovered(page: Page, chart: str, layer: str, step: int) -> str:
    """What the chart shows beside the pointer over a cell."""
    page.mouse.move(*cell(page, chart, layer, step))
    label = page.locator(f"#{chart} .hoverlayer .hovertext")
    label.wait_for()
    return label.text_content() or ""


def test_every_chart_has_marks(opened: Reports, run: Path) -> None:
    page = opened(run)
    for name in LINES:
        paths = page.locator(f"#{name} .scatterlayer path.js-line")
        assert paths.count() >= 1, name
        for index in range(paths.count()):
            assert (paths.nth(index).get_attribute("d") or "").count("L") > 2, name
    for name in ("amax", "underflow", "sqnr"):
        box = page.locator(f"#{name} .heatmaplayer image").first.bounding_box()
        assert box is not None
        assert box["width"] > 800, name
        assert box["height"] > 300, name
    assert page.locator("#saturation + .missing").text_content() == "No element was clamped."
    assert page.locator("#anomalies tbody tr").count() == 2
    titles = page.locator(".ytitle, .xtitle, .colorbar text").all_text_contents()
    assert {"step", "nats per byte", "tokens/s", "GiB", "L2 norm", "%", "dB"} <= set(titles)


def test_hover_shows_layer_step_and_value(opened: Reports, run: Path) -> None:
    page = opened(run)
    assert hovered(page, "underflow", SPIKE, 50) == f"{SPIKE}step 5061 % underflow"
    assert hovered(page, "sqnr", SPIKE, 50) == f"{SPIKE}step 50SQNR 9.50 dB"
    text = hovered(page, "amax", SPIKE, 50)
    assert text.startswith(f"{SPIKE}step 50amax ")
    assert float(text.rpartition(" ")[2]) > 1e4


def test_an_operand_is_chosen(opened: Reports, run: Path) -> None:
    page = opened(run)
    page.select_option("#grid", GRAD_OUTPUT)
    page.select_option("#layer", label=BROKEN)
    text = hovered(page, "sqnr", BROKEN, 110)
    assert text == f"{BROKEN}step 110has values that are not finiteSQNR NaN dB"
    assert page.url.endswith(f"#of={GRAD_OUTPUT}&layer={BROKEN}")
    legend = page.locator("#amax-lines .legendtext").all_text_contents()
    assert legend[0] == BROKEN
    page.select_option("#grid", GEMM)
    assert page.locator("#layer").evaluate("list => list.selectedOptions[0].text") == BROKEN
    names = ("amax-lines", "amax", "underflow", "saturation", "sqnr")
    assert [name for name in names if page.locator(f"#{name}").is_visible()] == ["sqnr"]


def test_a_click_chooses_the_layer(opened: Reports, run: Path) -> None:
    page = opened(run)
    layer = layers_of(4)[-1]
    page.mouse.click(*cell(page, "underflow", layer, 20))
    page.wait_for_function("() => location.hash.includes('layers.3.feed_forward.w3')")
    assert page.locator("#amax-lines .legendtext").first.text_content() == layer


def test_names_are_shown_as_they_are(opened: Reports, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)><b>&amp;</b>"
    write_run(tmp_path, steps=4, recipe=f"</script>{name}", float8_layers=[name], **{name: name})
    path = tmp_path / "float8_stats.jsonl"
    path.write_text(path.read_text().replace(BROKEN, name))
    page = opened(tmp_path)
    assert page.locator("img, figure b").count() == 0
    shown = page.evaluate("escaped(data.grids[0].labels[0])")
    assert hovered(page, "underflow", shown, 4).startswith(f"{name}step 4")
    assert name in page.locator("#amax .yaxislayer-above text").all_text_contents()
    assert page.locator("#amax-lines .legendtext").first.text_content() == name


def test_a_run_of_an_earlier_release(opened: Reports, tmp_path: Path) -> None:
    lines = [
        {"step": step, "loss": 2.0, "tokens_per_second": 9.0, "grad_norm": 1.0}
        for step in range(1, 4)
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    page = opened(tmp_path)
    assert page.locator("#loss .scatterlayer path.js-line").count() == 1
    for name in ("learning_rate", "memory_bytes"):
        text = page.locator(f"#{name} .missing").text_content()
        assert text == "Not recorded: the run is of an earlier release of the script."
