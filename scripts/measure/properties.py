"""Random training runs, compared with a twin in one process: each is right, or a documented error.

python -m scripts.measure.properties --cases 5000

tests/support/property_cases.py defines cases and draws them; tests/property runs a few. The exit
status is 1 if a case failed, or was not run. `--case` runs one case, as a report prints it.
"""

import json
from importlib import import_module

from scripts.common.options import command_parser, positive


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("scripts.measure.properties", __doc__)
    add = parser.add_argument
    add("--cases", type=positive, default=300, help="how many; default: %(default)s")
    add("--seed", type=int, default=0, help="of the drawing; default: %(default)s")
    add("--ranks", type=positive, default=4, help="at most, of a case; default: %(default)s")
    add("--jobs", type=positive, default=2, help="cases at a time; default: %(default)s")
    add("--case", type=json.loads, help="run this case alone, as a report shows it")
    args = parser.parse_args(argv)
    return import_module("scripts.measure.properties_run").run(args)


if __name__ == "__main__":
    raise SystemExit(main())
