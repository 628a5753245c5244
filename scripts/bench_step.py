"""Times a training step of the reference model beside bf16 and torchao, in one run.

    python scripts/bench_step.py --compile --assert 1 --write

One process, no communication: forward, backward, and the scales of the weights afterwards
(precompute, or the sync of delayed scales) of the model of scripts/llama.py, in bf16. All variants
take turns; medians are compared. `--compile` compiles each transformer block. Ratios carry over
between machines of a kind, times don't.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from llama import MODELS, Llama
from torch import nn
from tqdm import tqdm

from fp8_dist import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)

try:
    from torchao import float8 as torchao_float8
except ImportError:
    torchao_float8 = None

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
TORCHAO = {"torchao tensorwise": "tensorwise", "torchao rowwise": "rowwise"}
Variant = tuple[nn.Module, Callable[[nn.Module], None]]


def not_output(_: nn.Module, name: str) -> bool:
    """The head stays in high precision."""
    return name != "output"


def variant(name: str, args: argparse.Namespace, device: torch.device) -> Variant:
    """A model from the same seed, and what is called after its optimizer's step."""
    with device:
        model = Llama(MODELS[args.model]).bfloat16()
    call: Callable[[nn.Module], None] = lambda model: None  # noqa: E731
    if name in TORCHAO:
        config = torchao_float8.Float8LinearConfig.from_recipe_name(TORCHAO[name])
        torchao_float8.convert_to_float8_training(model, module_filter_fn=not_output, config=config)
    elif name != "bf16":
        ours = Float8LinearConfig.from_recipe_name(name)
        convert_to_float8_training(model, module_filter_fn=not_output, config=ours)
        call = precompute_float8_dynamic_scale
        if name == Float8LinearRecipeName.DELAYED.value:
            call = sync_float8_amax_and_scale_history
    if args.compile:
        for block in model.layers:
            block.compile(fullgraph=True, dynamic=False)
    return model, call


def seconds_of_a_step(variant: Variant, tokens: torch.Tensor) -> float:
    """Forward, backward, and what follows the optimizer's step."""
    model, after = variant
    start = time.perf_counter()
    model(tokens).logsumexp(-1).mean().backward()
    after(model)
    if tokens.is_cuda:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    model.zero_grad()
    return elapsed


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Median milliseconds of a step by variant, in turns after the first steps, which compile."""
    names = ["bf16", *(recipe.value for recipe in Float8LinearRecipeName)]
    names += list(TORCHAO) if torchao_float8 is not None else []
    tokens = torch.randint(256, (args.batch_size, args.seq_len), device=device)
    variants = {}
    for name in tqdm(names, desc="warm-up", disable=None):
        variants[name] = variant(name, args, device)
        for _ in range(3):
            seconds_of_a_step(variants[name], tokens)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in tqdm(range(args.repeat), desc="steps", disable=None):
        for name in names:
            times[name].append(seconds_of_a_step(variants[name], tokens))
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def table(medians: dict[str, float]) -> str:
    """Markdown: a row per variant, as a multiple of bf16 and of torchao's like recipe."""
    lines = ["| variant | ms | x bf16 | faster than torchao |", "|---|---|---|---|"]
    for name, median in medians.items():
        ratio = speedup(name, medians)
        shown = "" if ratio is None else f"{ratio:.2f}x"
        lines.append(f"| {name} | {median:.1f} | {median / medians['bf16']:.2f} | {shown} |")
    return "\n".join(lines)


def speedup(name: str, medians: dict[str, float]) -> float | None:
    """torchao's time over ours, for a recipe of ours; None where there is nothing to compare."""
    if name == "bf16" or name in TORCHAO:
        return None
    peer = "torchao rowwise" if name.startswith("rowwise") else "torchao tensorwise"
    return medians[peer] / medians[name] if peer in medians else None


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="debug")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    parser.add_argument(
        "--assert",
        dest="least",
        type=float,
        metavar="RATIO",
        help="fail unless tensorwise is faster than torchao's by this",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    medians = measure(args, device)
    kind = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU ({platform.machine()})"
    title = (
        f"{args.model} model, {args.batch_size} x {args.seq_len} tokens, "
        f"{'compiled blocks' if args.compile else 'eager'}, {kind}, one thread, "
        f"torch {torch.__version__}, medians of {args.repeat}"
    )
    print(f"{title}\n\n{table(medians)}")
    if args.json is not None:
        args.json.write_text(json.dumps(medians))
    if args.write:
        update_page("compiled" if args.compile else "eager", title, table(medians))
    if args.least is None:
        return 0
    ratio = speedup("tensorwise", medians)
    return 0 if ratio is not None and ratio >= args.least else 1


def update_page(section: str, title: str, text: str) -> None:
    """Replaces one section of the page, and leaves the others."""
    head = (
        "<!-- Made by `python scripts/bench_step.py --write`, with and without `--compile`. -->\n\n"
        "# Benchmarks\n"
    )
    sections = dict[str, str]()
    if PAGE.exists():
        for part in PAGE.read_text().split("\n## ")[1:]:
            name, _, body = part.partition("\n")
            sections[name] = body.strip()
    sections[f"A training step, {section}"] = f"{title}.\n\n{text}"
    body = "".join(f"\n## {name}\n\n{sections[name]}\n" for name in sorted(sections))
    PAGE.write_text(head + body)


if __name__ == "__main__":
    sys.exit(main())
