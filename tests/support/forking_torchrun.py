"""A torchrun that imports torch once and forks the ranks of a program:

python -m forking_torchrun --nproc-per-node 2 PROGRAM

In these ranks warnings of the library are errors, and gloo groups have one thread each (see
``scripts/common/gloo.py``).
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from unittest.mock import patch

import torch
from documented import own_warnings_raise
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

import fp8_dist.debug
import fp8_dist.fsdp
import fp8_dist.tensor_parallel  # noqa: F401
from scripts.common.gloo import use_one_thread_per_group

START_METHOD = "spawn" if sys.platform == "darwin" else "fork"
OPTIONS = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--start-method={START_METHOD}"]


def run_program(path: str) -> None:
    use_one_thread_per_group()
    sys.argv = [path]
    sys.path.insert(0, str(Path(path).parent))
    with own_warnings_raise():
        runpy.run_path(path, run_name="__main__")


def launch(*words: str) -> None:
    fork(parse_args([*OPTIONS, *words]), run_program)


def fork(args: Any, run: Callable[[str], None]) -> None:
    elastic_launch(config_from_args(args)[0], run)(args.training_script)


def run_as_on_gpus(path: str) -> None:
    trainer_runs = import_module("trainer_runs")
    with trainer_runs.as_on_gpus():
        run_program(path)


def accelerate_launch(*words: str) -> None:
    """Run `accelerate launch`, and let it treat ranks on CPUs as if they had GPUs."""
    command = import_module("accelerate.commands.launch")

    def run(args: Any) -> None:
        args.start_method = START_METHOD
        fork(args, run_as_on_gpus)

    with patch.object(torch.distributed.run, "run", run):
        command.launch_command(command.launch_command_parser().parse_args(words))


def launch_in(
    folder: Path, variables: dict[str, str], launch: Callable[..., None], *words: str
) -> tuple[bool, str, str]:
    """Launch in a folder; return whether all went well, stdout and stderr.

    The launcher runs in a fork: here it would leave threads behind, which might hold locks when
    the ranks of the next launch are forked.
    """
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:

        def run() -> None:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.update(variables)
            os.chdir(folder)
            launch(*words)

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        process.join()
        for file in (out, err):
            file.seek(0)
        return process.exitcode == 0, out.read(), err.read()


if __name__ == "__main__":
    launch(*sys.argv[1:])
