"""Sums over ranks whose summands travel in fewer bytes.

Nothing is summed in the narrow type. Ranks exchange encoded pieces in an all-to-all. The rank that
gets a sum decodes its pieces and adds them in fp32, in the order of ranks.
"""

from fp8_dist.transport.encoding import Encoding, Part, Run, decode, encode, runs_of, seed_of
from fp8_dist.transport.exchange import (
    Errors,
    Stage,
    all_reduce,
    reduce_scatter,
    split,
    stages_over,
)
from fp8_dist.transport.shards import Scattering, finish_reduction, reduced_to, start_reduction

__all__ = [
    "Encoding",
    "Errors",
    "Part",
    "Run",
    "Scattering",
    "Stage",
    "all_reduce",
    "decode",
    "encode",
    "finish_reduction",
    "reduce_scatter",
    "reduced_to",
    "runs_of",
    "seed_of",
    "split",
    "stages_over",
    "start_reduction",
]
