"""Makes docs/mesh_grid.md from the results of tests/test_mesh_grid.py.

python scripts/mesh_grid.py             runs the tests, writes the table
python scripts/mesh_grid.py --check     fails if the table in docs/ is not that of the results
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "mesh_grid.md"
HEADER = """\
<!-- Made by `python scripts/mesh_grid.py` from the results of tests/test_mesh_grid.py. -->

# Every mesh, every shape

One linear layer in each of the recipes tensorwise, rowwise, rowwise_with_gw_hp, rowwise_folded and
delayed; all operands of its float8 GEMMs on each rank, compared with the matching part of a single
process's: scales and bytes. (delayed: in its second step, scaled by the history of the first.)
Verdicts are those without / with `precompute_float8_dynamic_scale`. Shapes are out_features x
in_features. FSDP2 gathers in float8 where the recipe can.

"bitwise": equal bit for bit on all ranks. "refused": an error on all ranks that says why (FSDP2
can't shard a dim other than the first unevenly, nor reduce the gradient of an empty tensor-parallel
shard).

"""


def results(junit: Path) -> list[dict[str, str]]:
    """The recorded properties of each test, with ``passed`` or ``failed`` as ``outcome``."""
    rows = []
    for case in ElementTree.parse(junit).iter("testcase"):
        row = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
        failed = case.find("failure") is not None or case.find("error") is not None
        rows.append(row | {"outcome": "failed" if failed else "passed"})
    return rows


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: a row per mesh, a column per shape, verdicts without / with precompute."""
    verdicts = {
        (row["mesh"], row["shape"], row["precompute"]): (
            row["verdict"] if row["outcome"] == "passed" else "FAILED"
        )
        for row in rows
    }
    meshes = list(dict.fromkeys(row["mesh"] for row in rows))
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    lines = ["| mesh | " + " | ".join(shapes) + " |", "|---" * (len(shapes) + 1) + "|"]
    for mesh in meshes:
        cells = [
            " / ".join(verdicts[mesh, shape, precompute] for precompute in ("False", "True"))
            for shape in shapes
        ]
        lines.append(f"| {mesh} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--junit", type=Path, help="results of an earlier run: run nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        junit = args.junit or Path(folder) / "results.xml"
        status = 0
        if args.junit is None:
            tests = ROOT / "tests" / "test_mesh_grid.py"
            command = [sys.executable, "-m", "pytest", "-q", str(tests), f"--junitxml={junit}"]
            status = subprocess.run(command, cwd=ROOT).returncode
        page = HEADER + table(results(junit))
    if args.check:
        same = PAGE.exists() and PAGE.read_text() == page
        print(f"{PAGE} is {'as it should be' if same else 'out of date'}")
        return status or int(not same)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page)
    print(f"written: {PAGE}")
    return status


if __name__ == "__main__":
    sys.exit(main())
