"""Checkpoints of a training run: written while it goes on, complete or not there.

The state goes through DCP (torch.distributed.checkpoint): every rank writes its shards, and any
mesh can load them. `manifest` says what makes a folder a checkpoint. All ranks see one file system.
"""

import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tqdm import tqdm

from fp8_dist import Float8State, __version__, float8_layers
from scripts.train import manifest
from scripts.train.manifest import DamagedCheckpoint, RefusedCheckpoint, read_checkpoint

AUTO = "auto"


class Checkpoints:
    """Writes the checkpoints of a run, one at a time; all ranks make one and call it alike.

    Args:
        root: the folder of all checkpoints.
        keep: how many complete ones are kept.
        facts: what the manifests say of the run: "model", "recipe", "mesh" (sizes by axis).
    """

    def __init__(self, root: Path, keep: int, facts: Mapping[str, Any]) -> None:
        self.root = root
        self.keep = keep
        self.facts = {"torch": torch.__version__, "fp8_dist": __version__, **facts}
        self.is_first = dist.get_rank() == 0
        # Its own: the thread that writes communicates while the steps do.
        self.group = dist.new_group(backend="gloo")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[bool] | None = None
        if self.is_first:
            root.mkdir(parents=True, exist_ok=True)
            manifest.remove_leftovers(root)
        dist.barrier(self.group)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy the state after `step`, then write it beside the steps that follow.

        Waits for the checkpoint before, if it is still written.
        """
        self.wait()
        since = time.perf_counter()
        path = manifest.unfinished_folder_of(self.root, step)
        upload = dcp.async_save(
            dict(state),
            storage_writer=FileSystemWriter(path, sync_files=True),
            process_group=self.group,
        )
        assert isinstance(upload, Future)
        copied = time.perf_counter() - since
        self._pending = self._thread.submit(self._finish, upload, step, copied, since)

    def wait(self) -> bool:
        """Until the last checkpoint is complete; whether it is, on this rank."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else True

    def _finish(self, upload: Future[Any], step: int, copied: float, since: float) -> bool:
        """Wait until a rank's files are written; the first rank makes them a checkpoint."""
        try:
            upload.result()
            if self.is_first:
                path = manifest.publish(self.root, step, self.facts)
                seconds = time.perf_counter() - since
                tqdm.write(
                    f"checkpoint: {path} complete in {seconds:.1f} s, of which the steps waited "
                    f"{copied:.1f} s"
                )
                self._remove_old(step)
        except (Exception, CheckpointException) as error:  # DCP's own is no Exception
            # A full disk must not end a long run: the last good checkpoint is there, and the next
            # one may find room.
            if self.is_first:
                manifest.remove(manifest.unfinished_folder_of(self.root, step))
                tqdm.write(
                    f"checkpoint: step {step} NOT saved: {one_line(error)}; the last complete one "
                    f"is {self._newest()}"
                )
            return False
        return True

    def _remove_old(self, step: int) -> None:
        """Keep the one of `step`, and those before it; later ones are not this run's.

        Damaged ones don't count, and are left where they are: one may want to look at them.
        """
        older = [path for at, path in manifest.checkpoints_in(self.root).items() if at < step]
        for path in list(filter(_looks_complete, older))[self.keep - 1 :]:
            manifest.remove(path)

    def _newest(self) -> str:
        paths = list(manifest.checkpoints_in(self.root).values())
        return str(paths[0] if paths else None)


def _looks_complete(path: Path) -> bool:
    """Whether a checkpoint has all of its files, of the right sizes."""
    try:
        read_checkpoint(path, contents=False)
    except DamagedCheckpoint:
        return False
    return True


def one_line(error: BaseException) -> str:
    """The text of an error in one line, DCP's errors of several ranks included."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        rank, pair = next(iter(failures.items()))
        error = pair[0] if isinstance(pair, tuple) else pair
        return f"rank {rank}: {one_line(error)}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename or type(error).__name__})"
    return f"{type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0]}"


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State of a model and its optimizer for DCP, recipe state and generators included."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "float8": Float8State(model),
        "generators": {str(dist.get_rank()): generators()},
    }


def generators() -> dict[str, torch.Tensor]:
    """The states of this rank's random generators."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def load(
    path: Path, found: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Continue a model and its optimizer from a checkpoint; all ranks call it.

    Generators are restored where there are as many ranks as then.

    Args:
        path, found: of :func:`choose`.
        model, optimizer: of the same sizes as what was saved, on any mesh.
    """
    state = state_of(model, optimizer)
    # What a checkpoint may lack: histories of another recipe, which start anew, and the generators
    # of another kind of device.
    partial = {name: state.pop(name) for name in ("float8", "generators")}
    if math.prod(found["mesh"].values()) != dist.get_world_size():
        del partial["generators"]
    reader = FileSystemReader(path)
    dcp.load(state, storage_reader=reader)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(partial, planner=planner, storage_reader=reader)
    if "generators" in partial:
        mine = partial["generators"][str(dist.get_rank())]
        torch.set_rng_state(mine["cpu"])
        if "cuda" in mine:
            torch.cuda.set_rng_state(mine["cuda"])


def histories_kept(model: nn.Module) -> tuple[int, int]:
    """Number of amax histories that hold values, and number of all."""
    histories = [h for layer in float8_layers(model).values() for h in layer.histories.values()]
    return sum(h.history is not None for h in histories), len(histories)


def choose(root: Path, resume: str | None) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to continue from, with its manifest; the same on all ranks.

    The first rank looks, and tells the others. It prints which checkpoints it passes over.

    Args:
        root: the folder of the run's own checkpoints.
        resume: "auto": the newest complete one in `root`, if there is one; None: none; else the
            path of a checkpoint.

    Raises:
        RefusedCheckpoint: the checkpoint that was asked for is not complete, or `root` has later
            ones; on all ranks.
    """
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [_newest_complete(root) if resume == AUTO else _asked_for(root, resume)]
        except RefusedCheckpoint as error:
            answer = [str(error)]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], str):
        raise RefusedCheckpoint(answer[0])
    return answer[0]


def _asked_for(root: Path, resume: str | None) -> tuple[Path, dict[str, Any]] | None:
    if resume is None:
        return None
    path = Path(resume)
    found = read_checkpoint(path)
    newest = next(iter(manifest.checkpoints_in(root)), 0)
    if newest > found["step"]:
        raise RefusedCheckpoint(
            f"{root} has later checkpoints than {path}, up to step {newest}, which --resume auto "
            f"would take later on: move them away, or choose another --out"
        )
    return path, found


def _newest_complete(root: Path) -> tuple[Path, dict[str, Any]] | None:
    for path in manifest.checkpoints_in(root).values():
        try:
            return path, read_checkpoint(path)
        except DamagedCheckpoint as error:
            print(f"checkpoint: passed over: {error}", flush=True)
    print(f"checkpoint: no complete one in {root}: training starts from the beginning", flush=True)
    return None
