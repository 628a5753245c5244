"""Time a training step of the reference model, compared with bf16 and torchao.

    python -m scripts.bench.step --mesh dp=2 tp=2 dp=2,tp=2 --model debug small --assert 2
    python -m scripts.bench.step --compile --assert 1
    python -m scripts.bench.step --stats --model 1b --layers 1 --batch-size 8

A step is forward, backward, an AdamW step (fused) and the update of scales (precompute, or the sync
of delayed scales). `--mesh` gives the sizes of the FSDP2 axis ("dp") and the tensor-parallel axis
("tp", with sequence parallelism). The script starts these ranks on this machine, pinned to cores;
"none" is one process. `--compile` compiles each transformer block. `--stats` also times our recipes
inside `float8_stats`: "entered" (this step is not recorded), "recorded", and, without a mesh, "with
GEMMs" (recorded with the SQNR of each GEMM); and inside `record` without named layers ("watched").
`--stats watched` adds only the last. The first command takes 20 minutes on two cores.

With smaller batches, Python and the latency of collectives are a larger part of a step. The cost of
statistics is per element of an operand, so wider models spend a smaller part of a step on them.
"""

import argparse
import math

from scripts.common.options import mesh_type, positive
from scripts.common.recipes import add_candidates
from scripts.common.report import make_parser, parse, run
from scripts.common.sizes import MODELS


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = make_parser("scripts.bench.step", __doc__, repeat=7, ratio=True)
    add = parser.add_argument
    dense = [name for name, sizes in MODELS.items() if sizes.mixture is None]
    add_candidates(parser)
    add("--model", choices=dense, nargs="+", default=["debug"], help="default: debug")
    add("--layers", type=positive, help="so many of its layers, with 256 tokens to predict")
    add("--mesh", type=mesh_type, nargs="+", default=[mesh_type("none")], help="default: none")
    add("--batch-size", type=positive, default=64, help="rows per rank of dp; %(default)s")
    add("--seq-len", type=positive, default=128, help="tokens per row; %(default)s")
    add("--compile", action="store_true", help="torch.compile each block")
    kinds = ["entered", "recorded", "with GEMMs", "watched"]
    add("--stats", nargs="*", choices=kinds, help="also with statistics; default: in each way")
    args = parse(parser, argv)
    if args.compile and any(math.prod(mesh.values()) > 1 for mesh in args.mesh):
        parser.error("--compile is for --mesh none: torchao's layers don't compile with TP")
    return args


def main(argv: list[str] | None = None) -> int:
    return run("scripts.bench.step_run", parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
