"""The tables of docs/gpu.md: their times, and that each candidate's step runs without memory."""

import re
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import tables
from fake_cuda.counter import Counts, Kernel
from fake_cuda.dispatch import KERNELS_ALONE, Dispatched, seconds_to_dispatch
from fake_cuda.layer import LayerShape, count_layer
from fake_cuda.process import FakeCudaProcess
from fake_cuda.tables import Rates, milliseconds

from scripts.common.candidates import TORCHAO
from scripts.common.recipes import BF16, OURS

ROOT = Path(__file__).parents[2]

GEMM = Kernel("_scaled_mm", "gemm", 1, 10**9, 10**9, 12 * 10**11, "float8")
COUNTS = Counts([GEMM, Kernel("add", "tiny", 4, 100, 100)])


def test_times_of_a_roofline() -> None:
    assert milliseconds(COUNTS, Rates()) == pytest.approx({"gemm": 1.0, "tiny": 0.01})
    faster = Rates(float8=2400.0, launch=5.0)
    assert milliseconds(COUNTS, faster) == pytest.approx({"gemm": 0.5, "tiny": 0.02})


def test_counts_of_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every table has rows for bf16 and for tensorwise."""

    def answer(self: FakeCudaProcess, function: Any, *args: Any, **options: Any) -> Any:
        if function is tables.seconds_to_dispatch:
            return dict.fromkeys(args[0], Dispatched(40e-6, None, None))
        return COUNTS

    monkeypatch.setattr(FakeCudaProcess, "run", answer)
    assert tables.main(["--turns", "3"]) == 0
    for table in capsys.readouterr().out.split("gpu ")[1:]:
        assert f"| {BF16} " in table
        assert "| tensorwise " in table


def estimates_of_the_page() -> dict[str, list[str]]:
    """The cells of the table of estimates in docs/gpu.md, by candidate."""
    page = (ROOT / "docs/gpu.md").read_text()
    (shown,) = re.findall(r"^\| layer \| kernels .*\n\|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    lines = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in shown.splitlines()]
    return {name: cells for name, *cells in lines}


def test_estimates_of_eager_layers_are_on_the_page() -> None:
    shown, counted = estimates_of_the_page(), dict[str, Counts]()
    assert {*shown} >= {BF16, *OURS}
    with FakeCudaProcess() as process:
        for name in [name for name in shown if name in (BF16, *OURS, *TORCHAO)]:
            counted[name] = process.run(count_layer, name, LayerShape())
    times = {name: milliseconds(counts, Rates()).total() for name, counts in counted.items()}
    for name, counts in counted.items():
        gigabytes = f"{counts.bytes_besides_gemms / 1e9:.2f}"
        ratio = f"{times[BF16] / times[name]:.2f}"
        assert shown[name][:4] == [f"{counts.launches}", gigabytes, f"{times[name]:.2f}", ratio]


@pytest.mark.full
def test_estimates_of_compiled_layers_are_on_the_page() -> None:
    with FakeCudaProcess() as process:
        rows = {row.name: row for row in tables.count(process, LayerShape())}
    base = milliseconds(rows[BF16].eager, Rates()).total()
    for name, cells in estimates_of_the_page().items():
        compiled = milliseconds(rows[name].compiled, Rates()).total()
        assert cells[4:] == [f"{base / compiled:.2f}"], name


@pytest.mark.full
def test_every_candidate_is_timed() -> None:
    names = ("tensorwise",)
    with FakeCudaProcess() as process:  # its device can't have fake tensors afterwards
        seconds = process.run(seconds_to_dispatch, names, LayerShape(32, 64, 48), 1, 2)
    assert tuple(seconds) == (*names, KERNELS_ALONE)
    assert seconds[KERNELS_ALONE][1:] == (None, None)
    # The host can't run a step in less.
    assert min(time or 0.0 for time in seconds["tensorwise"]) > 5e-6
    assert seconds[KERNELS_ALONE].eager > 5e-6
