"""The files that scripts.train.train writes to the folder of a run, and the lines it prints."""

import argparse

import psutil
import torch
import torch.distributed as dist
from torch import nn

from fp8_dist import float8_layers
from fp8_dist.debug import CommAudit, Float8Stats
from fp8_dist.report import RunWriter

COLLECTIVES = "comm.txt"  # the file of their tables
UNITS = {"loss": "nats per byte"}
# The meaning of `memory_bytes` in metrics.jsonl by type of device, for config.json.
MEMORY = {
    "cuda": "rank 0: largest memory allocated on its GPU since the line before",
    "cpu": "rank 0: resident memory of the process at the end of the step",
}


def run_writer(
    args: argparse.Namespace,
    model: nn.Module,
    stats: Float8Stats | None,
    device: torch.device,
    first: int,
) -> RunWriter:
    """Create the folder of the run; called on all ranks.

    config.json has the options, the names of `float8_layers`, `memory` (the meaning of
    `memory_bytes` in metrics.jsonl), and versions.

    first: the first step that will be written.
    """
    corpus = args.corpus
    shown = {name: value for name, value in vars(args).items() if name != "corpus"}
    shown |= {
        "data": corpus.source,
        "data_bytes": len(corpus.text),
        "device": str(device),
        "parameters": sum(p.numel() for p in model.parameters()),
        "float8_layers": list(float8_layers(model)),
        "memory": MEMORY[device.type],
    }
    # Delete files of an earlier run first: an unfinished run must not look like a finished one.
    if dist.get_rank() == 0:
        (args.out / COLLECTIVES).unlink(missing_ok=True)
    return RunWriter(
        args.out, stats, config=shown, units=UNITS, first=None if first == 1 else first
    )


def write_audit(writer: RunWriter, audit: CommAudit) -> None:
    """Write the collectives of the audited (last) step, on rank 0."""
    writer.log_audit(audit)
    if dist.get_rank() == 0:
        tables = f"{audit.table()}\n\n{audit.table(by_module=True)}\n"
        (writer.folder / COLLECTIVES).write_text(tables)


def memory_bytes(device: torch.device) -> int:
    """The memory of this process, as `MEMORY` describes. On CUDA the peak is reset."""
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak
