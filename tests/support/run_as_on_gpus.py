"""Runs a program that uses accelerate on CPUs, as it would run on GPUs:

accelerate launch ... run_as_on_gpus.py PROGRAM

Warnings that the library gives are errors there.
"""

import runpy
import sys

from documented import own_warnings_raise
from trainer_runs import as_on_gpus

from scripts.common.gloo import leave

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with as_on_gpus(), own_warnings_raise():
        runpy.run_path(sys.argv[0], run_name="__main__")
    leave()
