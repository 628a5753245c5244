"""The training steps of `scripts.measure.soak`, and the measurements between them."""

import argparse
import gc
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from scripts.common.llama import LlamaConfig
from scripts.common.markdown import table
from scripts.common.models import after_step, build
from scripts.common.options import mesh_type
from scripts.common.ranks import run_on_ranks
from scripts.common.recipes import OURS
from scripts.common.report import Check, finish

MESHES = ("dp=2", "tp=2", "tp=2, checkpointed")
SIZES = LlamaConfig(64, 2, 4, 2, 128, vocab_size=256, max_seq_len=32)
TABLES = (dict, list, set, deque, WeakKeyDictionary, WeakValueDictionary, WeakSet)
# The allocator may take or return this much between two measurements.
ALLOWED_MB = 24


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    rss: int  # resident memory in MB
    tensors: int  # live tensors with a Python object
    entries: int  # of all tables of the library together
    works: int  # collectives whose result was not waited for


def table_sizes() -> dict[str, int]:
    """The number of entries of each table that the library has at module or class level."""
    sizes: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "fp8_dist":
            continue
        for owner, values in [("", vars(module)), *_classes(name, module)]:
            for key, value in values.items():
                if key.startswith("__"):
                    continue
                if isinstance(value, TABLES):
                    sizes[f"{name}.{owner}{key}"] = len(value)
                elif callable(getattr(value, "cache_info", None)) and value.__module__ == name:
                    sizes[f"{name}.{owner}{key} (cache)"] = value.cache_info().currsize
    return sizes


def _classes(name: str, module: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in vars(module).items():
        is_defined_here = isinstance(value, type) and value.__module__ == name
        if is_defined_here and not issubclass(value, Enum | tuple):  # their tables are Python's
            yield f"{key}.", dict(vars(value))


def usage() -> Usage:
    """Collect garbage, then measure what this process holds."""
    time.sleep(0.2)  # gloo's threads release sent tensors a little later
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    # (type, not isinstance: the __class__ of some objects imports something, or fails.)
    return Usage(
        rss=pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
        tensors=sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        entries=sum(table_sizes().values()),
        works=torch._C._distributed_c10d._get_work_registry_size(),
    )


def train(model: nn.Module, recipe: str, steps: range, progress: Any) -> None:
    """Train by SGD on random tokens, with an evaluation after every tenth step and the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    update = after_step(recipe, True)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(SIZES.vocab_size, (2, 17), generator=generator)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update(model)
        if step % 10 == 0 or step == steps[-1]:
            with torch.no_grad():
                model(tokens[:, :-1])
        progress.update()


Turn = tuple[str, str, Usage, Usage]


def soak(
    steps: int, recipes: Sequence[str] = OURS
) -> tuple[list[Turn], dict[str, tuple[int, int]]]:
    """Run all turns twice, on each rank. Return each turn, with usage after a third and at the end.

    Also return the entries of each table after the first and second round, with no model alive.
    """
    meshes = {
        text: init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for text in MESHES
        if (sizes := mesh_type(text.partition(", ")[0]))
    }
    turns = list(product(range(2), recipes, MESHES))
    steps_of_turn = max(6, steps // len(turns))
    turns_done: list[Turn] = []
    kept: dict[int, dict[str, int]] = {}
    progress = tqdm(total=steps_of_turn * len(turns), unit="step", disable=dist.get_rank() != 0)
    for number, recipe, text in turns:
        model = build(recipe, SIZES, meshes[text])
        if "checkpointed" in text:
            model.layers = nn.ModuleList(map(checkpoint_wrapper, model.layers))
        # In two calls: FSDP2 keeps buffers of its last gradients from the second call on.
        train(model, recipe, range(steps_of_turn // 6), progress)
        train(model, recipe, range(steps_of_turn // 6, steps_of_turn // 3), progress)
        early = usage()
        train(model, recipe, range(steps_of_turn // 3, steps_of_turn), progress)
        turns_done.append((recipe, text, early, usage()))
        del model
        gc.collect()
        kept[number] = table_sizes()
    progress.close()
    return turns_done, {name: (kept[0].get(name, 0), last) for name, last in kept[1].items()}


def soak_table(turns: Sequence[Turn]) -> str:
    """A table with a line per turn: each figure after a third of the turn and at its end."""
    head = ["recipe", "mesh", "RSS in MB", "live tensors", "table entries", "works"]
    lines = []
    for recipe, mesh, early, late in turns:
        figures = zip(astuple(early), astuple(late), strict=True)
        lines.append([recipe, mesh, *(f"{a} / {b}" for a, b in figures)])
    return table(head, lines)


def checks_of(turns: Sequence[Turn], kept: dict[str, tuple[int, int]]) -> list[Check]:
    """The checks of one rank."""
    ends = [(f"{recipe} on {mesh}", early, late) for recipe, mesh, early, late in turns]
    broken = {
        "no growth of resident memory": [n for n, a, b in ends if b.rss > a.rss + ALLOWED_MB],
        "no growth of live tensors": [n for n, a, b in ends if b.tensors > a.tensors],
        "no growth of entries of tables": [n for n, a, b in ends if b.entries > a.entries],
        "every collective is waited for": [n for n, _, b in ends if b.works],
        "no table grows in round 2": [f"{n} {a} -> {b}" for n, (a, b) in kept.items() if b > a],
    }
    return [Check(f"{rule} {but or ''}".strip(), not but) for rule, but in broken.items()]


def run(args: argparse.Namespace) -> int:
    results = run_on_ranks(2, soak, args.steps)
    turns, kept = results[0]
    lines = [[f"`{name}`", str(a), str(b)] for name, (a, b) in sorted(kept.items())]
    tables = table(["table", "after round 1", "after round 2"], lines)
    by_rank = [checks_of(*result) for result in results]
    checks = [check for checks in zip(*by_rank, strict=True) for check in dict.fromkeys(checks)]
    return finish(args, {"soak": soak_table(turns), "tables": tables}, checks)
