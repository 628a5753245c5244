"""Traces one training step with torch.profiler on the ranks of FSDP2.

The step begins where the gradients of the last one are complete: optimizer, precompute, the next
batch, forward, loss, backward.
"""

import json
import tempfile
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
STEP, OPTIMIZER, PRECOMPUTE, BATCH = "step", "optimizer", "precompute", "batch"
FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"
BATCH_SIZE, SEQ_LEN = 4, 64
TEXT_BYTES = 2**18


class Training:
    """A model whose FSDP2 gathers are asynchronous; `step` trains it.

    gloo's collectives run on threads of its own, but unless told otherwise FSDP2 waits for each
    gather where it begins it. That costs nothing on GPUs, where only a stream waits.
    """

    def __init__(self, sizes: LlamaConfig, mesh: DeviceMesh) -> None:
        self.model = build(RECIPE, sizes, mesh)
        assert isinstance(self.model, FSDPModule), "the mesh has no FSDP2 axis"
        self.model._set_unshard_async_op(True)
        for unit, following in pairwise([self.model, *self.model.layers]):
            unit.set_modules_to_forward_prefetch([following])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.seq_len = min(SEQ_LEN, sizes.max_seq_len)
        self.corpus = load_corpus(None, seq_len=self.seq_len, max_bytes=TEXT_BYTES)
        self.dp = mesh["dp"]
        self.steps = 0

    def step(self) -> None:
        """One step; each part is a range of the trace. (The first one has no gradients yet.)"""
        self.steps += 1
        with record_function(STEP):
            with record_function(OPTIMIZER):
                self.optimizer.step()
                self.optimizer.zero_grad()
            with record_function(PRECOMPUTE):
                after_step(RECIPE, sharded=True)(self.model)
            with record_function(BATCH):
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


def traced_step(sizes: LlamaConfig, trace: Path | None = None) -> list[dict[str, Any]]:
    """Trains three steps on every rank, and returns the third one's events, of Chrome's JSON.

    Only events that last are returned. trace: a copy of rank 0's trace goes there.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    training = Training(sizes, mesh)
    training.step()
    training.step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        training.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_text()
    if trace is not None and dist.get_rank() == 0:
        trace.write_text(text)
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
