"""Runs a program whose gloo groups have one thread each (``scripts/common/gloo.py`` says why):

torchrun --nproc-per-node 2 -m one_gloo_thread PROGRAM

It ends without finalizing the interpreter, which gloo's threads may disturb (docs/support.md).
"""

import os
import runpy
import sys
from pathlib import Path

from scripts.common.gloo import use_one_thread_per_group

if __name__ == "__main__":
    use_one_thread_per_group()
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
