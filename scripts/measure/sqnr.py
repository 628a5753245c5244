"""Measure the SQNR of a linear layer's three GEMMs in each float8 recipe, and of weights alone.

    python -m scripts.measure.sqnr --assert
    python -m scripts.measure.sqnr --weights FILE...

Trains the reference model in bf16, records the operands of its linear layers, multiplies them again
in float8, and compares with the product in fp64. SQNR is 20 log10(|exact| / |exact - float8|), in
dB. Synthetic operands, whose rows or channels differ by many orders of magnitude, are measured too.

Casts of weights alone are measured (mean, and worst in brackets) on the trained model, or on the
matrices of checkpoint files, cropped to whole blocks, without embeddings and optimizer states.
GEMMs of frozen weights in MXFP4 blocks of 1 x 32 are compared with those of the stored values.
"""

from pathlib import Path

from scripts.common.report import make_parser, parse, run

TOLERANCE = 0.1  # dB


def main(argv: list[str] | None = None) -> int:
    asserts = f"a recipe of one float8 copy is more than {TOLERANCE:g} dB behind two casts"
    parser = make_parser("scripts.measure.sqnr", __doc__, asserts=asserts)
    add = parser.add_argument
    add("--weights", nargs="+", type=Path, metavar="FILE", help="measure these weights alone")
    args = parse(parser, argv)
    if missing := [str(path) for path in args.weights or () if not path.is_file()]:
        parser.error(f"--weights: there is no file {', '.join(missing)}")
    return run("scripts.measure.sqnr_run", args)


if __name__ == "__main__":
    raise SystemExit(main())
