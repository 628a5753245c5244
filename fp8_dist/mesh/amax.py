"""Reduction of amaxes over a mesh. No other module implements one."""

import atexit
import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch.distributed.device_mesh import DeviceMesh

from fp8_dist.device import is_captured
from fp8_dist.mesh.groups import groups_over
from fp8_dist.torch_internals import funcol, without_dispatch_modes


def reduce_amax(amax: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """Maximum of local amaxes (fp32, non-negative or NaN, any shape) over some axes of a mesh.

    Collectives: one all-reduce of 4 bytes per element for each group of :func:`groups_over`.
    """
    return all_reduce_max(amax, groups_over(mesh, axes))


def all_reduce_max(amax: torch.Tensor, groups: Sequence[str]) -> torch.Tensor:
    """All-reduce (MAX) non-negative fp32 values or uint8 exponents. A NaN of any rank is kept.

    Collectives: one all-reduce for each group, one after the other.
    """
    for name in groups:
        amax = _wait(_start(amax, name))
    return amax


class AmaxReduction:
    """Asynchronous :func:`all_reduce_max`: the constructor starts it, :meth:`wait` ends it.

    If there are several groups, only the reduction over the last one is asynchronous, because each
    reduction needs the result of the one before.

    torch keeps the buffer of a reduction until it is waited for. A reduction that is freed without
    a wait is therefore waited for when the next one starts, or when the process exits. It can't be
    waited for at once, because the garbage collector may free it while a process group holds the
    lock that the wait needs. A reduction that is still alive at exit is waited for then, unless an
    exception ends the process: other ranks may never join the reduction, and the process has to
    exit for the launcher to see the failure.
    """

    def __init__(self, amax: torch.Tensor, groups: Sequence[str]) -> None:
        if not is_captured(amax):  # a CUDA graph can't wait for a collective started outside it
            _wait_for([reduction for reduction in list(_unwaited) if reduction() is None])
        *others, last = groups
        self._bits = _start(all_reduce_max(amax, others), last)
        self._reference = weakref.ref(self)
        _unwaited[self._reference] = self._bits

    def wait(self) -> torch.Tensor:
        """Wait for the maximum, and return it in the dtype of the argument (fp32 or uint8)."""
        _unwaited.pop(self._reference, None)
        return _wait(self._bits)

    @property
    def blocks_host(self) -> bool:
        """Whether :meth:`wait` blocks the host. On a GPU it makes the current stream wait."""
        return self._bits.is_cpu


def _start(amax: torch.Tensor, group_name: str) -> torch.Tensor:
    # Backends may drop a NaN in a MAX, so floats are reduced as int32. The bits of non-negative
    # floats, read as integers, are ordered like the floats, with NaN above infinity. The largest
    # uint8 exponent is NaN.
    bits = amax if amax.dtype is torch.uint8 else amax.view(torch.int32)
    return funcol.all_reduce(bits, "max", group_name)


def _wait(bits: torch.Tensor) -> torch.Tensor:
    found = funcol.wait_tensor(bits)
    return found if found.dtype is torch.uint8 else found.view(torch.float32)


# The buffers of reductions that have not been waited for.
_unwaited: dict[weakref.ref[AmaxReduction], torch.Tensor] = {}


def _wait_for(reductions: Iterable[weakref.ref[AmaxReduction]]) -> None:
    # Dispatch modes that count operators must not see this wait. It fails if another rank is gone.
    for reduction in reductions:
        bits = _unwaited.pop(reduction, None)
        if bits is not None:
            with suppress(Exception), without_dispatch_modes():
                _wait(bits)


@atexit.register
def _wait_for_all() -> None:
    if hasattr(sys, "last_value") and not hasattr(sys, "ps1"):
        return  # an uncaught exception ends the process, which is not interactive
    _wait_for(list(_unwaited))
