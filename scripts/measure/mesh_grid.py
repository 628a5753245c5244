"""Writes the table of docs/mesh_grid.md from the results of test_mesh_grid.py.

python -m scripts.measure.mesh_grid            runs the tests, replaces the table
python -m scripts.measure.mesh_grid --check    fails if the table is not that of the results
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from scripts.common.blocks import DOCS, read_block, replace_block
from scripts.common.markdown import table
from scripts.common.options import command_parser

PAGE = DOCS / "mesh_grid.md"
ROOT = DOCS.parent
TESTS = "tests/distributed/test_mesh_grid.py"


def results(junit: Path) -> list[dict[str, str]]:
    """The recorded properties of each test; the verdict of a failed one is FAILED."""
    rows = []
    for case in ElementTree.parse(junit).iter("testcase"):
        row = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
        failed = case.find("failure") is not None or case.find("error") is not None
        rows.append(row | ({"verdict": "FAILED"} if failed else {}))
    return rows


def verdicts_table(rows: Sequence[dict[str, str]]) -> str:
    """A line per mesh, a column per shape, verdicts without / with precompute."""
    verdicts = {(row["mesh"], row["shape"], row["precompute"]): row["verdict"] for row in rows}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    lines = [
        [mesh, *(" / ".join(verdicts[mesh, s, p] for p in ("False", "True")) for s in shapes)]
        for mesh in dict.fromkeys(row["mesh"] for row in rows)
    ]
    return table(["mesh", *shapes], lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = command_parser("scripts.measure.mesh_grid", __doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", TESTS, f"--junitxml={junit}"]
        status = subprocess.run(command, cwd=ROOT).returncode
        found = verdicts_table(results(junit))
    if args.check:
        same = read_block(PAGE, "verdicts") == found
        print(f"{PAGE} is {'as it should be' if same else 'out of date'}")
        return status or int(not same)
    replace_block(PAGE, "verdicts", found)
    return status


if __name__ == "__main__":
    sys.exit(main())
