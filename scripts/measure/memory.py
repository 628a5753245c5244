"""Measure the memory that the forward keeps for the backward, compared with bf16 and torchao.

    python -m scripts.measure.memory --assert

Counts the bytes of the storages that the second forward, after a change of the weights, saves for
its backward. The counts depend on the sizes, not on the machine. `--assert` fails if a layer that
saves its input in float8 keeps more than 0.55 of the bytes of bf16, or if under FSDP2 a block keeps
an unsharded weight.
"""

from scripts.common.report import make_parser, parse, run


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("scripts.measure.memory", __doc__, asserts="more is kept")
    return run("scripts.measure.memory_run", parse(parser, argv))


if __name__ == "__main__":
    raise SystemExit(main())
