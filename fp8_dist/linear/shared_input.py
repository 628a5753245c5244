"""The float8 copy of an input that several layers take: one slot, for the last input cast.

``wq``, ``wk`` and ``wv`` of an attention, ``w1`` and ``w3`` of a feed-forward take one tensor each.
Its float8 copy serves all of them: one cast, and one copy saved for backward, as nn.Linear layers
save the one tensor. The slot owns nothing: it refers weakly to what autograd saves.
"""

from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch.utils.weak import TensorWeakRef

from fp8_dist.granularity import Granularity
from fp8_dist.tensor import Quantized


class _LastCast(NamedTuple):
    source: ReferenceType[torch.Tensor]  # compared, never used
    key: Any
    qdata: ReferenceType[torch.Tensor]
    scale: torch.Tensor
    granularity: Granularity


_last: _LastCast | None = None


def cast_key(x: torch.Tensor, kind: Any) -> Any:
    """What must be the same for a cast of this kind to hold again; None if that can't be told."""
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
    if last is None or last.source() is not x or last.key != key:
        return None
    qdata = last.qdata()
    if qdata is None:
        return None
    # TensorWeakRef revives the Python object of a tensor that autograd alone still owns.
    return Quantized(TensorWeakRef(qdata)(), last.scale, last.granularity)


def note_cast(x: torch.Tensor, key: Any, cast: Quantized) -> None:
    """Note that ``x`` was cast, and how."""
    global _last
    _last = None
    if key is not None:
        _last = _LastCast(ref(x), key, ref(cast.qdata), cast.scale, cast.granularity)
