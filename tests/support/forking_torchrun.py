"""torchrun that imports torch once and forks the ranks of a program:

python -m forking_torchrun --nproc-per-node 2 PROGRAM

Warnings that the library gives are errors there. Their gloo groups have one thread each (``scripts/common/gloo.py`` says why). They end without
finalizing the interpreter, which gloo's threads may disturb (docs/support.md).
"""

import runpy
import sys
from pathlib import Path

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


if __name__ == "__main__":
    args = parse_args([*OPTIONS, *sys.argv[1:]])
    elastic_launch(config_from_args(args)[0], run_program)(args.training_script)
