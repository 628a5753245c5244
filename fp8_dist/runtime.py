"""Decisions that compiled graphs and selective activation checkpointing must not see.

Whether a weight's scale is still known depends on what happened since the last step. No graph can
see that, and guards on it would recompile; and where a recomputation finds it known and the forward
did not, selective checkpointing would give the results of ops that are missing to the ones that
follow. So in both cases one opaque operator is called, and it asks the object that knows. The
object is named by a tensor, an input of a graph like any other: layers that share a graph go on
sharing it.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from fp8_dist.scaling import Scaling
from fp8_dist.torch_internals import is_selectively_checkpointed

_LIB = torch.library.Library("fp8_dist", "FRAGMENT")
_LIB.define(
    "known_scaling(Tensor x, Tensor name, int[]? dims, str[] details) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class KnowsScaling(Protocol):
    """What :func:`known_scaling` asks."""

    def scaling_at_run_time(self, x: torch.Tensor, *details: Any) -> Scaling:
        """The (multiplier, scale) for a local tensor; ``details`` are strings."""


_known: WeakValueDictionary[int, KnowsScaling] = WeakValueDictionary()
_names = itertools.count()


def name_of(knows: KnowsScaling) -> torch.Tensor:
    """A new name for an object that is asked at run time: a 0-dim int64 CPU tensor."""
    name = next(_names)
    _known[name] = knows
    with torch.device("cpu"):
        return torch.tensor(name)


def known_scaling(
    knows: KnowsScaling,
    name: torch.Tensor,
    x: torch.Tensor,
    dims: Sequence[int] | None,
    *details: str,
) -> Scaling:
    """What an object says, when this is run, about casting a tensor.

    Args:
        knows: the object.
        name: its name, from :func:`name_of`.
        x: a local tensor.
        dims: what a scale covers, as in :func:`fp8_dist.scaling.amax_over`.
        details: what else the object is told.

    Collectives: those of the object's answer.
    """
    if torch.compiler.is_compiling() or is_selectively_checkpointed():
        return torch.ops.fp8_dist.known_scaling(x, name, dims, details)
    multiplier, scale = knows.scaling_at_run_time(x, *details)
    device = x.device
    return multiplier.to(device), scale.to(device)


def ask(x: torch.Tensor, name: torch.Tensor, dims: list[int] | None, details: list[str]) -> Scaling:
    """The operator itself, without the operator."""
    # What is found out in an evaluation under inference_mode, training may save.
    with torch.inference_mode(False), torch.no_grad():
        multiplier, scale = _known[int(name.item())].scaling_at_run_time(x, *details)
    # Not the tensors that are kept: a graph may write into what an operator returned.
    return multiplier.to(x.device, copy=True), scale.to(x.device, copy=True)


_LIB.impl("known_scaling", ask, "CompositeExplicitAutograd")
KNOWN_SCALING_OP = torch.ops.fp8_dist.known_scaling.default


@torch.library.register_fake("fp8_dist::known_scaling", lib=_LIB)
def _known_scaling_fake(
    x: torch.Tensor, name: torch.Tensor, dims: list[int] | None, details: list[str]
) -> Scaling:
    shape = [] if dims is None else [1 if d in dims else n for d, n in enumerate(x.shape)]
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)
