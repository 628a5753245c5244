"""Operands that several GEMMs multiply: on CPUs, whose GEMMs take no float8, made wide once.

A gradient is multiplied twice in a layer's backward. An input that layers share (``wq``, ``wk`` and
``wv`` of an attention, ``w1`` and ``w3`` of a feed-forward) is multiplied by each of them in turn,
in the forward and again in the backward. What is kept for that is one tensor at most, and no longer
than its float8 source.
"""

from weakref import ReferenceType, ref

import torch

from fp8_dist.dtypes import is_float8
from fp8_dist.torch_internals import no_one_watches
from fp8_dist.upcast import FEW, upcast

# Its float8 source, the version of that, the wide data.
_last: tuple[ReferenceType[torch.Tensor], int, torch.Tensor] | None = None


def shared_by_gemms(data: torch.Tensor) -> torch.Tensor:
    """An operand's data as the GEMMs of one layer take it: wide, if they would make it so."""
    return upcast(data, torch.bfloat16) if _is_made_wide(data) else data


def shared_by_layers(data: torch.Tensor) -> torch.Tensor:
    """An operand's data as the next layer may take it too: wide, if the GEMM would make it so."""
    global _last
    if not _is_made_wide(data) or data.numel() < FEW or data.is_inference():
        return data
    last = _last  # another thread may put its own there
    if last is not None and last[0]() is data and last[1] == data._version:
        return last[2]
    wide = upcast(data, torch.bfloat16)
    _last = (ref(data, _forget), data._version, wide)
    return wide


def _forget(source: ReferenceType[torch.Tensor]) -> None:
    global _last
    last = _last
    if last is not None and last[0] is source:
        _last = None


def _is_made_wide(data: torch.Tensor) -> bool:
    return data.is_cpu and is_float8(data.dtype) and no_one_watches(data)
