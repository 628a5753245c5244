"""Random recordings: a replay finds nothing in clean ones, and finds the planted fault in others.

    python -m tests.support.random_recordings --cases 200

recorded_cases.py defines cases and draws them. A case is drawn again if the library refuses it, or
if its fault changes nothing. The exit status is 1 if a verdict is wrong. `--case` runs one case, as
a report prints it.
"""

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import closing
from itertools import count
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent))

from ranks import RankError, RankPools
from recorded_cases import RecordedCase, drawn, verdict

from scripts.common.markdown import table
from scripts.common.options import command_parser, positive


def judged(case: RecordedCase, pools: RankPools) -> str:
    """The verdict on a case."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return verdict(case, pools, Path(folder))
        except (RankError, ValueError) as error:
            return f"raised {error}"


def run_cases(cases: int, seed: int, has_fault: bool, pools: RankPools) -> tuple[Counter[str], int]:
    """Judge cases; return the numbers of right verdicts by fault, and of wrong verdicts."""
    right, wrong = Counter[str](), 0
    progress = tqdm(total=cases, unit="recording")
    for number in count():
        if right.total() + wrong == cases:
            break
        case = drawn(number, seed, has_fault)
        outcome = judged(case, pools)
        if outcome in ("refused", "no fault"):
            continue
        progress.update()
        right[case.fault or "none"] += outcome == "right"
        if outcome != "right":
            wrong += 1
            progress.write(f"--case {seed}:{number}:{int(has_fault)} {case}\n  {outcome}")
    progress.close()
    return right, wrong


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with closing(RankPools()) as pools:
        if args.case is not None:
            seed, number, fault = map(int, args.case.split(":"))
            outcome = judged(drawn(number, seed, bool(fault)), pools)
            print(outcome)
            return int(outcome != "right")
        failures, lines = 0, []
        for has_fault in (False, True):
            right, wrong = run_cases(args.cases, args.seed, has_fault, pools)
            lines += [[fault, str(right[fault])] for fault in sorted(right)]
            failures += wrong
        print(f"{table(['fault', 'right'], lines)}\n\n{failures} wrong")
        return int(failures > 0)


def main() -> int:
    parser = command_parser("tests.support.random_recordings", __doc__)
    add = parser.add_argument
    add("--cases", type=positive, default=20, help="clean, and with a fault; default: %(default)s")
    add("--seed", type=int, default=0, help="of the drawing; default: %(default)s")
    add("--case", help="SEED:NUMBER:FAULT, run this case alone, as a report shows it")
    return run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
