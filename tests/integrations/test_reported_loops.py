"""docs/report.md: its loops run unchanged, and a browser shows their runs on one page."""

import itertools
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import pytest
import torch
from documented import NO_HEAD, run_shown
from playwright.sync_api import Page, sync_playwright
from ranks import RankPools
from reference import json_lines
from torch import nn
from torch.utils.data import DataLoader
from trainer_runs import dataset, launched, llama
from transformers import TrainingArguments

from fp8_dist import attach_update, convert_to_float8_training, skip_head
from fp8_dist.debug import float8_stats
from fp8_dist.report.__main__ import main
from scripts.common.llama import Llama, LlamaConfig

ROOT = Path(__file__).parents[2]
FSDP2, TRAINER, LIGHTNING, LOGGERS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/report.md").read_text(), re.DOTALL | re.MULTILINE
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# The pixels of the letters of a chart: matplotlib's 9 points, which are 12 pixels where the picture
# has the size that it was drawn in.
SMALLEST_LETTERS = "image => 12 * image.width / image.naturalWidth"
EXPECTED = f"float8_stats: |record: |{NO_HEAD}"
STEPS, FAULT = 21, 20  # the step of the fault, whose casts are recorded


class Net(nn.Module):
    """Norms and linear layers. In the step of the fault, the output of one norm has an outlier."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.calls = itertools.count()
        self.norms[1].register_forward_hook(self.spoil)

    def spoil(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if next(self.calls) != FAULT:
            return output
        return output + 1e5 * torch.eye(*output.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, 32, generator=generator) for _ in range(STEPS)]


def with_fsdp2(folder: Path) -> None:
    """Run the FSDP2 loop; called on every rank."""
    os.chdir(folder)
    torch.manual_seed(0)
    scope = {"model": Net(), "batches": inputs(), "loss_of": lambda y: y.square().mean()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_shown(FSDP2, scope, expected=EXPECTED)


def with_trainer(folder: Path) -> None:
    """Run the Trainer with DDP; called on every rank."""
    os.chdir(folder)
    options = {"max_steps": STEPS, "logging_steps": 2, "save_steps": 99, "report_to": "none"}
    with launched():
        arguments = TrainingArguments("trainer", use_cpu=True, **options)
        run_shown(TRAINER, {"model": llama(), "arguments": arguments, "dataset": dataset()})


class Module(lightning.LightningModule):
    """A Lightning module around a converted net."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convert_to_float8_training(Net())

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters())
        attach_update(optimizer, self)
        return optimizer


def with_lightning(folder: Path) -> None:
    os.chdir(folder)
    torch.manual_seed(0)
    options = {"accelerator": "cpu", "max_steps": STEPS, "logger": False}
    options |= {"enable_checkpointing": False, "enable_progress_bar": False}
    batches = DataLoader(inputs(), batch_size=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about workers
        scope = {"module": Module(), "batches": batches, "options": options}
        run_shown(LIGHTNING, scope, expected=EXPECTED)


@pytest.fixture(scope="module")
def runs(ranks: RankPools, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of three runs."""
    folder = tmp_path_factory.mktemp("loops")
    ranks(2).run(with_fsdp2, folder)
    ranks(2).run(with_trainer, folder)
    ranks(1).run(with_lightning, folder)
    return [folder / "runs" / name for name in ("first", "trainer", "lightning")]


@pytest.fixture(scope="module")
def browser_page() -> Iterator[Page]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        required = os.environ.get("FP8_DIST_REQUIRE_BROWSER") == "1"
        (pytest.fail if required else pytest.skip)("no Chromium or Chrome is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--disable-gpu"])
        yield browser.new_page(viewport={"width": 1400, "height": 900})
        browser.close()


def test_what_the_loops_write(runs: list[Path]) -> None:
    first, trainer, fabric = runs
    for run in (first, fabric):
        metrics = json_lines(run / "metrics.jsonl")
        assert [line["step"] for line in metrics] == list(range(STEPS))
        anomaly, *_ = json_lines(run / "anomalies.jsonl")
        assert (anomaly["step"], anomaly["what"], anomaly["operand"]) == (FAULT, "jump", "input")
        assert anomaly["fqn"].endswith("layers.1")
        steps = {line["step"] for line in json_lines(run / "float8_stats.jsonl")}
        assert steps == {0, 10, 20}
    metrics = json_lines(trainer / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(2, STEPS, 2))
    assert {"loss", "grad_norm", "learning_rate"} < metrics[0].keys()
    assert {line["step"] for line in json_lines(trainer / "float8_stats.jsonl")} == {10, 20}


def test_loggers_take_the_layers_that_are_chosen() -> None:
    model = Llama(LlamaConfig(32, 2, 2, 2, 64, vocab_size=16, max_seq_len=16))
    convert_to_float8_training(model, module_filter_fn=skip_head(model))
    stats, tensorboard, wandb = float8_stats(model), mock.Mock(), mock.Mock()
    first, second = LOGGERS.splitlines()
    for line in (first, second):
        with stats:
            model(torch.zeros(2, 8, dtype=torch.int64)).sum().backward()
        run_shown(line, {"stats": stats, "summary_writer": tensorboard, "wandb_run": wandb})
        assert stats.rows == []
    tags = [call.args[0] for call in tensorboard.add_scalar.call_args_list]
    assert len(tags) == 7 * 3 * 6
    assert all("/layers.0." in tag for tag in tags)
    ((scalars,), options) = wandb.log.call_args
    assert (len(scalars), options) == (2 * 7 * 3 * 6, {"step": 1})


def test_a_browser_shows_them(runs: list[Path], browser_page: Page, tmp_path: Path) -> None:
    page = browser_page
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    assert main([str(runs[0]), str(runs[2]), "--out", str(tmp_path / "page.html")]) == 0
    page.goto((tmp_path / "page.html").as_uri())
    assert page.title() == "first, lightning: float8 training"
    broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
    assert page.evaluate(broken) == 0
    # A click on the layer of the first anomaly leads to its section.
    page.locator("#anomalies a").first.click()
    target = page.locator(":target")
    assert target.inner_text() == "first: layers.1"
    assert -1 < target.bounding_box()["y"] < 900
    page.locator("#anomalies a").nth(1).click()
    assert page.locator("section:visible").all_inner_texts() == [
        "first: layers.1",  # the first layer of each run is always shown
        "first: layers.2",
        "lightning: net.layers.1",
    ]
    # With a dark theme in the browser, the page and its pictures are dark.
    colors = "[document.body, document.images[0]].map(e => getComputedStyle(e)).map(s => s.filter + s.backgroundColor)"
    for theme, shown in (
        ("light", ["nonergb(255, 255, 255)", "nonergba(0, 0, 0, 0)"]),
        ("dark", ["nonergb(20, 23, 27)", "invert(1) hue-rotate(180deg)rgba(0, 0, 0, 0)"]),
    ):
        page.emulate_media(color_scheme=theme)
        assert page.evaluate(colors) == shown
    # The width is used by charts and tables, in letters that can be read, and nothing is cut off.
    for width in (1280, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        for selector in (".charts", "#summary table", "#worst", "#collectives table", ".maps"):
            for box in page.locator(f"{selector}:visible").all():
                assert box.bounding_box()["width"] >= 0.96 * (width - 48), selector
        charts = page.locator(".charts figure").all()
        boxes = [chart.bounding_box() for chart in charts]
        assert max(box["x"] + box["width"] for box in boxes) >= 0.96 * (width - 24)
        pictures = page.locator("figure:visible img").all()
        letters = [page.evaluate(SMALLEST_LETTERS, each.element_handle()) for each in pictures]
        assert min(letters) >= 9
        assert max(letters) <= 18
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    # A header may wrap between words, not within them.
    words = page.locator("#summary th").all_inner_texts()
    assert not any("_" in word for word in words)
    assert page.locator("#colors .run").all_inner_texts() == ["first", "lightning"]
    # Maps with a fault are not collapsed.
    assert page.locator("details:has-text('input as') img").first.is_visible()
    assert problems == []
