"""Operands that several GEMMs multiply: on CPUs, whose GEMMs take no float8, made wide once.

A gradient is multiplied twice in a layer's backward. An input that layers share (``wq``, ``wk`` and
``wv`` of an attention, ``w1`` and ``w3`` of a feed-forward) is multiplied by each of them in turn,
in the forward and again in the backward; one float8 copy of it is then made wide for all of them,
if there is one (not of inputs that each GEMM casts in its own way, nor where autograd, which keeps
the copy, records nothing). The wide data of one input are kept, no longer than the input is.
"""

from typing import NamedTuple
from weakref import ReferenceType, ref

import torch

from fp8_dist.dtypes import is_float8
from fp8_dist.kernels.upcast import FEW, upcast
from fp8_dist.linear.recording import is_recording
from fp8_dist.torch_internals import no_one_watches


class _Kept(NamedTuple):
    """The wide data of an operand.

    (Plain references, though autograd may own what they refer to: that is compared, never used.)
    """

    source: ReferenceType[torch.Tensor]  # in float8
    version: int  # of the source
    owner: ReferenceType[torch.Tensor]  # what the source was cast from
    wide: torch.Tensor


_kept: _Kept | None = None


def shared_by_gemms(data: torch.Tensor) -> torch.Tensor:
    """An operand's data as the GEMMs of one layer take it: wide, if they would make it so."""
    return upcast(data, torch.bfloat16) if _is_made_wide(data) else data


def shared_by_layers(data: torch.Tensor, owner: torch.Tensor | None = None) -> torch.Tensor:
    """An operand's data as the next layer may take it too: wide, if the GEMM would make it so.

    Args:
        data: what the GEMM multiplies.
        owner: the wide data is dropped with it, and with ``data``. (In a forward the layer's input:
            autograd keeps the data for the backward.)
    """
    global _kept
    if not _is_made_wide(data) or data.numel() < FEW or data.is_inference():
        return data
    last = _kept  # another thread may put its own there
    if last is not None and last.source() is data and last.version == data._version:
        return last.wide
    last = _kept = None  # before there is another
    wide = upcast(data, torch.bfloat16)
    owner = data if owner is None else owner
    _kept = _Kept(ref(data, _forget), data._version, ref(owner, _forget), wide)
    return wide


def _forget(gone: ReferenceType[torch.Tensor]) -> None:
    global _kept
    last = _kept
    if last is not None and (gone is last.source or gone is last.owner):
        _kept = None


def _is_made_wide(data: torch.Tensor) -> bool:
    return data.is_cpu and is_float8(data.dtype) and no_one_watches(data) and not is_recording()
