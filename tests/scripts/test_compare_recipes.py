"""The comparison of recipes over several seeds: its runs and its verdict."""

from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from scripts.train import compare_recipes
from scripts.train.compare_recipes import checks, parse
from scripts.train.seeded_runs import Losses, results_table, train

QUICK = "--recipes tensorwise --steps 2 --seeds 2 --batch-size 2 --seq-len 16"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are written into a new current folder."""
    monkeypatch.setenv("PYTHONPATH", str(Path(compare_recipes.__file__).parents[2]))
    monkeypatch.chdir(tmp_path)


def test_a_run(capsys):
    assert compare_recipes.main([*QUICK.split(), "--jobs", "2", "--assert"]) == 0
    assert "| tensorwise |" in capsys.readouterr().out
    metrics = [path.read_text() for path in Path("runs/recipes").glob("*/metrics.jsonl")]
    assert len(set(metrics)) == 4, "seeds and recipes differ"


def test_run_that_fails():
    args = parse([*QUICK.split(), "--lr", "0"])
    with pytest.raises(SystemExit, match=r"(?s)train\.train .* did not end well:.*--lr"):
        train(args, "bf16", {"recipe": "bf16"}, 0)


def test_refused_options(capsys):
    messages = []
    for options in ("--seeds 1", "--jobs 0", "--steps 0", "--recipes bf16"):
        with pytest.raises(SystemExit, match=r"^2$"):
            parse(options.split())
        messages.append(capsys.readouterr().err.strip().splitlines()[-1].partition(": error: ")[2])
    assert_expected_inline(
        "\n".join(messages),
        """\
--seeds must be at least 2: differences have a standard error
argument --jobs: 0 is not positive
argument --steps: 0 is not positive
argument --recipes: invalid choice: 'bf16' (choose from 'tensorwise', 'rowwise', 'rowwise_with_gw_hp', 'rowwise_folded', 'blockwise', 'mxfp8', 'delayed')""",
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
    "blockwise": times(1.001, 1.003),
}


def test_table_and_verdict_of_good_losses():
    assert all(check.holds for check in checks(GOOD))
    assert_expected_inline(
        "\n".join(
            [results_table(GOOD, "bf16", "recipe"), *(check.sentence for check in checks(GOOD))]
        ),
        """\
| recipe         | loss, last 50 steps | difference to bf16 | its standard error |
| -------------- | ------------------: | -----------------: | -----------------: |
| bf16           |              2.5000 |                    |                    |
| tensorwise     |              2.5070 |           +0.300 % |            0.100 % |
| rowwise        |              2.5015 |           +0.050 % |            0.050 % |
| rowwise_folded |              2.5050 |           +0.200 % |            0.000 % |
| blockwise      |              2.5045 |           +0.200 % |            0.100 % |
tensorwise differs from bf16 by +0.300 % ± 0.100 %, at most 1 %
rowwise differs from bf16 by +0.050 % ± 0.050 %, at most 1 %
rowwise_folded differs from bf16 by +0.200 % ± 0.000 %, at most 1 %
blockwise differs from bf16 by +0.200 % ± 0.100 %, at most 0.3 %
rowwise_folded differs from rowwise by +0.150 % ± 0.050 %, at most 0.3 %""",
    )


@pytest.mark.parametrize(
    ("recipe", "factors", "broken"),
    [
        ("tensorwise", (1.011, 1.010), "tensorwise differs from bf16 by +1.050 % ± 0.050 %"),
        ("tensorwise", (0.985, 0.985), "tensorwise differs from bf16 by -1.500 % ± 0.000 %"),
        ("tensorwise", (float("nan"), 1.0), "tensorwise differs from bf16 by +nan %"),
        ("rowwise_folded", (1.006, 1.004), "rowwise_folded differs from rowwise by +0.4"),
        ("blockwise", (1.005, 1.003), "blockwise differs from bf16 by +0.400 % ± 0.100 %"),
    ],
)
def test_verdict_on_bad_losses(recipe, factors, broken):
    found = checks(GOOD | {recipe: times(*factors)})
    assert [c.sentence.startswith(broken) for c in found if not c.holds] == [True]


def test_noise_between_seeds_allows_more():
    losses = GOOD | {"rowwise_folded": times(1.010, 0.998)}
    assert all(check.holds for check in checks(losses))


def test_a_bad_verdict_fails_when_asked_to(monkeypatch):
    bad = GOOD | {"tensorwise": times(1.1, 1.1)}
    monkeypatch.setattr(compare_recipes, "losses_of", lambda args, variants: bad)
    assert compare_recipes.main([]) == 0
    assert compare_recipes.main(["--assert"]) == 1
