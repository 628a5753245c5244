"""docs/from_torchao.md names everything that torchao.float8 exports, and counterparts that exist."""

import dataclasses
import enum
import importlib
import importlib.util
import inspect
import logging
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
STYLES = ("Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput")

logging.getLogger("torchao").setLevel(logging.ERROR)
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
    """That the object of an entry exists, and has the parameters that the entry names."""
    path, parameters = parsed(entry)
    value = found(path, modules)
    if parameters:
        missing = set(parameters) - set(inspect.signature(value).parameters)
        assert not missing, f"{path} has no parameter {missing}"


def items(name: str, value: Any) -> Iterator[str]:
    """What a reader may look up of an object: itself, its parameters, members and methods."""
    yield name
    is_class, parameters = isinstance(value, type), set()
    if inspect.isroutine(value) or (is_class and not issubclass(value, enum.Enum)):
        parameters = set(inspect.signature(value).parameters) - {"self"}
        yield from (f"{name}({parameter})" for parameter in parameters)
    # (The defaults of a dataclass's fields are attributes, too.)
    for attribute in set(vars(value)) - parameters if is_class else ():
        member = getattr(value, attribute)
        is_item = isinstance(member, enum.Enum) or inspect.isroutine(member)
        if is_item and not attribute.startswith("_"):
            yield from items(f"{name}.{attribute}", member)


def items_on_the_page(table: list[Row]) -> set[str]:
    listed = set()
    for path, parameters in (parsed(entry) for row in table for entry in row.theirs):
        parts = path.split(".")
        listed |= {".".join(parts[: n + 1]) for n in range(len(parts))}
        listed |= {f"{path}({parameter})" for parameter in parameters}
    return listed


def exported() -> Iterator[str]:
    """What `torchao.float8` exports, and the constructors of its styles."""
    float8 = importlib.import_module("torchao.float8")
    for name in dict.fromkeys(float8.__all__):
        yield from items(name, getattr(float8, name))
    for name, value in vars(float8).items():
        if isinstance(value, type) and value.__module__.startswith("torchao."):
            yield name
    for name in STYLES:
        yield from items(name, found(name, THEIRS))


def default(value: Any, parameter: str) -> str:
    """Comparable between the libraries."""
    found = inspect.signature(value).parameters[parameter]
    kind = f"{found.kind.name} {type(found.default).__name__}"
    return kind if dataclasses.is_dataclass(found.default) else f"{kind} {found.default!r}"


@with_torchao
def test_the_page_names_what_torchao_has() -> None:
    assert set(exported()) - items_on_the_page(TABLE) == set()
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


@with_torchao
def test_what_the_walk_finds() -> None:
    page = "| `CastConfig(scaling_type)` | the same | |\n| `NoName` | `no_such(x)` | |"
    listed, all_items = items_on_the_page(list(rows(page))), set(exported())
    assert {"ScalingType", "CastConfig(target_dtype)", "ScalingType.DISABLED"} <= all_items - listed
    assert {"CastConfig.short_str", "Float8LinearConfig.from_recipe_name(recipe_name)"} <= all_items
    for entry in ("NoName", "CastConfig(no_such)", "no_such(x)"):
        with pytest.raises((pytest.fail.Exception, AssertionError)):
            check(entry, THEIRS)
