"""How a parameter is cast for the GEMMs of its layer.

Where it is cast depends on how it is distributed:

* On one device, or with tensor parallelism: the forward casts the shard, also for the backward
  (:meth:`WeightCasts.operands`).
* With FSDP2 and float8 gathers: FSDP2 gathers the cast of the shard (``fp8_dist/fsdp/weight.py``).
  In the forward the parameter is a ``Float8Tensor``.
* With FSDP2 without float8 gathers: the forward casts the unsharded parameter for its own GEMM. The
  backward casts it again (:class:`fp8_dist.weight.uncast.Uncast`).
* Stored in float8: it is not cast (:mod:`fp8_dist.weight.stored_weight`).

Statistics that need other ranks are looked up in the weight's tensor; see Note [What is known of a
weight] in :mod:`fp8_dist.weight.known`. Others are measured.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fp8_dist.config import Float8LinearConfig
from fp8_dist.device import is_float8
from fp8_dist.kernels import scale
from fp8_dist.mesh import Layout, local_tensor
from fp8_dist.operand.history import AmaxHistory
from fp8_dist.operand.observers import Use, is_observed
from fp8_dist.operand.prepare import cast_by_state, cast_local
from fp8_dist.operand.state import State, measured, needs_op
from fp8_dist.recipe import Gemm, Operand
from fp8_dist.scaling import (
    CastPlan,
    Quantized,
    Scheme,
    Statistics,
    operators,
    scheme_named,
    shared_schemes,
)
from fp8_dist.tensor import Float8Tensor, quantized_as
from fp8_dist.weight.known import Known, KnownWeight
from fp8_dist.weight.stored import StoredFloat8
from fp8_dist.weight.stored_weight import StoredWeight
from fp8_dist.weight.uncast import Uncast

_GEMMS: tuple[Gemm, Gemm] = ("output", "grad_input")  # the GEMMs that take a weight


class WeightOperands(NamedTuple):
    """The local operands of a weight's GEMMs for a forward and its backward.

    Attributes:
        output, grad_input: the operand of each GEMM, which may be the same. ``None`` means the
            weight in high precision.
        amax: in a graph the local amax, fp32, 0-dim, for the amax history. ``None`` in eager code,
            where the history keeps it, and without a history.
    """

    output: Quantized | None = None
    grad_input: Quantized | Uncast | None = None
    amax: torch.Tensor | None = None


class WeightCasts:
    """What a cast of a parameter needs to know of its layer.

    Attributes:
        config: the config of the layer.
        fqn, name, scales_name: the names of the module, of the parameter, and of the parameter that
            has the scales of a stored weight.
        histories: the amax histories of the layer's DELAYED operands.
        history: the one of the weight, if its scale is DELAYED.
        handle: identifies the weight in operators (:mod:`fp8_dist.operand.state`).
        unsharded: the local tensor of FSDP2's unsharded parameter in high precision, if its
            statistics are cached.
    """

    config: Float8LinearConfig
    fqn: str
    name: str
    scales_name: str
    histories: Mapping[str, AmaxHistory]
    history: AmaxHistory | None
    handle: torch.Tensor
    unsharded: KnownWeight | None

    @property
    def is_in_fsdp(self) -> bool:
        """Whether FSDP2 shards the parameter between uses."""
        raise NotImplementedError

    def layout(self, parameter: torch.Tensor) -> Layout | None:
        """The declared layout of a parameter, or that of its DTensor."""
        raise NotImplementedError

    def forward_layout(self, weight: torch.Tensor) -> Layout | None:
        """The layout of a forward's weight; with FSDP2, replicated over the mesh that shards it."""
        raise NotImplementedError

    def scales_of_stored(self) -> torch.Tensor:
        """The parameter that has the scales of a stored weight."""
        raise NotImplementedError

    # For eager code

    is_compared: bool  # whether the layer was compared between ranks (``agreement``)

    def compare(self, caller: str) -> None:
        """Compare the layer between the ranks of its mesh, once, if other code has placed it."""
        raise NotImplementedError

    def note_forward(self, parameter: torch.Tensor) -> None:
        """Prepare for a forward that casts the parameter; nothing in a graph."""
        raise NotImplementedError

    def record_amaxes(self, amaxes: dict[str, torch.Tensor], begins: bool | None = None) -> None:
        """Record a pass's amaxes, keyed by history, in its backward; see Note [Passes that count].

        The weight's amax is that of its last cast.

        ``begins``: whether the pass begins to accumulate gradients. ``None``: decided by the
        weight's own gradient if the weight is a trained leaf, else unknown.
        """
        raise NotImplementedError

    def high_precision(self, weight: torch.Tensor | None = None) -> torch.Tensor:
        """The parameter in high precision, detached.

        ``weight``: the weight of a forward, which other code may have computed from the parameter.
        With FSDP2, the result is the sharded parameter.

        Collectives: for a stored weight, those of :meth:`StoredWeight.dequantized`.
        """
        raise NotImplementedError

    def known(self, weight: KnownWeight, layout: Layout) -> Known:
        """The state of a weight's statistics."""
        raise NotImplementedError

    def stored_as(self, parameter: torch.Tensor) -> StoredWeight:
        """The stored weight of a parameter that is stored in float8, sharded or unsharded."""
        return StoredWeight(
            fqn=self.fqn,
            name=self.name,
            scales_name=self.scales_name,
            data=parameter,
            scales=self.scales_of_stored(),
            layout=self.layout(parameter),
            scheme=self.held_scheme(parameter),
        )

    def held_scheme(self, parameter: torch.Tensor) -> Scheme:
        """The scheme of the data, if the parameter is stored, and otherwise of its first cast."""
        scheme, local = self.schemes[0], local_tensor(parameter)
        if not isinstance(local, StoredFloat8) or local.key == scheme.key:
            return scheme
        stored = scheme_named(local.key)
        return stored if stored.is_storage else scheme

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes of the weight, in the order of its GEMMs."""
        return self.config.recipe.schemes["weight"]

    def plan(self, gemms: tuple[Gemm, ...], device: torch.device) -> CastPlan:
        """Return the plan of the casts for both GEMMs of the weight, or for one of them."""
        return self.config.recipe.plan("weight", gemms, device)

    def casts_of(self, operand: Operand) -> dict[tuple[Gemm, ...], Scheme]:
        """The casts of an operand that observers see; see :class:`observers.Owner`."""
        return self.config.recipe.casts[operand]

    def operands(self, parameter: torch.Tensor, both: bool) -> WeightOperands:
        """The operands of the parameter for a forward and its backward.

        ``both``: whether a backward may compute the input's gradient.

        Collectives: those of :meth:`State.statistics`.

        Raises:
            TypeError: the parameter was replaced by plain float8 data.
            ValueError: as :meth:`StoredWeight.quantized`; or what FSDP2 gathered was cast for
                another config than the layer's.
        """
        schemes = self.schemes
        if not schemes:
            return WeightOperands()
        local = local_tensor(parameter)
        if isinstance(local, Float8Tensor):  # FSDP2 gathered it
            if len(schemes) > 1 or schemes[0].key != local.key:
                raise ValueError(_gathered_otherwise(schemes, local, self.fqn))
            gathered = quantized_as(local, schemes[0])
            return WeightOperands(gathered, gathered)
        if isinstance(local, StoredFloat8):
            return self._stored_operands(parameter, both)
        if is_float8(local.dtype):
            raise TypeError(
                f"{self.fqn}: {self.name} is data of {local.dtype} without its scales, from a "
                "state dict that was assigned or passed to functional_call; load it with "
                "load_state_dict after freeze_to_float8"
            )
        is_in_fsdp = self.is_in_fsdp
        if is_in_fsdp or self.config.enable_fsdp_float8_all_gather:
            self.note_forward(parameter)
        shard = local.plain if isinstance(local, KnownWeight) else local
        if is_in_fsdp:
            return self._unsharded_operands(parameter, shard, both)
        plan = self.plan(_GEMMS if both else _GEMMS[:1], local.device)
        if not plan.of:
            return WeightOperands()
        layout, state = self.layout(parameter), None
        if layout is not None:
            plan = plan.on(layout)
        if layout is not None or self.histories:
            state = self.state(parameter, layout)
        use = Use((self,), "weight", layout) if is_observed() else None
        with torch.no_grad():
            copies, amax = cast_by_state(shard, plan, state, use)
        if amax is not None:
            amax = self._kept_amax(amax)
        first, last = plan.places[0], plan.places[-1]
        output = None if first is None else copies[first]
        grad_input = None if last is None or not both else copies[last]
        return WeightOperands(output, grad_input, amax)

    def _stored_operands(self, parameter: torch.Tensor, both: bool) -> WeightOperands:
        """:meth:`operands` of a weight that is stored in float8."""
        stored = self.stored_as(parameter)
        whole = stored.quantized()
        if not whole.scheme.is_storage or whole.scheme in self.schemes:
            later = Uncast(parameter, whole.scales, whole.scheme, stored.layout)
            return WeightOperands(whole, later if stored.is_packed else whole)
        values = operators.dequantize(whole, stored.data.dtype)
        scales, stored_as = whole.scales, whole.scheme
        del whole  # its float8 data
        return self._unsharded_operands(parameter, values, both, scales, stored_as)

    @torch.no_grad()
    def _unsharded_operands(
        self,
        parameter: torch.Tensor,
        values: torch.Tensor,
        both: bool,
        scales: Statistics = (),
        stored_as: Scheme | None = None,
    ) -> WeightOperands:
        """:meth:`operands` of values that no float8 copy may outlive, so that the backward casts
        them again.

        ``scales``, ``stored_as``: the scales and the scheme of a stored weight with these values.
        """
        layout, device = self.layout(parameter), values.device
        state, plan = self.state(parameter, layout), self.plan(_GEMMS[:1], device).on(layout)
        of_both = CastPlan(self.schemes).on(layout)
        if state is None:
            statistics: Sequence[Statistics] = measured(values, of_both)
        else:
            statistics = state.statistics(values, of_both)
        known = dict(zip(self.schemes, statistics, strict=True))
        measures = state is not None and state.amax_from == "cast"
        uncast = None
        for scheme in self.plan(_GEMMS[1:], device).schemes if both else ():
            owner = None if scheme in plan.schemes else self  # the forward's was reported
            uncast = Uncast(
                parameter,
                (*scales, *known[scheme]),
                scheme,
                layout,
                owner,
                measures,
                stored_as=stored_as,
            )
        output = amax = None
        if plan.of:
            use = None
            if is_observed():
                use = Use((self,), "weight", self.forward_layout(parameter))
            taken = [known[scheme] for scheme in plan.schemes]
            (output,), amax = cast_local(values, plan, taken, use, measures=measures)
        elif self.history is not None:  # the backward alone casts the weight
            amax = scale.amax(values)
        if state is not None and state.amax_from == "statistic":
            amax = statistics[0][0]
        return WeightOperands(output, uncast, self._kept_amax(amax))

    def _kept_amax(self, amax: torch.Tensor | None) -> torch.Tensor | None:
        """Keep the amax of a cast in the history; in a graph, return it instead."""
        if amax is None or self.history is None or torch.compiler.is_compiling():
            return amax
        self.history.last = amax
        return None

    def state(self, parameter: torch.Tensor, layout: Layout | None) -> State | None:
        """The state that decides a parameter's statistics in a forward; None: they are measured."""
        if (history := self.history) is not None:
            return history if parameter.requires_grad else history.frozen
        if layout is None or not shared_schemes(self.schemes, layout):
            return None
        local = local_tensor(parameter)
        weight = local if isinstance(local, KnownWeight) else self.unsharded
        if weight is None:
            return None
        if needs_op():  # the operator redirects to the sharded parameter
            return Known(self, weight)
        return self.known(weight.check(parameter), layout)


def _gathered_otherwise(schemes: Sequence[Scheme], weight: Float8Tensor, fqn: str) -> str:
    """The error if FSDP2 gathered a shared weight as another layer's config casts it."""
    wanted = " and ".join([scheme.described for scheme in schemes])
    return (
        f"{fqn}: FSDP2 gathered the weight as {weight.scheme.described} for another layer that "
        f"shares it, but this layer takes {wanted}; convert layers that share a weight with one "
        "config"
    )
