"""Measures the SQNR of a linear layer's three GEMMs in each float8 recipe.

    python -m scripts.measure.sqnr --assert

Trains the reference model in bf16, records what its linear layers multiply, multiplies it again in
float8 and compares with the product in fp64. SQNR is 20 log10(|exact| / |exact - float8|), in dB.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import nn
from tqdm import tqdm

from fp8_dist import CastConfig, Float8Linear, Float8LinearConfig, ScalingGranularity
from scripts.common.candidates import OURS
from scripts.common.gemms import GEMMS
from scripts.common.markdown import table
from scripts.common.options import positive
from scripts.common.report import Check, finish, make_parser, start
from scripts.measure import block_ways, folds
from scripts.measure.block_ways import AS_IT_IS, LINES, ONE_COPY, SQUARE, TWO_CASTS
from scripts.measure.operands import (
    INPUT_CHANNELS,
    OUTPUT_CHANNELS,
    TOKENS,
    WEIGHT_ROWS,
    ZERO_ROWS,
    ByWay,
    Operands,
    Place,
    Products,
    figures,
    record,
    stress_cases,
)

# A delayed scale is that of earlier steps, which a single record doesn't have.
RECIPES = [name for name in OURS if name != "delayed"]
# dB that rowwise_folded may be behind rowwise, and one copy in blocks behind two casts
TOLERANCE = 0.1
EXACT_SCALES = "rowwise, exact scales"
E5M2_GRADIENTS = "rowwise, e5m2 gradients"
ONE_SCALE = "tensorwise, e4m3 gradients"
ONE_POWER_OF_2 = f"{ONE_SCALE}, power-of-two scale"
FLOOR = "mxfp8, floor"
VARIANTS = (
    *("rowwise", EXACT_SCALES, E5M2_GRADIENTS),
    *("tensorwise", ONE_SCALE, ONE_POWER_OF_2),
    *("mxfp8", FLOOR),
)

# Made-up cases that differ from normal operands in the weight alone, and in other operands alone.
WEIGHT_CASES = {ZERO_ROWS, WEIGHT_ROWS}
TOKEN_CASES = {INPUT_CHANNELS, OUTPUT_CHANNELS, TOKENS}

MEAN, WORST = "recorded: mean", "recorded: worst linear layer"

ByPlace = dict[Place, ByWay]
ByCase = dict[str, ByWay]


def configs() -> dict[str, Float8LinearConfig]:
    """The recipes, and variants of them, by name."""
    known = {recipe: Float8LinearConfig.from_recipe_name(recipe) for recipe in RECIPES}
    e5m2_rows = CastConfig(
        scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e5m2
    )
    one_scale = dataclasses.replace(
        known["tensorwise"], cast_config_grad_output=CastConfig(target_dtype=torch.float8_e4m3fn)
    )
    rowwise, mxfp8 = known["rowwise"], known["mxfp8"]
    floor = {
        field: dataclasses.replace(getattr(mxfp8, field), scale_rule="floor")
        for field in ("cast_config_input", "cast_config_weight", "cast_config_grad_output")
    }
    return known | {
        EXACT_SCALES: dataclasses.replace(rowwise, round_scales_to_power_of_2=False),
        E5M2_GRADIENTS: dataclasses.replace(rowwise, cast_config_grad_output=e5m2_rows),
        ONE_SCALE: one_scale,
        ONE_POWER_OF_2: dataclasses.replace(one_scale, round_scales_to_power_of_2=True),
        FLOOR: dataclasses.replace(mxfp8, **floor),
    }


def products(operands: Operands, config: Float8LinearConfig) -> Products:
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


def measure(operands: Operands) -> ByWay:
    """The figures of the three GEMMs, by config."""
    by_config = {name: products(operands, config) for name, config in configs().items()}
    return figures(operands, by_config)


def checks(recipes: ByPlace, in_blocks: dict[str, ByPlace]) -> list[Check]:
    """The conditions of `--assert`; in_blocks: ways to cast in blocks."""
    found = [never_behind("rowwise_folded", "rowwise", recipes)]
    for blocks, by_place in in_blocks.items():
        # By floor the largest values saturate, and other ones in a second cast: no comparison.
        reference = AS_IT_IS if block_ways.BLOCKS[blocks][1] else TWO_CASTS
        found.append(never_behind(ONE_COPY, reference, by_place, f"{blocks}: "))
    return found


def never_behind(name: str, reference: str, by_place: ByPlace, prefix: str = "") -> Check:
    """The condition on the linear layer that is closest to breaking it; a NaN does."""
    behind = [
        by_way[reference][gemm] - by_way[name][gemm]
        for by_way in by_place.values()
        for gemm in GEMMS
    ]
    worst = max(behind, key=lambda each: (math.isnan(each), each))
    sentence = f"{prefix}{name} behind {reference}: {worst:.4f} dB, at most {TOLERANCE:g}"
    return Check(sentence, worst <= TOLERANCE)


def decibels(value: float) -> str:
    """One decimal; above 100 dB it is the result's own format that is measured."""
    return f"{round(value, 1) + 0.0:.1f}" if value < 100 else "> 100"  # never -0.0


def recipes_table(by_place: ByPlace) -> str:
    """Mean and worst of each recipe, GEMM and step."""
    lines = []
    for recipe in RECIPES:
        for step in sorted({place.step for place in by_place}):
            some = {place: row for place, row in by_place.items() if place.step == step}
            lines.append([f"`{recipe}`", str(step), *_cells(some, recipe)])
    return table(["recipe", "step", *GEMMS], lines)


def variants_table(by_place: ByPlace) -> str:
    """Mean and worst of each of the `VARIANTS` and GEMM."""
    return table(["config", *GEMMS], [[name, *_cells(by_place, name)] for name in VARIANTS])


def _cells(by_place: ByPlace, config: str) -> list[str]:
    values = ([row[config][gemm] for row in figures.values()] for gemm in GEMMS)
    return [f"{decibels(fmean(each))} ({decibels(min(each))})" for each in values]


def all_cases(recorded: Sequence[ByWay], stressed: ByCase) -> ByCase:
    """Mean and worst of what was recorded, then the cases that were made up."""
    cases = {
        case: {
            way: {figure: over([each[way][figure] for each in recorded]) for figure in first}
            for way, first in recorded[0].items()
        }
        for case, over in ((MEAN, fmean), (WORST, min))
    }
    return cases | stressed


def ways_table(cases: ByCase, ways: Sequence[str], columns: Sequence[str]) -> str:
    """Cases by figures, the ways in a cell."""
    lines = [
        [case, *(" / ".join(decibels(by_way[way][f]) for way in ways) for f in columns)]
        for case, by_way in cases.items()
    ]
    return table(["operands", *columns], lines)


def block_tables(by_recipe: dict[str, ByCase]) -> dict[str, str]:
    """The ways to cast in blocks: activations, a table for each recipe, and weights."""
    tables, weights = {}, {}
    for recipe, cases in by_recipe.items():
        activations = {case: ways for case, ways in cases.items() if case not in WEIGHT_CASES}
        tables[f"{recipe} ways"] = ways_table(
            activations, (TWO_CASTS, ONE_COPY, SQUARE), block_ways.OF_ACTIVATIONS
        )
        weights |= {
            f"{recipe}, {case}": ways for case, ways in cases.items() if case not in TOKEN_CASES
        }
    tables["weight blocks"] = ways_table(weights, (ONE_COPY, LINES), block_ways.OF_WEIGHTS)
    return tables


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    asserts = f"a way to use one float8 copy is more than {TOLERANCE:g} dB behind two casts"
    parser = make_parser("scripts.measure.sqnr", __doc__, asserts=asserts)
    steps = "steps that are recorded; the last one ends the training (default: 5 300)"
    parser.add_argument(
        "--at", type=positive, nargs="+", default=[5, 300], metavar="STEP", help=steps
    )
    args = start(parser, argv)
    operands, stressed = record(args.at, seed=0), stress_cases(seed=0)
    progress = tqdm(operands.items(), desc="multiplying", unit="layer")
    recipes = {place: measure(each) for place, each in progress}

    def folded(each: Operands) -> ByWay:
        return figures(each, folds.products(each))

    def blocked(each: Operands, blocks: str) -> ByWay:
        return figures(each, block_ways.products(each, *block_ways.BLOCKS[blocks]))

    in_blocks = {
        blocks: {place: blocked(each, blocks) for place, each in operands.items()}
        for blocks in block_ways.BLOCKS
    }
    of_folds = all_cases(
        [*map(folded, operands.values())], {case: folded(each) for case, each in stressed.items()}
    )
    of_blocks = {
        recipe: all_cases(
            [*in_blocks[recipe].values()],
            {case: blocked(each, recipe) for case, each in stressed.items()},
        )
        for recipe in block_ways.RECIPES
    }
    tables = {
        "recipes": recipes_table(recipes),
        "variants": variants_table(recipes),
        "folds": ways_table(of_folds, folds.WAYS, folds.FIGURES),
        **block_tables(of_blocks),
    }
    return finish(args, tables, checks(recipes, in_blocks))


if __name__ == "__main__":
    sys.exit(main())
