"""Sums over ranks whose summands are sent in fewer bytes.

Nothing is summed in the narrow type. Ranks exchange encoded pieces in an all-to-all. The rank that
owns a sum decodes the pieces it receives, and adds them in fp32, in the order of ranks.
"""

from fp8_dist.transport.encoding import Encoding, Part, Run, decode, encode, runs_of, seed_of
from fp8_dist.transport.exchange import GradientErrors, all_reduce, reduce_scatter, split
from fp8_dist.transport.shards import Scattering, finish_reduction, reduced_to, start_reduction

__all__ = [
    "Encoding",
    "GradientErrors",
    "Part",
    "Run",
    "Scattering",
    "all_reduce",
    "decode",
    "encode",
    "finish_reduction",
    "reduce_scatter",
    "reduced_to",
    "runs_of",
    "seed_of",
    "split",
    "start_reduction",
]
