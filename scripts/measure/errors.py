"""Every error message of the library, and the test that expects it.

    python -m scripts.measure.errors

Prints both, and fails if an error has no test. Nothing is run: the sources of the library and of
the tests are read. A test expects an error if a string in it (or in what it uses of its module)
repeats at least 17 characters of the message in a row. A string that fits several errors counts for
the one with which it has the most in common. If several have the same, it counts for the one that
it repeats most of.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.common.markdown import table
from scripts.common.report import Check, finish, make_parser, start

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("fp8_dist", "fsdp", "tensor_parallel")
HOLE = "\0"  # stands for what a message takes from its case
KINDS = ("ValueError", "TypeError", "NotImplementedError", "RuntimeError", "ImportError")
# Texts are compared by what GRAM characters follow each other in both. A string of a test must have
# ENOUGH of these in common with an error (17 characters in a row), or all that the error has.
GRAM, ENOUGH = 10, 8


@dataclass(frozen=True)
class Error:
    """A `raise` with a text: file and line, the class, and the text with holes."""

    file: str
    line: int
    kind: str
    text: str

    @property
    def shown(self) -> str:
        """The text with an ellipsis for each hole, in one line."""
        return re.sub(r"\s+", " ", re.sub(f"{HOLE}+", "…", self.text)).strip()


def grams(text: str) -> set[str]:
    """Sequences of GRAM characters in a text, without a hole."""
    every = (text[i : i + GRAM] for i in range(len(text) - GRAM + 1))
    return {gram for gram in every if HOLE not in gram}


def files(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """The sources in these folders, by name; not those behind links."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def errors() -> list[Error]:
    """The errors of the library, by file and line."""
    found = []
    for file, tree in files(*FOLDERS):
        functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            raised, scope = node.exc, scope_of(node, tree)
            if made := functions.get(ast.unparse(raised.func)):
                raised, scope = made_error(made), made
            kind = ast.unparse(raised.func)
            if kind in KINDS and raised.args:
                text = "".join(pieces(raised.args[0], functions, scope))
                found.append(Error(file, node.lineno, kind, text))
    return sorted(found, key=lambda error: (error.file, error.line))


def made_error(function: ast.FunctionDef) -> ast.Call:
    """The call in a function that returns an exception."""
    (call,) = (n.value for n in ast.walk(function) if isinstance(n, ast.Return))
    assert isinstance(call, ast.Call)
    return call


def scope_of(node: ast.AST, tree: ast.Module) -> ast.AST:
    """The innermost function around a node."""
    around = [
        each
        for each in ast.walk(tree)
        if isinstance(each, ast.FunctionDef) and node in ast.walk(each)
    ]
    return around[-1] if around else tree


def pieces(node: ast.AST, functions: dict[str, ast.FunctionDef], scope: ast.AST) -> Iterator[str]:
    """The text of a message: a hole for what is computed, unless a function of the file says it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from pieces(value, functions, scope)
    elif isinstance(node, ast.BinOp):
        yield from pieces(node.left, functions, scope)
        yield from pieces(node.right, functions, scope)
    elif isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Call | ast.Name):
        yield from pieces(node.value, functions, scope)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        function = functions.get(node.func.id)
        yield from returned(function, functions) if function is not None else [HOLE]
    elif isinstance(node, ast.Name):
        yield HOLE
        for statement in ast.walk(scope):
            if isinstance(statement, ast.Assign) and node.id in map(ast.unparse, statement.targets):
                told = isinstance(statement.value, ast.Constant | ast.JoinedStr)
                yield from (*pieces(statement.value, {}, scope), HOLE) if told else ()
    else:
        yield HOLE


def returned(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """The texts in a function that makes a message."""
    others = {name: other for name, other in functions.items() if other is not function}
    documentation = ast.get_docstring(function, clean=False)
    formatted = [node for node in ast.walk(function) if isinstance(node, ast.JoinedStr)]
    inner = {id(part) for node in formatted for part in ast.walk(node) if part is not node}
    for node in ast.walk(function):
        if id(node) in inner:
            continue
        if isinstance(node, ast.JoinedStr):
            yield HOLE
            yield from pieces(node, others, function)
            yield HOLE
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            told = len(node.value) >= GRAM and node.value != documentation
            yield f"{HOLE}{node.value}{HOLE}" if told else HOLE


def strings_of_tests() -> Iterator[tuple[str, str]]:
    """(test, line) of the strings in a test, and in what it uses of its module."""
    for file, tree in files("tests"):
        named = {
            name: node
            for node in tree.body
            for name in names_of(node)
            if not isinstance(node, ast.Import | ast.ImportFrom)
        }
        for name, node in named.items():
            if not name.startswith("test_"):
                continue
            waiting, seen = [node], {name}
            while waiting:
                for inner in without_docstrings(waiting.pop()):
                    if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                        for line in inner.value.splitlines():
                            yield f"{file}::{name}", line.replace("\\", "")
                    elif isinstance(inner, ast.Name) and inner.id in named.keys() - seen:
                        seen.add(inner.id)
                        waiting.append(named[inner.id])


def without_docstrings(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes in a node but for the strings that are statements."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield node
            waiting += ast.iter_child_nodes(node)


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def expected_by(found: Sequence[Error]) -> dict[Error, str]:
    """The test of each error that has one: the one with the most in common."""
    own = {error: grams(error.text) for error in found}
    holders: dict[str, list[Error]] = {}
    for error in found:
        for gram in own[error]:
            holders.setdefault(gram, []).append(error)
    best: dict[Error, tuple[tuple[int, float], str]] = {}
    for test, text in strings_of_tests():
        common = Counter(error for gram in grams(text) for error in holders.get(gram, ()))
        enough = {
            error: (n, n / len(own[error]))
            for error, n in common.items()
            if n >= min(ENOUGH, len(own[error]))
        }
        winners = [error for error, score in enough.items() if score == max(enough.values())]
        if len({winner.text for winner in winners}) == 1:
            for winner in winners:
                best[winner] = max(best.get(winner, ((0, 0.0), "")), (enough[winner], test))
    return {error: test for error, (_, test) in best.items()}


def errors_table(found: Sequence[Error], tests: dict[Error, str]) -> str:
    """A line per error."""
    lines = []
    for error in found:
        test = tests.get(error, "")
        where = f"`{test.removeprefix('tests/')}`" if test else "NONE"
        shown = error.shown.replace("|", "\\|").replace("<", "&lt;")
        lines.append([f"`{error.file}`", f"`{error.kind}`", shown, where])
    return table(["file", "error", "text", "test, in tests/"], lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = start(make_parser("scripts.measure.errors", __doc__), argv)
    args.asserted = True
    found = errors()
    tests = expected_by(found)
    without = [f"{e.file}:{e.line}" for e in found if e not in tests]
    check = Check(
        f"{len(found)} errors, without a test: {', '.join(without) or 'none'}", not without
    )
    return finish(args, {"errors": errors_table(found, tests)}, [check])


if __name__ == "__main__":
    sys.exit(main())
