"""What imports of the library load."""

import subprocess
import sys

import torch

from fp8_dist import torch_internals

PROGRAM = """
import sys
import fp8_dist, fp8_dist.debug, fp8_dist.fsdp, fp8_dist.moe, fp8_dist.report
import fp8_dist.tensor_parallel
print(*[name for name in sys.argv[1:] if name in sys.modules])
from torch.utils.flop_counter import FlopCounterMode
import torch
layer = fp8_dist.Float8Linear(32, 48)
with FlopCounterMode(display=False) as counter:
    layer(torch.ones(16, 32))
print(counter.get_total_flops())
"""


def test_the_library_imports_no_compiler() -> None:
    """Importing dynamo takes as long as importing the rest of torch."""
    compilers = ["torch._dynamo", "torch._inductor"]
    if torch.version.cuda is None and torch.version.hip is None:  # else it has kernels in Triton
        compilers.append("triton")
    command = [sys.executable, "-c", PROGRAM, *compilers]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    # torch's counter is imported after the library, and has its formulas.
    assert run.stdout.split("\n")[:2] == ["", str(2 * 16 * 32 * 48)]


def test_the_mark_of_constant_functions_is_that_of_dynamo() -> None:
    marks = []
    for mark in (torch.compiler.assume_constant_result, torch_internals.constant_in_graphs):

        def function() -> int:
            return 1

        mark(function)
        marks.append(vars(function))
    assert marks[0] == marks[1] != {}
