"""A linear layer in a graph: one operator.

Note [One operator per layer]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Dynamo does not trace a layer's forward. In a graph of Dynamo the forward is the operator
:func:`linear`, whose implementation AOTAutograd calls, and traces, while it makes the graphs of the
forward and the backward. So casts, collectives and GEMMs are separate operators for Inductor, but

* Dynamo guards on the few facts that are arguments of the operator, and not on each attribute that
  the implementation reads;
* torch caches the graphs. It does not cache graphs with an autograd function, which Dynamo traces.

The implementation must depend on nothing but the arguments of the operator, because layers share
graphs, and because a graph may come from the cache that another process wrote. They are

* tensors, among them the handles of the state that operators of the graph ask at run time (Note
  [Look-ups at run time] in :mod:`fp8_dist.operand.state`);
* the name of what was settled before: the config and the placements (:func:`settle`);
* the flags of this call;
* :func:`fp8_dist.operand.in_graph.context`, which stands for everything else: the library, and the
  process groups. (The names of a mesh's groups are constants of a graph; the key of a DTensor has
  them.)

A cast to a Float8Tensor is an operator for the same reasons (:mod:`fp8_dist.operand.cast`).
"""

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_dist import torch_internals as internals
from fp8_dist.config import Float8LinearConfig
from fp8_dist.kernels.custom_op import composite_op
from fp8_dist.linear.autograd import LinearSpec
from fp8_dist.linear.call import call_declared, call_linear
from fp8_dist.mesh import Layout, Placements, layout_over, local_tensor
from fp8_dist.operand.history import AmaxHistory
from fp8_dist.operand.in_graph import context, handles_of, history_of
from fp8_dist.operand.state import owner_of
from fp8_dist.transport import Encoding
from fp8_dist.weight.casts import WeightCasts
from fp8_dist.weight.float8_weight import Float8Weight
from fp8_dist.weight.known import KnownWeight
from fp8_dist.weight.local_placements import LocalPlacements
from fp8_dist.weight.stored import StoredFloat8


class Settled(NamedTuple):
    """What is settled about a layer before it is called."""

    config: Float8LinearConfig
    output_placements: Placements | None
    local_placements: LocalPlacements | None
    reduce_transport: Encoding

    @property
    def name(self) -> str:
        """The same text for layers of which the same is settled, in all processes."""
        recipe = self.config.recipe
        schemes = [scheme.key for used in recipe.schemes.values() for scheme in used]
        ranks, groups = None, None
        if self.local_placements is not None:
            mesh = self.local_placements.mesh
            ranks, groups = mesh.mesh.tolist(), internals.group_names(mesh)
        return f"{self} {schemes} {ranks} {groups}"


_settled: dict[str, Settled] = {}


def settle(settled: Settled) -> str:
    """Note what is settled about a layer; return its name."""
    name = sys.intern(settled.name)  # guards compare one object faster than equal texts
    _settled[name] = settled
    return name


class _WeightInGraph(WeightCasts):
    """The weight of a layer, as far as the operator knows it."""

    name = "weight"
    scales_name = "weight_scale_inv"

    def __init__(
        self,
        settled: Settled,
        handle: Tensor,
        histories: Mapping[str, AmaxHistory],
        is_in_fsdp: bool,
        unsharded: Tensor | None,
        scales: Tensor | None,
    ) -> None:
        assert unsharded is None or isinstance(unsharded, KnownWeight)
        self.config, self._declared = settled.config, settled.local_placements
        self.fqn = internals.module_being_traced() or "a float8 layer"
        self.handle, self.histories = handle, histories
        self.history = histories.get("weight")
        self.unsharded, self._scales = unsharded, scales
        self._is_in_fsdp = is_in_fsdp

    @property
    def is_in_fsdp(self) -> bool:
        return self._is_in_fsdp

    def layout(self, parameter: Tensor) -> Layout | None:
        if (declared := self._declared) is None:
            return Layout.of(parameter)
        return layout_over(parameter, declared.mesh, declared.weight, self.fqn)

    def note_forward(self, parameter: Tensor) -> None:
        pass

    def scales_of_stored(self) -> Tensor:
        assert self._scales is not None
        return self._scales


def linear_in_graph(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    owner: Float8Weight,
    settled: str,
    is_prepared: bool,
) -> Tensor:
    """:func:`fp8_dist.linear.call.call_linear`, by the operator of a layer.

    Args:
        owner: the object that casts the weight.
        settled: the name of what is settled about the layer.
        is_prepared: whether the input is shared by layers and has an amax history.
    """
    history_handles: list[Tensor] = []
    for history in owner.histories.values():
        history_handles += handles_of(history)
    scales = None
    if isinstance(local_tensor(weight), StoredFloat8):
        scales = owner.scales_of_stored()
    result: Tensor = linear(
        input,
        weight,
        bias,
        scales,
        owner.unsharded if owner.is_in_fsdp else None,
        owner.handle,
        history_handles,
        [*owner.histories],
        isinstance(weight, torch.nn.Parameter),
        owner.is_in_fsdp,
        is_prepared,
        torch.is_grad_enabled(),
        settled,
        context(),
    )
    return result


@composite_op(
    "linear(Tensor input, Tensor weight, Tensor? bias, Tensor? scales, Tensor? unsharded, "
    "Tensor handle, Tensor[] history_handles, str[] histories, bool is_parameter, "
    "bool is_in_fsdp, bool is_prepared, bool training, str settled, str context) -> Tensor",
)
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    unsharded: Tensor | None,
    handle: Tensor,
    history_handles: Sequence[Tensor],
    histories: Sequence[str],
    is_parameter: bool,
    is_in_fsdp: bool,
    is_prepared: bool,
    training: bool,
    settled: str,
    context: str,
) -> Tensor:
    """Operator of :func:`linear_in_graph`.

    Args:
        scales: the scales of a weight that is stored in float8.
        unsharded: see :attr:`WeightCasts.unsharded`.
        histories, history_handles: the names of the layer's histories, and two handles of each.
        is_parameter: whether ``weight`` is an nn.Parameter, which AOTAutograd hides.
        context: not used here; a part of the key in torch's caches.
    """
    known = _settled[settled]
    casts: WeightCasts
    if isinstance(handle, internals.STAND_INS):
        by_name: dict[str, AmaxHistory] = {}
        for i, name in enumerate(histories):
            by_name[name] = history_of(history_handles[2 * i : 2 * i + 2])
        if is_parameter:
            internals.mark_as_parameter(weight)
        casts = _WeightInGraph(known, handle, by_name, is_in_fsdp, unsharded, scales)
    else:  # a backend runs the graph of dynamo as it is
        casts = owner_of(handle)
    spec = LinearSpec(
        config=known.config,
        output_placements=known.output_placements,
        fqn=casts.fqn,
        histories=casts.histories,
        weight=casts,
        training=training,
        is_prepared=is_prepared,
        reduce_transport=known.reduce_transport,
    )
    if known.local_placements is not None:
        return call_declared(input, weight, bias, spec, known.local_placements)
    return call_linear(input, weight, bias, weight, spec)
