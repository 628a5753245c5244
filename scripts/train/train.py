"""Train the reference Llama on text, in bf16 or with float8 GEMMs and communication.

    torchrun --nproc-per-node 4 -m scripts.train.train --recipe tensorwise --dp 2 --tp 2
    torchrun --nproc-per-node 4 -m scripts.train.train --model moe --recipe mxfp8 --dp 2 --ep 2

Byte-level language modelling. Master weights and optimizer state are fp32. All computation outside
of float8 GEMMs is in bf16, or, with --compute fp32, in fp32. With the same --seed, --batch-size and
--seq-len, runs of all recipes and meshes start from the same weights and see the same data. Runs on
CUDA with NCCL, or on CPUs with gloo; without torchrun it is a single process. A run with
--checkpoint-every can be continued by --resume auto. With --micro-batches and --gradient-transport
the bits do not depend on --dp, which may then differ when the run is continued.
"""

import argparse
from importlib import import_module

from scripts.train.options import make_parser, parse_options


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the options; errors end the process with status 2, on all ranks alike."""
    return parse_options(make_parser("scripts.train.train", __doc__), argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    import_module("scripts.train.train_run").run(args)


if __name__ == "__main__":
    main()
    import_module("scripts.common.gloo").leave()
