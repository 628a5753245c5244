"""Rates of this machine's GPU, and times of layers, blocks and experts: stages of gpu_day.

    python -m scripts.bench.gpu layers
    python -m scripts.bench.gpu blocks --results results.jsonl --begun blocks.begun

A line is printed for each case. Readings are device times, measured by CUDA events while the host
is ahead. Cases named "wall" have the host's mean time per step, which is longer if the device waits
for the host. FLOPs are those of linear layers alone, three GEMMs each. Peak memory is that of one
candidate, including its parameters.

- versions: the GPU, and the installed releases.
- rates: copies, and GEMMs of each kind. They calibrate docs/gpu.md.
- kernels: each Triton kernel in a layer's step of each recipe, with the block sizes that it chose.
  Bytes are the sizes of its tensors, each counted once. The cache starts without them.
- layers: forward and backward of the widest layer of Llama 8B, with 8192, 2048 and 8191 rows, after
  a change of the weight. Candidates take turns.
- blocks: eight blocks of Llama 8B with a small vocabulary, one sequence, without FSDP2. "step" is
  forward and backward; "optimizer" is AdamW (fused) and the update of scales.
- experts: forward and backward of a layer of experts, with equal and unequal groups of rows.
- training: fifty steps of a Llama in some recipes, eager and compiled.
- nccl: training steps of a small model under FSDP2, in an NCCL group of one rank.
"""

from importlib import import_module

from scripts.bench.gpu_results import add_options
from scripts.common.options import positive
from scripts.common.report import make_parser, parse, run

PARTS = "versions", "rates", "kernels", "layers", "blocks", "experts", "nccl", "training"


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("scripts.bench.gpu", __doc__, repeat=7)
    parser.set_defaults(device="cuda")
    add_options(parser, "")
    add = parser.add_argument
    add("part", choices=PARTS, help="the stage")
    every = [8192, 2048, 8191]
    add("--rows", type=positive, nargs="+", default=every, help="of a layer; %(default)s")
    add("--turns", type=positive, default=3, help="of all candidates for a layer; %(default)s")
    add("--blocks", type=positive, default=8, help="of the model; %(default)s")
    add("--tokens", type=positive, default=8192, help="of the sequence; %(default)s")
    args = parse(parser, argv)
    torch = import_module("torch")
    if args.device != "cuda" or not torch.cuda.is_available():
        parser.error(
            "there is no CUDA device that this torch can use "
            f"(torch {torch.__version__}, torch.version.cuda {torch.version.cuda}); docs/gpu.md "
            "has what can be derived without one"
        )
    args.stage = args.stage or args.part
    return run("scripts.bench.gpu_run", args)


if __name__ == "__main__":
    raise SystemExit(main())
