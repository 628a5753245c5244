"""Text for users: names of modules and parameters, tables, and warnings."""

import warnings
from collections.abc import Iterable, Sequence

# Path segments that wrappers add and ``state_dict`` keys leave out.
_WRAPPER_SEGMENTS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")

_warned: set[str] = set()


def without_wrappers(fqn: str) -> str:
    """Return the name that a module or parameter has in the keys of ``state_dict()``."""
    return ".".join(s for s in fqn.split(".") if s not in _WRAPPER_SEGMENTS)


def is_part(name: str, fqn: str) -> bool:
    """Whether the path segments of ``name`` occur in ``fqn``, one after the other."""
    return f".{name}." in f".{fqn}."


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


def warn_once(kind: str, message: str) -> None:
    """Issue a warning unless one of the same kind was issued before, as in an earlier step."""
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(message, stacklevel=3)
