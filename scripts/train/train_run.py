"""A training run of `scripts.train.train`: its model, data, steps and processes."""

import argparse
import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from fp8_dist.debug import comm_audit, float8_stats, record
from fp8_dist.debug.rows import summarized
from fp8_dist.fsdp import clip_grad_norm_, micro_batches, set_gradient_transport
from scripts.common.corpus import VOCAB_SIZE
from scripts.common.gloo import use_one_thread_per_group
from scripts.common.llama import MODELS, Llama, LlamaConfig
from scripts.common.models import after_step, build, data_parallel_mesh, multiply_in_fp32
from scripts.train import checkpoints
from scripts.train.options import CHECKPOINTS
from scripts.train.run_writer import COLLECTIVES, memory_bytes, run_writer, write_audit

MAX_GRAD_NORM = 1.0
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}  # of process groups, by type of device


class Trainer:
    """A model, its optimizer and its data; `step` makes one training step.

    FSDP2 is applied even if the dp axis has one rank. So on every mesh it casts the fp32 masters to
    the compute dtype, and float8 weights are cast from the masters.
    """

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
        self.args = args
        self.dp = data_parallel_mesh(mesh)
        self.device = device
        self.model = build(
            args.recipe,
            sizes_of(args),
            mesh,
            device,
            shard=True,
            compiled=args.compile,
            seed=args.seed,
            reduce_transport=args.reduce_transport,
            param_dtype=torch.bfloat16 if args.compute == "bf16" else torch.float32,
        )
        if device.type == "cpu":
            multiply_in_fp32(self.model)
        if args.micro_batches is not None:
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
        if args.gradient_transport is not None:
            nodes, per_node = None, args.gpus_per_node
            if per_node is not None:
                nodes = init_device_mesh(device.type, (dist.get_world_size() // per_node, per_node))
            how = {"nodes": nodes, "within_nodes": args.within_nodes}
            set_gradient_transport(self.model, args.gradient_transport, **how)
        self.after_step = after_step(args.recipe, sharded=True)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=args.lr,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            # On CPUs a fused step computes the last elements of a shard differently.
            fused=args.micro_batches is None,
        )

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Train on the batch of `step`, counted from 1.

        Returns:
            Terms of the mean loss, fp32 `[n]`, to be summed over all data-parallel ranks; and the
            norm of the full gradient before clipping, an fp32 scalar. Both are on the device.
        """
        count, losses = self.args.micro_batches, torch.zeros(1, device=self.device)
        if count is None:
            losses += self.backward(step, self.dp.get_local_rank(), self.dp.size())
        else:
            losses = losses.repeat(count)
            for index, weight in micro_batches(count, self.dp):
                losses[index] += self.backward(step, index, count, weight)
        exact = count is not None
        grad_norm = clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM, exact=exact)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_step(self.model)
        return losses, grad_norm

    def backward(self, step: int, part: int, parts: int, weight: float = 1.0) -> Tensor:
        """Compute gradients for a part of the batch of `step`, and return its share of the loss.

        With `--micro-batches` gradients are sums over parts, otherwise means over ranks.
        """
        args = self.args
        inputs, targets = args.corpus.batch(
            seed=args.seed,
            step=step,
            batch_size=args.batch_size,
            seq_len=args.seq_len,
            rank=part,
            ranks=parts,
        )
        logits = self.model(inputs.to(self.device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(self.device))
        share = loss * (weight / parts)
        (loss if args.micro_batches is None else share).backward()
        return share.detach()

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        args = self.args
        return float(args.lr * learning_rate_factor(step - 1, args.warmup, args.steps))

    def whole_loss(self, losses: Tensor) -> float:
        """The mean loss: sum the losses of `step` over the data-parallel ranks."""
        dist.all_reduce(losses, group=self.dp.get_group())
        return losses.double().sum().item()


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """The factor of the peak learning rate at a step (from 0): linear warmup, then linear decay."""
    if step < warmup:
        return (step + 1) / warmup
    return (steps - step) / max(steps - warmup, 1)


def sizes_of(args: argparse.Namespace) -> LlamaConfig:
    """The sizes of the model."""
    model = MODELS[args.model]
    return dataclasses.replace(model, vocab_size=VOCAB_SIZE, max_seq_len=args.seq_len)


def described(args: argparse.Namespace, device: torch.device, reason: str) -> str:
    """A line about the model, the mesh, the device and the text.

    reason: why the device is not a GPU; "" if there is nothing to explain.
    """
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Llama(sizes_of(args)).parameters())
    ep = f"ep {args.ep} x " if args.ep > 1 else ""
    where = f"{device.type} with {BACKENDS[device.type]}{f' ({reason})' if reason else ''}"
    return (
        f"{args.model} Llama, {parameters:,} parameters, dp {args.dp} x {ep}tp {args.tp} on "
        f"{where}; {len(args.corpus.text):,} bytes of {args.corpus.source}"
    )


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Run the steps. Rank 0 shows progress, and writes the files of `--out`."""
    experts = {"ep": args.ep} if args.ep > 1 else {}
    axes = {"dp": args.dp, **experts, "tp": args.tp}
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    trainer = Trainer(args, mesh, device)
    is_first, folder, done = dist.get_rank() == 0, args.out / CHECKPOINTS, 0
    if args.resume:
        done = checkpoints.load_newest(folder, trainer.model, trainer.optimizer)
        if is_first:
            print(f"checkpoint: continues in {folder} after step {done}", flush=True)
    if done >= args.steps:
        return
    stats = None
    if args.stats_every is not None:
        stats = float8_stats(trainer.model, every=args.stats_every)
    writer = run_writer(args, trainer.model, stats, device, first=done + 1)
    recorder = None
    if args.record is not None:
        recorder = record(trainer.model, args.out / "recordings", layers=args.record)
    shown = {"initial": done, "total": args.steps, "disable": not is_first}
    name = args.out.resolve().name
    progress = tqdm(range(done + 1, args.steps + 1), name, unit="step", **shown)
    audit = comm_audit(mesh)  # for the last step
    for step in progress:
        last = step == args.steps
        since = time.perf_counter()
        recorded = nullcontext() if stats is None else stats.at(step)
        watched = nullcontext() if recorder is None else recorder.at(step)
        known = 0 if stats is None else len(stats.anomalies)
        with recorded, watched, audit if last else nullcontext():
            losses, grad_norm = trainer.step(step)
        if is_first and stats is not None and len(stats.anomalies) > known:
            tqdm.write(f"anomaly: {summarized(stats.anomalies[known:])}")
        # Reading the values waits for the device, so the clock is read after them.
        mean, norm = trainer.whole_loss(losses), grad_norm.item()
        speed = args.batch_size * args.seq_len / (time.perf_counter() - since)
        numbers = {"loss": mean, "tokens_per_second": speed, "grad_norm": norm}
        numbers |= {"learning_rate": trainer.learning_rate(step)}
        writer.log(step, **numbers, memory_bytes=memory_bytes(device))
        progress.set_postfix_str(f"loss {mean:.3f}, {speed:.0f} tok/s", refresh=False)
        if last:
            # Before the last checkpoint: a run that is resumed from it writes nothing more.
            progress.update()
            progress.close()
            write_audit(writer, audit)
        if args.checkpoint_every is not None and (last or step % args.checkpoint_every == 0):
            writer.sync()
            checkpoints.save(folder, step, trainer.model, trainer.optimizer)


def choose_device(local_rank: int, local_ranks: int) -> tuple[torch.device, str]:
    """Return this rank's device, and the reason if GPUs are left unused ("" otherwise).

    Ranks that share a GPU cannot form an NCCL group, so they all train on the CPU instead.
    """
    gpus = torch.cuda.device_count()
    if local_ranks <= gpus:
        return torch.device("cuda", local_rank), ""
    reason = f"{local_ranks} ranks need as many GPUs, this machine has {gpus}" if gpus else ""
    return torch.device("cpu"), reason


def train_rank(args: argparse.Namespace) -> None:
    """Train as a rank of the default group."""
    device, _ = choose_device(dist.get_rank(), dist.get_world_size())
    train(args, device)


@contextmanager
def process_group(store: dist.Store | None = None) -> Iterator[tuple[torch.device, str]]:
    """Join the ranks of torchrun, or create a group of one; yield the result of `choose_device`.

    store: where the ranks meet; None: the launcher's.
    """
    device, reason = choose_device(
        int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    use_one_thread_per_group()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if store is None:
        store = dist.HashStore()
        if "RANK" in os.environ:
            store = next(dist.rendezvous("env://"))[0]
            # torchrun has one store for all restarts, where gloo would find ranks that have ended.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt/{attempt}", store)
    dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=ranks)
    yield device, reason
    # gloo may abort a rank's last collective if another rank leaves first.
    dist.barrier()
    dist.destroy_process_group()


def run(args: argparse.Namespace) -> None:
    """Train as a rank of the launcher; rank 0 prints what is trained, and what a step sends."""
    with process_group() as (device, reason):
        is_first = dist.get_rank() == 0
        if is_first:
            print(described(args, device, reason), flush=True)
        train(args, device)
        if is_first:
            table, _, _ = (args.out / COLLECTIVES).read_text().partition("\n\n")
            print(f"\nCollectives of one training step, as one rank sees them:\n{table}\n")
