"""Measures the SQNR of a linear layer's three GEMMs in each float8 recipe.

    python -m scripts.measure.sqnr --assert --write

Trains the reference model in bf16, records what its linear layers multiply, multiplies it again in
float8 and compares with the product in fp64. SQNR is 20 log10(|exact| / |exact - float8|), in dB.
"""

import dataclasses
import math
import sys
from statistics import fmean

import torch
from torch import nn
from tqdm import tqdm

from fp8_dist import CastConfig, Float8Linear, Float8LinearConfig, ScalingGranularity
from scripts.common.candidates import OURS
from scripts.common.gemms import GEMMS
from scripts.common.markdown import table
from scripts.common.metrics import sqnr
from scripts.common.options import positive
from scripts.common.report import Check, finish, make_parser, start
from scripts.measure.folds import FIGURES, WAYS, ByWay, fold_figures
from scripts.measure.operands import Operands, Place, exact, record, stress_cases

# A delayed scale is that of earlier steps, which a single record doesn't have.
RECIPES = [name for name in OURS if name != "delayed"]
TOLERANCE = 0.1  # dB that rowwise_folded may be behind rowwise
EXACT_SCALES = "rowwise, exact scales"
E5M2_GRADIENTS = "rowwise, e5m2 gradients"
ONE_SCALE = "tensorwise, e4m3 gradients"
ONE_POWER_OF_2 = f"{ONE_SCALE}, power-of-two scale"
VARIANTS = ("rowwise", EXACT_SCALES, E5M2_GRADIENTS, "tensorwise", ONE_SCALE, ONE_POWER_OF_2)

Figures = dict[Place, dict[str, dict[str, float]]]  # SQNR in dB, by config


def configs() -> dict[str, Float8LinearConfig]:
    """The recipes, and variants of them, by name."""
    known = {recipe: Float8LinearConfig.from_recipe_name(recipe) for recipe in RECIPES}
    e5m2_rows = CastConfig(
        scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e5m2
    )
    one_scale = dataclasses.replace(
        known["tensorwise"], cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn)
    )
    rowwise = known["rowwise"]
    return known | {
        EXACT_SCALES: dataclasses.replace(rowwise, round_scales_to_power_of_2=False),
        E5M2_GRADIENTS: dataclasses.replace(rowwise, cast_config_grad_output=e5m2_rows),
        ONE_SCALE: one_scale,
        ONE_POWER_OF_2: dataclasses.replace(one_scale, round_scales_to_power_of_2=True),
    }


def products(operands: Operands, config: Float8LinearConfig) -> dict[str, torch.Tensor]:
    """The output and the gradients of a Float8Linear, fp32."""
    n, k = operands.weight.shape
    linear = nn.Linear(k, n, bias=False)
    linear.weight = nn.Parameter(operands.weight)
    layer = Float8Linear.from_float(linear, config)
    x = operands.input.clone().requires_grad_()
    output = layer(x)
    output.backward(operands.grad_output)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return dict(zip(GEMMS, (output.detach(), x.grad, layer.weight.grad), strict=True))


def measure(operands: Operands) -> dict[str, dict[str, float]]:
    """SQNR of the three GEMMs in dB, by config."""
    expected = dict(zip(GEMMS, exact(operands), strict=True))
    return {
        name: {gemm: sqnr(expected[gemm], result) for gemm, result in actual.items()}
        for name, config in configs().items()
        for actual in [products(operands, config)]
    }


def checks(figures: Figures) -> list[Check]:
    """The condition of `--assert`, said of the linear layer that is closest to breaking it."""
    behind = {
        (by_config["rowwise"][gemm] - by_config["rowwise_folded"][gemm], place, gemm)
        for place, by_config in figures.items()
        for gemm in GEMMS
    }
    # A NaN is a broken promise too.
    worst, (linear, step), gemm = max(behind, key=lambda each: (math.isnan(each[0]), each[0]))
    sentence = f"rowwise_folded is at most {TOLERANCE:g} dB behind rowwise"
    furthest = f"furthest, {worst:.4f} dB, in {linear}, step {step}, {gemm}"
    return [Check(f"{sentence}; {furthest}", worst <= TOLERANCE)]


def decibels(value: float) -> str:
    """One decimal; above 100 dB it is the result's own format that is measured."""
    return f"{value:.1f}" if value < 100 else "> 100"


def recipes_table(figures: Figures) -> str:
    """Mean and worst of each recipe, GEMM and step."""
    lines = []
    for recipe in RECIPES:
        for step in sorted({place.step for place in figures}):
            some = {place: row for place, row in figures.items() if place.step == step}
            lines.append([f"`{recipe}`", str(step), *_cells(some, recipe)])
    return table(["recipe", "step", *GEMMS], lines)


def variants_table(figures: Figures) -> str:
    """Mean and worst of each of the `VARIANTS` and GEMM."""
    return table(["config", *GEMMS], [[name, *_cells(figures, name)] for name in VARIANTS])


def _cells(figures: Figures, config: str) -> list[str]:
    values = ([row[config][gemm] for row in figures.values()] for gemm in GEMMS)
    return [f"{decibels(fmean(each))} ({decibels(min(each))})" for each in values]


def folds_table(recorded: list[ByWay], stressed: dict[str, ByWay]) -> str:
    """Cases by figures, the ways in a cell; of what was recorded, the mean and the worst."""
    cases = {
        case: {
            way: {f: over([by_way[way][f] for by_way in recorded]) for f in FIGURES} for way in WAYS
        }
        for case, over in (("recorded: mean", fmean), ("recorded: worst linear layer", min))
    }
    lines = [
        [case, *(" / ".join(decibels(by_way[way][f]) for way in WAYS) for f in FIGURES)]
        for case, by_way in (cases | stressed).items()
    ]
    return table(["operands", *FIGURES], lines)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    asserts = f"rowwise_folded is more than {TOLERANCE:g} dB behind rowwise"
    parser = make_parser("scripts.measure.sqnr", __doc__, "sqnr.md", asserts=asserts)
    steps = "steps that are recorded; the last one ends the training (default: 5 300)"
    parser.add_argument(
        "--at", type=positive, nargs="+", default=[5, 300], metavar="STEP", help=steps
    )
    args = start(parser, argv)
    operands = record(args.at, seed=0)
    progress = tqdm(operands.items(), desc="multiplying", unit="layer")
    figures = {place: measure(each) for place, each in progress}
    recorded = [fold_figures(each) for each in operands.values()]
    stressed = {case: fold_figures(each) for case, each in stress_cases(seed=0).items()}
    blocks = {
        "recipes": recipes_table(figures),
        "variants": variants_table(figures),
        "folds": folds_table(recorded, stressed),
    }
    return finish(args, blocks, checks(figures))


if __name__ == "__main__":
    sys.exit(main())
