"""Tables as text."""

from collections.abc import Iterable, Sequence


def aligned(lines: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Format cells as a table. Lines of one cell don't count for the widths of columns.

    Args:
        lines: the cells of each line.
        right: the numbers of the right-aligned columns.
    """
    lines = list(lines)
    columns = zip(*(line for line in lines if len(line) > 1), strict=True)
    widths = [max(map(len, column)) for column in columns]
    padded = (
        [cell.rjust(n) if i in right else cell.ljust(n) for i, (cell, n) in enumerate(pairs)]
        for pairs in (zip(line, widths, strict=False) for line in lines)
    )
    return "\n".join("  ".join(cells).rstrip() for cells in padded)
