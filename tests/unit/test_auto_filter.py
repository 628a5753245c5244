"""Which layers auto_filter admits, what its report says, and the benchmark of its thresholds."""

import contextlib
import importlib.util
import io
import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from documented import run_shown
from expecttest import assert_expected_inline
from reference import raised

from fp8_dist import Float8Linear, Float8LinearRecipeName, auto_filter, convert_to_float8_training
from fp8_dist.model.filters import TOO_SMALL, AutoFilter, _shards, smallest_parts

installed = importlib.util.find_spec("torchao") is not None
if installed:
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
SIZES = [16, 24, 1000, 1024, 1040, 2048, 2064, 4096, 4104, 4112, 8192]


def section_of_page() -> str:
    """The section of the page about the filter."""
    _, section = PAGE.read_text().split("\n## Layers too small for float8\n")
    return section.partition("\n## ")[0]


def layer(out: int, in_: int) -> nn.Linear:
    return nn.Linear(in_, out, device="meta")


def admits(out: int, in_: int, recipe: str = "tensorwise", **arguments: Any) -> bool:
    return auto_filter(recipe, **arguments)(layer(out, in_), "layer")


def model() -> nn.Module:
    blocks = nn.ModuleList()
    for _ in range(2):
        layers = {"up": layer(8192, 4096), "down": layer(4096, 8192), "tiny": layer(8, 4096)}
        blocks.append(nn.ModuleDict({"norm": nn.LayerNorm(4096, device="meta"), **layers}))
    return nn.ModuleDict({"layers": blocks, "head": layer(32000, 4096)})


def decisions(filter_fn: AutoFilter) -> list[tuple[tuple[int, int], str]]:
    """The local shape of each layer, and why it is skipped."""
    return [(row.local_shape, "" if row.convert else row.reason) for row in filter_fn.report.rows]


def decided(filter_fn: AutoFilter, *shapes: tuple[int, int]) -> list[tuple[tuple[int, int], str]]:
    """What a filter decides about layers of these shapes, which are named layer.0, layer.1, ..."""
    for i, shape in enumerate(shapes):
        filter_fn(layer(*shape), f"layer.{i}")
    return decisions(filter_fn)


@pytest.mark.skipif(not installed, reason="torchao is not installed")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_one_rank_decides_as_torchao(recipe: str) -> None:
    ours, theirs = auto_filter(recipe, ["head"]), _auto_filter_for_recipe(recipe, ["head"])
    for fqn, out, in_ in product(("layer", "my.heads.0"), SIZES, SIZES):
        assert ours(layer(out, in_), fqn) == theirs(layer(out, in_), fqn), (fqn, out, in_)


def test_every_recipe_has_thresholds_and_stands_on_the_page() -> None:
    assert {recipe.value for recipe in Float8LinearRecipeName} == set(TOO_SMALL)
    for member in Float8LinearRecipeName:
        recipe = member.value
        (shown,) = re.findall(rf"^\| `{recipe}` \| (.*) \|$", section_of_page(), re.MULTILINE)
        like = re.findall(r"^as `(\w+)`", shown) or [recipe]
        assert TOO_SMALL[recipe] == TOO_SMALL[like[0]]
        assert auto_filter(recipe).report.recipe == auto_filter(member).report.recipe == recipe


def test_the_division_that_gains_less_decides() -> None:
    # Halves by rows and by columns: too small and large enough, the other way round, both large
    # enough (twice: the shorter side is shown), and one of the two misaligned (twice).
    shapes = [(2048, 4096), (1024, 8192), (8192, 4096), (4096, 8192), (2064, 8192), (8192, 4112)]
    small = ((1024, 4096), "out <= 1024 and in <= 4096")
    assert decided(auto_filter("tensorwise", tp_size=2), *shapes) == [
        small,
        small,
        ((8192, 2048), ""),
        ((2048, 8192), ""),
        ((1032, 8192), "out = 1032 is not a multiple of 16"),
        ((8192, 2056), "in = 2056 is not a multiple of 16"),
    ]


def test_of_an_uneven_division_the_smallest_part_decides() -> None:
    # 1008 is 31 parts of 32 and one of 16; 528 is 31 of 17 and one of 1; 32 x 17 is 544.
    sizes = (1024, 1008, 528, 544, 1040, 48)
    found = [smallest_parts("tensorwise", (2048, in_), 32)[1] for in_ in sizes]
    assert found == [
        ((2048, 32), ""),
        ((2048, 16), ""),
        ((2048, 1), "in = 1 is not a multiple of 16"),
        ((2048, 17), "in = 17 is not a multiple of 16"),
        ((2048, 17), "in = 17 is not a multiple of 16"),
        ((2048, 0), "a rank holds nothing of it"),
    ]


def test_parts_are_those_of_torch() -> None:
    for size, ranks in product(range(1, 70), range(1, 9)):
        parts = [len(part) for part in torch.arange(size).chunk(ranks)]
        parts += [0] * (ranks - len(parts))
        for dim in (0, 1):
            largest, smallest = _shards((size, size), dim, ranks)
            assert (largest[dim], smallest[dim]) == (max(parts), min(parts))
            assert (largest[1 - dim], smallest[1 - dim]) == (size, size)


def test_conversion_and_report() -> None:
    net = model()
    filter_fn = auto_filter("tensorwise", ["head", "lm_head", "1.up"], 4)
    assert filter_fn.report.unmatched_fqns == ("head", "lm_head", "1.up")
    for _ in range(2):  # the second time it keeps one row for each layer
        convert_to_float8_training(net, module_filter_fn=filter_fn)
    converted = [fqn for fqn, m in net.named_modules() if isinstance(m, Float8Linear)]
    assert converted == [row.fqn for row in filter_fn.report.rows if row.convert]
    assert filter_fn.report.unmatched_fqns == ("lm_head",)
    assert_expected_inline(
        str(filter_fn.report),
        """\
auto_filter: 3 of 7 weights to float8, recipe tensorwise (thresholds: H100)
local: tp_size 4, out or in divided, whichever gains less
  layer          out x in      local                 reason
  layers.0.up    8192 x 4096   8192 x 1024   float8  large enough, from about 13,300 tokens on
  layers.0.down  4096 x 8192   1024 x 8192   float8  large enough, from about 13,300 tokens on
  layers.0.tiny  8 x 4096      2 x 4096      skip    out = 2 is not a multiple of 16
  layers.1.up    8192 x 4096   8192 x 1024   skip    filter_fqns: '1.up'
  layers.1.down  4096 x 8192   1024 x 8192   float8  large enough, from about 13,300 tokens on
  layers.1.tiny  8 x 4096      2 x 4096      skip    out = 2 is not a multiple of 16
  head           32000 x 4096  32000 x 1024  skip    filter_fqns: 'head'
filter_fqns: 'lm_head' matched no layer""",
    )
    one = auto_filter("tensorwise")
    convert_to_float8_training(layer(8192, 8192), module_filter_fn=one)
    assert decisions(one) == [((8192, 8192), "")]
    assert "(the module itself)" in str(one.report)


def test_lazy_layers() -> None:
    model = nn.Sequential(layer(8192, 8192), nn.LazyLinear(64))
    filter_fn = auto_filter("tensorwise")
    text = raised(ValueError, lambda: convert_to_float8_training(model, module_filter_fn=filter_fn))
    assert "auto_filter: 1 is lazy and has no shape yet: run it once" in text
    filter_fn = auto_filter("tensorwise", ["1"])
    convert_to_float8_training(model, module_filter_fn=filter_fn)
    assert [row.convert for row in filter_fn.report.rows] == [True, False]


def test_arguments_are_checked() -> None:
    names = "pass a list of parts of names, such as ['output']"
    mistakes: list[tuple[type[Exception], str, Any, str]] = [
        (ValueError, "recipe", "rowwize", "auto_filter: recipe='rowwize' is not one of ['tens"),
        (ValueError, "recipe", ["tensorwise"], "is not one of ['tensorwise'"),
        (TypeError, "filter_fqns", "output", f"filter_fqns='output': {names}"),
        (TypeError, "filter_fqns", ["output", ["head"]], names),
        (TypeError, "filter_fqns", ["output", ""], names),
        (ValueError, "tp_size", True, "tp_size=True: pass the number of ranks"),
        (ValueError, "tp_size", 0, "auto_filter: tp_size=0: pass the number of ranks, 1 or more"),
    ]
    for kind, name, value, text in mistakes:
        call = partial(auto_filter, **{"recipe": "tensorwise"} | {name: value})
        assert text in raised(kind, call), (name, value)


def test_the_example_of_the_page() -> None:
    text = section_of_page()
    code = re.search(r"<<'END'\n(.*?)END\n", text, re.DOTALL)
    shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert code is not None
    assert shown is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_shown(code.group(1), {})
    assert printed.getvalue() == shown.group(1)
