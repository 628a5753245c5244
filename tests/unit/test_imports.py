"""What imports of the library load."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fp8_dist
from fp8_dist import debug, report, torch_internals
from fp8_dist.imports import AfterImport

COMMANDS = """
import contextlib, io, runpy, sys
sys.modules["torch"] = None  # its import is an error
import fp8_dist
for command in ("fp8_dist", "fp8_dist.doctor", "fp8_dist.report", "fp8_dist.debug.replay"):
    for option in ("--help", "--other"):
        sys.argv, said = ["", option], io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                runpy.run_module(command, run_name="__main__", alter_sys=True)
            except SystemExit as stopped:
                status = stopped.code
        print(status, *said.getvalue().split()[:4])
print(fp8_dist.__version__)
try:
    fp8_dist.Float8Linear
except ModuleNotFoundError as error:
    print(error)
"""


def output(program: str, *arguments: str) -> list[str]:
    """Run a program in a separate process, and return the lines that it prints."""
    command = [sys.executable, "-c", program, *arguments]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_commands_answer_without_torch() -> None:
    commands = ("fp8_dist", "fp8_dist.doctor", "fp8_dist.report", "fp8_dist.debug.replay")
    usages = [f"{status} usage: python -m {name}" for name in commands for status in (0, 2)]
    missing = "import of torch halted; None in sys.modules"
    assert output(COMMANDS) == [*usages, fp8_dist.__version__, missing]


WHOLE = """
import sys
from importlib.util import find_spec
import fp8_dist
assert find_spec("torch") and "torch" not in sys.modules  # it was only looked for
{}
print(*[name for name in sys.argv[1:] if name in sys.modules])
import torch
from torch.utils.flop_counter import FlopCounterMode
layer = vars(fp8_dist)["Float8Linear"](32, 48)
with FlopCounterMode(display=False) as counter:
    layer(torch.ones(16, 32))
print(counter.get_total_flops(), *sys.modules["fp8_dist.moe.experts"].EXPERTS_ADAPTERS)
print(sys.modules["fp8_dist.fsdp.gathers"].__name__)
"""
FIRST = {
    "torch": "import torch",
    "a module": """
import fp8_dist.moe.config
assert "Float8Linear" in vars(fp8_dist)
from fp8_dist.debug import record
from fp8_dist.report import RunWriter
import fp8_dist.tensor_parallel""",
    "an unknown torch": """
sys.modules["fp8_dist.torch_internals"] = None
import torch
try:
    fp8_dist.skip_head
except ImportError:
    del sys.modules["fp8_dist.torch_internals"]
fp8_dist.skip_head""",
}


@pytest.mark.parametrize("first", FIRST)
def test_the_whole_library_is_imported_with_torch_but_no_compiler(first: str) -> None:
    """Operators, hooks and adapters of experts are registered, whatever is imported first.

    Importing dynamo takes as long as importing the rest of torch.
    """
    compilers = ["torch._dynamo", "torch._inductor"]
    if torch.version.cuda is None and torch.version.hip is None:  # else the library imports it
        compilers.append("triton")
    imported, counted, hooks = output(WHOLE.format(FIRST[first]), *compilers)
    assert imported == ""
    # torch's counter is imported after the library, and has its formulas.
    assert counted == f"{2 * 16 * 32 * 48} transformers"
    assert hooks == "fp8_dist.fsdp.gathers"


@pytest.mark.parametrize("package", [fp8_dist, debug, report])
def test_public_names_are_plain_attributes(package: ModuleType) -> None:
    for name in package.__all__:
        value = vars(package)[name]
        if hasattr(value, "__module__"):
            assert getattr(sys.modules[value.__module__], value.__name__) is value
    names: dict[str, object] = {}
    exec(f"from {package.__name__} import *", names)
    assert names.keys() - {"__builtins__"} == set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"^module '{package.__name__}' has no attribute 'x'"):
        _ = package.x


def test_sub_packages_are_attributes() -> None:
    for path in Path(fp8_dist.__file__).parent.iterdir():
        if path.joinpath("__init__.py").is_file():
            assert getattr(fp8_dist, path.name) is sys.modules[f"fp8_dist.{path.name}"]


def test_a_call_after_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fp8_outer.py").write_text("import fp8_inner\nis_done = True\n")
    (tmp_path / "fp8_inner.py").touch()
    (tmp_path / "fp8_later.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    calls: list[bool] = []

    def call() -> bool:
        calls.append(hasattr(sys.modules.get("fp8_outer"), "is_done"))
        return "fp8_later" in sys.modules

    finder = AfterImport(("fp8_outer", "fp8_inner", "fp8_later").__contains__, call)
    importlib.util.find_spec("fp8_outer")
    for name, expected in (("fp8_outer", [False, True]), ("fp8_later", [False, True, True])):
        assert finder in sys.meta_path
        importlib.import_module(name)
        assert calls == expected
    assert finder not in sys.meta_path


def test_the_mark_of_constant_functions_is_that_of_dynamo() -> None:
    marks = []
    for mark in (torch.compiler.assume_constant_result, torch_internals.constant_in_graphs):

        def function() -> int:
            return 1

        mark(function)
        marks.append(vars(function))
    assert marks[0] == marks[1] != {}
