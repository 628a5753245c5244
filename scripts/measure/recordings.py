"""Random recordings: a replay finds nothing in clean ones, and names one planted fault in others.

python -m scripts.measure.recordings --cases 200

tests/support/recorded_cases.py says what a case is and how it is drawn. Cases that the library
refuses, and faults that have nothing to change, are drawn again. Exit status 1 if a verdict is
wrong: `--case` runs the one that the report shows.
"""

from importlib import import_module

from scripts.common.options import command_parser, positive


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("scripts.measure.recordings", __doc__)
    add = parser.add_argument
    add("--cases", type=positive, default=20, help="clean, and with a fault; default: %(default)s")
    add("--seed", type=int, default=0, help="of the drawing; default: %(default)s")
    add("--case", help="SEED:NUMBER:FAULT, run this case alone, as a report shows it")
    args = parser.parse_args(argv)
    return import_module("scripts.measure.recordings_run").run(args)


if __name__ == "__main__":
    raise SystemExit(main())
