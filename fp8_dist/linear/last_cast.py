"""The last cast of an input, for the next layer that takes the same input in the same way.

``wq``, ``wk`` and ``wv`` of an attention, ``w1`` and ``w3`` of a feed-forward take one tensor each.
Its float8 copy then serves all of them: one cast, and one copy saved for backward, as nn.Linear
layers save the one tensor. Nothing is kept for it: only a weak reference to what autograd saves.
"""

from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.utils.weak import TensorWeakRef

from fp8_dist.kernels import Quantized

# Its source (compared, never used), its key, its data, its scale.
_last: tuple[ReferenceType[torch.Tensor], Any, ReferenceType[torch.Tensor], torch.Tensor] | None
_last = None


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


def last_cast(x: torch.Tensor, key: Any) -> Quantized | None:
    """The last cast that was noted, if it still exists and is that of ``x`` by the same key."""
    last = _last  # another thread may note its own
    if last is None:
        return None
    source, noted, kept, scale = last
    if source() is not x or noted != key:
        return None
    data = kept()
    # (A tensor that autograd alone kept alive must be told of its new owner.)
    return None if data is None else Quantized(TensorWeakRef(data)(), scale)


def note_cast(x: torch.Tensor, key: Any, cast: Quantized) -> None:
    """Note that ``x`` was cast, and how."""
    global _last
    _last = None if key is None else (ref(x), key, ref(cast.qdata), cast.scale)
