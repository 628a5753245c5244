"""Check the bits of kernels on this machine's GPU. (tests/gpu covers GEMMs and training steps.)

    python -m scripts.bench.gpu_smoke PART

- kernels: each Triton kernel, with each choice of block sizes, on the default stream and on a side
  stream, against the portable code. With TRITON_INTERPRET=1 it runs on CPUs.
- inductor: the copies that compiled code writes, in each of Inductor's launch configs, against the
  library's kernels.

A line is printed for each case (scripts/bench/gpu_results.py).
"""

from scripts.bench.gpu_results import add_options
from scripts.common.report import DEVICE, make_parser, parse, run

PARTS = "kernels", "inductor"


def share_type(text: str) -> tuple[int, int]:
    """Parse ``--part``: the number of a process, from 1, and the number of processes."""
    index, count = map(int, text.split("/"))
    if not 1 <= index <= count:
        raise ValueError(text)
    return index, count


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("scripts.bench.gpu_smoke", __doc__)
    add = parser.add_argument
    add("kind", metavar="PART", choices=PARTS, help=f"one of {', '.join(PARTS)}")
    add("--device", choices=["cpu", "cuda"], default=None, help=DEVICE)
    share = "the I-th of N processes that share the cases, from 1"
    add("--part", type=share_type, metavar="I/N", default=(1, 1), help=share)
    add_options(parser, "")
    args = parse(parser, argv)
    args.stage = args.stage or args.kind
    return run("scripts.bench.gpu_smoke_run", args)


if __name__ == "__main__":
    raise SystemExit(main())
