"""One training step under torch.profiler, on each rank; rank 0 leaves its trace.

The step begins where the last one's gradients are complete: optimizer, precompute, the next batch,
forward, loss, backward.
"""

import json
import math
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_models import build
from corpus import load_corpus
from llama import LlamaConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile, record_function

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
# What is kept of an event's arguments.
ARGUMENTS = ("Input Dims", "Input type")


class Training:
    """A model in recipe tensorwise, FSDP2's gathers of it made asynchronous; `step` trains it.

    gloo's collectives run on threads of its own, but unless told otherwise FSDP2 waits for each
    gather where it begins it: that costs nothing on GPUs, where only a stream waits.
    """

    def __init__(
        self,
        config: LlamaConfig,
        mesh: DeviceMesh,
        batch_size: int,
        seq_len: int,
        late: float = 0.0,
        loading: float = 0.0,
    ) -> None:
        self.model, self.precompute = build("tensorwise", config, mesh, torch.device("cpu"))
        assert isinstance(self.model, FSDPModule), "the mesh has no FSDP2 axis"
        self.model._set_unshard_async_op(True)
        units = [self.model, *self.model.layers]
        for unit, following in pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.corpus = load_corpus(None, seq_len=seq_len, max_bytes=TEXT_BYTES)
        self.drawn = {"seed": 0, "batch_size": batch_size, "seq_len": seq_len}
        self.drawn |= {"rank": mesh.get_local_rank("dp"), "ranks": mesh["dp"].size()}
        last = dist.get_rank() == dist.get_world_size() - 1
        self.late, self.loading = (late if last else 0.0), loading
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
                time.sleep(self.loading)
                inputs, targets = self.corpus.batch(step=self.steps, **self.drawn)
            with record_function(FORWARD):
                logits = self.model(inputs)
            with record_function(LOSS):
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            with record_function(BACKWARD):
                loss.backward()


def trace_step(
    path: Path,
    mesh_sizes: tuple[int, int],
    config: LlamaConfig,
    batch_size: int,
    seq_len: int,
    late: float,
    loading: float,
    repeat: int,
) -> None:
    """Trains for a few steps; rank 0 writes the trace of the shortest one. Called on every rank.

    Args:
        path: of Chrome's JSON.
        mesh_sizes: ranks of FSDP2 (at least 2) and of tensor parallelism.
        config: sizes of the model.
        batch_size: rows of the global batch, a multiple of the FSDP2 ranks.
        seq_len: tokens of a row.
        late: seconds that the last rank pauses before precompute: the others' all-reduces wait.
        loading: seconds that pass until the batch is there.
        repeat: how many steps are traced.
    """
    mesh = init_device_mesh("cpu", mesh_sizes, mesh_dim_names=("dp", "tp"))
    training = Training(config, mesh, batch_size, seq_len, late, loading)
    for _ in range(WARM_UP):
        training.step()
    shortest = math.inf
    for _ in range(repeat):
        # Shapes tell collectives apart.
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            dist.barrier()  # the ranks start the step together
            training.step()
        if dist.get_rank() > 0:
            continue
        with tempfile.TemporaryDirectory() as folder:
            whole = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(whole))
            trace = json.loads(whole.read_text())
        duration = step_of(trace["traceEvents"])["dur"]
        if duration < shortest:
            shortest = duration
            path.write_text(json.dumps(trace | {"traceEvents": trimmed(trace["traceEvents"])}))


def step_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The range of the whole step."""
    (step,) = (e for e in events if e["name"] == STEP and e["ph"] == "X")
    return step


def trimmed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events that a timeline is read from, those of a trace a small part.

    These are the ranges of the step, the collectives, and the operators that run directly within a
    range: not those that operators call.
    """
    step = step_of(events)
    end = step["ts"] + step["dur"]
    kept = [e for e in events if e["ph"] == "M"]
    open_spans: list[tuple[float, bool]] = []  # of the main thread: when one ends, is it a range
    timed = (e for e in events if e["ph"] == "X" and step["ts"] <= e["ts"] < end)
    for event in sorted(timed, key=lambda e: (e["ts"], -e["dur"])):
        if event["name"].startswith("gloo:"):
            kept.append(_bare(event))
        if event["tid"] != step["tid"]:
            continue
        while open_spans and open_spans[-1][0] <= event["ts"]:
            open_spans.pop()
        is_range = event["cat"] == "user_annotation"
        in_range = not open_spans or open_spans[-1][1]
        if is_range or in_range or "c10d" in event["name"].partition("::")[0]:
            kept.append(_bare(event))
        open_spans.append((event["ts"] + event["dur"], is_range))
    return kept


def _bare(event: dict[str, Any]) -> dict[str, Any]:
    """Without the arguments that nobody reads."""
    communicates = "gloo" in event["name"] or "c10d" in event["name"]
    wanted = ARGUMENTS if communicates else ()
    args = {key: value for key, value in event.get("args", {}).items() if key in wanted}
    return event | {"args": args}
