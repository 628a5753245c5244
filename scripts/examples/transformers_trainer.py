"""Train a small Llama in float8 with transformers' Trainer: FSDP2, evaluation, checkpoints.

    torchrun --nproc-per-node 2 scripts/examples/transformers_trainer.py --out runs/trainer

Tokens are the bytes of Python's standard library. To continue from the last checkpoint, run it
again with --resume and more --steps. On CPUs accelerate uses DDP, not FSDP2. Needs the extra hf.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fp8_dist import conversion_summary
from fp8_dist.integrations.transformers import Float8Callback

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def pieces(files: list[Path], length: int = 128) -> list[dict[str, torch.Tensor]]:
    """The bytes of all files, cut into pieces that are both inputs and labels."""
    text = bytearray(b"".join(file.read_bytes() for file in files))
    tokens = torch.frombuffer(text, dtype=torch.uint8)[: len(text) // length * length].long()
    return [{"input_ids": piece, "labels": piece} for piece in tokens.view(-1, length)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/trainer")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --out")
    options = parser.parse_args(argv)

    arguments = TrainingArguments(
        options.out,
        fsdp=True,
        fsdp_config={"version": 2},
        bf16=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=options.steps,
        learning_rate=3e-3,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=max(1, options.steps // 2),
        save_steps=max(1, options.steps // 2),
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    torch.manual_seed(0)
    trainer = Trainer(
        LlamaForCausalLM(CONFIG),
        arguments,
        train_dataset=pieces(files[1:40]),
        eval_dataset=pieces(files[:1]),
        callbacks=[Float8Callback()],  # the only change that float8 needs
    )
    if trainer.is_world_process_zero():
        print(conversion_summary(trainer.model))
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model(f"{options.out}/final")  # plain transformers can load it


if __name__ == "__main__":
    main()
