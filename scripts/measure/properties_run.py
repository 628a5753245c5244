"""The cases of `scripts.measure.properties`: draw, judge and simplify them."""

import argparse
import json
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import hypothesis
import torch
from tqdm import tqdm

SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

from property_cases import TrainCase, from_json, simpler, to_json, train_cases  # noqa: E402
from property_runs import verdict_of  # noqa: E402
from property_verdicts import Verdict  # noqa: E402
from ranks import RankPools  # noqa: E402

from scripts.common.markdown import table  # noqa: E402

# For this many kinds of failures, one case is simplified and shown.
SHOWN = 3
# Each group of this many cases has its own seed, because hypothesis varies what it drew before.
TURN = 50


def drawn(count: int, seed: int, max_ranks: int) -> list[TrainCase]:
    """Draw `count` cases from a seed."""
    cases: list[TrainCase] = []
    for turn, start in enumerate(range(0, count, TURN)):

        @hypothesis.seed(seed * 100_000 + turn)
        @hypothesis.settings(
            max_examples=min(TURN, count - start),
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(train_cases(max_ranks))
        def each(case: TrainCase) -> None:
            cases.append(case)

        each()
    return cases


def judged(cases: Sequence[TrainCase], jobs: int) -> list[tuple[TrainCase, Verdict]]:
    """Judge cases, `jobs` at a time, each on ranks of its own; fewer after Ctrl-C.

    One case leaves processors idle, because its ranks wait for each other.
    """
    verdicts: list[tuple[TrainCase, Verdict]] = []
    waiting = iter(cases)
    lock, progress = threading.Lock(), tqdm(total=len(cases), unit="case", smoothing=0)

    def judge_next(pools: RankPools) -> bool:
        with lock:
            case = next(waiting, None)
        if case is None:
            return False
        verdict = verdict_of(case, pools)
        with lock:
            if verdict.kind == "FAILED":
                progress.write(f"{to_json(case)}\n  {verdict.name}")
            verdicts.append((case, verdict))
            progress.update()
        return True

    def judge_all() -> None:
        with closing(RankPools()) as pools:
            while judge_next(pools):
                pass

    if jobs == 1:  # cases of one process run in this one
        with suppress(KeyboardInterrupt):
            judge_all()
        progress.close()
        return verdicts
    with ThreadPoolExecutor(jobs) as executor:
        running = [executor.submit(judge_all) for _ in range(jobs)]
        try:
            for each in running:
                each.result()
        except KeyboardInterrupt:
            waiting = iter(())
    progress.close()
    return verdicts


def simplest(case: TrainCase, verdict: Verdict, pools: RankPools) -> tuple[TrainCase, Verdict]:
    """The simplest case with the same failure, found by changing one field after the other."""
    while not verdict.text.startswith("ranks: "):  # (a case that hangs takes the whole timeout)
        for other in simpler(case):
            again = verdict_of(other, pools)
            if again.kind == "FAILED" and again.name[:20] == verdict.name[:20]:
                case, verdict = other, again
                break
        else:
            break
    return case, verdict


def counts(verdicts: Sequence[tuple[TrainCase, Verdict]]) -> str:
    """A table of the numbers of cases that were right, a documented error, or failed."""
    by_kind = Counter(verdict.kind for _, verdict in verdicts)
    numbers = [str(by_kind[kind]) for kind in ("right", "error", "FAILED")]
    return table(["right", "documented error", "failed"], [numbers])


def errors(verdicts: Sequence[tuple[TrainCase, Verdict]]) -> str:
    """A table of the documented errors, and the number of cases of each."""
    by_name = Counter(verdict.name for _, verdict in verdicts if verdict.kind == "error")
    lines = [[name.replace("|", r"\|"), str(count)] for name, count in by_name.most_common()]
    return table(["documented error", "cases"], lines)


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with closing(RankPools()) as pools:
        if args.case is not None:
            verdict = verdict_of(from_json(json.dumps(args.case)), pools)
            print(f"{verdict.kind}: {verdict.text}" if verdict.text else verdict.kind)
            return int(verdict.kind == "FAILED")
        verdicts = judged(drawn(args.cases, args.seed, args.ranks), args.jobs)
        print(f"{counts(verdicts)}\n\n{errors(verdicts)}")
        failed: dict[str, list[tuple[TrainCase, Verdict]]] = {}
        for case, verdict in verdicts:
            if verdict.kind == "FAILED":
                failed.setdefault(verdict.name, []).append((case, verdict))
        for name, alike in list(failed.items())[:SHOWN]:
            case, verdict = simplest(*alike[0], pools)
            print(f"\n{len(alike)} cases: {name}\n--case '{to_json(case)}'\n{verdict.text}")
        return int(bool(failed) or len(verdicts) < args.cases)
