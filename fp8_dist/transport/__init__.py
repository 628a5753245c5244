"""Sums over ranks whose summands travel in fewer bytes.

Never a sum in the narrow type: ranks exchange encoded pieces (an all-to-all), and the rank that
gets a sum decodes them and adds them in fp32, in the order of ranks.
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
