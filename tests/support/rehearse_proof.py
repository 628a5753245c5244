"""List the cases of `scripts.prove` on several GPUs, and add up their time from measured parts.

    python -m tests.support.rehearse_proof 2 8 16

For each number of GPUs, on nodes of eight, it prints the cases of "bits" by kind (the same on each
kind of GPU), the seconds of one of each kind, and their sum beside the time that the stage has. The
exit status is 1 if that is less than 1.5 times the sum. It needs no GPU. Ranks share the
cores of this machine, so each part is measured alone: what a rank does on the host, in a world of
one; and how long a rank replays its part of what all ranks have recorded. What GPUs, their driver
and NCCL need besides is not measured; it is in `OTHER`.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from scripts.common.markdown import table
from scripts.common.ranks import run_on_ranks
from scripts.prove import checks
from scripts.prove.runner import Place
from scripts.prove.stages import STAGES

MARGIN, PER_NODE = 1.5, 8
# Seconds besides: to compile 130 Triton kernels, each 0.4 s, with cold caches, and for NCCL.
OTHER = 52 + 12
AS_ON_GPUS = {
    name: of | {"cpu": of["cuda"]}
    for name, of in (("BLOCKS", checks.BLOCKS), ("STEPS", checks.STEPS))
}


def place(device: str, ranks: int) -> Place:
    return Place(torch.device(device), ranks, min(ranks, PER_NODE), 0.0)


def timed(run: Callable[[], object]) -> float:
    begin = monotonic()
    run()
    return monotonic() - begin


def steps(compiled: bool) -> float:
    """The seconds of one rank's steps in a case, without replays, on this rank alone."""
    axes, kinds = {"dp": 1, "tp": 1}, ("aot_eager", False) if compiled else (False,)
    recorded = set() if compiled else {0, checks.STEPS["cuda"] - 1}
    with patch.multiple(checks, replayed=lambda folder: (1, ""), **AS_ON_GPUS):
        run = [
            lambda kind=kind: checks.trained("mxfp8", axes, kind, place("cpu", 1), recorded)
            for kind in kinds
        ]
        return sum(map(timed, run))


def sums(ranks: int) -> float:
    """The seconds of trainings with 1, 2, ... of a node's ranks, at most: as if all were with 1."""
    per_node = min(ranks, PER_NODE)
    of = "tensorwise", "float8", [1], place("cpu", 1)._replace(per_node=per_node)
    sizes = [n for n in range(1, per_node + 1) if per_node % n == 0]
    return len(sizes) * timed(lambda: checks.one_sum(*of))


def record(recipe: str, axes: dict[str, int], folder: str) -> None:
    """Run an eager case; copy this rank's recording of the last step to a folder."""

    def copied(recording: Path) -> tuple[int, str]:
        (mine,) = recording.parent.glob(f"{recording.name}*/rank*.pt")
        shutil.copy(mine, folder)
        return 1, ""

    with patch.multiple(checks, replayed=copied, **AS_ON_GPUS):
        here = place("cpu", dist.get_world_size())
        checks.trained(recipe, axes, False, here, {checks.STEPS["cuda"] - 1})


def replays(ranks: int) -> float:
    """The seconds in which the last of the ranks has replayed its part of a recording."""
    axes = checks.meshes(ranks)[f"FSDP2 {ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(ranks, record, "mxfp8", axes, folder)
        parts = [(rank, ranks) for rank in range(ranks)]
        return max(timed(lambda part=part: checks.Replay(Path(folder), part)) for part in parts)


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    return run_on_ranks(1, function, *arguments)[0]


def rehearsed(ranks: int) -> tuple[list[str], bool]:
    """A line of the table for a number of GPUs, and whether the cases fit their time."""
    cases = checks.cases_of_bits(place("cuda", ranks))
    seconds = {"sum": alone(sums, ranks), "compiled": alone(steps, True)}
    seconds["eager"] = alone(steps, False) + 2 * replays(ranks)
    total = OTHER + sum(seconds[kind] * len(cases[kind]) for kind in cases)
    allowed = STAGES["bits"].seconds + checks.seconds_of_bits(place("cuda", ranks))
    words = [f"{len(cases[kind])} x {seconds[kind]:.1f} s" for kind in cases]
    numbers = [total, MARGIN * total, allowed]
    for kind in cases:
        print(f"{ranks} GPUs, {kind}:", *(case.name for case in cases[kind]), sep="\n  ")
    return [str(ranks), *words, *(f"{number:.0f}" for number in numbers)], numbers[1] <= allowed


def main() -> int:
    head = ["GPUs", "sum", "compiled", "eager", "seconds in all", f"x {MARGIN}", "the stage has"]
    lines, fit = zip(*(rehearsed(int(ranks)) for ranks in sys.argv[1:]), strict=True)
    print(table(head, lines, "r"))
    return int(not all(fit))


if __name__ == "__main__":
    sys.exit(main())
