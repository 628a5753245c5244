"""Times what follows the optimizer's step (precompute, or the sync) at the real number of weights.

One process holds rank 0's real shards of a planned model in real memory, in a fake process group of
all ranks. All of the call runs but the all-reduce itself, which moves nothing there: the amaxes of
all local shards, the vector, the scales, what the layers keep.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from plan_memory import bytes_of
from plan_step import Plan, calls_between_steps, make_mesh, parallelized, start_histories
from plan_world import fake_world
from torch.distributed.tensor import DTensor

from fp8_dist.debug import comm_audit
from fp8_dist.kernels import amax
from fp8_dist.linear import float8_layers

MOST_BYTES = 8 << 30
REPEAT = 7


@dataclass
class Timed:
    """Medians of CPU seconds of one thread, which other processes on the machine don't change.

    Attributes:
        weights: converted weights of the model.
        shard_bytes: of their local shards, which are read.
        reduced_bytes: of the vectors that are reduced.
        collectives: how many all-reduces.
        call_seconds: of the whole call, but for the all-reduce.
        amax_seconds: of the amaxes of all shards alone.
        repeat: how often each was timed.
    """

    weights: int
    shard_bytes: int
    reduced_bytes: int
    collectives: int
    call_seconds: float
    amax_seconds: float
    repeat: int = REPEAT


def timed(plan: Plan) -> Timed | str:
    """Times the call in this process; a sentence where there is nothing to time."""
    calls = calls_between_steps(plan)
    if not calls:
        return f"{plan.variant} calls nothing between two steps"
    torch.set_num_threads(1)
    with fake_world(plan.ranks):
        mesh = make_mesh(plan)
        model = parallelized(plan, mesh)
        held = bytes_of(model.parameters())
        if held > MOST_BYTES:
            return (
                f"rank 0 holds {held:,} bytes of parameters, more than the {MOST_BYTES:,} that "
                "are allocated for timing: shard over more ranks"
            )
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                assert isinstance(parameter, DTensor)
                parameter.to_local().normal_(std=0.02, generator=generator)
        start_histories(model)
        layers = float8_layers(model).values()
        shards = [layer.float8_weight.shard() for layer in layers]
        with comm_audit(mesh) as audit:
            for call in calls:
                call(model)
        return Timed(
            weights=len(shards),
            shard_bytes=bytes_of(shards),
            reduced_bytes=sum(row.bytes for row in audit.rows),
            collectives=audit.count(),
            call_seconds=_median(lambda: [call(model) for call in calls]),
            amax_seconds=_median(lambda: [amax(shard) for shard in shards]),
        )


def _median(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEAT):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)
