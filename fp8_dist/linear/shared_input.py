"""Cache of the float8 copies of the last input that was cast, for layers that share it.

``wq``, ``wk`` and ``wv`` of an attention share one input, as do ``w1`` and ``w3`` of a
feed-forward. Its float8 copies serve all of them: the input is cast once, and one copy is saved for
backward, just as nn.Linear layers save a shared input once. The cache entry lives as long as the
copy that autograd saves.
"""

from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch.utils.weak import TensorWeakRef

from fp8_dist.cast import Copies
from fp8_dist.device import current_stream, is_captured
from fp8_dist.scaling import Copy, Quantized
from fp8_dist.torch_internals import version_of


class _LastCast(NamedTuple):
    source: ReferenceType[torch.Tensor]  # only compared by identity
    key: Any
    first: Copies  # the copies that only the forward takes
    saved: Copy
    data: ReferenceType[torch.Tensor]
    rest: Quantized  # the saved copy, with a scale in place of its data


_last: _LastCast | None = None


def cast_key(x: torch.Tensor, kind: Any) -> Any:
    """The key under which a cast of this kind may be reused; None if it must not be reused."""
    version = version_of(x)
    if version is None or is_captured(x):
        return None  # a CUDA graph must hold the cast itself
    return version, kind, current_stream(x.device)


def last_cast(x: torch.Tensor, key: Any) -> Copies | None:
    """The last noted copies, if they still exist and belong to ``x`` and this key."""
    last = _last  # another thread may replace it
    if last is None or last.source() is not x or last.key != key:
        return None
    data = last.data()
    if data is None:
        return None
    # TensorWeakRef revives the Python object of a tensor that only autograd still owns.
    saved = last.rest._replace(qdata=TensorWeakRef(data)())
    return {**last.first, last.saved: saved}


def note_cast(x: torch.Tensor, key: Any, copies: Copies) -> None:
    """Note the copies of ``x``. Autograd saves the last of them."""
    global _last
    _last = None
    if key is not None:
        *first, (copy, saved) = copies.items()
        rest = saved._replace(qdata=saved.scales[0])
        _last = _LastCast(ref(x), key, dict(first), copy, ref(saved.qdata, _forget), rest)


def _forget(data: ReferenceType[torch.Tensor]) -> None:
    """Drop the other copies once autograd has freed the one that it saved."""
    global _last
    if _last is not None and _last.data is data:
        _last = None
