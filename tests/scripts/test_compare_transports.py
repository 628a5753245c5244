"""The comparison of gradient transports over several seeds: its runs, their reuse, its verdict."""

import json
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from scripts.train import compare_transports, seeded_runs
from scripts.train.compare_transports import COMPARISONS, checks, parse
from scripts.train.seeded_runs import Losses, results_table

QUICK = ["--steps", "2", "--seeds", "2", "--batch-size", "4", "--seq-len", "16", "--reuse"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are written into a new current folder."""
    monkeypatch.setenv("PYTHONPATH", str(Path(compare_transports.__file__).parents[2]))
    monkeypatch.chdir(tmp_path)


def test_runs_on_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gradients = COMPARISONS["gradients"]
    fewer = {name: gradients.variants[name] for name in ("fp32", "float8, error feedback")}
    fewer["bf16"] = {"gradient_transport": "bf16", "stochastic_rounding": 5}
    on_2_ranks = gradients._replace(ranks=2, variants=fewer)
    monkeypatch.setitem(COMPARISONS, "gradients", on_2_ranks)
    assert compare_transports.main(QUICK) == 0
    assert "| bf16 " in capsys.readouterr().out
    sent = {}
    for folder in Path("runs/transports/gradients").glob("*-0"):
        rows = json.loads((folder / "comm.json").read_text())
        sent[folder.name] = {
            row["op"]: sum(r["bytes"] for r in rows if r["op"] == row["op"])
            for row in rows
            if row["op"] in ("reduce_scatter", "all_to_all")
        }
    whole = sent["fp32-0"]["reduce_scatter"]
    assert sent["bf16-0"].keys() == sent["float8_error_feedback-0"].keys() == {"all_to_all"}
    assert 0.5 * whole < sent["bf16-0"]["all_to_all"] < 0.51 * whole  # norms travel in fp32
    assert 0.25 * whole < sent["float8_error_feedback-0"]["all_to_all"] < 0.26 * whole


def test_runs_of_tensor_parallelism() -> None:
    assert compare_transports.main([*QUICK, "--of", "tensor-parallel"]) == 0
    ops = {}
    for folder in Path("runs/transports/tensor-parallel").glob("*-1"):
        rows = json.loads((folder / "comm.json").read_text())
        ops[folder.name] = {r["op"] for r in rows if r["axis"] == "tp" and r["op"] != "all_gather"}
    assert ops["reduce-scatter-1"] >= {"reduce_scatter"}
    assert ops["float8-1"] == ops["reduce-scatter-1"] | {"all_to_all"}
    finished = {path: path.stat().st_mtime for path in Path("runs").rglob("config.json")}
    assert compare_transports.main([*QUICK, "--of", "tensor-parallel"]) == 0  # with --reuse
    assert finished == {path: path.stat().st_mtime for path in Path("runs").rglob("config.json")}


def test_finished_runs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def run(arguments: list[str], ranks: int, threads: int) -> None:
        started.append(seed := next(a for a in arguments if a.startswith("--seed=")))
        folder = Path(next(a for a in arguments if a.startswith("--out=")).removeprefix("--out="))
        config = {"dp": ranks, "recipe": "bf16"}
        asked = vars(seeded_runs.make_parser("", None).parse_args(arguments))
        asked |= {"torch": seeded_runs.torch.__version__, "fp8_dist": seeded_runs.__version__}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(asked | config, default=str))
        lines = [json.dumps({"step": s, "loss": 1.0}) + "\n" for s in range(asked["steps"])]
        if seed == "--seed=1" and len(started) == 2:
            lines.pop()  # cut off
        (folder / "metrics.jsonl").write_text("".join(lines))
        (folder / "comm.json").write_text("[]")

    monkeypatch.setattr(seeded_runs, "_run", run)
    options = {"recipe": "bf16", "gradient_transport": "bf16"}

    def train(*argv: str) -> list[str]:
        started_before = len(started)
        seeded_runs.losses_of(parse([*QUICK, "--jobs", "1", *argv]), {"x": options}, 4)
        return started[started_before:]

    assert train() == ["--seed=0", "--seed=1"]
    assert train() == ["--seed=1"]  # the one that was cut off
    assert train() == []
    assert train("--seeds", "3") == ["--seed=2"]
    assert train("--lr", "1e-4") == ["--seed=0", "--seed=1"]
    options["error_feedback"] = True  # type: ignore[assignment]
    assert train("--lr", "1e-4") == ["--seed=0", "--seed=1"]
    Path("runs").rename("moved")
    assert train("--lr", "1e-4", "--out", "moved/transports") == []


def test_refused_options(capsys: pytest.CaptureFixture[str]) -> None:
    messages = []
    parse(["--batch-size", "6", "--of", "tensor-parallel"])
    for options in ("--seeds 1", "--batch-size 6"):
        with pytest.raises(SystemExit, match=r"^2$"):
            parse(options.split())
        messages.append(capsys.readouterr().err.strip().splitlines()[-1].partition(": error: ")[2])
    assert_expected_inline(
        "\n".join(messages),
        """\
--seeds must be at least 2: differences have a standard error
--batch-size must be a multiple of the 4 data-parallel ranks""",
    )


GOOD: Losses = {
    "fp32": [[3.0], [2.0]],
    "bf16": [[3.0 * 1.004], [2.0 * 1.0]],
    "float8": [[3.0 * 1.1], [2.0 * 0.99]],
}


def test_table_and_verdict() -> None:
    shown = results_table(GOOD, "fp32", "gradients on the wire", spread=True)
    sentences = [
        f"{check.holds}: {check.sentence}" for check in checks(GOOD, COMPARISONS["gradients"])
    ]
    assert_expected_inline(
        "\n".join([shown, *sentences]),
        """\
| gradients on the wire | loss, last 50 steps | difference to fp32 | its standard error |       of single seeds |
| --------------------- | ------------------: | -----------------: | -----------------: | --------------------: |
| fp32                  |              2.5000 |                    |                    |                       |
| bf16                  |              2.5060 |           +0.200 % |            0.200 % |  +0.000 % to +0.400 % |
| float8                |              2.6400 |           +4.500 % |            5.500 % | -1.000 % to +10.000 % |
True: bf16 differs from fp32 by +0.200 % ± 0.200 %, at most 0.3 %""",
    )


@pytest.mark.parametrize("factor", [1.004, 0.996, float("nan")])
def test_bf16_too_far_from_fp32(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    bad = GOOD | {"bf16": [[loss * factor for loss in run] for run in GOOD["fp32"]]}
    monkeypatch.setattr(compare_transports, "losses_of", lambda args, variants, ranks: bad)
    assert compare_transports.main([]) == 0
    assert compare_transports.main(["--assert"]) == 1
