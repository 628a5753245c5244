"""docs/from_torchao.md names everything that torchao.float8 exports, and counterparts that exist."""

import dataclasses
import enum
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "from_torchao.md"
OURS = ("fp8_dist", "fp8_dist.tensor_parallel")
THEIRS = tuple(
    f"torchao.float8{module}"
    for module in ("", ".float8_tensor_parallel", ".float8_linear", ".fsdp_utils")
)

installed = importlib.util.find_spec("torchao") is not None
with_torchao = pytest.mark.skipif(not installed, reason="torchao is not installed")


class Row(NamedTuple):
    """A row of the page's tables; entries as `path` or `path(parameter, ...)`."""

    theirs: list[str]
    ours: list[str]
    same: bool
    remark: str


def rows(text: str) -> Iterator[Row]:
    for line in text.splitlines():
        if line.startswith("| `"):
            theirs, ours, remark = (cell.strip() for cell in line.strip("|").split("|"))
            same = ours == "the same"
            entries = (re.findall("`([^`]+)`", cell) for cell in (theirs, theirs if same else ours))
            yield Row(*entries, same, remark)


TABLE = list(rows(PAGE.read_text()))


def parsed(entry: str) -> tuple[str, list[str]]:
    path, _, parameters = entry.removesuffix(")").partition("(")
    return path, [name for name in parameters.split(", ") if name]


def found(path: str, modules: tuple[str, ...]) -> Any:
    """The object at a dotted path in one of the modules."""
    for module in map(importlib.import_module, modules):
        value: Any = module
        for part in path.split("."):
            value = getattr(value, part, None)
        if value is not None:
            return value
    pytest.fail(f"{path} is in none of {', '.join(modules)}")


def check(entry: str, modules: tuple[str, ...]) -> None:
    """Check that the object of an entry exists, and has the parameters that the entry names."""
    path, parameters = parsed(entry)
    value = found(path, modules)
    if parameters:
        missing = set(parameters) - set(inspect.signature(value).parameters)
        assert not missing, f"{path} has no parameter {missing}"


def default(value: Any, parameter: str) -> str:
    """The kind and default of a parameter, comparable between the libraries."""
    found = inspect.signature(value).parameters[parameter]
    kind = f"{found.kind.name} {type(found.default).__name__}"
    return kind if dataclasses.is_dataclass(found.default) else f"{kind} {found.default!r}"


@with_torchao
def test_the_page_names_what_torchao_has() -> None:
    listed = {parsed(entry)[0].partition(".")[0] for row in TABLE for entry in row.theirs}
    assert set(importlib.import_module("torchao.float8").__all__) <= listed
    for row in TABLE:
        for entry in row.theirs:
            check(entry, THEIRS)


def test_counterparts_exist() -> None:
    for row in TABLE:
        assert row.ours or row.remark, f"{row.theirs}: a name without a counterpart says why"
        for entry in row.ours:
            check(entry, OURS)


@with_torchao
def test_what_is_called_the_same_is() -> None:
    for path, parameters in (parsed(entry) for row in TABLE if row.same for entry in row.theirs):
        ours, theirs = found(path, OURS), found(path, THEIRS)
        for parameter in parameters:
            assert default(ours, parameter) == default(theirs, parameter), (path, parameter)
        if isinstance(theirs, enum.Enum):
            assert ours.value == theirs.value
