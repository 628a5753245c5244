"""Time the precompute of weight scales, compared with torchao's.

    python -m scripts.bench.precompute --assert 4

The script starts `--ranks` ranks on this machine. Each has its shards of `--layers` linear layers
of `--size` x `--size` under FSDP2 with float8 gathers.
"""

from scripts.common.options import positive
from scripts.common.report import make_parser, parse, run


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("scripts.bench.precompute", __doc__, repeat=15, ratio=True)
    add = parser.add_argument
    add("--layers", type=positive, default=100, help="default: %(default)s")
    add("--size", type=positive, default=512, help="default: %(default)s")
    add("--ranks", type=positive, default=2, help="default: %(default)s")
    return run("scripts.bench.precompute_run", parse(parser, argv))


if __name__ == "__main__":
    raise SystemExit(main())
