"""Counts the lines of the repository: how much is there to read?

    python -m scripts.measure.mass

Code of the library, by room: lines with a token, without docstrings, comments and blank lines. Of
tests, scripts and documents: all lines. And the functions of the library that take many arguments,
without Triton's kernels.
"""

import ast
import tokenize
from pathlib import Path

from scripts.common.markdown import table

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ("fp8_dist", "fsdp", "tensor_parallel")
MOST_ARGUMENTS = 7
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(path: Path) -> int:
    """The lines of a file that have a token which is no docstring."""
    with tokenize.open(path) as file:
        tokens = [t for t in tokenize.generate_tokens(file.readline) if t.type not in LAYOUT]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines - {tokens[-1].start[0]})  # that of the end


def many_arguments(path: Path) -> list[str]:
    """The functions of a file with more than `MOST_ARGUMENTS` arguments beside self."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function) and not any(
            "jit" in ast.unparse(d) for d in node.decorator_list
        ):
            of = node.args
            names = [a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls", "ctx")])
            if count > MOST_ARGUMENTS:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} ({count})")
    return found


def files(folder: str, pattern: str = "*.py") -> list[Path]:
    """The files of a folder, but for those behind links."""
    paths = sorted((ROOT / folder).rglob(pattern))
    return [p for p in paths if not any(parent.is_symlink() for parent in (p, *p.parents))]


def main() -> None:
    """Prints the tables."""
    library = [path for folder in LIBRARY for path in files(folder)]
    rooms: dict[str, int] = {}
    for path in library:
        room = str(path.parent.relative_to(ROOT))
        rooms[room] = rooms.get(room, 0) + code_lines(path)
    rows = [[room, f"{count:,}"] for room, count in rooms.items()]
    print(table(["room", "code"], [*rows, ["all", f"{sum(rooms.values()):,}"]], "lr"), end="\n\n")
    tests = [path for path in files("tests") if "support/fake_cuda" not in str(path)]
    kinds = {"tests, without support/fake_cuda": tests, "scripts": files("scripts")}
    kinds["docs"] = files("docs", "*.md")
    counts = {k: sum(len(p.read_text().splitlines()) for p in ps) for k, ps in kinds.items()}
    rows = [[kind, f"{count:,}"] for kind, count in counts.items()]
    print(table(["", "lines"], rows, "lr"), end="\n\n")
    print(f"functions with more than {MOST_ARGUMENTS} arguments:")
    print("\n".join(name for path in library for name in many_arguments(path)))


if __name__ == "__main__":
    main()
