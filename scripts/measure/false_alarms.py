"""Healthy training under float8_stats, in every recipe: how many anomalies are reported?

    python -m scripts.measure.false_alarms --steps 1000 --assert

Each recipe trains a small Llama on text with warmup, a cosine schedule and clipped gradients, and
every cast is recorded in every step. Beside the number of anomalies, the table has the most extreme
value of each kind, which tells how far healthy training stays from the limits. (The SQNR of casts
that saturate by a lag is shown, and the lag alone is judged.)
"""

import math
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, get_args

import torch
import torch.nn.functional as F
from tqdm import tqdm

from fp8_dist import Float8LinearConfig, Float8LinearRecipeName
from fp8_dist.debug import AnomalyLimits, CastStats, float8_stats
from fp8_dist.recipe import Operand
from scripts.common.corpus import VOCAB_SIZE, load_corpus
from scripts.common.llama import LlamaConfig
from scripts.common.markdown import table
from scripts.common.models import after_step, build
from scripts.common.options import positive
from scripts.common.report import Check, finish, make_parser, start

FP32_BLOCKS = "blockwise_fp32"  # blockwise with scales that are not powers of two
RECIPES = [*(recipe.value for recipe in Float8LinearRecipeName), FP32_BLOCKS]
SEQ_LEN, BATCH_SIZE = 64, 4
SIZES = LlamaConfig(64, 2, 4, 2, 128, vocab_size=VOCAB_SIZE, max_seq_len=SEQ_LEN)
LIMITS = AnomalyLimits()


def run(recipe: str, steps: int, seed: int) -> tuple[list[str], dict[str, float], list[float]]:
    """Train in a recipe: the anomalies as texts, the extreme values by kind, and the losses."""
    corpus = load_corpus(None, seq_len=SEQ_LEN)
    changes: dict[str, Any] = {}
    if recipe == FP32_BLOCKS:
        recipe, config = (
            "blockwise",
            Float8LinearConfig.from_recipe_name("blockwise", scale_format="fp32"),
        )
        changes = {
            f"cast_config_{name}": getattr(config, f"cast_config_{name}")
            for name in get_args(Operand)
        }
    model, update = build(recipe, SIZES, seed=seed, **changes), after_step(recipe, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    warmup = max(1, steps // 50)
    stats, losses = float8_stats(model), []
    extremes = {"jump": -math.inf, "lag": -math.inf, "underflow": 0.0, "SQNR": math.inf}
    recent: dict[tuple[str, ...], deque[float]] = defaultdict(lambda: deque(maxlen=16))
    for step in tqdm(range(steps), desc=recipe, disable=None):
        factor = min((step + 1) / warmup, (1 + math.cos(math.pi * step / steps)) / 2)
        optimizer.param_groups[0]["lr"] = 3e-3 * factor
        inputs, targets = corpus.batch(seed=seed, step=step, batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
        with stats:
            loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update(model)
        losses.append(loss.item())
        for row in stats.rows:
            assert isinstance(row, CastStats)
            amaxes = recent[row.fqn, row.operand, *row.gemms]
            if usual := max(amaxes, default=0.0):
                extremes["jump"] = max(extremes["jump"], math.log2(row.amax / usual))
            amaxes.append(row.amax)
            if row.delayed:
                fits = row.scale * torch.finfo(row.dtype).max
                extremes["lag"] = max(extremes["lag"], math.log2(row.amax / fits))
            extremes["underflow"] = max(extremes["underflow"], row.underflow)
            extremes["SQNR"] = min(extremes["SQNR"], row.sqnr)
        stats.rows.clear()
    return [str(anomaly) for anomaly in stats.anomalies], extremes, losses


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = make_parser("scripts.measure.false_alarms", __doc__, asserts="an anomaly is reported")
    parser.add_argument("--steps", type=positive, default=1000, help="of each run; %(default)s")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, metavar="RECIPE")
    parser.add_argument("--seed", type=int, default=0)
    args = start(parser, argv)
    rows, alarms = [], []
    for recipe in args.recipes:
        found, extremes, losses = run(recipe, args.steps, args.seed)
        alarms += [f"{recipe}: {text}" for text in found]
        rows.append([recipe, f"{losses[0]:.2f}", f"{losses[-1]:.2f}", str(len(found))])
        rows[-1] += [f"{value:.2f}" if math.isfinite(value) else "" for value in extremes.values()]
    shown = [getattr(LIMITS, name) for name in ("jump", "lag", "underflow", "sqnr")]
    header = ["recipe", "first loss", "last loss", "anomalies"]
    units = ("jump, octaves", "lag, octaves", "underflow, %", "lowest SQNR, dB")
    header += [f"{unit} (limit {limit:g})" for unit, limit in zip(units, shown, strict=True)]
    tables = {f"Anomalies in {args.steps:,} steps": table(header, rows, "lr")}
    if alarms:
        tables["They are"] = "\n".join(alarms)
    return finish(args, tables, [Check(f"{len(alarms)} anomalies: none", not alarms)])


if __name__ == "__main__":
    sys.exit(main())
