"""The commands of the README: their options and the environment that they create."""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest
from operator_calls import operator_calls
from processes import run

from scripts.train import quickstart
from scripts.train.quickstart import ROOT


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text in the current folder, which is outside of the repository."""
    monkeypatch.chdir(tmp_path)
    path = Path("text.txt")
    path.write_text("All work and no play makes float8 a dull dtype.\n" * 21)
    return path


def test_bf16_is_no_float8_recipe(capsys: pytest.CaptureFixture[str], text: Path) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        quickstart.parse_args(["--recipe", "bf16"])
    message = "--recipe bf16 is what the float8 recipe is compared with"
    assert capsys.readouterr().err.count(message) == 1


def test_transports_are_those_of_the_float8_run(text: Path) -> None:
    """The bf16 run has no transports; it is the baseline for bytes."""
    wire = ["--gradient-transport", "float8", "--reduce-transport", "float8"]
    args = quickstart.parse_args(["--data", "text.txt", *wire])
    bf16, float8 = quickstart.runs_of(args)
    assert (bf16.recipe, bf16.gradient_transport, bf16.reduce_transport) == ("bf16", None, None)
    assert vars(float8) == vars(args) | {"out": args.out / "tensorwise"}


def test_a_third_run_sends_sums_in_float8_where_it_can(text: Path) -> None:
    args = quickstart.parse_args(["--data", "text.txt"])
    assert args.out == ROOT / "runs/quickstart"
    names = ["bf16", "tensorwise", "tensorwise-float8-sums"]
    assert [run.out.name for run in quickstart.runs_of(args)] == names
    third = quickstart.runs_of(args)[2]
    assert (third.recipe, third.gradient_transport, third.reduce_transport) == (
        "tensorwise",
        "float8",
        "float8",
    )
    for options in (["--tp", "1"], ["--dp", "1"], ["--model", "moe"]):
        args = quickstart.parse_args(["--data", "text.txt", *options])
        assert len(quickstart.runs_of(args)) == 2


def test_the_runs_and_their_comparison(text: Path) -> None:
    """Run the command with few steps and without installation. The page shows its collectives."""
    text.write_text(text.read_text() * 9)
    argv = "--data text.txt --out base --steps 2"
    done = run(
        [sys.executable, "-P", "-m", "scripts.train.quickstart", *argv.split()],
        env=dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES=""),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs/quickstart.md").read_text()
    table, _, _ = Path("base/tensorwise/comm.txt").read_text().partition("\n\n")
    assert f"{indent(table, '    ')}\n\n" in page
    # For each run: bytes of gathers and of all collectives, each also as a ratio to bf16.
    sizes = re.compile(r"^ *\| ((?:bf16|tensorwise)[^|]*(?:\| +[\d,.]+ ){4})", re.MULTILINE)
    found = sizes.findall(done.stdout)
    assert len(found) == 3
    assert found == sizes.findall(page)
    for line in ("send 0.56 of", "sends 0.78,", "sends 0.49."):
        assert line in page
    for name in ("bf16/metrics.jsonl", "tensorwise-float8-sums/comm.txt", "report.html"):
        assert Path("base", name).stat().st_size > 0


def script(name: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in an existing environment, whose interpreter prints its arguments."""
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text('#!/bin/sh\ncase "$*" in *pip*) ;; *) echo "$PYTHONPATH" "$@" ;; esac\n')
    python.chmod(0o755)
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / name), *words],
        cwd=folder,
        env=dict(os.environ, FP8_DIST_VENV="venv", PYTHONPATH=""),
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_script_runs_it_from_any_folder(tmp_path: Path) -> None:
    done = script("quickstart.sh", "--steps", "3", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{ROOT} -P -m scripts.train.quickstart --steps 3"


@pytest.mark.parametrize("name", ["reblock", "encode_float8"])
def test_the_tests_of_one_kernel(tmp_path: Path, name: str) -> None:
    done = script("test.sh", "--kernel", name, "-x", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (tests,) = re.findall(r"-m pytest (.*) -n 2 -x$", done.stdout, re.MULTILINE)
    compiled, compared = tests.split()
    file, function = compiled.split("::")
    assert f"\ndef {function}(" in (ROOT / file).read_text()
    assert re.search(rf"\b{name}\b", (ROOT / compared).read_text())


def test_a_kernel_that_is_not_there(tmp_path: Path) -> None:
    done = script("test.sh", "--kernel", "reblok", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    named = done.stderr.partition("--kernel takes an operator with Triton kernels: ")[2].split()
    assert {*named} == {call.op.__name__ for call in operator_calls(37, 131).values()}


def ensure_env(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call ensure_env in `folder`, with a pip that only prints its arguments."""
    script = f"""
        source '{ROOT}/scripts/env.sh'
        pip_install() {{ echo "pip install $*"; }}
        ensure_env train || exit 1
        echo "PY=$PY"
    """
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=dict(os.environ, PYTHON=sys.executable, FP8_DIST_TORCH="") | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_environment_is_made_once_and_relative_to_the_current_folder(tmp_path: Path) -> None:
    """An unfinished environment is created again."""
    half = [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")]
    subprocess.run(half, check=True)
    (tmp_path / "venv/installed-train").write_text("a stamp")
    first = ensure_env(tmp_path, FP8_DIST_VENV="venv", CDPATH="/")
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines() == [
        f"== creating the environment {tmp_path}/venv",
        "== installing fp8-dist[train]",
        "pip install setuptools>=77",
        f"pip install --no-build-isolation -e {ROOT}[train]",
        f"PY={tmp_path}/venv/bin/python",
    ]
    again = ensure_env(tmp_path, FP8_DIST_VENV="venv")
    assert again.stdout == f"PY={tmp_path}/venv/bin/python\n"


def test_environments_that_can_not_be_made(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ntest "$1" = -c\n')
    python.chmod(0o755)
    done = ensure_env(tmp_path, FP8_DIST_VENV="v", PYTHON="./python")
    assert done.returncode == 1
    assert "apt install python3-venv" in done.stderr
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    done = ensure_env(tmp_path, FP8_DIST_VENV="mine")
    assert done.returncode == 1
    assert f"{tmp_path}/mine holds something else" in done.stderr
    assert (tmp_path / "mine/thesis.txt").exists()
