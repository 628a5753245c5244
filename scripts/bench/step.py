"""Times a training step of the reference model beside bf16 and torchao, in one run.

    python -m scripts.bench.step --mesh dp=2 tp=2 dp=2,tp=2 --model debug small --assert 2
    python -m scripts.bench.step --compile --assert 1
    python -m scripts.bench.step --stats --model 1b --layers 1 --batch-size 8

A step is forward, backward, an AdamW step (fused) and what follows it (precompute, or the sync of
delayed scales). `--mesh` names FSDP2 ("dp") and tensor-parallel ("tp", with sequence parallelism)
axes, whose ranks this script starts on this machine, bound to cores; "none" is one process.
`--compile` compiles each transformer block. `--stats` times our recipes with the statistics of
`float8_stats`, too: "entered" (but this step is not recorded), "recorded", and "with GEMMs"
(recorded with the SQNR of each GEMM; on no mesh); and in a block of `record` without named layers
("watched"). `--stats watched` times that alone. The first command takes 20 minutes on two cores.

The smaller the batch, the more of a step is Python and the latency of collectives. Statistics cost
a time per element of an operand: the wider the model, the less of a step they are.
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
