"""Thousands of training steps on two ranks, in every recipe in turn: does anything grow?

python -m scripts.measure.soak --steps 5000 --assert

A turn trains a small Llama in one recipe on one mesh, evaluates every tenth step, and ends with its
model deleted. All turns run twice, in the same two processes, so that what one leaves shows in the
next. After a third of a turn and at its end the script measures resident memory, live tensors, the
entries of all tables that the library keeps at the level of a module or a class, and collectives
that nobody waited for.
"""

from scripts.common.options import positive
from scripts.common.report import make_parser, parse, run


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("scripts.measure.soak", __doc__, asserts="anything grows")
    steps = "of all turns together; %(default)s"
    parser.add_argument("--steps", type=positive, default=5000, help=steps)
    return run("scripts.measure.soak_run", parse(parser, argv))


if __name__ == "__main__":
    raise SystemExit(main())
