"""Times precompute_float8_dynamic_scale beside torchao's, in one run.

    python -m scripts.bench.precompute --assert 4

Each of `--ranks` ranks, which this script starts on this machine, holds its shards of `--layers`
linear layers of `--size` x `--size` under FSDP2 with float8 gathers.
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
