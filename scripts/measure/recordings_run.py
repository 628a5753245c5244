"""The cases of `scripts.measure.recordings`: record, replay and count them."""

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

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

from ranks import RankError, RankPools  # noqa: E402
from recorded_cases import RecordedCase, drawn, verdict  # noqa: E402

from scripts.common.markdown import table  # noqa: E402


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
