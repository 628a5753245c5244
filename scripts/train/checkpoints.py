"""Checkpoints of a training run, which are never incomplete.

DCP (torch.distributed.checkpoint) saves the state: every rank writes its shards, and any mesh can
load them. They are written to a hidden folder, which is renamed once all ranks have written, so a
folder with the final name is complete. All ranks must share a file system.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fp8_dist import Float8State
from scripts.train.options import checkpoints_in

KEPT = 2  # the newest checkpoints; older ones are deleted


def save(root: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the checkpoint after `step`, and delete old ones; called on all ranks."""
    path = root / f"step-{step:08d}"
    unfinished = root / f".{path.name}.unfinished"
    if dist.get_rank() == 0:  # before others write, because DCP first plans on all ranks
        shutil.rmtree(unfinished, ignore_errors=True)
    writer = FileSystemWriter(unfinished, sync_files=True)
    dcp.save(_state_of(model, optimizer), storage_writer=writer)
    if dist.get_rank() == 0:
        unfinished.rename(path)
        for old in list(checkpoints_in(root).values())[KEPT:]:
            shutil.rmtree(old)
    dist.barrier()


def load_newest(root: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint into a model and its optimizer, on any mesh.

    Returns:
        The step after which it was written; 0 if there is no checkpoint.
    """
    newest = [next(iter(checkpoints_in(root).items()), None)]
    dist.broadcast_object_list(newest)  # what rank 0 sees
    if newest[0] is None:
        return 0
    step, path = newest[0]
    state = _state_of(model, optimizer)
    dcp.load(state, storage_reader=FileSystemReader(path))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return step


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "float8": Float8State(model)}
