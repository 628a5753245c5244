"""Trains the reference Llama on text, in bf16 or with float8 GEMMs and communication.

    torchrun --nproc-per-node 4 scripts/train.py --recipe tensorwise --dp 2 --tp 2

Byte-level language modelling; masters and optimizer state are fp32 and compute is bf16 in every
recipe. With the same --seed, --batch-size and --seq-len, runs of all recipes and meshes start
from the same weights and see the same data. Runs on CUDA with NCCL, or on CPUs with gloo; without
torchrun it is a single process.
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import VOCAB_SIZE, Corpus
from llama import MODELS, Llama
from options import BF16, make_parser, parse_options
from run_writer import RunWriter
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from fp8_dist import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.config import Operand
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import clip_grad_norm_
from fp8_dist.tensor_parallel import apply_tp_plan, llama_tp_plan

MAX_GRAD_NORM = 1.0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses and checks the options; errors end the process with status 2, on every rank alike."""
    return parse_options(make_parser(__doc__), argv)


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
    backend = "nccl" if use_cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device, reason
        # A rank that leaves while another still ends its last collective may abort that one (gloo).
        dist.barrier()
    finally:
        dist.destroy_process_group()


def float8_config(recipe: str) -> Float8LinearConfig | None:
    """The config of a recipe, its weights gathered in float8 where it allows that; None: bf16."""
    if recipe == BF16:
        return None
    config = Float8LinearConfig.from_recipe_name(recipe)
    one_copy = config.gather_cast("weight") is not None
    return dataclasses.replace(config, enable_fsdp_float8_all_gather=one_copy)


def calls_after_step(
    config: Float8LinearConfig | None, precompute: bool
) -> list[Callable[[nn.Module], None]]:
    """What to call with the model, on all ranks, after each step of the optimizer.

    precompute: compute the scales of all weights together. That helps dynamic scales, and serves
        the weight that FSDP2 gathers in float8: one that it gathers in high precision is another
        tensor, which is scaled when it has been gathered.
    """
    calls: list[Callable[[nn.Module], None]] = []
    if config is None:
        return calls
    operands: tuple[Operand, ...] = get_args(Operand)
    if any(cast.delayed for operand in operands for cast in config.casts(operand)):
        calls.append(sync_float8_amax_and_scale_history)
    weight = config.gather_cast("weight")
    if precompute and weight is not None and not weight.delayed:
        calls.append(precompute_float8_dynamic_scale)
    return calls


def build_model(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Llama:
    """Makes the sharded model: meta, converted, tensor-parallel, compiled, FSDP2, initialized.

    The FSDP2 axis exists also when it has one rank: that gives fp32 masters with bf16 compute the
    same way on every mesh, and float8 weights are cast from the masters.
    """
    config = dataclasses.replace(
        MODELS[args.model], vocab_size=VOCAB_SIZE, max_seq_len=args.seq_len
    )
    with torch.device("meta"):
        model = Llama(config)
    converted = float8_config(args.recipe)
    if converted is not None:
        convert_to_float8_training(
            model, module_filter_fn=lambda _, name: name != "output", config=converted
        )
    if args.tp > 1:
        plan = llama_tp_plan(model, sequence_parallel=args.sequence_parallel)
        apply_tp_plan(model, mesh["tp"], plan)
    if args.compile:
        for block in model.layers:
            block.compile(fullgraph=True)
    # Activations are bf16 from the embedding on; casting a block's inputs would only round the
    # rotary tables.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    model.to_empty(device=device)
    model.init_weights(args.seed)
    return model


class Trainer:
    """A model, its optimizer and its data; `step` makes one training step."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> None:
        self.args = args
        self.corpus: Corpus = args.corpus
        self.dp = mesh["dp"]
        self.device = device
        self.model = build_model(args, mesh, device)
        # Without sequence parallelism the norms are not on the tensor-parallel axis, and kernels
        # over many DTensors do not mix meshes.
        by_mesh: dict[DeviceMesh, list[nn.Parameter]] = {}
        for parameter in self.model.parameters():
            assert isinstance(parameter, DTensor)
            by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters} for parameters in by_mesh.values()],
            lr=args.lr,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, args.warmup, args.steps)
        )
        self.calls_after_step = calls_after_step(float8_config(args.recipe), args.precompute)

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
        for call in self.calls_after_step:
            call(self.model)
        return loss.detach(), grad_norm

    def mean_over_ranks(self, loss: Tensor) -> float:
        """Averages a scalar over the data-parallel ranks."""
        total = loss.clone()
        dist.all_reduce(total, group=self.dp.get_group())
        return total.item() / self.dp.size()


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """Returns what the peak learning rate is multiplied by: up linearly, then down to (almost) 0.

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

    reason: why the device is not another one, for people.
    """
    writer = RunWriter(args) if dist.get_rank() == 0 else None
    mesh = init_device_mesh(device.type, (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    trainer = Trainer(args, mesh, device)
    if writer is not None:
        writer.write_config(trainer.model, device, reason)
    progress = tqdm(range(1, args.steps + 1), desc=args.recipe, unit="step", disable=writer is None)
    pending: list[tuple[int, Tensor, Tensor]] = []
    since = time.perf_counter()
    audit = comm_audit(mesh)
    for step in progress:
        with ExitStack() as around_step:
            if step == args.steps:
                # The audit sees eager code; compiled blocks communicate alike.
                around_step.enter_context(torch.compiler.set_stance("force_eager"))
                around_step.enter_context(audit)
            pending.append((step, *trainer.step(step)))
        if step % args.log_every and step != args.steps:
            continue
        # Reading values waits for the device, so the clock stops after that.
        values = [(at, trainer.mean_over_ranks(loss), norm.item()) for at, loss, norm in pending]
        seconds = (time.perf_counter() - since) / len(pending)
        speed = args.batch_size * args.seq_len / seconds
        if writer is not None:
            for at, loss, grad_norm in values:
                writer.write_step(at, loss, grad_norm, speed)
            shown = f"loss {values[-1][1]:.3f}, {speed:.0f} tok/s"
            progress.set_postfix_str(shown, refresh=False)
        pending.clear()
        since = time.perf_counter()
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
