"""Run a case on as many ranks as it needs, and return the verdict."""

import logging
import threading
import warnings

from property_actions import run_training
from property_cases import TrainCase, processes
from property_verdicts import Verdict, judge
from ranks import RankError, RankPools

# Only few cases take longer than a second, so this ends a hang.
TIMEOUT_S = 120.0


def verdict_of(case: TrainCase, pools: RankPools) -> Verdict:
    """The verdict on a case. It has failed if its ranks disagree, die or hang."""
    ranks = processes(case.mesh)
    # Cases in other threads would share the seeds and the caches of this process.
    is_alone = threading.current_thread() is threading.main_thread()
    if ranks == 1 and is_alone:
        return on_this_rank(case)
    try:
        found = pools(ranks).run(on_this_rank, case, timeout=TIMEOUT_S)
    except RankError as error:
        return Verdict("FAILED", f"ranks: {error}")
    failed = [v for v in found if v.kind == "FAILED"]
    if len({(v.kind, v.name) for v in found}) > 1:
        failed = failed or [Verdict("FAILED", f"ranks disagree: {found}")]
    if failed:
        pools(ranks).close()  # a rank may still be waiting, which would fail the next case
        return failed[0]
    return found[0]


def on_this_rank(case: TrainCase) -> Verdict:
    """The verdict of this rank; called on every rank of the case."""
    refused: list[str] = []
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

    verdict = judge(lambda: refused.extend(run_training(case)))
    if verdict.kind == "right" and refused:
        return Verdict("error", refused[0])
    return verdict
