"""Measures the SQNR of a linear layer's three GEMMs in each float8 recipe.

    python scripts/measure_sqnr.py --assert --write

Trains the reference model in bf16, records what its linear layers multiply, multiplies it again in
float8 and compares with the product in fp64. SQNR is 20 log10(|exact| / |exact - float8|), in dB.
"""

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from sqnr_folds import exact, fold_figures, sqnr
from sqnr_page import (
    E5M2_GRADIENTS,
    EXACT_SCALES,
    GEMMS,
    ONE_POWER_OF_2,
    ONE_SCALE,
    Figures,
    differences,
    folds_table,
    full_tables,
    page,
    recipes_table,
    summary,
    variants_table,
)
from sqnr_tensors import BATCH_SIZE, MODEL, SEQ_LEN, Operands, record, stress_cases
from torch import nn
from tqdm import tqdm

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScalingGranularity,
)
from fp8_dist.config import Gemm

REPORT = Path(__file__).resolve().parent.parent / "docs/sqnr.md"
# A delayed scale is that of earlier steps, which a single record doesn't have.
RECIPES = [name.value for name in Float8LinearRecipeName if name.value != "delayed"]
TOLERANCE = 0.1  # dB that rowwise_folded may be behind rowwise


def configs() -> dict[str, Float8LinearConfig]:
    """The recipes, and the variants of them that the page compares, by name."""
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


def products(operands: Operands, config: Float8LinearConfig) -> dict[Gemm, torch.Tensor]:
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
    results = (output.detach(), x.grad, layer.weight.grad)
    return dict(zip(GEMMS, results, strict=True))


def measure(operands: Operands) -> dict[str, dict[Gemm, float]]:
    """SQNR of the three GEMMs in dB, by config."""
    expected = dict(zip(GEMMS, exact(operands), strict=True))
    return {
        name: {gemm: sqnr(expected[gemm], result) for gemm, result in actual.items()}
        for name, config in configs().items()
        for actual in [products(operands, config)]
    }


def broken_promises(figures: Figures) -> Iterator[str]:
    """Where rowwise_folded is behind rowwise, a sentence each."""
    for gemm, ahead in differences(figures, "rowwise_folded", "rowwise").items():
        for place, value in zip(figures, ahead, strict=True):
            # (So that a NaN is a broken promise too.)
            if not value >= -TOLERANCE:
                yield (
                    f"{place.linear}, step {place.step}, {gemm}: rowwise_folded is "
                    f"{-value:.2f} dB behind rowwise, more than {TOLERANCE:g}"
                )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; errors end the process with status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    steps = "steps that are recorded; the last one ends the training (default: 5 300)"
    add("--at", type=int, nargs="+", default=[5, 300], metavar="STEP", help=steps)
    add("--seed", type=int, default=0, help="of weights, data and made-up operands")
    add("--full", action="store_true", help="print the tables of every linear layer too")
    add("--write", action="store_true", help=f"write {REPORT.name} in docs/")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    failing = f"fail where rowwise_folded is more than {TOLERANCE:g} dB behind rowwise"
    add("--assert", dest="check", action="store_true", help=failing)
    args = parser.parse_args(argv)
    if min(args.at) < 1 or not 0 <= args.seed < 2**31:
        parser.error("steps count from 1, and --seed lies in [0, 2**31)")
    return args


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    operands = record(args.at, args.seed)
    progress = tqdm(operands.items(), desc="multiplying", unit="layer")
    figures, recorded = {}, {}
    for place, triple in progress:
        figures[place], recorded[place] = measure(triple), fold_figures(triple)
    stressed = {case: fold_figures(each) for case, each in stress_cases(args.seed).items()}

    shown = [recipes_table(figures, RECIPES), variants_table(figures)]
    shown.append(folds_table({**summary(recorded), **stressed}))
    print(*shown, *([full_tables(figures, RECIPES)] if args.full else []), sep="\n\n")
    if args.write:
        settings = {"model": MODEL, "tokens": f"{BATCH_SIZE} x {SEQ_LEN}", "seed": args.seed}
        settings |= {"at": " ".join(map(str, args.at)), "tolerance": TOLERANCE}
        settings |= {"steps": " and ".join(map(str, args.at)), "last": max(args.at)}
        settings |= {"torch": torch.__version__, "python": platform.python_version()}
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(page(figures, recorded, stressed, RECIPES, settings))
    if args.json is not None:
        rows = [
            {**place._asdict(), "sqnr": figures[place], "gradients": recorded[place]}
            for place in figures
        ]
        args.json.write_text(json.dumps({"recorded": rows, "stressed": stressed}, indent=1) + "\n")
    if not args.check:
        return 0
    broken = list(broken_promises(figures))
    for sentence in broken:
        print(f"broken: {sentence}", file=sys.stderr)
    if not broken:
        print(f"rowwise_folded is nowhere more than {TOLERANCE:g} dB behind rowwise")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
