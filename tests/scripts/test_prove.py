"""scripts.prove on real ranks: its verdict, and what planted faults cost."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.prove import page
from scripts.prove.__main__ import main
from scripts.prove.results import Result, append

ROOT = Path(__file__).resolve().parents[2]
PATHS = f"{ROOT}:{ROOT}/tests/support"


def proved(folder: Path, *words: str, ranks: int = 2) -> tuple[int, dict[tuple[str, str], Result]]:
    """Run the program with planted faults; return the status, and the results by stage and name."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", *launcher, f"{ROOT}/tests/support/planted_proof.py", *words]
    environment = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    with (folder / "console.txt").open("w") as console:
        done = subprocess.run(
            [*command, "--out", str(folder)],
            env=environment,
            cwd=ROOT,
            stdout=console,
            stderr=subprocess.STDOUT,
        )
    print((folder / "console.txt").read_text())
    results = folder / "results.jsonl"
    found = page.of_cases(page.latest([results])) if results.exists() else []
    return done.returncode, {(r.stage, r.name): r for r in found}


def test_faults_are_on_the_page_and_cost_nothing_else(tmp_path: Path) -> None:
    only = ["--only", "facts", "bits", "bytes", "loss"]
    faults = "wrong_bit,wrong_sum,wrong_compiled,wrong_byte,crash,hang,no_facts,no_loss"
    status, found = proved(tmp_path, faults, *only)
    assert status == 1
    bits = {name: r for (stage, name), r in found.items() if stage == "bits"}
    wrong = {name: r.wrong for name, r in bits.items() if r.wrong}
    failed = {name: r.error for name, r in bits.items() if r.error}
    text = wrong.pop("FSDP2 2, tensorwise")
    assert "on rank 1: what arrived for the GEMM is not what was cast" in text
    assert "compiled steps end with weights" in wrong.pop("FSDP2 2, tensorwise, compiled")
    assert "digests by ranks: " in wrong.pop("one sum on 1, 2 ranks, tensorwise, float8")
    assert wrong == {}
    assert "ended with SIGSEGV" in failed.pop("FSDP2 2, rowwise_folded")
    assert "s without a result" in failed.pop("FSDP2 2, blockwise")
    assert failed == {}
    assert len(bits) == bits["FSDP2 2, mxfp8"].cases == 6
    sent = {name: r.wrong for (stage, name), r in found.items() if stage == "bytes"}
    assert len(sent) == 8
    assert all("bfloat16" in text for text in sent.values() if text)
    assert any(sent.values())
    assert "AttributeError" in (tmp_path / "facts.0.log").read_text()
    assert "AttributeError" in found["facts", "start"].error
    assert "without a result" in found["loss", "start"].error
    text = (tmp_path / "page.md").read_text()
    for line in ("cases are WRONG", "bits: FSDP2 2, blockwise: FAILED: ", "loss: start: FAILED: "):
        assert line in text


def test_a_gpu_that_does_not_work_is_one_sentence(tmp_path: Path) -> None:
    """Such as one with a driver that is too old."""
    status, found = proved(tmp_path, "old_driver")
    assert (status, found) == (1, {})
    console = (tmp_path / "console.txt").read_text()
    sentence = "scripts.prove: no rank can start: the GPU of rank 1: AssertionError: Torch not "
    assert console.count(sentence) == 1
    *_, last, line = console.strip().splitlines()
    assert last.strip() == f"{sentence}compiled with CUDA enabled"
    assert line.strip("=") == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["console.txt"]


def test_the_program_ends_with_the_verdict(tmp_path: Path) -> None:
    """Where torchrun alone would end with a traceback."""
    command = ["bash", f"{ROOT}/scripts/prove.sh", "--only", "bits", "--seconds", "1"]
    own = {"PY": sys.executable, "RANKS": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        env=os.environ | own,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    assert done.stdout.endswith("did not end.\nBytes: not checked.\nSpeed: not measured.\n")


def test_cases_share_meshes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mesh of NCCL would have communicators of its own. Sums in switches may differ in them."""
    monkeypatch.setenv("GROUPS", str(tmp_path / "groups.txt"))
    status, found = proved(tmp_path, "count_groups", "--only", "bits")
    assert (status, found["bits", "FSDP2 2, tensorwise"].error) == (0, "")
    lines = (tmp_path / "groups.txt").read_text().splitlines()
    assert len(lines) == 4 + 2
    (line,) = {*lines}
    assert line.split()[1] == "0"


def test_faults_of_other_stages_are_no_failure(tmp_path: Path) -> None:
    status, found = proved(tmp_path, "no_facts,no_loss", "--only", "facts", "bytes", "loss")
    assert status == 0
    assert sum(bool(r.error) for r in found.values()) == 2
    status, found = proved(tmp_path, "wrong_byte_of_one_rank", "--only", "bytes", "bytes")
    assert status == 1
    assert all(r.wrong.startswith("rank 1: ") for r in found.values())
    # The console ends with the cases and the verdict, after torchrun's report of one failure.
    console = (tmp_path / "console.txt").read_text()
    _, _, end = console.rpartition("Traceback (most recent call last):")
    assert "<NO_OTHER_FAILURES>" in end
    *_, cases, bits, sent, speed, line = end.strip().splitlines()
    assert "WRONG: rank 1: " in cases
    assert console.count(cases.strip()) == 1
    assert bits == "  Bits: not checked."
    assert sent.startswith("  Bytes: 8 of 8 cases are WRONG; ")
    assert speed == "  Speed: not measured."
    assert line.strip("=") == ""


@pytest.mark.full
def test_all_bits_and_bytes_on_four_ranks(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "4", "-m", "scripts.prove", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = page.latest([tmp_path / "results.jsonl"])
    assert page.missing([r for r in results if r.stage == "bits"]) == 0
    assert "Bits: 30 of 30 cases have the bits of one device.\n" in done.stdout
    assert "Bytes: 8 of 8 cases send what scripts.plan predicts.\n" in done.stdout
    casts = [r.values["casts"] for r in results if r.rank == 0 and "casts" in r.values]
    assert len(casts) == 26
    assert min(casts) > 0


def test_the_page_of_canned_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page has medians over all turns, the repeated baseline, and the last try of a case."""
    path, shape = tmp_path / "results.jsonl", "8192 x 4096 x 14336"
    ident = {"card": "NVIDIA H100", "commit": "abc"}
    layer = {"stage": "layers", "shape": shape, "tokens": 8192, "flops": 2.9e12, **ident}
    step = {"stage": "time", "shape": "8b, 8,192 tokens", "tokens": 8192, **ident}
    lines = [
        Result("facts", "facts", note="torch 2.13.0", values={"host": "a"}, rank=0, **ident),
        Result("facts", "facts", note="torch 2.13.0", values={"host": "a"}, rank=1, **ident),
        Result("bits", "FSDP2 2, tensorwise", cases=3, **ident),
        Result("bits", "FSDP2 2, tensorwise", cases=3, rank=1, **ident),
        Result("bits", "TP 2, tensorwise", cases=3, error="RuntimeError: no", **ident),
        Result("bits", "TP 2, tensorwise", cases=3, **ident),
        Result("tests", "test_gemms", error="RuntimeError: refused", **ident),
        Result("rates", "copy", readings=(1e-3, 2e-3, 3e-3), bytes=6 * 10**9, **ident),
        Result("kernels", "tensorwise", recipe="tensorwise", note="_cast 2 us", **ident),
        Result(name="bf16, turn 1", recipe="bf16", readings=(4e-3, 5e-3), **layer),
        Result(name="bf16, turn 2", recipe="bf16", readings=(9e-3,), **layer),
        Result(name="bf16, turn 1, again", recipe="bf16", readings=(6e-3,), **layer),
        Result(name="bf16, wall", recipe="bf16", readings=(7e-3,), **layer),
        Result(name="tensorwise", recipe="tensorwise", compiled=True, readings=(2.5e-3,), peak=10**9, **layer),
        Result(name="bf16", recipe="bf16", compiled=True, readings=(0.3,), values={"exposed ms": 1.5}, **step),
        Result(name="bf16, other rank", recipe="bf16", compiled=True, readings=(9.0,), rank=1, **step),
        Result(name="tensorwise", recipe="tensorwise", compiled=True, readings=(0.2,), **step),
        Result(name="tensorwise, graph", recipe="tensorwise", compiled=True, readings=(0.1,), **step),
        Result(name="torchao", recipe="torchao tensorwise", compiled=True, readings=(0.24,), **step),
        Result("loss", "bf16", "bf16", shape="12 steps", values={"loss": 1.25}, **ident),
        Result("loss", "bf16, seed 1", "bf16", shape="12 steps", values={"loss": 1.5, "difference": 0.2}, **ident),
        Result("curve", "tensorwise", "tensorwise", shape="4 steps", values={"every": 2, "losses": [2.0, 1.25]}, **ident),
    ]  # fmt: skip
    append(path, *lines)
    assert main(["--show", str(path)]) == 0
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert re.findall("^## (.*)$", shown, re.MULTILINE)[:3] == ["Verdict", "Cases", "Machine"]
    for row in (
        "Bits: 2 of 3 cases have the bits of one device; 1 did not end.",
        "Bytes: not checked.",
        "Speed: 1.50 x bf16 in 8b, 8,192 tokens with tensorwise, compiled (torchao 1.25).",
        "Cards: NVIDIA H100. Commit: abc.",
        "- ranks 0, 1: a torch 2.13.0",
        "| bits | 2 | 0 | 0 | 1 | 0 |",
        "- tests: test_gemms: FAILED: RuntimeError: refused",
        "- copy: 2.000 ms: 3,000 GB/s",
        "- tensorwise: _cast 2 us",
        "| bf16 | 5.000 | 4.000 to 9.000 | 1.00 | 1,638,400 | 580 | |",
        "| bf16, again | 6.000 | 6.000 to 6.000 | 0.83 |",
        "| bf16, wall | 7.000 |",
        "| tensorwise, compiled | 2.500 | 2.500 to 2.500 | 2.00 | 3,276,800 | 1,160 | 1.00 |",
        "| bf16, compiled | 300.000 | 300.000 to 300.000 | 1.00 | 27,307 | 1.5 |",
        "| tensorwise, compiled, graph | 100.000 |",
        "| bf16, seed 1 | 1.5 | 0.2 |",
    ):
        assert row in shown, row
    results = page.latest([path])
    assert page.fails(results, ["bits"])  # a case did not begin
    assert page.fails(results, ["bytes"])  # none began
    assert page.fails(results, ["tests"])
    assert not page.fails(results, ["time"])
    assert page.draw(results, tmp_path / "page.svg")
    assert "8b, 8,192 tokens" in (tmp_path / "page.svg").read_text()
    path.write_text(json.dumps({"stage": 1}))
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["--show", str(path)])
    assert f"{path}, line 1, is no result" in capsys.readouterr().err
