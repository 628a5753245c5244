"""The files that scripts.train.train writes to the folder of a run, and the lines it prints."""

import argparse

import psutil
import torch
import torch.distributed as dist
from torch import nn

from fp8_dist import float8_layers
from fp8_dist.debug import CommAudit, Float8Stats
from fp8_dist.report import RunWriter

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
    reason: str,
    first: int,
) -> RunWriter:
    """Print what is trained, and where, and create the folder of the run; called on all ranks.

    config.json has the options, the names of `float8_layers`, `memory` (the meaning of
    `memory_bytes` in metrics.jsonl), and versions.

    reason: why the device is not a GPU; "" if there is nothing to explain. first: the first step
    that will be written.
    """
    corpus = args.corpus
    parameters = sum(p.numel() for p in model.parameters())
    where = f"{device.type} with {dist.get_backend()}{f' ({reason})' if reason else ''}"
    ep = f"ep {args.ep} x " if args.ep > 1 else ""
    if dist.get_rank() == 0:
        print(
            f"{args.model} Llama, {parameters:,} parameters, {args.recipe}, dp {args.dp} x {ep}tp "
            f"{args.tp} on {where}; {len(corpus.text):,} bytes of {corpus.source}",
            flush=True,
        )
    shown = {name: value for name, value in vars(args).items() if name != "corpus"}
    shown |= {
        "data": corpus.source,
        "data_bytes": len(corpus.text),
        "device": str(device),
        "parameters": parameters,
        "float8_layers": list(float8_layers(model)),
        "memory": MEMORY[device.type],
    }
    # Delete files of an earlier run first: an unfinished run must not look like a finished one.
    if dist.get_rank() == 0:
        (args.out / "comm.txt").unlink(missing_ok=True)
    return RunWriter(
        args.out, stats, config=shown, units=UNITS, first=None if first == 1 else first
    )


def write_audit(writer: RunWriter, audit: CommAudit) -> None:
    """Print and write the collectives of the audited (last) step, on rank 0."""
    writer.log_audit(audit)
    if dist.get_rank() == 0:
        table = audit.table()
        print(f"\nCollectives of one training step, as one rank sees them:\n{table}\n", flush=True)
        (writer.folder / "comm.txt").write_text(f"{table}\n\n{audit.table(by_module=True)}\n")


def memory_bytes(device: torch.device) -> int:
    """The memory of this process, as `MEMORY` describes. On CUDA the peak is reset."""
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak
