"""What the documents refer to exists; the code of some pages runs, and recipes are as shown."""

import importlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from documented import run_shown
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fp8_dist
from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    debug,
    fsdp,
    tensor_parallel,
)
from fp8_dist.device import short_name
from fp8_dist.recipe import Operand
from fp8_dist.scaling import Scheme

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [
    README,
    *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *ROOT.glob("scripts/*.md"),
    *DOCS,
]

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
MODULE = re.compile(r"(?:^|[\s`])-m\s+(scripts(?:\.\w+)+)")
FOLDERS = "docs|fp8_dist|fsdp|scripts|tensor_parallel|tests"
FILE = re.compile(rf"(?<![\w/.])((?:{FOLDERS})/[\w/]+\.(?:md|png|py|sh))\b")
# A call in the text, on the model or the optimizer of the reader.
CALL = re.compile(r"`(\w+)\((?:model|optimizer)\b[^`]*\)`")


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    text = FENCED.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for target in LINK.findall(FENCED.sub("", text)):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (fragment and fragment not in anchors(file)):
            yield target


def unknown_files(text: str) -> Iterator[str]:
    for module in MODULE.findall(text):
        path = ROOT / module.replace(".", "/")
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            yield module
    for file in FILE.findall(text):
        if not (ROOT / file).is_file():
            yield file


def unknown_calls(text: str) -> set[str]:
    public = {*fp8_dist.__all__, *debug.__all__, *fsdp.__all__, *tensor_parallel.__all__}
    return set(CALL.findall(text)) - public


def test_what_pages_refer_to_exists() -> None:
    for page in PAGES:
        text = page.read_text()
        placeholders = [line for line in text.splitlines() if re.fullmatch(r"[A-Z_]{4,}", line)]
        found = [*broken_links(page, text), *unknown_files(text), *unknown_calls(text)]
        assert [*found, *placeholders] == [], page


def test_the_index_lists_every_page() -> None:
    linked = set(LINK.findall((ROOT / "docs/README.md").read_text()))
    assert {page.name for page in DOCS} - {"README.md"} <= linked


def run_code(page: str, **scope: Any) -> dict[str, Any]:
    """Run the only Python block of a page, and return its names."""
    (code,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.M
    )
    run_shown(code, scope)
    return scope


def test_recipes_converts_a_model() -> None:
    model = nn.ModuleDict({"body": nn.Linear(32, 32), "head": nn.Linear(32, 32)})
    config = run_code("recipes.md", model=model)["config"]
    assert config.fsdp_float8_all_gather
    assert isinstance(model["body"], Float8Linear)
    assert model["body"].config.fold_row_scales


def test_numerics_sets_the_rule_of_every_operand() -> None:
    config = run_code("numerics.md")["config"]
    casts = [config.cast_config_input, config.cast_config_weight, config.cast_config_grad_output]
    assert [(cast.scale_rule, cast.block_size) for cast in casts] == [
        ("floor", (1, 32)),
        ("floor", (32, 32)),
        ("floor", (1, 32)),
    ]


def test_communication_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    run_code("communication.md", mesh=None, model=model, x=torch.ones(2, 4), optimizer=optimizer)
    assert capsys.readouterr().out == "no collectives\n"


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.ModuleDict({"feed_forward": nn.ModuleDict({"w2": nn.Linear(32, 32)})})
        self.layers = nn.ModuleDict({"3": block})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["3"]["feed_forward"]["w2"](x)  # type: ignore[index]


def test_debugging_records_replays_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs/debugging.md").read_text()
    recorded, statistics, comparison, left_out, one_layer = re.findall(
        r"^```python\n(.*?)^```", text, re.DOTALL | re.M
    )
    monkeypatch.chdir(tmp_path)
    model = fp8_dist.convert_to_float8_training(OneLayer())
    scope = {
        "model": model,
        "batches": [torch.ones(4, 32)] * 2,
        "optimizer": torch.optim.SGD(model.parameters()),
    }
    run_shown(recorded, scope)
    assert not list((tmp_path / "recordings").iterdir())  # nothing went wrong
    run_shown(statistics, scope)
    printed = capsys.readouterr().out
    assert printed.count("layers.3.feed_forward.w2") == 3  # its casts in step 0
    two_steps = one_layer.replace("...  # two steps", "model(batches[0])")
    run_shown(two_steps, scope, expected="record: on demand")
    (command,) = re.findall(r"^python -m (fp8_dist.debug.replay) (.*)$", text, re.M)
    assert importlib.import_module(command[0]).main([command[1]]) == 0
    assert capsys.readouterr().out.count("layers.3.feed_forward.w2") == 2
    scope |= {"tokens": torch.randn(4, 32), "loss": torch.sum}
    run_shown(comparison, scope)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {(line[0], line[-2]) for line in lines} == {
        (recipe, "layers.3.feed_forward.w2") for recipe in ("tensorwise", "rowwise_folded")
    }
    run_shown(left_out.replace("24.7", "0"), scope)
    assert scope["low"] == set()


class FusedAttention(nn.Module):
    """Attention like nanoGPT's, with two heads."""

    head_dim = 8

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(-2))


@pytest.fixture
def one_rank() -> Iterator[dict[str, DeviceMesh]]:
    """A mesh of this process alone, by the name of its axis."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield {"tp": init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))}
    dist.destroy_process_group()


def test_tensor_parallel_orders_a_projection_by_head(one_rank: dict[str, DeviceMesh]) -> None:
    section = (ROOT / "docs/tensor_parallel.md").read_text().partition("## Check the plan")[2]
    checked, by_head = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.M)[:2]
    model, x = FusedAttention(), torch.randn(2, 4, 16)
    expected = model(x)
    scope = {"torch": torch, "F": F}
    run_shown(by_head, scope)
    scope["order_by_head"](model.qkv, model.head_dim)
    model.forward = partial(scope["attention"], model)  # type: ignore[method-assign]
    torch.testing.assert_close(model(x), expected)
    plan = {"qkv": tensor_parallel.Float8ColwiseParallel()}
    fp8_dist.convert_to_float8_training(model)
    run = {"check_tp_plan": tensor_parallel.check_tp_plan, "mesh": one_rank, "plan": plan}
    one_rank_warning = "check_tp_plan: on a mesh of one rank"
    run_shown(checked, run | {"model": model, "tokens": x}, expected=one_rank_warning)


def test_the_table_of_recipes() -> None:
    section = (ROOT / "docs/recipes.md").read_text().partition("## What each recipe casts")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section.partition("\n## ")[0], re.M)
    assert sorted(name for name, _ in rows) == sorted(r.value for r in Float8LinearRecipeName)
    for name, row in rows:
        *casts, gathers, _ = row.split(" | ")
        config = Float8LinearConfig.from_recipe_name(name)
        for operand, shown in zip(get_args(Operand), casts, strict=True):
            first, second = (cast_in_words(s) for s in config.recipe.uses[operand].values())
            then = second.removeprefix(first.partition(" ")[0] + " ")
            assert shown == (first if first == second else f"{first}, then {then}"), name
        assert ("float8" in gathers) == (config.recipe.gather_scheme["weight"] is not None), name
    (others,) = re.findall(r"^- Scales are powers of two in all recipes but (.*)\.$", section, re.M)
    configs = {name: Float8LinearConfig.from_recipe_name(name) for name, _ in rows}
    free = {name for name, each in configs.items() if not each.round_scales_to_power_of_2}
    assert set(re.findall(r"`(\w+)`", others)) == free


def cast_in_words(scheme: Scheme | None) -> str:
    """The words of the table of recipes for an operand's scheme in a GEMM."""
    if scheme is None:
        return "high precision"
    covers = scheme.covers.removeprefix("block of ").partition(" (")[0]
    return f"{short_name(scheme.dtype).removesuffix('fn')} per {covers}"
