"""Is the library right on these ranks, does it send what it says, and how fast is it?

    torchrun --nproc-per-node 8 -m scripts.prove

Runs on the GPUs of one or several nodes, or on CPUs, which only prove that the program works. It
runs stages one after the other, writes each result to OUT/results.jsonl at once, and ends with a
page of all results, which begins with a verdict. A case that is wrong, raises, crashes or hangs
costs no other case its result. The exit status is 1 if a bit or a byte is wrong, or could not be
checked. Slowness is no failure.

    python -m scripts.prove --show docs/gpu_h100.jsonl

prints the page of results that were found elsewhere.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

from scripts.common.options import command_parser, positive
from scripts.prove.stages import STAGES


def main(argv: list[str] | None = None) -> int:
    parser = command_parser("scripts.prove", __doc__)
    add = parser.add_argument
    stages = f"these stages, of {', '.join(STAGES)}"
    add("--only", nargs="+", choices=STAGES, metavar="STAGE", help=stages)
    add("--seconds", type=positive, help="for all stages; default: what their cases need")
    out = "folder of results; default: %(default)s"
    add("--out", type=Path, default="runs/prove", help=out)
    add("--show", type=Path, nargs="+", metavar="FILE", help="print the page of these results")
    args = parser.parse_args(argv)
    if args.show:
        page = import_module("scripts.prove.page")
        try:
            results = page.latest(args.show)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        print(page.text(results))
        return 0
    # A process that has asked CUDA's runtime for GPUs can't fork others that use them.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return import_module("scripts.prove.run").run(args)


if __name__ == "__main__":
    sys.exit(main())
