"""Comparisons of runs: of two, and of recipes and transports over several seeds."""

import json
import re
from pathlib import Path

import pytest

from scripts.train import compare, compare_recipes, compare_transports, seeded_runs
from scripts.train.compare_recipes import comparison
from scripts.train.compare_transports import COMPARISONS
from scripts.train.seeded_runs import Losses, checks

QUICK = ["--steps", "2", "--seeds", "2", "--batch-size", "4", "--seq-len", "16"]


def write_run(folder: Path, recipe: str, losses: list[float], gathered: int = 0) -> Path:
    """Writes the files of a run."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"recipe": recipe, "steps": len(losses)}))
    lines = [
        {"step": step, "loss": loss, "tokens_per_second": 1000.0, "grad_norm": 1.0}
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = {"op": "all_gather", "bytes": gathered, "float8_bytes": gathered}
    (folder / "comm.json").write_text(json.dumps([row] if gathered else []))
    return folder


def test_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bf16 = write_run(tmp_path / "bf16", "bf16", [5.5] + [3.0] * 20, 4000)
    for i, (last, gathered, problem) in enumerate(
        (
            (3.012, 2200, ""),
            (3.0, 0, ""),  # one process sends nothing
            (3.06, 2200, "the losses differ by more than 1%"),
            (float("nan"), 2200, "the losses differ by more than 1%"),
            (4.5, 2200, "did not get below 70% of its first loss"),
        )
    ):
        losses = [5.5] + [last] * 20
        float8 = write_run(tmp_path / str(i), "tensorwise", losses, gathered)
        arguments = [str(bf16), str(float8), "--out", str(tmp_path)]
        assert compare.main(arguments) == 0
        assert compare.main([*arguments, "--assert"]) == int(bool(problem))
        assert problem in capsys.readouterr().out
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_was_cut_off(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", "bf16", [5.5, 5.4])
    text = (run / "metrics.jsonl").read_text()
    for cut, message in (
        (text[: text.index("\n") + 1], "metrics.jsonl holds 1 of 2 steps"),
        (text[:-5], "is not a finished run of"),
    ):
        (run / "metrics.jsonl").write_text(cut)
        with pytest.raises(SystemExit, match=re.escape(message)):
            compare.read_run(run)


# Over several seeds


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are written into a new current folder."""
    monkeypatch.setenv("PYTHONPATH", str(Path(compare.__file__).parents[2]))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
def test_transports(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs under torchrun."""
    words = [*QUICK, "--of", "tensor-parallel"]
    assert compare_transports.main(words) == 0
    assert "| reduce-scatter " in capsys.readouterr().out
    ops = {}
    for folder in Path("runs/transports/tensor-parallel").glob("*-1"):
        rows = json.loads((folder / "comm.json").read_text())
        ops[folder.name] = {r["op"] for r in rows if r["axis"] == "tp" and r["op"] != "all_gather"}
    assert ops["float8-1"] == ops["reduce-scatter-1"] | {"all_to_all"}


@pytest.mark.usefixtures("folder")
def test_a_run_that_fails() -> None:
    with pytest.raises(SystemExit, match=r"(?s)train\.train .* did not end well:.*--lr"):
        compare_recipes.main([*QUICK, "--recipes", "tensorwise", "--lr", "0"])


@pytest.mark.parametrize(
    "options", [["--seeds", "1"], ["--batch-size", "6"], ["--of", "gradient"], ["--jobs", "0"]]
)
def test_refused_options(options: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        compare_transports.main(options)


def losses(**factors: tuple[float, float]) -> Losses:
    """Two seeds that differ much from each other, and variants that differ little from bf16."""
    bf16 = (3.0, 2.0)
    return {"bf16": [[x] for x in bf16]} | {
        name: [[x * f] for x, f in zip(bf16, both, strict=True)] for name, both in factors.items()
    }


def test_losses_that_are_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {
        "tensorwise": (1.002, 1.004),
        "rowwise": (1.001, 1.000),
        "rowwise_folded": (1.002, 1.002),
        "blockwise": (1.001, 1.003),
    }
    cases: tuple[tuple[dict[str, tuple[float, float]], bool], ...] = (
        ({}, True),
        ({"tensorwise": (1.011, 1.010)}, False),
        ({"tensorwise": (0.985, 0.985)}, False),
        ({"tensorwise": (float("nan"), 1.0)}, False),
        ({"blockwise": (1.005, 1.003)}, False),
        ({"rowwise_folded": (1.006, 1.004)}, False),
        ({"rowwise_folded": (1.010, 0.998)}, True),  # noise between seeds allows more
    )
    for changed, holds in cases:
        found = losses(**good | changed)
        assert all(check.holds for check in checks(found, comparison([*good]))) is holds, changed
        monkeypatch.setattr(seeded_runs, "losses_of", lambda *_, found=found: found)
        assert compare_recipes.main(["--assert", "--recipes", *good]) == int(not holds)


def test_limits_of_transports() -> None:
    for name, compared in COMPARISONS.items():
        reference = next(iter(compared.variants))
        for factor, holds in ((1.001, True), (1.006, False), (float("nan"), False)):
            found = {v: [[1.0 if v == reference else factor]] * 2 for v in compared.variants}
            assert all(check.holds for check in checks(found, compared)) is holds, name
