"""Count what the repository has: how much is there to read, and how dense is it?

    python -m scripts.measure.mass

For the library, by room: nodes of the syntax tree, lines of code (without docstrings, comments and
blank lines), and nodes per line. For tests, scripts and documents: all lines.
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


def syntax_nodes(path: Path) -> int:
    """The number of nodes of the syntax tree, without those that say how a name is used."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return sum(not isinstance(node, ast.expr_context) for node in nodes)


def files(folder: str, pattern: str = "*.py") -> list[Path]:
    """The files of a folder, except symbolic links and files below them."""
    paths = sorted((ROOT / folder).rglob(pattern))
    return [p for p in paths if not any(parent.is_symlink() for parent in (p, *p.parents))]


def main() -> None:
    command_parser("scripts.measure.mass", __doc__).parse_args()
    library = [path for folder in LIBRARY for path in files(folder)]
    rooms: dict[str, list[Path]] = {"all": library}
    for path in library:
        rooms.setdefault(str(path.parent.relative_to(ROOT)), []).append(path)
    rows = []
    for room, paths in rooms.items():
        nodes, lines = sum(map(syntax_nodes, paths)), sum(map(code_lines, paths))
        rows.append([room, f"{nodes:,}", f"{lines:,}", f"{nodes / max(1, lines):.1f}"])
    print(table(["room", "nodes", "code", "nodes per line"], rows, "lrrr"), end="\n\n")
    tests = [path for path in files("tests") if "support/fake_cuda" not in str(path)]
    kinds = {"tests, without support/fake_cuda": tests, "scripts": files("scripts")}
    kinds["docs"] = files("docs", "*.md")
    counts = {k: sum(len(p.read_text().splitlines()) for p in ps) for k, ps in kinds.items()}
    rows = [[kind, f"{count:,}"] for kind, count in counts.items()]
    print(table(["", "lines"], rows, "lr"))


if __name__ == "__main__":
    main()
