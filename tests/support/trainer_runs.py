"""Run transformers' Trainer and accelerate on the ranks of a pool, with a tiny Llama."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import update_float8_scales

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MICRO_BATCH, ACCUMULATION = 2, 2
FSDP: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}}


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes))


def dataset(length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Texts of 16 tokens: 8 random tokens, and the same again."""
    texts = torch.randint(0, 64, (length, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": text, "labels": text} for text in texts.repeat(1, 2)]


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Make accelerate treat ranks on CPUs as if they had GPUs.

    On CPUs accelerate silently leaves out FSDP.
    """
    known = ("gloo", DistributedType.MULTI_GPU)
    with (
        patch.object(PartialState, "_prepare_backend", lambda *args, **kwargs: known),
        patch.object(
            PartialState, "set_device", lambda state: setattr(state, "device", torch.device("cpu"))
        ),
    ):
        yield


@contextmanager
def launched(fsdp: bool = False) -> Iterator[None]:
    """Set up a rank of a pool for accelerate; ``fsdp``: as a rank with a GPU."""
    with ExitStack() as stack:
        if dist.is_initialized():
            rank, size = str(dist.get_rank()), str(dist.get_world_size())
            os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
            os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
        for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
            os.environ.pop(name, None)
        os.environ["FSDP_VERSION"] = "2"  # transformers 4 has no argument for it
        if fsdp:
            stack.enter_context(as_on_gpus())
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


class SequentialTrainer(Trainer):
    """A Trainer that does not shuffle texts."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Audit(TrainerCallback):
    """A callback that audits each step; it must come after the callback that updates scales."""

    def __init__(self) -> None:
        self.gathers: list[tuple[int, int]] = []  # of float8: (messages, elements)
        self.amaxes: list[int] = []  # numbers of int32 messages
        self._stack = ExitStack()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._audit = self._stack.enter_context(comm_audit())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._stack.close()
        found = [r for r in self._audit.rows if r.op == "all_gather" and r.dtype.itemsize == 1]
        self.gathers.append((sum(r.count for r in found), sum(r.elements for r in found)))
        self.amaxes.append(sum(r.count for r in self._audit.rows if r.dtype is torch.int32))


def train(
    folder: Path | str,
    callbacks: list[TrainerCallback],
    model: LlamaForCausalLM | None = None,
    *,
    resume: str | None = None,
    steps: int = 6,
    **arguments: Any,
) -> tuple[Trainer, dict[str, Any]]:
    """Train, and return the trainer and its losses by kind."""
    defaults = {
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": steps,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    }
    args = TrainingArguments(str(folder), **defaults | arguments)
    trainer = SequentialTrainer(
        model or llama(),
        args,
        train_dataset=dataset(),
        eval_dataset=dataset(8),
        callbacks=callbacks,
    )
    with patch("builtins.print"):  # PrinterCallback
        trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    losses = {key: [h[key] for h in history if key in h] for key in ("loss", "eval_loss")}
    return trainer, losses


def single_process(model: LlamaForCausalLM) -> list[float]:
    """The losses of a plain loop over the batches that both ranks of a Trainer see in six steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    texts = torch.stack([text["input_ids"] for text in dataset()])
    batches = texts.split(MICRO_BATCH)
    losses, count = [], 2 * ACCUMULATION
    for step in range(6):
        total = 0.0
        for batch in batches[step * count : (step + 1) * count]:
            loss = model(input_ids=batch, labels=batch).loss / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_float8_scales(model)
        losses.append(total)
    return losses
