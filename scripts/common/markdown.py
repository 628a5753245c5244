"""Markdown tables."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str = "l") -> str:
    """Return a table with padded columns. Columns whose rows are all empty are left out.

    align: "l" or "r" per column; the last letter also applies to all columns after it.
    """
    letters = align.ljust(len(header), align[-1])
    columns = zip(letters, zip(header, *rows, strict=True), strict=True)
    padded = [_padded(letter, cells) for letter, cells in columns if any(cells[1:]) or not rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*padded, strict=True))


def _padded(letter: str, cells: Sequence[str]) -> list[str]:
    width = max(3, *map(len, cells))
    rule = "-" * (width - 1) + ":" if letter == "r" else "-" * width
    pad = str.rjust if letter == "r" else str.ljust
    head, *body = (pad(cell, width) for cell in cells)
    return [head, rule, *body]
