"""Lets ranks of training runs fail, and checks that the runs survive without losing anything.

    python -m scripts.train.fault_test

Every run trains the debug Llama with `--checkpoint-every` and `--resume auto`, under the launcher
of torchrun, and has one fault: a rank is killed in a gather, in the update of scales, in backward
or while it writes a checkpoint; the disk is full; a checkpoint is damaged; SIGTERM or SIGUSR1
arrives; a rank is late, or hangs. A run has survived if it ends well after restarts, with the
losses and gradient norms of a run without faults, bit for bit. Steps are lost if they were made
again. A complete checkpoint is lost if a restart did not take it. A run hangs if it takes longer
than --limit.

The exit status is 1 if a run did not survive, lost a checkpoint, or hung. The folders of such runs
stay in --out.
"""

import argparse
import dataclasses
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from scripts.common.candidates import RECIPES
from scripts.common.markdown import table
from scripts.common.options import positive
from scripts.common.report import Check, finish, make_parser, start
from scripts.train.fault_runs import EVERY, STEPS, Outcome, Run
from scripts.train.faulty import Fault
from scripts.train.manifest import MANIFEST

KILLS = {
    "killed in a gather": "gather",
    "killed in backward": "backward",
    "killed in the update of scales": "precompute",
    "killed while writing": "write",
}
DAMAGES = ("a file is cut off", "a byte has changed", "a file is missing", "no manifest")


def killed(run: Run, expected: list[tuple[float, ...]], fault: Fault) -> Outcome:
    """A rank is killed; torchrun starts all of them again."""
    line = r"rank \d+ of \d+ (died or hangs|failed)"
    return survived(run, expected, fault, line if run.args.ranks > 1 else "")


def late(run: Run, expected: list[tuple[float, ...]], fault: Fault) -> Outcome:
    """A rank starts after the timeout; the others end, and torchrun starts all of them again."""
    return survived(run, expected, fault, f"rank {fault.rank} of {run.args.ranks} did not start")


def disk_is_full(run: Run, expected: list[tuple[float, ...]], fault: Fault) -> Outcome:
    """A checkpoint can't be written: the run goes on."""
    return survived(run, expected, fault, f"step {fault.step} NOT saved")


def survived(run: Run, expected: list[tuple[float, ...]], fault: Fault, line: str) -> Outcome:
    """What came of one program that has to end well, and to print a line about the fault."""
    status = run.train(fault)
    said = re.search(line, run.output) is not None
    return run.outcome(
        expected,
        fault,
        f"exit status {status}" if status else "",
        "" if said else f"no line says: {line}",
    )


def stopped(run: Run, expected: list[tuple[float, ...]], fault: Fault) -> Outcome:
    """One rank gets a signal; all end with status 0, and a second program continues."""
    status = run.train(fault, restarts=0)
    problem = f"exit status {status} after {fault.signal}" if status else ""
    status = run.train()
    return run.outcome(expected, fault, problem, f"exit status {status}" if status else "")


def damaged(
    run: Run, expected: list[tuple[float, ...]], fault: Fault, damage: str = DAMAGES[0]
) -> Outcome:
    """The newest checkpoint is damaged while no run uses it: the one before it is taken."""
    problems = [f"exit status {status}" for status in [run.train(fault, restarts=0)] if status]
    newest, before, *_ = run.checkpoints().items()
    do_damage(newest[1], damage)
    status = run.train(None, "--resume", str(newest[1]), restarts=0)
    if not status or f"{newest[1]}" not in run.output.rpartition("scripts.train.train: ")[2]:
        problems.append("--resume PATH did not refuse it by name")
    status = run.train()
    if status:
        problems.append(f"exit status {status}")
    if f"passed over: {newest[1]}" not in run.output:
        problems.append("no line names it")
    if [step for step, _ in run.resumes()] != [before[0]]:
        problems.append(f"continued from {run.resumes()} instead of {before[0]}")
    outcome = run.outcome(expected, fault, *problems)
    # It was not lost by the run.
    return dataclasses.replace(outcome, checkpoints_lost=0)


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


Case = tuple[str, Callable[[Run, list[tuple[float, ...]]], Outcome]]


def cases(args: argparse.Namespace) -> list[Case]:
    """What is run, in order: the name of the fault, and the function that runs and judges it."""
    choose = random.Random(args.seed)
    found: list[Case] = []

    def add(name: str, judge: Callable[..., Outcome], fault: Fault, **more: str) -> None:
        found.append((name, lambda run, expected: judge(run, expected, fault, **more)))

    def fault(**values: object) -> Fault:
        some = {"rank": choose.randrange(args.ranks), "step": choose.randrange(2, STEPS - 2)}
        return Fault(**{**some, **values})

    for damage in DAMAGES:
        add("a damaged checkpoint", damaged, fault(signal="SIGTERM", step=6), damage=damage)
    for rank in range(min(args.ranks, 2)):
        add("a full disk", disk_is_full, Fault(rank=rank, step=2 * EVERY, full_disk=True))
    for name in ("SIGTERM", "SIGUSR1"):
        add(name, stopped, fault(signal=name, nth=choose.randrange(9)))
    add("a late rank", late, Fault(rank=args.ranks - 1, late_s=10 * args.timeout))
    add("a rank that hangs", killed, fault(signal="SIGSTOP", rank=args.ranks - 1))
    for i in range(args.kills):
        name, point = list(KILLS.items())[i % len(KILLS)]
        # How often a step passes the point, about. (Writing: each rank syncs its own file; the
        # first rank also the metrics, the table of contents, the manifest and two folders.)
        rank = choose.randrange(args.ranks)
        often = {"gather": 9, "backward": 4, "precompute": 1, "write": 1 if rank else 10}[point]
        nth = choose.randrange(often)
        add(name, killed, fault(signal="SIGKILL", point=point, rank=rank, nth=nth))
    return [case for case in found if case[0] in args.faults]


def names_of_faults() -> list[str]:
    """All rows of the table."""
    others = ["a damaged checkpoint", "a full disk", "SIGTERM", "SIGUSR1"]
    return [*KILLS, *others, "a late rank", "a rank that hangs"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options; errors end the process with status 2."""
    parser = make_parser("scripts.train.fault_test", __doc__)
    add = parser.add_argument
    add("--ranks", type=positive, default=2)
    add("--kills", type=positive, default=20, help="runs whose rank is killed; %(default)s")
    add("--faults", nargs="+", choices=names_of_faults(), default=names_of_faults(), metavar="NAME")
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


def report(outcomes: dict[str, list[Outcome]]) -> str:
    """The table of all faults."""
    rows = []
    for name, found in outcomes.items():
        lost = [outcome.steps_lost for outcome in found]
        rows.append(
            [
                name,
                str(len(found)),
                str(sum(not outcome.problem for outcome in found)),
                f"{sum(lost) / len(lost):.1f} (at most {max(lost)})",
                str(sum(outcome.checkpoints_lost for outcome in found)),
                str(sum(outcome.hung for outcome in found)),
            ]
        )
    head = ["fault", "runs", "survived", "steps lost", "checkpoints lost", "hangs"]
    return table(head, rows, "lr")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse(argv)
    expected: dict[str, list[tuple[float, ...]]] = {}
    outcomes: dict[str, list[Outcome]] = {}
    for number, (name, judge) in enumerate(tqdm(cases(args), unit="run")):
        recipe = args.recipes[number % len(args.recipes)]
        if recipe not in expected:
            reference = Run(args, f"reference-{recipe}", recipe)
            if reference.train():
                sys.exit(f"the run without faults failed:\n{reference.output}")
            expected[recipe] = reference.metrics()
        run = Run(args, f"{number:02}", recipe)
        outcome = judge(run, expected[recipe])
        outcomes.setdefault(name, []).append(outcome)
        if outcome.problem or outcome.checkpoints_lost or outcome.hung:
            tqdm.write(f"{name}, {recipe}, {run.folder}: {outcome}")
    everything = [outcome for found in outcomes.values() for outcome in found]
    hangs = sum(outcome.hung for outcome in everything)
    lost = sum(outcome.checkpoints_lost for outcome in everything)
    survived = sum(not outcome.problem for outcome in everything)
    checks = [
        Check(f"{survived} of {len(everything)} runs survived", survived == len(everything)),
        Check(f"{hangs} runs hung", hangs == 0),
        Check(f"{lost} complete checkpoints were lost", lost == 0),
    ]
    return finish(args, {"faults": report(outcomes)}, checks)


if __name__ == "__main__":
    sys.exit(main())
