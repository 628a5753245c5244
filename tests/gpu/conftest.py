"""Tests on several GPUs run functions of tests/distributed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
