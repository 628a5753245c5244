"""Count the lines of the repository: how much is there to read?

    python -m scripts.measure.mass

For the library, by room: lines of code, without docstrings, comments and blank lines. For tests,
scripts and documents: all lines.
"""

import ast
import tokenize
from pathlib import Path

from scripts.common.markdown import table
from scripts.common.options import command_parser

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ("fp8_dist", "fsdp", "tensor_parallel")
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def code_lines(path: Path) -> int:
    """The number of lines that have a token other than a comment or a docstring."""
    with tokenize.open(path) as file:
        *tokens, _ = [t for t in tokenize.generate_tokens(file.readline) if t.type not in LAYOUT]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def files(folder: str, pattern: str = "*.py") -> list[Path]:
    """The files of a folder, except symbolic links and files below them."""
    paths = sorted((ROOT / folder).rglob(pattern))
    return [p for p in paths if not any(parent.is_symlink() for parent in (p, *p.parents))]


def main() -> None:
    command_parser("scripts.measure.mass", __doc__).parse_args()
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
    print(table(["", "lines"], rows, "lr"))


if __name__ == "__main__":
    main()
