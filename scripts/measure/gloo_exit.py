"""Ends of programs on gloo: plain DDP on one process, without float8, again and again.

python -m scripts.measure.gloo_exit --runs 10

Gloo's threads run when nothing else does (SCHED_IDLE, Linux), as on a busy machine: a thread still
holds the last all-reduce of a backward, and with it Python objects, when the interpreter ends.
docs/support.md says what follows.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scripts.common.gloo import use_one_thread_per_group
from scripts.common.markdown import table
from scripts.common.options import command_parser, positive

ENDINGS = ("destroy_process_group", "barrier, destroy_process_group", "os._exit")
TIMEOUT_S = 60


def program(ending: str) -> None:
    """Train for some steps, and end in one of the ways."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    use_one_thread_per_group()
    torch.set_num_threads(1)
    others = set(os.listdir("/proc/self/task"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(64, 64))
    for thread in set(os.listdir("/proc/self/task")) - others:
        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
    if ending == "os._exit":
        sys.stdout.flush()
        os._exit(0)
    if ending.startswith("barrier"):
        dist.barrier()
    dist.destroy_process_group()


def end_of(ending: str) -> str:
    """The end of a run: well, aborted, or not at all."""
    command = [sys.executable, "-m", "scripts.measure.gloo_exit", "--program", ending]
    try:
        status = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        return "hung"
    return "ended" if status == 0 else "aborted"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = command_parser("scripts.measure.gloo_exit", __doc__)
    parser.add_argument("--runs", type=positive, default=10, help="of each; default: %(default)s")
    parser.add_argument("--program", choices=ENDINGS, help="run the program itself, once")
    args = parser.parse_args(argv)
    if args.program:
        program(args.program)
        return 0
    kinds = ("ended", "aborted", "hung")
    rows = []
    for ending in ENDINGS:
        found = Counter(end_of(ending) for _ in range(args.runs))
        rows.append([ending, *(str(found[kind]) for kind in kinds)])
    print(table(["a program that ends by", *kinds], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
