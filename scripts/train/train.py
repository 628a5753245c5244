"""Trains the reference Llama on text, in bf16 or with float8 GEMMs and communication.

    torchrun --nproc-per-node 4 -m scripts.train.train --recipe tensorwise --dp 2 --tp 2

Byte-level language modelling. Masters and optimizer state are fp32 and compute is bf16 in every
recipe. With the same --seed, --batch-size and --seq-len, runs of all recipes and meshes start
from the same weights and see the same data. Runs on CUDA with NCCL, or on CPUs with gloo; without
torchrun it is a single process.
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import clip_grad_norm_
from scripts.common.corpus import VOCAB_SIZE, Corpus
from scripts.common.gloo import use_one_thread_per_group
from scripts.common.llama import MODELS
from scripts.common.models import after_step, build
from scripts.train.options import make_parser, parse_options
from scripts.train.run_writer import RunWriter

MAX_GRAD_NORM = 1.0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses and checks the options; errors end the process with status 2, on every rank alike."""
    return parse_options(make_parser("scripts.train.train", __doc__), argv)


def choose_device(local_rank: int, local_ranks: int) -> tuple[torch.device, str]:
    """Returns this rank's device and, where GPUs are left unused, the reason ("" otherwise).

    Ranks that share a GPU cannot form an NCCL group: they all train on the CPU instead.
    """
    gpus = torch.cuda.device_count()
    if local_ranks <= gpus:
        return torch.device("cuda", local_rank), ""
    reason = f"{local_ranks} ranks need as many GPUs, this machine has {gpus}" if gpus else ""
    return torch.device("cpu"), reason


@contextmanager
def process_group() -> Iterator[tuple[torch.device, str]]:
    """Joins the ranks that torchrun started, or makes a world of one; yields `choose_device`."""
    device, reason = choose_device(
        int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )
    use_cuda = device.type == "cuda"
    if use_cuda:
        torch.cuda.set_device(device)
    use_one_thread_per_group()
    backend = "nccl" if use_cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device, reason
        # gloo may abort a rank's last collective if another rank leaves first.
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Trainer:
    """A model, its optimizer and its data; `step` makes one training step.

    FSDP2 shards also over a dp axis of one rank: fp32 masters with bf16 compute then come about the
    same way on every mesh, and float8 weights are cast from the masters.
    """

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
        self.args = args
        self.corpus: Corpus = args.corpus
        self.dp = mesh["dp"]
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
        )
        self.after_step = after_step(args.recipe, sharded=True)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=args.lr,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, args.warmup, args.steps)
        )

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


def train(args: argparse.Namespace, device: torch.device, reason: str = "") -> None:
    """Runs the steps; rank 0 shows progress and writes the files of `--out`.

    reason: why the device is not a GPU, for people.
    """
    writer = RunWriter(args) if dist.get_rank() == 0 else None
    mesh = init_device_mesh(device.type, (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    trainer = Trainer(args, mesh, device)
    if writer is not None:
        writer.write_config(trainer.model, device, reason)
    progress = tqdm(range(1, args.steps + 1), desc=args.recipe, unit="step", disable=writer is None)
    audit = comm_audit(mesh)
    for step in progress:
        since = time.perf_counter()
        with ExitStack() as around_step:
            if step == args.steps:
                # The audit sees eager code; compiled blocks communicate alike.
                around_step.enter_context(torch.compiler.set_stance("force_eager"))
                around_step.enter_context(audit)
            loss, grad_norm = trainer.step(step)
        # Reading the values waits for the device, so the clock stops after that.
        values = trainer.mean_over_ranks(loss), grad_norm.item()
        speed = args.batch_size * args.seq_len / (time.perf_counter() - since)
        if writer is not None:
            writer.write_step(step, *values, speed)
            progress.set_postfix_str(f"loss {values[0]:.3f}, {speed:.0f} tok/s", refresh=False)
    progress.close()
    if writer is not None:
        writer.write_audit(audit)


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    args = parse_args(argv)
    with process_group() as (device, reason):
        train(args, device, reason)


if __name__ == "__main__":
    main()
