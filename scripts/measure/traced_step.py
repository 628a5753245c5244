"""Traces one training step with torch.profiler on the ranks of FSDP2.

The step begins where the gradients of the last one are complete: optimizer, precompute, the next
batch, forward, backward.
"""

import json
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile, record_function

from fp8_dist import update_float8_scales
from scripts.common.llama import LlamaConfig
from scripts.common.models import build

RECIPE = "tensorwise"
STEP, OPTIMIZER, PRECOMPUTE, BATCH = "step", "optimizer", "precompute", "batch"
FORWARD, BACKWARD = "forward", "backward"
BATCH_SIZE, SEQ_LEN = 2, 64  # of each rank


def make_step(sizes: LlamaConfig, mesh: DeviceMesh) -> Callable[[], None]:
    """A training step whose parts are ranges of the trace. (The first one has no gradients yet.)

    gloo's collectives run on threads of its own, but unless told otherwise FSDP2 waits for each
    gather where it begins it. That costs nothing on GPUs, where only a stream waits.
    """
    model = build(RECIPE, sizes, mesh)
    assert isinstance(model, FSDPModule), "the mesh has no FSDP2 axis"
    model._set_unshard_async_op(True)
    for unit, following in pairwise([model, *model.layers]):
        unit.set_modules_to_forward_prefetch([following])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    seq_len = min(SEQ_LEN, sizes.max_seq_len)

    def step() -> None:
        with record_function(STEP):
            with record_function(OPTIMIZER):
                optimizer.step()
                optimizer.zero_grad()
            with record_function(PRECOMPUTE):
                update_float8_scales(model)
            with record_function(BATCH):
                tokens = torch.randint(sizes.vocab_size, (BATCH_SIZE, seq_len))
            with record_function(FORWARD):
                loss = model(tokens).logsumexp(-1).mean()
            with record_function(BACKWARD):
                loss.backward()

    return step


def traced_step(sizes: LlamaConfig, trace: Path | None = None) -> list[dict[str, Any]]:
    """Trains three steps on every rank, and returns the third one's events, of Chrome's JSON.

    Only events that last are returned. trace: a copy of rank 0's trace goes there.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    step = make_step(sizes, mesh)
    step()
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_text()
    if trace is not None and dist.get_rank() == 0:
        trace.write_text(text)
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
