"""The commands of the README: their options and the environment that they create."""

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from operator_calls import operator_calls
from processes import run

from scripts.train import compare, quickstart
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


def test_transports_and_statistics_are_those_of_the_float8_run(text: Path) -> None:
    """The bf16 run has no transports, and no casts; it is the baseline for bytes."""
    wire = ["--gradient-transport", "float8", "--reduce-transport", "float8"]
    args = quickstart.parse_args(["--data", "text.txt", *wire])
    bf16, float8 = quickstart.runs_of(args)
    assert (bf16.recipe, bf16.gradient_transport, bf16.reduce_transport) == ("bf16", None, None)
    assert (bf16.stats_every, bf16.record, args.stats_every) == (None, None, 10)
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


NAMES = ["bf16", "tensorwise", "tensorwise-float8-sums"]
PAGE = ROOT / "docs/quickstart.md"


def table_in(text: str) -> list[list[str]]:
    """The cells of the first Markdown table in a text, without its rule."""
    lines = [line.strip() for line in text.splitlines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("| run "))
    rows = [*takewhile(lambda line: line.startswith("|"), lines[first:])]
    cells = [row.strip("|").split("|") for row in rows if "---" not in row]
    return [[cell.strip() for cell in row] for row in cells]


def test_the_runs_and_their_comparison(text: Path) -> None:
    """Run the command with few steps and without installation; the page shows what it prints.

    Bytes are the same in every step, and on every machine. Losses depend on both.
    """
    text.write_text(text.read_text() * 9)
    argv = "--data text.txt --out base --steps 2 --stats-every 2"
    done = run(
        [sys.executable, "-P", "-m", "scripts.train.quickstart", *argv.split()],
        env=dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES=""),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    # One bar for each run, and no warnings of torch.
    shown = filter(None, re.split(r"[\r\n]+", done.stderr))
    assert [*dict.fromkeys(re.sub(r": +\d+%\|.*", "", line) for line in shown)] == NAMES
    page = PAGE.read_text()
    table, _, _ = Path("base/tensorwise/comm.txt").read_text().partition("\n\n")
    assert f"{indent(table, '    ')}\n\n" in page
    assert done.stdout.count("\n| --") == 1
    printed, documented = table_in(done.stdout), table_in(page)
    assert printed[0] == documented[0]
    assert [row[0] for row in printed[1:]] == NAMES
    # The name; MB of gathers and of all collectives, each also as a ratio to bf16's.
    assert [row[:5] for row in printed] == [row[:5] for row in documented]
    for line in ("send 0.56 of", "sends 0.78,", "sends 0.49."):
        assert line in page
    for name in ("bf16/metrics.jsonl", "tensorwise-float8-sums/comm.txt"):
        assert Path("base", name).stat().st_size > 0
    report = Path("base/report.html").read_text()
    assert report.count("in the casts of 1 recorded steps") == 2
    assert "No casts were recorded" not in report


def test_losses_of_the_page_are_as_expected() -> None:
    """The relative differences are those of the losses beside them, and the verdict is true."""
    _, bf16, *others = table_in(PAGE.read_text())
    for row in others:
        difference = float(row[5]) / float(bf16[5]) - 1
        assert row[6] == f"{difference:+.2%}"
        assert abs(difference) <= compare.MAX_DIFFERENCE


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


def installed(folder: Path, pip: str, stdout: int = subprocess.PIPE) -> Any:
    """Call pip_install with an interpreter that runs the lines `pip`."""
    python = folder / "python"
    python.write_text(f"#!/bin/bash\n{pip}\n")
    python.chmod(0o755)
    call = f"source '{ROOT}/scripts/env.sh'; PY={python}; pip_install torch"
    env = dict(os.environ, FP8_DIST_VENV=str(folder))
    command = ["bash", "-c", call]
    return subprocess.run(
        command, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )


def test_pip_says_little_unless_it_fails(tmp_path: Path) -> None:
    works = 'echo "Collecting $9"; echo "  Downloading torch.whl (190 MB)"; sleep 1.5'
    done = installed(tmp_path, works)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # On a terminal one line changes, and goes in the end.
    terminal, at_its_end = pty.openpty()
    done = installed(tmp_path, works, stdout=at_its_end)
    os.close(at_its_end)
    read = b""
    with suppress(OSError):  # at the end
        while chunk := os.read(terminal, 10_000):
            read += chunk
    os.close(terminal)
    shown = read.decode().split("\r\033[K")
    assert done.returncode == 0
    assert re.fullmatch(r"   \d+ s: Downloading torch\.whl \(190 MB\)", shown[1])
    assert (shown[0], shown[-1]) == ("", "")
    done = installed(tmp_path, 'echo "Collecting torch"; echo "ERROR: no space left" >&2; exit 2')
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Collecting torch\nERROR: no space left\n"


def test_without_a_terminal_it_is_heard_now_and_then(tmp_path: Path) -> None:
    words = "(echo Collecting torch; sleep 2.5) | last_line 1"
    call = ["bash", "-c", f"source '{ROOT}/scripts/env.sh'; {words}"]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert 1 <= len(lines) <= 3
    assert all(re.fullmatch(r"   \d s: Collecting torch", line) for line in lines)


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
