"""Comparisons of two runs, and of recipes and transports over several seeds."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from expecttest import assert_expected_inline

from scripts.train import compare, compare_seeds
from scripts.train.compare_seeds import COMPARISONS, Losses, checks
from scripts.train.options import make_parser, parse_options

QUICK = ["--steps", "2", "--seeds", "2", "--batch-size", "8", "--seq-len", "16"]


def write_run(folder: Path, recipe: str, losses: list[float], sizes: dict[str, int]) -> Path:
    """Write the files of a run; sizes: bytes by "op dtype"."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"recipe": recipe, "steps": len(losses)}))
    lines = [
        {"step": step, "loss": loss, "tokens_per_second": 1000.0, "grad_norm": 1.0}
        for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [
        {"op": op, "bytes": size, "float8_bytes": size if "float8" in dtype else 0}
        for kind, size in sizes.items()
        for op, dtype in [kind.split()]
    ]
    (folder / "comm.json").write_text(json.dumps(rows))
    return folder


@pytest.mark.parametrize(
    ("last", "sizes", "problem"),
    [
        (3.012, {"all_gather float8_e4m3fn": 2200}, ""),
        (3.0, {}, ""),  # one process sends nothing
        (float("nan"), {"all_gather float8_e4m3fn": 2200}, "the losses differ by more than 1%"),
        (4.5, {"all_gather float8_e4m3fn": 2200}, "did not get below 70% of its first loss"),
        (3.0, {"all_gather bfloat16": 80}, "communicated nothing in float8"),
    ],
)
def test_two_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    last: float,
    sizes: dict[str, int],
    problem: str,
) -> None:
    gathers = {"all_gather bfloat16": 4000} if sizes else {}
    bf16 = write_run(tmp_path / "a", "bf16", [5.5] + [3.0] * 20, gathers)
    float8 = write_run(tmp_path / "b", "tensorwise", [5.5] + [last] * 20, sizes)
    arguments = [str(bf16), str(float8), "--out", str(tmp_path)]
    assert compare.main([*arguments, "--assert"]) == int(bool(problem))
    assert problem in capsys.readouterr().out
    assert "tensorwise" in (tmp_path / "report.html").read_text()


def test_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [5.5] + [3.0] * 20
    bf16 = write_run(tmp_path / "a", "bf16", losses, {"all_gather bfloat16": 4_000_000})
    sizes = {"all_gather float8_e4m3fn": 2_000_000, "reduce_scatter float32": 4_000_000}
    float8 = write_run(tmp_path / "b", "tensorwise", losses, sizes)
    losses = [5.5] + [3.003] * 20
    sums = write_run(tmp_path / "c", "tensorwise", losses, {"all_gather float8_e4m3fn": 2_000_000})
    arguments = [str(bf16), str(float8), str(sums), "--out", str(tmp_path)]
    assert compare.main([*arguments, "--assert"]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # the page's own progress is left out
    assert_expected_inline(
        out.replace(str(tmp_path), "FOLDER"),
        """\
| run | gathers of a step, MB | of a's | all collectives, MB | of a's | loss, last 20 steps | above a's |
| --- | --------------------: | -----: | ------------------: | -----: | ------------------: | --------: |
| a   |                  4.00 |   1.00 |                4.00 |   1.00 |              3.0000 |           |
| b   |                  2.00 |   0.50 |                6.00 |   1.50 |              3.0000 |    +0.00% |
| c   |                  2.00 |   0.50 |                2.00 |   0.50 |              3.0030 |    +0.10% |

As expected: losses are within 1% of a's, and below 70% of the first ones.
a: no fault found. No casts were recorded.
b: no fault found. Over the last 20 common steps the loss minus a's is +0 (median). No casts were recorded.
c: no fault found. Over the last 20 common steps the loss minus a's is +0.003 (median). No casts were recorded.
written: FOLDER/report.html
""",
    )
    # Folders of one name are told apart by their paths.
    (tmp_path / "again").mkdir()
    again = write_run(tmp_path / "again/b", "tensorwise", losses, sizes)
    assert compare.main([str(bf16), str(float8), str(again), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(f"| {folder} " in out for folder in ("a", float8, again))


@pytest.mark.parametrize(
    ("end", "message"),
    [(-1, "metrics.jsonl holds 1 of 2 steps"), (-5, "is not a finished run of")],
)
def test_a_run_that_was_cut_off(tmp_path: Path, end: int, message: str) -> None:
    run = write_run(tmp_path / "a", "bf16", [5.5, 5.4], {})
    text = (run / "metrics.jsonl").read_text()
    first_line = text[: text.index("\n") + 1]
    (run / "metrics.jsonl").write_text(first_line if end == -1 else text[:end])
    with pytest.raises(SystemExit, match=re.escape(message)):
        compare.read_run(run, "a")


# Over several seeds


def test_commands_of_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each run gets the right options, and its losses are read from its folder."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        words = command[command.index("scripts.train.train") + 1 :]
        ranks = 2 if "torch.distributed.run" in command else 1
        args = parse_options(make_parser("train", ""), words, world_size=ranks)
        args.out.mkdir(parents=True)
        (args.out / "metrics.jsonl").write_text('{"loss": 3.0}\n{"loss": 2.5}\n')
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("scripts.train.options.load_corpus", lambda *_, **__: None)
    for of, compared in COMPARISONS.items():
        args = compare_seeds.parse_args([*QUICK, "--of", of, "--out", str(tmp_path)])
        assert compare_seeds.losses_of(args) == {v: [[3.0, 2.5]] * 2 for v in compared.variants}
        assert all(("torch.distributed.run" in c) == (compared.ranks > 1) for c in commands)
        commands.clear()


@pytest.mark.parametrize(
    "options",
    [["--seeds", "1"], ["--of", "gradients", "--batch-size", "6"]],
)
def test_refused_options(options: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        compare_seeds.main(options)


def losses(**factors: tuple[float, float]) -> Losses:
    """Losses for two seeds, which differ much, and for variants, which differ little from bf16."""
    bf16 = (3.0, 2.0)
    return {"bf16": [[x] for x in bf16]} | {
        name: [[x * f] for x, f in zip(bf16, both, strict=True)] for name, both in factors.items()
    }


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({}, True),
        ({"tensorwise": (1.011, 1.010)}, False),
        ({"tensorwise": (float("nan"), 1.0)}, False),
        ({"rowwise_folded": (1.006, 1.004)}, False),
        ({"rowwise_folded": (1.010, 0.998)}, True),  # noise between seeds allows more
    ],
)
def test_losses_that_are_too_far(
    changed: dict[str, tuple[float, float]], holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {
        "tensorwise": (1.002, 1.004),
        "rowwise": (1.001, 1.000),
        "rowwise_folded": (1.002, 1.002),
        "blockwise": (1.001, 1.003),
    }
    found = losses(**good | changed)
    monkeypatch.setattr(compare_seeds, "losses_of", lambda args: found)
    assert compare_seeds.main(["--assert"]) == int(not holds)


def test_limits_of_transports() -> None:
    for name, compared in COMPARISONS.items():
        reference = next(iter(compared.variants))
        for factor, holds in ((1.001, True), (1.011, False), (float("nan"), False)):
            found = {v: [[1.0 if v == reference else factor]] * 2 for v in compared.variants}
            assert all(check.holds for check in checks(found, compared.limits)) is holds, name
