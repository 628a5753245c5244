"""Helpers for recordings of several ranks: their casts and values, and a planted fault."""

import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8_dist import Float8Tensor
from fp8_dist.debug import Recorder
from fp8_dist.debug.replay.comparisons import Cast
from fp8_dist.debug.replay.findings import Replay
from fp8_dist.fsdp.weight import Float8AllGatherWeight
from fp8_dist.mesh import local_tensor


def written(recorder: Recorder) -> Path:
    """Make a recorder write, and return the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warnings name the folder
        return recorder.write()


def casts(folder: Path) -> list[Cast]:
    """The casts of a recording without findings, with the parts of all ranks."""
    replay = Replay(folder)
    assert not replay.findings
    return replay.casts


def values(folder: Path, rank: int | None = None) -> dict[tuple[Any, ...], list[list[float]]]:
    """For each cast of a layer, all values in high precision and all dequantized values, sorted.

    Weights count once, even if several micro-batches or ranks cast the same weight. ``rank``: count
    only this rank's casts, for recordings in which every rank casts the same as one device.
    """
    found: dict[tuple[Any, ...], list[Cast]] = defaultdict(list)
    for cast in casts(folder):
        first = cast.parts[0]
        is_again = first["operand"] == "weight" and (first["call"], first["rank"]) > (0, 0)
        if rank in (None, first["rank"]) and not is_again:
            found[first["fqn"], first["operand"], *first["gemms"]].append(cast)
    return {
        key: [
            torch.cat([t.reshape(-1) for t in tensors]).double().sort().values.tolist()
            for tensors in zip(
                *((c.high, Float8Tensor.of(c.low, c.high.dtype).dequantize()) for c in each),
                strict=True,
            )
        ]
        for key, each in found.items()
    }


def different(ranks_folder: Path, device_folder: Path) -> list[tuple[Any, ...]]:
    """The casts whose values on ranks differ from one device, which every rank recorded."""
    mine, its = values(ranks_folder), values(device_folder, rank=0)
    assert mine.keys() == its.keys()
    return [key for key, each in its.items() if mine[key] != each]


def corrupt_gathers(fault: str, shape: Sequence[int], patch: pytest.MonkeyPatch) -> None:
    """Corrupt each weight of a shape after FSDP2's gather on this rank: its scales, or a byte."""
    gather = Float8AllGatherWeight.fsdp_post_all_gather

    def corrupted(self: Any, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        made = gather(self, outputs, metadata, dtype, out=out)
        weight = local_tensor(out) if made is None else made[0]
        assert isinstance(weight, Float8Tensor)
        if weight.shape == tuple(shape):
            if fault == "scale":
                as_byte = weight.scales[0].dtype is torch.uint8
                weight.set_scales(tuple([s + 1 if as_byte else s * 2 for s in weight.scales]))
            else:
                weight.qdata.data.view(torch.uint8)[..., 5, 7] ^= 8
        return made

    patch.setattr(Float8AllGatherWeight, "fsdp_post_all_gather", corrupted)
