"""List the commands: ``python -m fp8_dist``.

In a checkout the list includes the scripts that train, plan and test, as ``scripts/README.md``
describes them. Benchmarks and measurements are in that file alone.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fp8_dist.text import aligned
from fp8_dist.version import __version__

COMMANDS = {
    "python -m fp8_dist.doctor": "does float8 run on this machine, and would a model gain?",
    "python -m fp8_dist.report RUN...": "a page of runs: the first bad step or a verdict, charts",
    "python -m fp8_dist.debug.replay FOLDER": "the first wrong value in a recording of a step",
}
# A row of the table of scripts, unless it is for a benchmark or a measurement.
ROW = re.compile(r"^\| `((?!.*scripts\.(?:bench|measure)).+?)` \| (.+) \|$", re.MULTILINE)
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts" / "README.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the commands; return 0.

    Raises:
        SystemExit: with status 2, for arguments.
    """
    about = "Lists the commands of fp8_dist. Each has --help."
    argparse.ArgumentParser("python -m fp8_dist", description=about).parse_args(argv)
    print(f"Commands of fp8_dist {__version__}. Each has --help.\n\n{_listed(COMMANDS.items())}")
    if SCRIPTS.is_file():
        rows = ROW.findall(SCRIPTS.read_text())
        print(f"\nIn this checkout ({SCRIPTS} has more):\n\n{_listed(rows)}")
    return 0


def _listed(commands: Iterable[tuple[str, str]]) -> str:
    return aligned([f"  {command}", text] for command, text in commands)


if __name__ == "__main__":
    raise SystemExit(main())
