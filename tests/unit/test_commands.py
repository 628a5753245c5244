"""python -m fp8_dist: it lists every command of the library, and the scripts of a checkout."""

import re
from pathlib import Path

import pytest

from fp8_dist import __main__ as commands

ROOT = Path(__file__).resolve().parents[2]


def listed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert commands.main([]) == 0
    return capsys.readouterr().out.splitlines()


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    folders = ("fp8_dist", "fsdp", "tensor_parallel")
    paths = [p for folder in folders for p in (ROOT / folder).rglob("*/__main__.py")]
    modules = {".".join(p.parent.relative_to(ROOT).parts) for p in paths}
    lines = listed(capsys)
    named = [re.match(r"  python -m (fp8_dist[\w.]+)", line) for line in lines]
    assert {match[1] for match in named if match} == modules - {"fp8_dist"} != set()
    for line in lines:
        assert not line.startswith("  ") or re.fullmatch(r"  \S.*?  +\S.*", line), line


def test_scripts_are_those_of_the_checkout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "\n".join(listed(capsys))
    assert re.search(r"^  python -m scripts\.plan +messages and memory of a step", text, re.M)
    assert re.search(r"^  bash scripts/quickstart\.sh +trains", text, re.M)
    assert f"In this checkout ({ROOT / 'scripts' / 'README.md'} has more):" in text
    assert "scripts.bench" not in text
    monkeypatch.setattr(commands, "SCRIPTS", tmp_path / "README.md")  # an installed package
    assert "scripts" not in "\n".join(listed(capsys))


def test_it_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        commands.main(["doctor"])
    assert "python -m fp8_dist: error: unrecognized arguments: doctor" in capsys.readouterr().err
