"""torchrun that imports torch once and forks the ranks of a program:

python -m forking_torchrun --nproc-per-node 2 PROGRAM

Warnings that the library gives are errors there. Their gloo groups have one thread each (``scripts/common/gloo.py`` says why). They end without
finalizing the interpreter, which gloo's threads may disturb (docs/support.md).
"""

import os
import runpy
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryFile
from unittest.mock import patch

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
    args = parse_args([*OPTIONS, *words])
    elastic_launch(config_from_args(args)[0], run_program)(args.training_script)


def launch_in(folder: Path, variables: dict[str, str], *words: str) -> tuple[bool, str, str]:
    """Launch in a folder; return whether all went well, and what was written to both streams."""
    good, streams, kept = True, (sys.stdout, sys.stderr), [os.dup(1), os.dup(2)]
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err, patch.dict(os.environ, variables):
        for number, (stream, file) in enumerate(zip(streams, (out, err), strict=True), 1):
            stream.flush()
            os.dup2(file.fileno(), number)
        os.chdir(folder)
        try:
            launch(*words)
        except Exception:
            good = False
            traceback.print_exc()
        finally:
            for number, (stream, saved) in enumerate(zip(streams, kept, strict=True), 1):
                stream.flush()
                os.dup2(saved, number)
                os.close(saved)
        for file in (out, err):
            file.seek(0)
        return good, out.read(), err.read()


if __name__ == "__main__":
    launch(*sys.argv[1:])
