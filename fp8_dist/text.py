"""Text for users: names of modules and parameters, tables, progress, and warnings."""

import re
import sys
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import TypeVar

_T = TypeVar("_T")

# Path segments that wrappers add and ``state_dict`` keys leave out.
_WRAPPER_SEGMENTS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")

# Names that begin with the sound of a vowel: Adam, LSTM, ndarray, but not UserDict or uint8.
_VOWEL = re.compile(r"[AEIOaeio]|[Uu](?!ni|se|N|I|int)|[FHLMNRSX][A-Z]|nd|nn\.")

_warned: set[str] = set()


def without_wrappers(fqn: str) -> str:
    """Return the name that a module or parameter has in the keys of ``state_dict()``."""
    return ".".join(s for s in fqn.split(".") if s not in _WRAPPER_SEGMENTS)


def is_part(name: str, fqn: str) -> bool:
    """Return whether the path segments of ``name`` occur consecutively in ``fqn``."""
    return f".{name}." in f".{fqn}."


def aligned(lines: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Format cells as a table. Lines of one cell don't widen columns.

    Args:
        lines: the cells of each line.
        right: the numbers of the right-aligned columns.
    """
    lines = list(lines)
    columns = zip(*(line for line in lines if len(line) > 1), strict=True)
    widths = [max(map(len, column)) for column in columns]
    formats = [f"{'>' if i in right else '<'}{width}" for i, width in enumerate(widths)]
    return "\n".join("  ".join(map(format, line, formats)).rstrip() for line in lines)


def alike(
    items: Iterable[_T], facts: Callable[[_T], tuple[str, Hashable]]
) -> list[tuple[str, list[_T]]]:
    """Group items that differ only in the numbers in their names.

    The name of a group has ``*`` in place of the numbers, and ends with the number of items.

    Args:
        items: the items.
        facts: returns the name of an item, and other facts that all items of a group share.
    """
    groups: dict[tuple[str, Hashable], list[_T]] = {}
    for item in items:
        name, others = facts(item)
        pattern = re.sub(r"(?<![^.'])\d+(?![^.'])", "*", name)
        groups.setdefault((pattern, others), []).append(item)
    return [
        (f"{pattern} ({len(group)})" if len(group) > 1 else facts(group[0])[0], group)
        for (pattern, _), group in groups.items()
    ]


def alike_names(names: Iterable[str]) -> list[str]:
    """Merge names that differ only in numbers, such as ``layers.*.wq (32)``."""
    return [name for name, _ in alike(names, lambda name: (name, None))]


def wrong_type(value: object, expected: Iterable[type]) -> str:
    """Describe a value of a wrong type: by its repr, or by its type and package.

    torchao's types have the same names as the library's.
    """
    kind = type(value)
    name, package = kind.__name__, kind.__module__.partition(".")[0]
    if name in [cls.__name__ for cls in expected]:
        return f"{package}'s {name}; import {name} from fp8_dist"
    is_instance = is_dataclass(value) and not isinstance(value, type)
    return f"{package}'s {name}" if is_instance else repr(value)


def is_torchaos(kind: type) -> bool:
    """Return whether a class or one of its bases is torchao's, without importing torchao."""
    return any(base.__module__.partition(".")[0] == "torchao" for base in kind.__mro__)


def with_article(name: str) -> str:
    """Return the name of a type or kind after "a" or "an", by its sound."""
    return f"an {name}" if _VOWEL.match(name) else f"a {name}"


def kind_of(value: object) -> str:
    """Name the type of a value, and tell torchao's types from the library's of the same name."""
    name = type(value).__name__
    return f"torchao's {name}" if is_torchaos(type(value)) else with_article(name)


def did_you_mean(given: object, names: Iterable[str], n: int = 1) -> str:
    """Return a question after the names that are most like a misspelt one; ``""`` if none is."""
    known = {name.lower(): name for name in names}
    near = [known[name] for name in get_close_matches(str(given).lower(), known, n)]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def progress(text: str) -> None:
    """Print what a command does next, as a line to stderr."""
    print(text, file=sys.stderr, flush=True)


def warn_once(kind: str, message: str) -> None:
    """Issue a warning once for each kind."""
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(message, stacklevel=3)
