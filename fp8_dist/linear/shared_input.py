"""The float8 copies of an input that several layers take: one slot, for the last input cast.

``wq``, ``wk`` and ``wv`` of an attention, ``w1`` and ``w3`` of a feed-forward take one tensor each.
Its float8 copies serve all of them: one cast, and one copy saved for backward, as nn.Linear layers
save the one tensor. The slot lives as long as the input that was cast.
"""

from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch

from fp8_dist.cast import Copies


class _LastCast(NamedTuple):
    source: ReferenceType[torch.Tensor]  # compared, never used
    key: Any
    copies: Copies


_last: _LastCast | None = None


def cast_key(x: torch.Tensor, kind: Any) -> Any:
    """What must be the same for a cast of ``x`` to hold again; None if that can't be told.

    Args:
        x: a plain tensor.
        kind: in which way it is cast.
    """
    if x.is_inference():
        return None  # it keeps no version
    if not x.is_cuda:
        return x._version, kind
    if torch.cuda.is_current_stream_capturing():
        return None  # a CUDA graph must hold the cast itself
    return x._version, kind, torch.cuda.current_stream(x.device)


def last_cast(x: torch.Tensor, key: Any) -> Copies | None:
    """The last copies that were noted, if they are those of ``x`` by the same key."""
    last = _last  # another thread may note its own
    return last.copies if last and last.source() is x and last.key == key else None


def note_cast(x: torch.Tensor, key: Any, copies: Copies) -> None:
    """Note that ``x`` was cast, and how."""
    global _last
    _last = None if key is None else _LastCast(ref(x, _forget), key, copies)


def _forget(source: ReferenceType[torch.Tensor]) -> None:
    """The input is gone: its copies can't be asked for any more."""
    global _last
    if _last is not None and _last.source is source:
        _last = None
