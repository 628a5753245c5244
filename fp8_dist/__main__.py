"""List the commands: ``python -m fp8_dist``.

In a checkout the list includes the scripts that train, plan and test, as ``scripts/README.md``
describes them. Benchmarks and measurements are in that file alone.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from fp8_dist.text import aligned
from fp8_dist.version import __version__

COMMANDS = {
    "python -m fp8_dist.doctor": "does float8 run on this machine, and would a model gain?",
    "python -m fp8_dist.report RUN...": "a page of runs: the first bad step or a verdict, charts",
    "python -m fp8_dist.debug.replay FOLDER": "the first wrong value in a recording of a step",
}
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts" / "README.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the commands; return 0.

    Raises:
        SystemExit: with status 2, for arguments.
    """
    about = "Lists the commands of fp8_dist. Each has --help."
    argparse.ArgumentParser("python -m fp8_dist", description=about).parse_args(argv)
    print(f"Commands of fp8_dist {__version__}. Each has --help.\n\n{_listed(COMMANDS)}")
    if SCRIPTS.is_file():
        rows = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", SCRIPTS.read_text(), re.MULTILINE))
        main_ones = {c: text for c, text in rows.items() if not re.search("bench|measure", c)}
        print(f"\nIn this checkout ({SCRIPTS} has more):\n\n{_listed(main_ones)}")
    return 0


def _listed(commands: dict[str, str]) -> str:
    return aligned([f"  {command}", text] for command, text in commands.items())


if __name__ == "__main__":
    raise SystemExit(main())
