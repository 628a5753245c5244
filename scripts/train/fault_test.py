"""Lets ranks of training runs fail, and checks that the runs survive without losing anything.

    python -m scripts.train.fault_test

Every run trains the debug Llama with `--checkpoint-every` and `--resume auto`, under the launcher
of torchrun, and has one fault: a rank is killed in a gather, in the update of scales, in backward
or while it writes a checkpoint; the disk is full; a checkpoint is damaged; SIGTERM or SIGUSR1
arrives; a rank is late, or hangs. A run has survived if it ends well after restarts, with the
losses and gradient norms of a run without faults, bit for bit, within --limit, and if each restart
has taken the newest complete checkpoint.

The exit status is 1 if a run did not survive. The folders of such runs stay in --out.
"""

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from tqdm import tqdm

from scripts.common.candidates import RECIPES
from scripts.common.markdown import table
from scripts.common.options import positive
from scripts.common.ranks import LOOPBACK
from scripts.common.report import Check, finish, make_parser, start
from scripts.train.faulty import Fault, run_rank
from scripts.train.manifest import MANIFEST, checkpoints_in
from scripts.train.options import CHECKPOINTS

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 10, 2
KILLS = {
    "killed in a gather": "gather",
    "killed in backward": "backward",
    "killed in the update of scales": "precompute",
    "killed while writing": "write",
}
OTHERS = ("a damaged checkpoint", "a full disk", "SIGTERM", "SIGUSR1", "a late rank")
FAULTS = (*KILLS, *OTHERS, "a rank that hangs")
DAMAGES = ("a file is cut off", "a byte has changed", "a file is missing", "no manifest")
# Ranks are forked from a process that has imported all they need.
CONTEXT = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
CONTEXT.set_forkserver_preload(["scripts.train.faulty", "torch.distributed.launcher.api"])

Metrics = list[tuple[float, ...]]  # step, loss and gradient norm


def launch(
    ranks: int, restarts: int, log: Path, options: list[str], fault: Fault, record: Path
) -> None:
    """Do as torchrun does, in a process of its own whose output goes to a file."""
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

    def train(self, fault: Fault | None = None, *options: str, restarts: int = 2) -> str:
        """Runs the ranks, as torchrun does; returns what is wrong with the exit status, or ""."""
        words = [
            *("--model", "debug", "--recipe", self.recipe, "--batch-size", "4", "--seq-len", "16"),
            *("--steps", str(STEPS), "--warmup", "2", "--data", str(ROOT / "docs")),
            *("--checkpoint-every", str(EVERY), "--timeout", str(self.args.timeout)),
            *("--out", str(self.folder), *(options or ("--resume", "auto"))),
        ]
        log = self.folder / "output.txt"
        log.touch()
        task = (self.args.ranks, restarts, log, words, fault or Fault(), self.record)
        launcher = CONTEXT.Process(target=launch, args=task)
        launcher.start()
        launcher.join(self.args.limit)
        if launcher.is_alive():
            launcher.terminate()  # it ends its ranks
            launcher.join()
            return f"hung for {self.args.limit:g} s"
        self.output = log.read_text()
        return f"exit status {launcher.exitcode}" if launcher.exitcode else ""

    def metrics(self) -> Metrics:
        path = self.folder / "metrics.jsonl"
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]

    def lost(self) -> str:
        """Names a complete checkpoint that a restart did not take, if there is one."""
        newest = 0
        pattern = r"checkpoint: (?:\S*step-(\d+) complete|continues from .*, after step (\d+))"
        for complete, resumed in re.findall(pattern, self.output):
            if complete:
                newest = int(complete)
            elif int(resumed) < newest:
                return f"the checkpoint of step {newest} was lost"
        return ""

    def problem(self, expected: Metrics, *problems: str) -> str:
        """Judges a run that has ended: "" if it survived, and then its folder goes."""
        found = [problem for problem in problems if problem]
        if not self.record.exists():
            found.append("the fault did not happen")
        if self.metrics() != expected:
            found.append("its metrics are not those of the run without faults")
        if not found:
            shutil.rmtree(self.folder)
        return "; ".join(found)


def survived(run: Run, expected: Metrics, fault: Fault, says: str) -> str:
    """One program has to end well, after restarts, and to print a line about the fault.

    says: a regular expression.
    """
    problem = run.train(fault)
    said = re.search(says, run.output) is not None
    return run.problem(expected, problem, "" if said else f"not said: {says}", run.lost())


def stopped(run: Run, expected: Metrics, fault: Fault) -> str:
    """One rank gets a signal; all end with status 0, and a second program continues."""
    return run.problem(expected, run.train(fault, restarts=0), run.train(), run.lost())


def damaged(run: Run, expected: Metrics, fault: Fault, damage: str) -> str:
    """The newest checkpoint is damaged while no run uses it: the one before it is taken."""
    problems = [run.train(fault, restarts=0)]
    (_, newest), (before, _), *_ = checkpoints_in(run.folder / CHECKPOINTS).items()
    do_damage(newest, damage)
    refused = run.train(None, "--resume", str(newest), restarts=0)
    if not refused or f"{newest}" not in run.output.rpartition("scripts.train.train: ")[2]:
        problems.append("--resume PATH did not refuse it by name")
    problems.append(run.train())
    if f"passed over: {newest}" not in run.output:
        problems.append("no line names it")
    if not re.search(f"continues from .*, after step {before}$", run.output, re.MULTILINE):
        problems.append(f"did not continue from step {before}")
    return run.problem(expected, *problems)


def do_damage(checkpoint: Path, damage: str) -> None:
    """Do one of `DAMAGES` to a checkpoint."""
    file = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    if damage == "a file is cut off":
        os.truncate(file, file.stat().st_size // 2)
    elif damage == "a byte has changed":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "a file is missing":
        file.unlink()
    else:
        (checkpoint / MANIFEST).unlink()


Case = tuple[str, Callable[[Run, Metrics], str]]


def cases(args: argparse.Namespace) -> list[Case]:
    """The runs in order: the name of the fault, and the function that runs and judges it."""
    choose = random.Random(args.seed)
    found: list[Case] = []

    def add(name: str, judge: Callable[..., str], *more: str, **values: object) -> None:
        some = {"rank": choose.randrange(args.ranks), "step": choose.randrange(2, STEPS - 2)}
        fault = Fault(**{**some, **values})
        found.append((name, lambda run, expected: judge(run, expected, fault, *more)))

    last = args.ranks - 1
    dead = r"rank \d+ of \d+ (died or hangs|failed)" if last else ""
    for damage in DAMAGES:
        add("a damaged checkpoint", damaged, damage, signal="SIGTERM", step=6)
    for rank in range(min(args.ranks, 2)):
        says, step = f"step {2 * EVERY} NOT saved", 2 * EVERY
        add("a full disk", survived, says, rank=rank, step=step, full_disk=True)
    for name in ("SIGTERM", "SIGUSR1"):
        add(name, stopped, signal=name, nth=choose.randrange(9))
    late = f"rank {last} of {args.ranks} did not start"
    add("a late rank", survived, late, rank=last, late_s=10 * args.timeout)
    add("a rank that hangs", survived, dead, signal="SIGSTOP", rank=last)
    for i in range(args.kills):
        name, point = list(KILLS.items())[i % len(KILLS)]
        # How often a step passes the point, about. (Writing: each rank syncs its own file; the
        # first rank also the metrics, the table of contents, the manifest and two folders.)
        rank = choose.randrange(args.ranks)
        often = {"gather": 9, "backward": 4, "precompute": 1, "write": 1 if rank else 10}[point]
        nth = choose.randrange(often)
        add(name, survived, dead, signal="SIGKILL", point=point, rank=rank, nth=nth)
    return [case for case in found if case[0] in args.faults]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; errors end the process with status 2."""
    parser = make_parser("scripts.train.fault_test", __doc__)
    add = parser.add_argument
    add("--ranks", type=positive, default=2)
    add("--kills", type=positive, default=20, help="runs whose rank is killed; %(default)s")
    add("--faults", nargs="+", choices=FAULTS, default=FAULTS, metavar="NAME")
    recipes = ["delayed", "tensorwise"]
    add("--recipes", nargs="+", choices=RECIPES, default=recipes, help="in turn; %(default)s")
    add("--timeout", type=float, default=20.0, help="of collectives, in seconds; %(default)s")
    add("--limit", type=float, default=300.0, help="seconds after which a run hangs; %(default)s")
    add("--seed", type=int, default=0, help="of the points of the faults")
    add("--out", type=Path, default=Path("runs/faults"), help="folder of the runs; %(default)s")
    args = start(parser, argv)
    args.out = args.out.resolve()
    args.asserted = True
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    expected: dict[str, Metrics] = {}
    runs: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    for number, (name, judge) in enumerate(tqdm(cases(args), unit="run")):
        recipe = args.recipes[number % len(args.recipes)]
        if recipe not in expected:
            reference = Run(args, f"reference-{recipe}", recipe)
            if reference.train():
                sys.exit(f"the run without faults failed:\n{reference.output}")
            expected[recipe] = reference.metrics()
        run = Run(args, f"{number:02}", recipe)
        problem = judge(run, expected[recipe])
        runs[name] += 1
        survived[name] += not problem
        if problem:
            tqdm.write(f"{name}, {recipe}, {run.folder}: {problem}")
    lines = [[name, str(count), str(survived[name])] for name, count in runs.items()]
    good, every = survived.total(), runs.total()
    check = Check(f"{good} of {every} runs survived", good == every)
    return finish(args, {"faults": table(["fault", "runs", "survived"], lines, "lr")}, [check])


if __name__ == "__main__":
    sys.exit(main())
