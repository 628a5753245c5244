"""Measures what forward keeps for backward, beside bf16 and torchao.

    python -m scripts.measure.memory --assert

Counts bytes of the storages that a forward saves for its backward, in the second forward, after the
weights have changed. The counts depend on the sizes, not on the machine. `--assert` fails where a
layer that saves its input in float8 keeps more than 0.55 of what bf16 keeps, or where under FSDP2 a
block keeps an unsharded weight.
"""

from scripts.common.report import make_parser, parse, run


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("scripts.measure.memory", __doc__, asserts="more is kept")
    return run("scripts.measure.memory_run", parse(parser, argv))


if __name__ == "__main__":
    raise SystemExit(main())
