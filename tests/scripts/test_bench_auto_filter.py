"""scripts/bench/auto_filter.py: a run, what it converts, its table."""

import json
from itertools import product
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from torch import nn

from fp8_dist import Float8Linear
from scripts.bench import auto_filter
from scripts.common.candidates import BF16
from scripts.common.models import convert


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run(
    compiled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    converted: dict[str, list[nn.Module]] = {BF16: [], "rowwise": []}

    def recording(name: str, model: nn.Module) -> None:
        convert(name, model)
        converted[name].append(model)

    monkeypatch.setattr(auto_filter, "convert", recording)
    data, sizes = tmp_path / "figures.json", ["32"] if compiled else ["16", "32"]
    options = ["--recipe", "rowwise", "--rows", "16", "--sizes", *sizes, "--repeat", "1"]
    options += ["--json", str(data), *(["--compile"] if compiled else [])]
    assert auto_filter.main(options) == 0
    rows = json.loads(data.read_text())["rows"]
    shapes = list(product([16], *[[int(size) for size in sizes]] * 2))
    assert [(row["m"], row["k"], row["n"]) for row in rows] == shapes
    for row in rows:
        assert row["speedup"] == row["bf16"] / row["float8"] > 0
        assert (row["recipe"], row["compiled"]) == ("rowwise", compiled)
    printed = capsys.readouterr().out
    assert auto_filter.speedup_table(rows, "rowwise", 1.0) in printed
    for name, kind in ((BF16, nn.Linear), ("rowwise", Float8Linear)):
        weights = [tuple(linear.weight.shape) for _, linear, _ in converted[name]]
        assert weights == [(n, k) for _, k, n in shapes]
        assert all(type(linear) is kind for _, linear, _ in converted[name])


def test_the_table() -> None:
    speedups = {(16, 1024): 0.9, (4112, 1024): 1.2, (8192, 1024): 1.3, (16, 2048): 1.1}
    rows = [
        {"m": m, "k": k, "n": n, "bf16": 1e-3 * speedup * m, "float8": 1e-3 * m, "speedup": speedup}
        for m in (64, 128)
        for (k, n), speedup in speedups.items()
    ]
    rows[2] |= {"bf16": 0.032, "speedup": 0.5}  # at the other M it gains
    assert_expected_inline(
        auto_filter.speedup_table(rows, "tensorwise", 1.0),
        """\
| K (in) | N (out) | least at M | bf16, ms | float8, ms | speedup | auto_filter         |
| -----: | ------: | ---------: | -------: | ---------: | ------: | ------------------- |
|     16 |    1024 |         64 |     57.6 |       64.0 |   0.90x | skips               |
|   4112 |    1024 |         64 |     76.8 |       64.0 |   1.20x | converts            |
|   8192 |    1024 |         64 |     32.0 |       64.0 |   0.50x | converts, but loses |
|     16 |    2048 |         64 |     70.4 |       64.0 |   1.10x | converts            |""",
    )


def test_misaligned_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--sizes", "24"], ["--rows", "0"], ["--repeat", "0"], ["--sizes", "0"]):
        with pytest.raises(SystemExit) as info:
            auto_filter.main(options)
        assert info.value.code == 2
    assert "multiples of 16" in capsys.readouterr().err
