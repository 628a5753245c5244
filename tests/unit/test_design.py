"""docs/design.md is true of the code: rooms, their tests, state and patches; names are unique."""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DESIGN = (ROOT / "docs/design.md").read_text()
LIBRARY = ("fp8_dist", "fsdp", "tensor_parallel")
MUTATORS = (
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("remove", "setdefault", "update"),
)


@cache
def modules() -> dict[str, ast.Module]:
    """The library's modules by their dotted names."""
    paths = [p for folder in LIBRARY for p in (ROOT / folder).rglob("*.py") if p.resolve() == p]
    return {dotted(p.relative_to(ROOT).with_suffix("")): ast.parse(p.read_text()) for p in paths}


def dotted(path: Path) -> str:
    parts = [part for part in path.parts if part != "__init__"]
    return ".".join(parts if parts[0] == "fp8_dist" else ["fp8_dist", *parts])


def section(title: str) -> str:
    return DESIGN.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of the table of a section, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines[1:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_rooms_are_the_layers_of_the_import_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    assert [set(quoted(row[0])) for row in rows("Rooms")] == [
        set(layer.split(" | ")) for layer in layers
    ]


def test_tests_of_each_room_exist_and_use_it() -> None:
    for room, _, tests in rows("Rooms"):
        names = "|".join([*quoted(room), "__all__"])  # all that the room `api` exports
        paths = [ROOT / "tests" / name for name in quoted(tests)]
        files = [file for path in paths for file in ([path] if path.suffix else path.rglob("*.py"))]
        text = "".join(file.read_text() for file in files)
        assert all(path.exists() for path in paths), room
        assert re.search(rf"fp8_dist(\.| import .*)({names})\b", text), room


def top_level(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a module itself defines, as functions, classes or values."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.Assign(targets=targets):
                yield from ((t.id, node) for t in targets if isinstance(t, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node


def is_shared_by_convention(name: str, node: ast.stmt) -> bool:
    """Type variables, short names of torch's namespaces, and the entry points of commands."""
    value = ast.unparse(node.value) if isinstance(node, ast.Assign) else ""
    return name == "main" or value.startswith(("TypeVar(", "ParamSpec(", "torch.ops."))


def test_public_names_are_defined_once() -> None:
    owners = defaultdict(set)
    for module, tree in modules().items():
        for name, node in top_level(tree):
            if not name.startswith("_") and not is_shared_by_convention(name, node):
                owners[name].add(module)
    assert {name: files for name, files in owners.items() if len(files) > 1} == {}


def imported(tree: ast.Module) -> dict[str, str]:
    """The full names of what a module imports, by the names that it uses."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.asname or a.name.partition(".")[0]: a.name for a in node.names}
    return names


def written_to(node: ast.AST) -> Iterator[str]:
    """The expressions that a node replaces or mutates."""
    match node:
        case ast.Global(names=names):
            yield from names
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            yield ast.unparse(value)
        case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in MUTATORS:
            yield ast.unparse(value)
        case ast.Attribute(ctx=ast.Store() | ast.Del()):
            yield ast.unparse(node)


def writes() -> set[str]:
    """Names that the library replaces or mutates at run time, except locals of functions."""
    nodes = [(m, *item) for m, tree in modules().items() for item in top_level(tree)]
    values = {f"{m}.{name}" for m, name, n in nodes if isinstance(n, ast.Assign | ast.AnnAssign)}
    changed = set()
    for module, tree in modules().items():
        names = imported(tree)
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        inside = {n for function in functions for n in ast.walk(function)}
        for node in ast.walk(tree):
            for target in written_to(node):
                root, dot, rest = target.partition(".")
                full = f"{names.get(root, f'{module}.{root}')}{dot}{rest}"
                is_state = full in values and (root in names or node in inside)
                if is_state or (root in names and dot):
                    changed.add(full)
    return changed


def shown(full: str) -> str:
    """A name as the tables have it: without its module, which the next column names."""
    owner = max((m for m in modules() if full.startswith(f"{m}.")), key=len, default=None)
    return full.removeprefix(f"{owner}.") if owner else ".".join(full.split(".")[-2:])


def path_of(full: str) -> str:
    owner = max((m for m in modules() if full.startswith(f"{m}.")), key=len)
    return "/".join(owner.split(".")[1:]) + ".py"


def test_state_at_module_level() -> None:
    state = {(shown(w), path_of(w)) for w in writes() if w.startswith("fp8_dist.")}
    listed = {
        (name, path)
        for names, owner, *_ in rows("State at module level")
        for name, path in zip(quoted(names), quoted(owner) * len(quoted(names)), strict=False)
    }
    assert listed == state


def test_what_the_library_replaces_in_others() -> None:
    replaced = {shown(w) for w in writes() if not w.startswith("fp8_dist.")}
    assert {
        name for row in rows("What is replaced in torch") for name in quoted(row[0])
    } == replaced
