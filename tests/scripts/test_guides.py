"""The guides of CONTRIBUTING, followed to the letter in a copy of the checkout, leave green tests."""

import re
from pathlib import Path

from scripts.measure.mutations import PASSED, ROOT, checkout, run_tests


def named_tests(guide: str) -> list[str]:
    """The files of tests that a section of CONTRIBUTING names."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition(f"\n## {guide}\n")[2].partition("\n## ")[0]
    return re.findall(r"`(tests/(?:unit|distributed)/[\w/]+\.py)`", section)


def insert(file: Path, after: str, text: str) -> None:
    """Insert text behind the only place of a file that holds ``after``."""
    source = file.read_text()
    assert source.count(after) == 1, (file, after)
    file.write_text(source.replace(after, after + text))


def check(folder: Path, guide: str, chosen: dict[str, list[str]]) -> None:
    """Run the tests that the guide names; of some files these alone."""
    named = named_tests(guide)
    assert chosen.keys() <= set(named)
    tests = [f"{file}{test}" for file in named for test in chosen.get(file, [""])]
    status, output = run_tests(folder, tests)
    assert status == PASSED, output


def test_adding_a_recipe() -> None:
    """Scales as those of tensorwise, but for the dtype of gradients."""
    name = "tensorwise_e4m3"
    with checkout() as folder:
        names = folder / "fp8_dist/recipe_names.py"
        insert(names, '    MXFP8 = "mxfp8"\n', f'    {name.upper()} = "{name}"\n')
        insert(
            folder / "fp8_dist/config.py",
            "    Float8LinearRecipeName.DELAYED: lambda: _alike(CastConfig(ScalingType.DELAYED)),\n",
            f"    Float8LinearRecipeName.{name.upper()}: "
            "lambda: _alike(CastConfig(target_dtype=e4m3())),\n",
        )
        support, recipes = folder / "docs/support.md", folder / "docs/recipes.md"
        insert(
            support,
            "| `delayed` | as `tensorwise` (assumed) |\n",
            f"| `{name}` | as `tensorwise` (assumed) |\n",
        )
        row = re.findall(r"^\| `tensorwise` (\| e4m3 .*\n)", recipes.read_text(), re.MULTILINE)[0]
        insert(recipes, f"| `tensorwise` {row}", f"| `{name}` {row.replace('e5m2', 'e4m3')}")
        insert(recipes, "- Scales are powers of two in all recipes but ", f"`{name}`, ")
        check(
            folder,
            "Adding a recipe",
            {
                "tests/distributed/test_mesh_grid.py": ["::test_operands[FSDP2 x2]"],
                "tests/distributed/test_recipes_on_meshes.py": ["::test_outputs_and_gradients"],
                "tests/unit/linear/test_recipes.py": [
                    f"::test_the_three_gemms_equal_the_algebra[{name}]"
                ],
            },
        )


def test_adding_a_scaling_scheme() -> None:
    """The example under another name, with blocks of another size."""
    with checkout() as folder:
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
        meshes = ["::test_operands[TP x2, row]"]
        check(folder, "Adding a scaling scheme", {"tests/distributed/test_mesh_grid.py": meshes})
