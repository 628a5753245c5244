"""The runs of scripts.train.fault_test: how their ranks are started, and how they are judged."""

import argparse
import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from scripts.common.ranks import LOOPBACK
from scripts.train.faulty import Fault, run_rank
from scripts.train.manifest import checkpoints_in
from scripts.train.options import CHECKPOINTS

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 10, 2
# Ranks are forked from a process that has imported all they need.
CONTEXT = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
CONTEXT.set_forkserver_preload(["scripts.train.faulty", "torch.distributed.launcher.api"])


def launch(
    ranks: int, restarts: int, log: Path, options: list[str], fault: Fault, record: Path
) -> None:
    """What torchrun does, in a process of its own whose output goes to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=log.parent.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="spawn" if sys.platform == "darwin" else "fork",
        shutdown_timeout=5,
    )
    try:
        elastic_launch(config, run_rank)(options, fault, record)
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(1)


@dataclasses.dataclass
class Outcome:
    """What became of a run. `problem` is "" if it survived."""

    problem: str = ""
    steps_lost: int = 0
    checkpoints_lost: int = 0
    hung: bool = False


class Run:
    """One run in a folder of its own; several programs may work on it, one after the other."""

    def __init__(self, args: argparse.Namespace, name: str, recipe: str) -> None:
        self.args = args
        self.recipe = recipe
        self.folder: Path = args.out / name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.record = self.folder / "fault"
        self.output = ""
        self.hung = False

    def train(self, fault: Fault | None = None, *options: str, restarts: int = 2) -> int:
        """Runs the ranks, as torchrun does; returns its exit status, and adds to `output`."""
        text = [
            *("--model", "debug", "--recipe", self.recipe, "--batch-size", "4", "--seq-len", "16"),
            *("--steps", str(STEPS), "--warmup", "2", "--data", str(ROOT / "docs")),
            *("--checkpoint-every", str(EVERY), "--timeout", str(self.args.timeout)),
            *("--out", str(self.folder), *(options or ("--resume", "auto"))),
        ]
        log = self.folder / "output.txt"
        log.touch()
        launcher = CONTEXT.Process(
            target=launch,
            args=(self.args.ranks, restarts, log, text, fault or Fault(), self.record),
        )
        launcher.start()
        launcher.join(self.args.limit)
        if launcher.is_alive():
            self.hung = True
            launcher.terminate()  # it ends its ranks
            launcher.join()
        self.output = log.read_text()
        return int(launcher.exitcode or 0)

    def metrics(self) -> list[tuple[float, ...]]:
        """Step, loss and gradient norm of every line."""
        path = self.folder / "metrics.jsonl"
        lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]

    def checkpoints(self) -> dict[int, Path]:
        """By step, the newest first."""
        return checkpoints_in(self.folder / CHECKPOINTS)

    def resumes(self) -> list[tuple[int, int]]:
        """The step of each checkpoint that was continued from, and of the newest one before it."""
        found, newest = [], 0
        pattern = r"checkpoint: (?:\S*step-(\d+) complete|continues from .*, after step (\d+))"
        for complete, resumed in re.findall(pattern, self.output):
            if complete:
                newest = int(complete)
            else:
                found.append((int(resumed), newest))
        return found

    def outcome(self, expected: list[tuple[float, ...]], fault: Fault, *problems: str) -> Outcome:
        """Judges a run that has ended."""
        found = [problem for problem in problems if problem]
        if not self.record.exists():
            found.append("the fault did not happen")
        if self.metrics() != expected:
            found.append("its metrics are not those of the run without faults")
        resumes = self.resumes()
        lost = sum(newest > step for step, newest in resumes)
        steps_lost = 0
        if resumes and self.record.exists() and fault.signal:
            # The step in which a rank was killed was not made yet.
            made = int(self.record.read_text()) - (fault.signal == "SIGKILL")
            steps_lost = max(made - resumes[0][0], 0)
        outcome = Outcome("; ".join(found), steps_lost, lost, self.hung)
        if not (found or lost or self.hung):
            shutil.rmtree(self.folder)
        return outcome
