"""SECURITY.md: nothing that is read is unpickled, evaluated, or given to a shell."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("fp8_dist", "fsdp", "tensor_parallel", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
}
# The exception in SECURITY.md: a program unpickles what it has just made itself.
KNOWN = {("scripts/common/ranks.py", "pickle.loads")}
UNPICKLING = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
FORBIDDEN = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
FORBIDDEN |= {"torch.hub.load", "runpy.run_path", "builtins.eval", "builtins.exec"}


def dangerous_calls(tree: ast.AST) -> Iterator[str]:
    """Calls that may run what they are given, by the full names of what they call."""
    names = imported_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, _, rest = ast.unparse(node.func).partition(".")
        called = names.get(first, first) + (f".{rest}" if rest else "")
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        room, _, function = called.rpartition(".")
        if called in FORBIDDEN:
            yield called
        elif called == "torch.load" and keywords.get("weights_only") != "True":
            yield "torch.load without weights_only=True"
        elif room in UNPICKLING and function in ("load", "loads", "Unpickler", "open"):
            yield called
        elif keywords.get("shell", "False") != "False":
            yield f"{called} with shell={keywords['shell']}"
        elif keywords.get("allow_pickle", "False") != "False":
            yield f"{called} with allow_pickle={keywords['allow_pickle']}"


def imported_names(tree: ast.AST) -> dict[str, str]:
    """The full name of each imported name of a module."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def test_nothing_that_is_read_is_run() -> None:
    found = {
        (name, call)
        for name, path in FILES.items()
        for call in dangerous_calls(ast.parse(path.read_text()))
    }
    assert found == KNOWN
