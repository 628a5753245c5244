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

from fp8_dist.config import CastSpec
from fp8_dist.granularity import Granularity
from fp8_dist.kernels.scale import Scaling
from fp8_dist.torch_internals import is_selectively_checkpointed

_LIB = torch.library.Library("fp8_dist", "FRAGMENT")
for _name in ("known_scaling", "scaling_to_gather"):
    _LIB.define(
        f"{_name}(Tensor x, Tensor name, str[] granularities, str[] details) -> Tensor[]",
        tags=(torch.Tag.pt2_compliant_tag,),
    )


class KnowsScaling(Protocol):
    """What :func:`known_scalings` asks."""

    def scalings_at_run_time(self, x: torch.Tensor, *details: Any) -> Sequence[Scaling]:
        """The (multiplier, scale) for each way of casting a local tensor; details: strings."""


_known: WeakValueDictionary[int, KnowsScaling] = WeakValueDictionary()
_names = itertools.count()


def name_of(knows: KnowsScaling) -> torch.Tensor:
    """A new name for an object that is asked at run time: a 0-dim int64 CPU tensor."""
    name = next(_names)
    _known[name] = knows
    with torch.device("cpu"):
        return torch.tensor(name)


def known_scalings(
    knows: KnowsScaling,
    name: torch.Tensor,
    x: torch.Tensor,
    casts: Sequence[CastSpec],
    *details: str,
) -> Sequence[Scaling]:
    """What an object says, when this is run, about casting a tensor in some ways.

    (All at once: a graph would put what only its backward needs there, where FSDP2 has gathered the
    weight anew and nothing is known of it.)

    Args:
        knows: the object.
        name: its name, from :func:`name_of`.
        x: a local tensor.
        casts: the ways.
        details: what else the object is told.

    Collectives: those of the object's answer.
    """
    if torch.compiler.is_compiling() or is_selectively_checkpointed():
        gathered = details[0] == "gather"
        op = SCALING_TO_GATHER_OP if gathered else KNOWN_SCALING_OP
        flat = op(x, name, [cast.granularity.name for cast in casts], details)
        return list(zip(flat[::2], flat[1::2], strict=True))
    device = x.device
    return [
        scaling if scaling[1].device == device else (scaling[0].to(device), scaling[1].to(device))
        for scaling in knows.scalings_at_run_time(x, *details)
    ]


def ask(
    x: torch.Tensor, name: torch.Tensor, granularities: list[str], details: list[str]
) -> list[torch.Tensor]:
    """The operator itself, without the operator."""
    # What is found out in an evaluation under inference_mode, training may save.
    with torch.inference_mode(False), torch.no_grad():
        found = _known[int(name.item())].scalings_at_run_time(x, *details)
    # Not the tensors that are kept: a graph may write into what an operator returned.
    return [tensor.to(x.device, copy=True) for scaling in found for tensor in scaling]


_LIB.impl("known_scaling", ask, "CompositeExplicitAutograd")
_LIB.impl("scaling_to_gather", ask, "CompositeExplicitAutograd")
KNOWN_SCALING_OP = torch.ops.fp8_dist.known_scaling.default
# The same, where FSDP2 asks: it may gather in a checkpointed forward and not in its recomputation,
# which therefore mustn't count on the results of one.
SCALING_TO_GATHER_OP = torch.ops.fp8_dist.scaling_to_gather.default


@torch.library.register_fake("fp8_dist::scaling_to_gather", lib=_LIB)
@torch.library.register_fake("fp8_dist::known_scaling", lib=_LIB)
def _known_scaling_fake(
    x: torch.Tensor, name: torch.Tensor, granularities: list[str], details: list[str]
) -> list[torch.Tensor]:
    shapes = [Granularity.named(name).scale_shape(x.shape) for name in granularities]
    return [x.new_empty(shape, dtype=torch.float32) for shape in shapes for _ in range(2)]
