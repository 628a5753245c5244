"""What scripts/compare_recipes.py makes of losses: differences, a verdict, docs/recipes.md."""

import statistics
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from compare import plt, running_mean
from options import BF16

from fp8_dist import Float8LinearConfig
from fp8_dist.config import GEMM_OPERANDS, CastSpec, Operand
from fp8_dist.dtypes import short_name

LAST_STEPS = 50
SMOOTHING_STEPS = 15
# The largest differences that pass, in %: of a recipe to bf16; of rowwise_folded to rowwise, unless
# two standard errors are more.
MAX_TO_BF16 = 1.0
MAX_TO_ROWWISE = 0.3
FOLDED, ROWWISE = "rowwise_folded", "rowwise"

PAGE_TEXT = """\
<!-- Made by `python scripts/compare_recipes.py --write`. -->

# Recipes

## What is cast, and what is gathered in float8

{recipes}

The columns of operands say the dtype and what one scale covers; "A, then B": two casts of one
operand, for its two GEMMs. An operand can be gathered in float8 if one copy serves both.

## Losses

{results}

{verdict}

![losses of all recipes, and their differences to bf16](recipes.png)

    {command}

- Model: the {model} Llama of `scripts/llama.py`, on {text}.
- {seeds} seeds, {steps} steps of {batch_size} x {seq_len} tokens, learning rate up to {lr:g}.
- Each run is one process on a {where}; torch {torch}.
- Runs of one seed start from the same weights and see the same data. A loss is the mean of the last
  {last} steps and over seeds; a difference is the mean over seeds of the relative difference of two
  such runs.
"""

# The losses of all steps of each seed's run, by recipe; bf16 is among them.
Losses = dict[str, list[list[float]]]


class Difference(NamedTuple):
    """Of the last losses of two recipes, in %: the mean over seeds, and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} % ± {self.error:.3f} %"


def last_loss(losses: list[float]) -> float:
    """The mean of the last steps, or of all when there are fewer."""
    return statistics.fmean(losses[-LAST_STEPS:])


def difference(values: list[float], references: list[float]) -> Difference:
    """Of two recipes' losses, one of each seed; those of the same seed are compared."""
    percent = 100 * (np.array(values) / np.array(references) - 1)
    return Difference(float(percent.mean()), float(percent.std(ddof=1)) / len(percent) ** 0.5)


def last_difference(losses: Losses, recipe: str, reference: str) -> Difference:
    """Of the last losses of two recipes."""
    values, references = ([last_loss(run) for run in losses[name]] for name in (recipe, reference))
    return difference(values, references)


def problems(losses: Losses) -> list[str]:
    """What is worse than it should be. (Written so that a NaN is a problem too.)"""
    found = []
    for recipe in losses:
        distance = last_difference(losses, recipe, BF16)
        if not abs(distance.mean) <= MAX_TO_BF16:
            found.append(f"{recipe} differs from {BF16} by {distance}, more than {MAX_TO_BF16:g} %")
    if FOLDED in losses and ROWWISE in losses:
        distance = last_difference(losses, FOLDED, ROWWISE)
        allowed = max(MAX_TO_ROWWISE, 2 * distance.error)
        if not abs(distance.mean) <= allowed:
            found.append(
                f"{FOLDED} differs from {ROWWISE} by {distance}, more than {allowed:.3f} %"
            )
    return found


def verdict(losses: Losses) -> str:
    """A sentence for people."""
    bad = "; ".join(problems(losses))
    if bad:
        return f"Not as expected: {bad}."
    text = f"Every recipe is within {MAX_TO_BF16:g} % of bf16."
    if FOLDED in losses and ROWWISE in losses:
        distance = last_difference(losses, FOLDED, ROWWISE)
        near = abs(distance.mean) <= MAX_TO_ROWWISE
        bound = f"{MAX_TO_ROWWISE} %" if near else "two standard errors"
        text += f" {FOLDED} differs from {ROWWISE} by {distance}, within {bound}."
    return text


def results_table(losses: Losses) -> str:
    """The result in Markdown, to be read on a terminal too."""
    header = f"loss, last {LAST_STEPS} steps"
    lines = [
        f"| {'recipe':<18} | {header} | difference to bf16 | its standard error |",
        f"|{'-' * 20}|{'-' * (len(header) + 2)}|{'-' * 20}|{'-' * 20}|",
    ]
    for recipe, runs in losses.items():
        mean, error = last_difference(losses, recipe, BF16)
        cells = ("", "") if recipe == BF16 else (f"{mean:+.3f} %", f"{error:.3f} %")
        loss = f"{statistics.fmean(map(last_loss, runs)):.4f}"
        lines.append(f"| {recipe:<18} | {loss:>{len(header)}} | {cells[0]:>18} | {cells[1]:>18} |")
    return "\n".join(lines)


def recipe_table(recipes: list[str]) -> str:
    """What each recipe casts and gathers, in Markdown, read off its config."""
    lines = [
        "| recipe | input | weight | grad_output | FSDP2 weight gather | SP input gather "
        "| row-parallel + SP grad_output gather |",
        "|---|---|---|---|---|---|---|",
    ]
    gathered: tuple[Operand, ...] = ("weight", "input", "grad_output")
    for recipe in recipes:
        config = Float8LinearConfig.from_recipe_name(recipe)
        cells = [_casts(config, operand) for operand in get_args(Operand)]
        for operand in gathered:
            travels = config.gather_cast(operand)
            rows = (
                ", scales travel with their rows"
                if travels and travels.granularity.name == "row"
                else ""
            )
            cells.append(short_name(travels.dtype) + rows if travels else "high precision")
        lines.append(f"| `{recipe}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _casts(config: Float8LinearConfig, operand: Operand) -> str:
    """The casts of an operand in its two GEMMs, for example "e4m3fn per row"."""
    gemms = [gemm for gemm, pair in GEMM_OPERANDS.items() if operand in pair]
    return ", then ".join(dict.fromkeys(_cast(config.cast(operand, gemm)) for gemm in gemms))


def _cast(cast: CastSpec | None) -> str:
    if cast is None:
        return "high precision"
    return (
        f"{short_name(cast.dtype)} per {cast.granularity.name}{', delayed' if cast.delayed else ''}"
    )


def page(losses: Losses, **setting: Any) -> str:
    """The text of docs/recipes.md; setting: the fields of `PAGE_TEXT` that say how it was made."""
    return PAGE_TEXT.format(
        recipes=recipe_table([recipe for recipe in losses if recipe != BF16]),
        results=results_table(losses),
        verdict=verdict(losses),
        last=LAST_STEPS,
        **setting,
    )


def plot(losses: Losses, path: Path) -> None:
    """Draws the mean losses of all recipes over their differences to bf16."""
    figure, (axes, below) = plt.subplots(2, sharex=True, figsize=(9, 8), layout="constrained")
    # At each step, the mean of the last ones of each seed.
    means = {
        recipe: list(zip(*(running_mean(run, LAST_STEPS) for run in runs), strict=True))
        for recipe, runs in losses.items()
    }
    for index, (recipe, runs) in enumerate(losses.items()):
        mean = [statistics.fmean(values) for values in zip(*runs, strict=True)]
        steps = range(1, len(mean) + 1)
        line = {"color": f"C{index}", "linewidth": 1.2}
        axes.plot(steps, running_mean(mean, SMOOTHING_STEPS), label=recipe, **line)
        distances = [
            difference(list(values), list(references))
            for values, references in zip(means[recipe], means[BF16], strict=True)
        ]
        below.plot(steps, [distance.mean for distance in distances], **line)
        low, high = ([d.mean + sign * d.error for d in distances] for sign in (-1, 1))
        below.fill_between(steps, low, high, color=f"C{index}", alpha=0.12, linewidth=0)
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(f"Mean over seeds, mean of the last {SMOOTHING_STEPS} steps")
    axes.legend()
    below.set_ylabel("difference to bf16, %")
    below.set_title(f"Mean over seeds and its standard error, mean of the last {LAST_STEPS} steps")
    below.set_xlabel("step")
    for each in (axes, below):
        each.grid(alpha=0.3)
    figure.savefig(path, dpi=90)
    plt.close(figure)
