"""Files that a run of scripts.train.train leaves in its folder, and lines that it prints."""

import argparse
import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from fp8_dist import float8_layers
from fp8_dist.debug import Anomaly, CommAudit, Float8Stats, anomaly_dict, append_jsonl
from fp8_dist.linear.weight import float8_weights
from fp8_dist.version import __version__

STATS, ANOMALIES = "float8_stats.jsonl", "anomalies.jsonl"
# What `memory_bytes` in metrics.jsonl means, by the kind of device; config.json says which.
MEMORY = {
    "cuda": "rank 0: largest memory allocated on its GPU since the line before",
    "cpu": "rank 0: resident memory of the process at the end of the step",
}


class RunWriter:
    """Writes config.json, metrics.jsonl, comm.txt and comm.json into `--out`.

    With `--stats-every` also float8_stats.jsonl, and anomalies.jsonl if there is one.

    What an earlier run left there goes first: half of a run must not look like a whole one. A run
    that continues from a checkpoint keeps the lines of the steps before it.

    Args:
        args: the options of the run.
        first: the first step that will be written; the lines of later ones go.
    """

    def __init__(self, args: argparse.Namespace, first: int = 1) -> None:
        self.args = args
        self.out: Path = args.out
        self.out.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "comm.txt", "comm.json"):
            (self.out / name).unlink(missing_ok=True)
        for name in ("metrics.jsonl", STATS, ANOMALIES):
            keep_lines_before(first, self.out / name)
        # Those before a resumed step: statistics know the anomalies of their own process alone.
        self._told = anomalies_in(self.out / ANOMALIES)
        self.metrics = (self.out / "metrics.jsonl").open("a", buffering=1)

    def write_config(self, model: nn.Module, device: torch.device, reason: str) -> None:
        """Says what is trained, and where; reason: why not on a GPU, "" if there is nothing to say.

        config.json has the options, `float8_layers` by name, `high_precision_gather`: how many
        elements an FSDP2 gather of each other parameter moves, `memory`: what `memory_bytes` of
        metrics.jsonl means, and versions.
        """
        args, corpus = self.args, self.args.corpus
        parameters = sum(p.numel() for p in model.parameters())
        where = f"{device.type} with {dist.get_backend()}{f' ({reason})' if reason else ''}"
        ep = f"ep {args.ep} x " if args.ep > 1 else ""
        print(
            f"{args.model} Llama, {parameters:,} parameters, {args.recipe}, dp {args.dp} x {ep}tp "
            f"{args.tp} on {where}; {corpus.tokens.numel():,} bytes of {corpus.source}",
            flush=True,
        )
        shown = {name: value for name, value in vars(args).items() if name != "corpus"}
        shown |= {
            "data": corpus.source,
            "data_bytes": corpus.tokens.numel(),
            "device": str(device),
            "parameters": parameters,
            "float8_layers": list(float8_layers(model)),
            "high_precision_gather": high_precision_gather(model, args.dp * args.ep),
            "memory": MEMORY[device.type],
            "torch": torch.__version__,
            "fp8_dist": __version__,
            "python": platform.python_version(),
        }
        (self.out / "config.json").write_text(json.dumps(shown, indent=2, default=str) + "\n")

    def write_step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        speed: float,
        learning_rate: float,
        device: torch.device,
    ) -> None:
        """Appends one line to metrics.jsonl, with the memory of this process; see `MEMORY`.

        Args:
            step: counts from 1.
            loss: the mean over all ranks.
            grad_norm: of the whole gradient before clipping.
            speed: in tokens per second over all ranks.
            learning_rate: what the step's update was made with.
            device: where the model is.
        """
        line = {
            "step": step,
            "loss": loss,
            "tokens_per_second": speed,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "memory_bytes": memory_bytes(device),
        }
        self.metrics.write(json.dumps(line) + "\n")

    def write_stats(self, stats: Float8Stats) -> None:
        """Appends what was recorded since the last call."""
        stats.append_jsonl(self.out / STATS)

    def write_anomaly(self, anomaly: Anomaly) -> None:
        """Prints and appends an anomaly, the first of its kind in a layer."""
        line = anomaly_dict(anomaly)
        if (line["fqn"], line["what"]) not in self._told:
            tqdm.write(f"anomaly: {anomaly}")
            append_jsonl([line], self.out / ANOMALIES)

    def sync(self) -> None:
        """Returns once the lines that were written survive a crash of the machine."""
        for name in ("metrics.jsonl", STATS, ANOMALIES):
            if (path := self.out / name).exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def write_audit(self, audit: CommAudit) -> None:
        """Prints and writes the collectives of the audited (last) step."""
        table = audit.table()
        print(f"\nCollectives of one training step, as one rank sees them:\n{table}\n", flush=True)
        (self.out / "comm.txt").write_text(f"{table}\n\n{audit.table(by_module=True)}\n")
        (self.out / "comm.json").write_text(json.dumps(audit_rows(audit), indent=2) + "\n")


def memory_bytes(device: torch.device) -> int:
    """The memory of this process; see `MEMORY`. On CUDA the peak starts anew."""
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def keep_lines_before(first: int, path: Path) -> None:
    """Remove a file of the steps from 1 on, or what it has of the step `first` and later ones."""
    if first == 1:
        path.unlink(missing_ok=True)
    elif path.exists():
        # Replaced at once: a run that is killed here loses no line.
        new = path.with_name(f".{path.name}.new")
        new.write_text(lines_before(first, path))
        new.replace(path)


def lines_before(step: int, path: Path) -> str:
    """The lines of a file of the steps before a step, but for one that was cut off."""
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            at = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if at < step and line.endswith("\n"):
            kept.append(line)
    return "".join(kept)


def anomalies_in(path: Path) -> set[tuple[str, str]]:
    """The layers and kinds of the anomalies in a file, if there is one."""
    if not path.exists():
        return set()
    found = map(json.loads, path.read_text().splitlines())
    return {(anomaly["fqn"], anomaly["what"]) for anomaly in found}


def audit_rows(audit: CommAudit) -> list[dict[str, Any]]:
    """The rows of an audit as JSON can hold them, with their `float8_bytes`."""
    return [
        dataclasses.asdict(row) | {"dtype": str(row.dtype), "float8_bytes": row.float8_bytes}
        for row in audit.rows
    ]


def high_precision_gather(model: nn.Module, ranks: int) -> dict[str, int]:
    """Elements that an FSDP2 gather over so many ranks moves of each weight that is not float8.

    Called on rank 0, whose shard is the largest: FSDP2 pads the others to its size.
    """
    float8 = float8_weights(model)
    return {
        name: ranks * parameter.to_local().numel()
        for name, parameter in model.named_parameters()
        if name not in float8
    }
