"""Random recordings: a replay finds nothing in clean ones, and names one planted fault in others.

python -m scripts.measure.recordings --cases 200

tests/support/recorded_cases.py says what a case is and how it is drawn. Cases that the library
refuses, and faults that have nothing to change, are drawn again. Exit status 1 if a verdict is
wrong: `--case` runs the one that the report shows.
"""

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from tqdm import tqdm

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

from ranks import RankError, RankPools  # noqa: E402
from recorded_cases import RecordedCase, drawn, verdict  # noqa: E402

from scripts.common.markdown import table  # noqa: E402
from scripts.common.options import command_parser, positive  # noqa: E402


def judged(case: RecordedCase, pools: RankPools) -> str:
    """The verdict on a case."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return verdict(case, pools, Path(folder))
        except (RankError, ValueError) as error:
            return f"raised {error}"


def run(cases: int, seed: int, has_fault: bool, pools: RankPools) -> tuple[Counter[str], int]:
    """Judge so many cases: the number of right ones of each fault, and of wrong ones."""
    right, wrong = Counter[str](), 0
    progress = tqdm(total=cases, unit="recording")
    for number in count():
        if right.total() + wrong == cases:
            break
        case = drawn(number, seed, has_fault)
        found = judged(case, pools)
        if found in ("refused", "no fault"):
            continue
        progress.update()
        right[case.fault or "none"] += found == "right"
        if found != "right":
            wrong += 1
            progress.write(f"--case {seed}:{number}:{int(has_fault)} {case}\n  {found}")
    progress.close()
    return right, wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = command_parser("scripts.measure.recordings", __doc__)
    add = parser.add_argument
    add("--cases", type=positive, default=20, help="clean, and with a fault; default: %(default)s")
    add("--kind", choices=("clean", "fault"), help="only these; default: both")
    add("--seed", type=int, default=0, help="of the drawing; default: %(default)s")
    add("--case", help="SEED:NUMBER:FAULT, run this case alone, as a report shows it")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pools = RankPools()
    try:
        if args.case is not None:
            seed, number, has_fault = map(int, args.case.split(":"))
            found = judged(drawn(number, seed, bool(has_fault)), pools)
            print(found)
            return int(found != "right")
        failures, lines = 0, []
        for kind in ("clean", "fault") if args.kind is None else (args.kind,):
            right, wrong = run(args.cases, args.seed, kind == "fault", pools)
            lines += [[fault, str(right[fault])] for fault in sorted(right)]
            failures += wrong
        print(f"{table(['fault', 'right'], lines)}\n\n{failures} wrong")
        return int(failures > 0)
    finally:
        pools.close()


if __name__ == "__main__":
    sys.exit(main())
