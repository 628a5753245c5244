"""The last cast of an input, for the next layer that takes the same input in the same way.

``wq``, ``wk`` and ``wv`` of an attention, ``w1`` and ``w3`` of a feed-forward take one tensor each.
Its float8 copy then serves all of them: one cast, and one copy saved for backward, as nn.Linear
layers save the one tensor. Nothing is kept for it: only a weak reference to what autograd saves.
"""

from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef


class _Last(NamedTuple):
    source: TensorWeakRef
    key: tuple[Any, ...]
    data: TensorWeakRef
    scale: torch.Tensor


_last: _Last | None = None


def last_cast(x: torch.Tensor, kind: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(qdata, scale) of ``x`` if that was the last cast to be noted, still exists, and still holds.

    Args:
        x: a plain tensor.
        kind: in which way it is cast.
    """
    last = _last
    if last is None or last.source() is not x or last.key != _key(x, kind):
        return None
    data = last.data()
    return None if data is None else (data, last.scale)


def note_cast(x: torch.Tensor, kind: Any, data: torch.Tensor, scale: torch.Tensor) -> None:
    """Note that ``x`` was cast to ``data``, in the way ``kind``."""
    global _last
    key = _key(x, kind)
    _last = None if key is None else _Last(TensorWeakRef(x), key, TensorWeakRef(data), scale)


def _key(x: torch.Tensor, kind: Any) -> tuple[Any, ...] | None:
    """What must be as it was; None if that can't be told."""
    if x.is_inference():
        return None  # it keeps no version
    if not x.is_cuda:
        return x._version, kind
    if torch.cuda.is_current_stream_capturing():
        return None  # a CUDA graph must hold the cast itself
    return x._version, kind, torch.cuda.current_stream(x.device)
