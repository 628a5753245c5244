"""The comparison of recipes over several seeds: its runs, what it uses again, its verdict."""

import re
from pathlib import Path

import compare_recipes
import pytest
from compare_recipes import Run, parse_args, planned_runs
from expecttest import assert_expected_inline
from recipe_results import Losses, problems, recipe_table, results_table, verdict

QUICK = "--data text.txt --recipes tensorwise --steps 2 --seeds 2 --batch-size 2 --seq-len 16"


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text in the current folder, which is also the one that the page goes to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_recipes, "PAGE", tmp_path / "recipes.md")
    path = Path("text.txt")
    path.write_text("All work and no play makes float8 a dull dtype.\n" * 21)
    return path


def not_again(run: Run) -> list[float]:
    """In the place of `Run.train`."""
    raise AssertionError(f"{run.out} was trained again")


def test_runs_are_made_once(text, monkeypatch, capsys):
    argv = [*QUICK.split(), "--jobs", "2", "--write", "--assert"]
    assert compare_recipes.main(argv) == 0
    first = capsys.readouterr().out
    assert "| tensorwise " in first
    folder = Path("runs/recipes/2x2x16-lr0.0005")
    names = ["bf16-0", "bf16-1", "tensorwise-0", "tensorwise-1"]
    assert sorted(path.name for path in folder.iterdir()) == names
    runs = planned_runs(parse_args(argv))
    assert len({str(run.losses()) for run in runs}) == 4, "seeds and recipes differ"
    page = Path("recipes.md").read_text()
    assert "2 seeds, 2 steps of 2 x 16 tokens, learning rate up to 0.0005" in " ".join(page.split())
    assert re.search(r"^\| tensorwise .* % \|$", page, re.MULTILINE)
    assert Path("recipes.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(Run, "train", not_again)
    assert compare_recipes.main(argv) == 0
    again = capsys.readouterr().out
    assert again == f"4 of 4 runs are finished already, in {folder}\n{first}"
    assert Path("recipes.md").read_text() == page

    metrics = runs[0].out / "metrics.jsonl"
    whole = metrics.read_text()
    for cut_off in (whole[:-5], whole[: whole.index("\n") + 1]):
        metrics.write_text(cut_off)
        assert runs[0].losses() is None
    metrics.write_text(whole)
    assert runs[0].losses() is not None
    text.write_text(text.read_text() + "!")
    assert [run.losses() for run in planned_runs(parse_args(argv))] == [None] * 4


def test_run_that_fails(text):
    run = planned_runs(parse_args(QUICK.split()))[0]
    with pytest.raises(SystemExit, match=r"(?s)train\.py .* did not end well:.*--steps"):
        run._replace(options=[*run.options, "--steps=0"]).train()


def test_refused_options(capsys):
    refused = [
        "--seeds 1",
        "--jobs 0",
        "--steps 0",
        "--data nowhere",
        "--recipes bf16",
        "--out text.txt",
    ]
    messages = []
    for options in refused:
        with pytest.raises(SystemExit) as error:
            planned_runs(parse_args(options.split()))
        assert error.value.code == 2
        messages.append(capsys.readouterr().err.strip().splitlines()[-1].partition(": error: ")[2])
    assert_expected_inline(
        "\n".join(messages),
        """\
--seeds must be at least 2
--jobs must be at least 1
--steps must be at least 1
--data: nowhere: no such file or folder
argument --recipes: invalid choice: 'bf16' (choose from 'tensorwise', 'rowwise', 'rowwise_with_gw_hp', 'rowwise_folded', 'delayed')
--out text.txt: text.txt is a file; name a folder""",
    )


# Two seeds that differ much from each other, and recipes that differ little from bf16.
BF16 = [[3.0], [2.0]]


def times(first: float, second: float) -> list[list[float]]:
    """The losses of `BF16`, each seed's multiplied."""
    return [
        [loss * factor for loss in run] for run, factor in zip(BF16, (first, second), strict=True)
    ]


GOOD: Losses = {
    "bf16": BF16,
    "tensorwise": times(1.002, 1.004),
    "rowwise": times(1.001, 1.000),
    "rowwise_folded": times(1.002, 1.002),
}


def test_table_and_verdict_of_good_losses():
    assert problems(GOOD) == []
    assert_expected_inline(
        f"{results_table(GOOD)}\n{verdict(GOOD)}",
        """\
| recipe             | loss, last 50 steps | difference to bf16 | its standard error |
|--------------------|---------------------|--------------------|--------------------|
| bf16               |              2.5000 |                    |                    |
| tensorwise         |              2.5070 |           +0.300 % |            0.100 % |
| rowwise            |              2.5015 |           +0.050 % |            0.050 % |
| rowwise_folded     |              2.5050 |           +0.200 % |            0.000 % |
Every recipe is within 1 % of bf16. rowwise_folded differs from rowwise by +0.150 % ± 0.050 %, within 0.3 %.""",
    )


@pytest.mark.parametrize(
    ("recipe", "factors", "problem"),
    [
        ("tensorwise", (1.011, 1.010), "tensorwise differs from bf16 by +1.050 % ± 0.050 %"),
        ("tensorwise", (0.985, 0.985), "tensorwise differs from bf16 by -1.500 % ± 0.000 %"),
        ("tensorwise", (float("nan"), 1.0), "tensorwise differs from bf16 by +nan %"),
        ("rowwise_folded", (1.006, 1.004), "rowwise_folded differs from rowwise by +0.4"),
    ],
)
def test_verdict_on_bad_losses(recipe, factors, problem):
    losses = GOOD | {recipe: times(*factors)}
    assert [found.startswith(problem) for found in problems(losses)] == [True]
    assert verdict(losses).startswith(f"Not as expected: {problem}")


def test_noise_between_seeds_allows_more():
    losses = GOOD | {"rowwise_folded": times(1.010, 0.998)}
    assert problems(losses) == []
    assert verdict(losses).endswith("within two standard errors.")


def test_a_bad_verdict_fails_when_asked_to(monkeypatch, capsys):
    bad = GOOD | {"tensorwise": times(1.1, 1.1)}
    monkeypatch.setattr(compare_recipes, "losses_of", lambda *_: bad)
    argv = ["--data", "text.txt"]
    assert compare_recipes.main(argv) == 0
    assert compare_recipes.main([*argv, "--assert"]) == 1
    assert "Not as expected: tensorwise differs from bf16 by +10" in capsys.readouterr().out


def test_what_recipes_gather():
    recipes = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "rowwise_folded", "delayed"]
    assert_expected_inline(
        recipe_table(recipes),
        """\
| recipe | input | weight | grad_output | FSDP2 weight gather | SP input gather | row-parallel + SP grad_output gather |
|---|---|---|---|---|---|---|
| `tensorwise` | e4m3fn per tensor | e4m3fn per tensor | e5m2 per tensor | e4m3fn | e4m3fn | e5m2 |
| `rowwise` | e4m3fn per row, then e4m3fn per column | e4m3fn per row, then e4m3fn per column | e4m3fn per row, then e4m3fn per column | high precision | high precision | high precision |
| `rowwise_with_gw_hp` | e4m3fn per row, then high precision | e4m3fn per row, then e4m3fn per tensor | e4m3fn per row, then high precision | high precision | high precision | high precision |
| `rowwise_folded` | e4m3fn per row | e4m3fn per row | e4m3fn per row | e4m3fn, scales travel with their rows | e4m3fn, scales travel with their rows | e4m3fn, scales travel with their rows |
| `delayed` | e4m3fn per tensor, delayed | e4m3fn per tensor, delayed | e5m2 per tensor, delayed | e4m3fn | e4m3fn | e5m2 |""",
    )
