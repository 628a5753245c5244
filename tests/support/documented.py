"""Run code blocks of documentation pages, with warnings of the library as errors."""

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from property_verdicts import SOURCES

from fp8_dist import text

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


# The warning of a page's skip_head(model) where a test's model has no head.
NO_HEAD = "skip_head: no layer of the .* was taken for its head"


class OwnWarning(Exception):
    """A warning of the library, raised as an error."""


def python_blocks(page: str) -> list[str]:
    """The Python blocks of a page, given by its path from the root of the checkout."""
    return PYTHON.findall((ROOT / page).read_text())


@contextmanager
def own_warnings_raise(expected: str = "") -> Iterator[None]:
    """Raise OwnWarning if a module of the library warns, even if it gave this warning before.

    Args:
        expected: a regular expression; warnings that match it are given as usual.
    """
    warn = warnings.warn

    def strict(message: Any, category: Any = None, stacklevel: int = 1, **options: Any) -> None:
        folders = Path(sys._getframe(1).f_code.co_filename).resolve().parents
        is_own = any(source in folders for source in SOURCES)
        if is_own and not (expected and re.match(expected, str(message), re.DOTALL)):
            raise OwnWarning(message)
        warn(message, category, stacklevel + 1, **options)

    with patch.object(warnings, "warn", strict), patch.object(text, "_warned", set()):
        yield


def run_shown(code: str, scope: dict[str, Any], expected: str = "") -> None:
    """Execute code of a page; for ``expected`` see :func:`own_warnings_raise`."""
    with own_warnings_raise(expected):
        exec(code, scope)
