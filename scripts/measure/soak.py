"""Thousands of training steps on two ranks, in every recipe in turn: does anything grow?

python -m scripts.measure.soak --steps 5000 --assert

A turn trains a small Llama in one recipe on one mesh, evaluates after every tenth step, and deletes
the model at the end. All turns run twice, in the same two processes, so that leftovers of a turn
show in the next. After a third of a turn and at its end the script measures resident memory, live
tensors, the entries of all of the library's tables at module or class level, and collectives whose
results were never waited for.
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
