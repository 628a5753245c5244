"""Random recordings: a replay finds nothing in clean ones, and finds the planted fault in others.

python -m scripts.measure.recordings --cases 200

tests/support/recorded_cases.py defines cases and draws them. A case is drawn again if the library
refuses it, or if its fault changes nothing. The exit status is 1 if a verdict is wrong. `--case`
runs one case, as a report prints it.
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
