"""One training step under torch.profiler, on each rank; rank 0 leaves its trace.

The step begins where the last one's gradients are complete: optimizer, precompute, the next batch,
forward, loss, backward.
"""

import json
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile, record_function

from scripts.common.corpus import load_corpus
from scripts.common.llama import LlamaConfig
from scripts.common.models import after_step, build

RECIPE = "tensorwise"
STEP = "step"
OPTIMIZER, PRECOMPUTE, BATCH, FORWARD, LOSS, BACKWARD = PHASES = (
    "optimizer",
    "precompute",
    "batch",
    "forward",
    "loss",
    "backward",
)
WARM_UP = 2
TEXT_BYTES = 2**18
BATCH_SIZE, SEQ_LEN = 4, 64
# Seconds of pauses: the last rank comes late to precompute, as some rank always does, and the
# others' all-reduces wait for it; a batch takes a while to load.
LATE, LOADING = 0.003, 0.005


class Training:
    """A model whose FSDP2 gathers are asynchronous; `step` trains it.

    gloo's collectives run on threads of its own, but unless told otherwise FSDP2 waits for each
    gather where it begins it. That costs nothing on GPUs, where only a stream waits.
    """

    def __init__(self, sizes: LlamaConfig, mesh: DeviceMesh) -> None:
        self.model = build(RECIPE, sizes, mesh)
        self.precompute = after_step(RECIPE, sharded=True)
        assert isinstance(self.model, FSDPModule), "the mesh has no FSDP2 axis"
        self.model._set_unshard_async_op(True)
        for unit, following in pairwise([self.model, *self.model.layers]):
            unit.set_modules_to_forward_prefetch([following])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.seq_len = min(SEQ_LEN, sizes.max_seq_len)
        self.corpus = load_corpus(None, seq_len=self.seq_len, max_bytes=TEXT_BYTES)
        self.dp = mesh["dp"]
        self.late = LATE if dist.get_rank() == dist.get_world_size() - 1 else 0.0
        self.steps = 0

    def step(self) -> None:
        """See the file; each part is a range of the trace. (The first one has no gradients yet.)"""
        self.steps += 1
        with record_function(STEP):
            with record_function(OPTIMIZER):
                self.optimizer.step()
                self.optimizer.zero_grad()
            time.sleep(self.late)
            with record_function(PRECOMPUTE):
                self.precompute(self.model)
            with record_function(BATCH):
                time.sleep(LOADING)
                inputs, targets = self.corpus.batch(
                    seed=0,
                    step=self.steps,
                    batch_size=BATCH_SIZE,
                    seq_len=self.seq_len,
                    rank=self.dp.get_local_rank(),
                    ranks=self.dp.size(),
                )
            with record_function(FORWARD):
                logits = self.model(inputs)
            with record_function(LOSS):
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            with record_function(BACKWARD):
                loss.backward()


def trace_step(path: Path, sizes: LlamaConfig, mesh_sizes: tuple[int, int], repeat: int) -> None:
    """Trains for a few steps; rank 0 writes the trace of the shortest one. Called on every rank.

    Args:
        path: of Chrome's JSON.
        sizes: of the model.
        mesh_sizes: ranks of FSDP2 (at least 2) and of tensor parallelism.
        repeat: how many steps are traced.
    """
    mesh = init_device_mesh("cpu", mesh_sizes, mesh_dim_names=("dp", "tp"))
    training = Training(sizes, mesh)
    for _ in range(WARM_UP):
        training.step()
    shortest = math.inf
    for _ in range(repeat):
        # Shapes tell collectives apart.
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            dist.barrier()  # the ranks start the step together
            since = time.perf_counter()
            training.step()
            seconds = time.perf_counter() - since
        if dist.get_rank() == 0 and seconds < shortest:
            shortest = seconds
            profiler.export_chrome_trace(str(path))


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that last."""
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
