"""Runs test_mesh_grid.py, and makes the table of docs/mesh_grid.md from its results.

python -m scripts.measure.mesh_grid --assert --write
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from scripts.common.blocks import DOCS
from scripts.common.markdown import table
from scripts.common.report import Check, finish, make_parser, start

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
    parser = make_parser(
        "scripts.measure.mesh_grid", __doc__, "mesh_grid.md", asserts="a test fails"
    )
    args = start(parser, argv)
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", TESTS, f"--junitxml={junit}"]
        status = subprocess.run(command, cwd=DOCS.parent).returncode
        found = verdicts_table(results(junit))
    return finish(args, {"verdicts": found}, [Check("all tests pass", status == 0)])


if __name__ == "__main__":
    sys.exit(main())
