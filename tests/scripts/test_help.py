"""Commands answer --help and wrong options without importing slow packages."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# (Examples are also left out: they are single files to copy, with imports at the top.)
LEFT_OUT = {
    "scripts.train.torchtitan_cpu": "the options are torchtitan's, which imports torch for them",
}
WRONG = """\
scripts.bench.step --device cuda --clock cpu: --clock cpu does not see
scripts.bench.host --candidates fp16: invalid choice: 'fp16'
scripts.bench.host --dim 100: 100 is not a multiple of 128
scripts.bench.host --experts 8 --candidates delayed: is not for experts (torchao.float8 converts none): use bf16,
scripts.bench.linear --shapes 16x40x16: positive multiples of 16
scripts.bench.step --mesh tp=2 --compile: --compile is for --mesh none
scripts.measure.properties --case [: invalid loads value
scripts.measure.sqnr --weights nowhere: there is no file nowhere
scripts.plan --mesh dp=2,tp=16: tp=16 does not divide the 8 key/value heads
scripts.plan --model 9b: it is not MODULE:FUNCTION or one of debug, small
scripts.plan --model some:model --mesh dp=2,ep=2: ep is for debug
scripts.plan --model some:model --mesh dp=2 --tp-plan some:plan: --tp-plan needs a tp of 2 or more in --mesh
scripts.prove --only proof: invalid choice: 'proof'
scripts.prove --show nowhere.jsonl: No such file or directory: 'nowhere.jsonl'
scripts.train.compare_seeds --only fp16: there is no fp16 in bf16
scripts.train.quickstart --recipe bf16: name a float8 one
scripts.train.train --dp 3 --tp 2: start that many (torchrun --nproc-per-node 6)
scripts.train.train --data nowhere: no such file or folder
"""
PROGRAM = """
import contextlib, io, runpy, sys

class Refused:
    def find_spec(name, path=None, target=None):
        if name in ("matplotlib", "numpy", "torch", "transformers"):
            raise AssertionError(f"imports {name}")

sys.meta_path.insert(0, Refused)
for line in sys.stdin.read().splitlines():
    sys.argv[1:] = line.split()[1:]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            runpy.run_module(line.split()[0], run_name="__main__")
    except BaseException as error:
        said.write(f"{type(error).__name__}: {error}")
    print(line, " ".join(said.getvalue().split()), sep=": ")
"""


def commands() -> list[str]:
    """The modules of scripts/ that can be run, except examples."""
    found = []
    for path in (ROOT / "scripts").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        runs = path.stem == "__main__" or 'if __name__ == "__main__"' in path.read_text()
        if runs and not name.startswith("scripts.examples.") and name not in LEFT_OUT:
            found.append(name)
    return sorted(found)


def test_commands_answer_without_torch() -> None:
    """Run all commands in one process, with a finder that refuses imports of slow packages."""
    lines = [f"{name} --help" for name in commands()]
    assert len(lines) > 15
    wrong = dict(line.split(": ", 1) for line in WRONG.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="\n".join([*lines, *wrong]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    answers = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert answers.keys() == {*lines, *wrong}
    for line in lines:
        name = line.removesuffix(" --help")
        prog = "quickstart.sh" if name == "scripts.train.quickstart" else f"python -m {name}"
        assert re.fullmatch(rf"usage: {prog} .* options: .*SystemExit: 0", answers[line]), answers[
            line
        ]
    for line, message in wrong.items():
        assert re.fullmatch(r"usage: .* error: .*SystemExit: 2", answers[line]), answers[line]
        assert message in answers[line]
