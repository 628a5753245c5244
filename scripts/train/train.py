"""Trains the reference Llama on text, in bf16 or with float8 GEMMs and communication.

    torchrun --nproc-per-node 4 -m scripts.train.train --recipe tensorwise --dp 2 --tp 2
    torchrun --nproc-per-node 4 -m scripts.train.train --model moe --recipe mxfp8 --dp 2 --ep 2

Byte-level language modelling. Masters and optimizer state are fp32. What is not in float8 computes
in bf16, in every recipe, unless --compute says fp32. With the same --seed, --batch-size and
--seq-len, runs of all recipes and meshes start from the same weights and see the same data. Runs on
CUDA with NCCL, or on CPUs with gloo; without torchrun it is a single process. With
--checkpoint-every the run can be stopped and continued.
"""

import argparse
import dataclasses
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

from fp8_dist.debug import Float8Stats, comm_audit, float8_stats
from fp8_dist.fsdp import clip_grad_norm_, set_gradient_transport
from fp8_dist.report import RunWriter
from scripts.common.corpus import VOCAB_SIZE, Corpus
from scripts.common.gloo import leave
from scripts.common.llama import MODELS
from scripts.common.models import after_step, build, data_parallel_mesh
from scripts.train import checkpoints
from scripts.train.checkpoints import Checkpoints
from scripts.train.manifest import RefusedCheckpoint
from scripts.train.options import CHECKPOINTS, make_parser, parse_options
from scripts.train.processes import process_group
from scripts.train.roll import MissingRank, Roll
from scripts.train.run_writer import memory_bytes, print_anomaly, run_writer, write_audit
from scripts.train.stop import StopRequest, stop_on_signals

MAX_GRAD_NORM = 1.0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses and checks the options; errors end the process with status 2, on every rank alike."""
    return parse_options(make_parser("scripts.train.train", __doc__), argv)


class Trainer:
    """A model, its optimizer and its data; `step` makes one training step.

    FSDP2 shards also over a dp axis of one rank: fp32 masters with bf16 compute then come about the
    same way on every mesh, and float8 weights are cast from the masters.
    """

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
        self.args = args
        self.corpus: Corpus = args.corpus
        self.dp = data_parallel_mesh(mesh)
        self.device = device
        self.model = build(
            args.recipe,
            dataclasses.replace(
                MODELS[args.model], vocab_size=VOCAB_SIZE, max_seq_len=args.seq_len
            ),
            mesh,
            device,
            shard=True,
            compiled=args.compile,
            seed=args.seed,
            reduce_transport=args.reduce_transport,
            param_dtype=torch.bfloat16 if args.compute == "bf16" else torch.float32,
        )
        if args.gradient_transport is not None:
            rounding = args.stochastic_rounding
            set_gradient_transport(
                self.model,
                args.gradient_transport,
                error_feedback=args.error_feedback,
                stochastic_rounding=False if rounding is None else rounding,
            )
        self.after_step = after_step(args.recipe, sharded=True)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=args.lr,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        )
        self.start_after(0)

    def start_after(self, step: int) -> None:
        """Make the next step the one after `step`: its learning rate is a function of both."""
        args = self.args
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = args.lr
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: learning_rate_factor(step, args.warmup, args.steps),
            last_epoch=step - 1,
        )

    def resume(self, path: Path, found: dict[str, Any]) -> int:
        """Continue from a checkpoint; returns its step. See `checkpoints.load`."""
        checkpoints.load(path, found, self.model, self.optimizer)
        step: int = found["step"]
        self.start_after(step)
        return step

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Trains on the batch of `step`.

        Returns:
            This data-parallel rank's mean loss and the norm of the whole gradient before
            clipping, both fp32 scalars on the device.
        """
        args = self.args
        inputs, targets = self.corpus.batch(
            seed=args.seed,
            step=step,
            batch_size=args.batch_size,
            seq_len=args.seq_len,
            rank=self.dp.get_local_rank(),
            ranks=self.dp.size(),
        )
        logits = self.model(inputs.to(self.device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(self.device))
        loss.backward()
        grad_norm = clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.after_step(self.model)
        return loss.detach(), grad_norm

    def mean_over_ranks(self, loss: Tensor) -> float:
        """Averages a scalar over the data-parallel ranks."""
        total = loss.clone()
        dist.all_reduce(total, group=self.dp.get_group())
        return total.item() / self.dp.size()


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """Returns the factor of the peak learning rate: up linearly, then down to (almost) 0.

    Args:
        step: counts from 0.
        warmup: steps until the peak.
        steps: of the whole run.
    """
    if step < warmup:
        return (step + 1) / warmup
    return (steps - step) / max(steps - warmup, 1)


def train(
    args: argparse.Namespace,
    device: torch.device,
    reason: str = "",
    stop: StopRequest | None = None,
    roll: Roll | None = None,
) -> bool:
    """Runs the steps; rank 0 shows progress and writes the files of `--out`.

    Args:
        args: the options.
        device: where the model is.
        reason: why the device is not a GPU, for people.
        stop: asked after each step, if checkpoints are written.
        roll: told of each step.

    Returns:
        Whether all is well: False if the last checkpoint, the one to continue from, failed.

    Raises:
        RefusedCheckpoint: the run can't continue from what `--resume` names; on all ranks.
    """
    found = checkpoints.choose(args.out / CHECKPOINTS, args.resume)
    if found is not None and found[1]["model"] != args.model:
        raise RefusedCheckpoint(
            f"{found[0]} is of --model {found[1]['model']}, and this run of --model {args.model}"
        )
    axes = mesh_of(args)
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    trainer = Trainer(args, mesh, device)
    first = 1
    if found is not None:
        first += trainer.resume(*found)
        if dist.get_rank() == 0:
            print(describe_resume(args, trainer.model, *found), flush=True)
    if first > args.steps:
        return True
    stats = stats_of(trainer)
    writer = run_writer(args, trainer.model, stats, device, reason, first)
    saver = None
    if args.checkpoint_every is not None:
        saver = Checkpoints(args.out / CHECKPOINTS, args.keep, facts_of(args))
    return run_steps(trainer, first, mesh, stats, writer, saver, stop or StopRequest(), roll)


def run_steps(
    trainer: Trainer,
    first: int,
    mesh: DeviceMesh,
    stats: Float8Stats | None,
    writer: RunWriter,
    saver: Checkpoints | None,
    stop: StopRequest,
    roll: Roll | None,
) -> bool:
    """The steps from `first` on; see `train`."""
    args = trainer.args
    progress = tqdm(
        range(first, args.steps + 1),
        desc=args.recipe,
        unit="step",
        initial=first - 1,
        total=args.steps,
        disable=dist.get_rank() != 0,
    )
    # Not the one of Checkpoints: its thread communicates at any time.
    control = dist.new_group(backend="gloo") if saver is not None else None
    audit = comm_audit(mesh)
    for step in progress:
        if roll is not None:
            roll.at_step(step)
        last = step == args.steps
        if last and saver is not None:
            saver.wait()  # the audit would see its collectives too
        since = time.perf_counter()
        recorded = nullcontext() if stats is None else stats.at(step)
        with recorded, audit if last else nullcontext():
            loss, grad_norm = trainer.step(step)
        # Reading the values waits for the device, so the clock stops after that.
        mean, norm = trainer.mean_over_ranks(loss), grad_norm.item()
        speed = args.batch_size * args.seq_len / (time.perf_counter() - since)
        writer.log(
            step,
            loss=mean,
            tokens_per_second=speed,
            grad_norm=norm,
            learning_rate=args.lr * learning_rate_factor(step - 1, args.warmup, args.steps),
            memory_bytes=memory_bytes(trainer.device),
        )
        progress.set_postfix_str(f"loss {mean:.3f}, {speed:.0f} tok/s", refresh=False)
        if saver is None or control is None or last:
            continue
        signal = stop.agreed(control)
        if signal or step % args.checkpoint_every == 0:
            save(saver, step, trainer, writer)
        if signal:
            progress.close()
            return end_early(saver, step, signal)
    progress.close()
    write_audit(writer, audit)
    if saver is None:
        return True
    # After all files: a run whose last checkpoint is there has nothing left to do.
    save(saver, args.steps, trainer, writer)
    return saver.wait()


def stats_of(trainer: Trainer) -> Float8Stats | None:
    """Statistics of every so many steps, if they are asked for; for all ranks."""
    args = trainer.args
    if args.stats_every is None:
        return None
    return float8_stats(
        trainer.model, every=args.stats_every, gemms=args.stats_gemms, on_anomaly=print_anomaly
    )


def save(saver: Checkpoints, step: int, trainer: Trainer, writer: RunWriter) -> None:
    """Starts to write the checkpoint after a step; the lines of its metrics are safe before it."""
    writer.sync()
    saver.save(step, checkpoints.state_of(trainer.model, trainer.optimizer))


def end_early(saver: Checkpoints, step: int, signal: str) -> bool:
    """Waits for the last checkpoint; whether the run can be continued from it."""
    complete = saver.wait()
    if saver.is_first:
        then = "--resume auto continues" if complete else "and its checkpoint FAILED"
        print(f"stopped by {signal} after step {step}: {then}", flush=True)
    return complete


def facts_of(args: argparse.Namespace) -> dict[str, Any]:
    """Facts of a run, for the manifests of its checkpoints."""
    names = ("model", "recipe", "seed", "batch_size", "seq_len", "steps", "lr", "warmup")
    names += ("compute", "reduce_transport")
    facts = {name: getattr(args, name) for name in names}
    wire = None
    if args.gradient_transport is not None:
        options = ("gradient_transport", "error_feedback", "stochastic_rounding")
        wire = {name: getattr(args, name) for name in options}
    return facts | {"gradients": wire, "mesh": mesh_of(args), "data": args.corpus.source}


def mesh_of(args: argparse.Namespace) -> dict[str, int]:
    """The sizes of the mesh's axes; "ep" is one if experts are divided."""
    experts = {"ep": args.ep} if args.ep > 1 else {}
    return {"dp": args.dp, **experts, "tp": args.tp}


def describe_resume(
    args: argparse.Namespace, model: torch.nn.Module, path: Path, found: dict[str, Any]
) -> str:
    """Say what a run continues from, what differs, and which histories were kept."""
    now = facts_of(args)
    differs = [
        f"{name} {found.get(name)} -> {value}"
        for name, value in now.items()
        if found.get(name) != value
    ]
    lines = [f"checkpoint: continues from {path}, after step {found['step']}"]
    if differs:
        lines.append(f"checkpoint: the run has changed: {'; '.join(differs)}")
    kept, histories = checkpoints.histories_kept(model)
    if histories:
        rest = "" if kept == histories else ", the others start anew"
        lines.append(f"checkpoint: {kept} of {histories} amax histories are kept{rest}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse_args(argv)
    roll = None
    try:
        with process_group(args.timeout) as (device, reason, roll):
            stop = stop_on_signals() if args.checkpoint_every is not None else None
            return 0 if train(args, device, reason, stop, roll) else 1
    except MissingRank as error:
        text: str | None = str(error)
    except RefusedCheckpoint as error:
        text = str(error) if dist.get_rank() == 0 else ""
    except (Exception, CheckpointException) as error:
        text = roll.explain(error) if roll is not None else None
        if text is None:
            traceback.print_exc()
    if text:
        print(f"scripts.train.train: {text}", file=sys.stderr, flush=True)
    leave(1)  # now: threads may wait for a rank that is gone


if __name__ == "__main__":
    leave(main())
