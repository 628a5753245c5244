"""Following the guides in CONTRIBUTING, in a copy of the checkout, leaves passing tests."""

import re
from pathlib import Path

from scripts.measure.mutations import PASSED, ROOT, checkout, run_tests


def named_tests(guide: str) -> list[str]:
    """The test files that a section of CONTRIBUTING names."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition(f"\n## {guide}\n")[2].partition("\n## ")[0]
    return re.findall(r"`(tests/(?:unit|distributed)/[\w/]+\.py)`", section)


def insert(file: Path, after: str, text: str) -> None:
    """Insert text into a file after the only occurrence of ``after``."""
    source = file.read_text()
    assert source.count(after) == 1, (file, after)
    file.write_text(source.replace(after, after + text))


RECIPE = "tensorwise_e4m3"
GRID = "tests/distributed/test_mesh_grid.py"
# By guide, the tests to run in some files (by default all).
CHOSEN = {
    "Adding a recipe": {
        GRID: ["::test_operands[FSDP2 x2]"],
        "tests/unit/linear/test_recipes.py": [
            f"::test_the_three_gemms_equal_the_algebra[{RECIPE}]"
        ],
    },
    "Adding a scaling scheme": {GRID: ["::test_operands[TP x2, row]"]},
}


def add_recipe(folder: Path) -> None:
    """Add a recipe that differs from tensorwise in the dtype of gradients."""
    names = folder / "fp8_dist/recipe_names.py"
    insert(names, '    MXFP8 = "mxfp8"\n', f'    {RECIPE.upper()} = "{RECIPE}"\n')
    insert(
        folder / "fp8_dist/config.py",
        '    "delayed": lambda: _alike(CastConfig(ScalingType.DELAYED)),\n',
        f'    "{RECIPE}": lambda: _alike(CastConfig(target_dtype=e4m3())),\n',
    )
    support, recipes = folder / "docs/support.md", folder / "docs/recipes.md"
    insert(
        support,
        "| `delayed` | as `tensorwise` (assumed) |\n",
        f"| `{RECIPE}` | as `tensorwise` (assumed) |\n",
    )
    row = re.findall(r"^\| `tensorwise` (\| e4m3 .*\n)", recipes.read_text(), re.MULTILINE)[0]
    insert(recipes, f"| `tensorwise` {row}", f"| `{RECIPE}` {row.replace('e5m2', 'e4m3')}")
    insert(recipes, "- Scales are powers of two in all recipes but ", f"`{RECIPE}`, ")


def add_scaling_scheme(folder: Path) -> None:
    """Add the example scheme under another name, with blocks of another size."""
    example = folder / "tests/support/two_level.py"
    scheme, _, _ = example.read_text().partition("\n\ndef config_named(")
    for old, new in (
        ('family: ClassVar[str] = "two_level"', 'family: ClassVar[str] = "other_levels"'),
        ("TwoLevel", "OtherLevels"),
        ("two_level_config", "other_levels_config"),
        ("from half_octaves import half_octaves_config\n", ""),
        ("columns: int = 16", "columns: int = 8"),
        ("rows=16", "rows=8"),
    ):
        assert old in scheme, old
        scheme = scheme.replace(old, new)
    (folder / "tests/support/other_levels.py").write_text(scheme + "\n")
    imported = "from other_levels import other_levels_config\n"
    insert(example, "from half_octaves import half_octaves_config\n", imported)
    insert(
        example,
        '    if name == "two levels":\n        return two_level_config()\n',
        '    if name == "other levels":\n        return other_levels_config()\n',
    )
    grid = folder / "tests/distributed/test_mesh_grid.py"
    insert(grid, "from half_octaves import half_octaves_config\n", imported)
    insert(
        grid,
        '    found["two levels"] = two_level_config()\n',
        '    found["other levels"] = other_levels_config()\n',
    )


def test_adding_a_recipe_and_a_scaling_scheme() -> None:
    tests = []
    for guide, chosen in CHOSEN.items():
        named = named_tests(guide)
        assert chosen.keys() <= set(named)
        tests += [f"{file}{test}" for file in named for test in chosen.get(file, [""])]
    with checkout() as folder:
        add_recipe(folder)
        add_scaling_scheme(folder)
        status, output = run_tests(folder, list(dict.fromkeys(tests)))
    assert status == PASSED, output
