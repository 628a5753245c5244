"""The weight of a ``Float8Linear``, from the parameter to the float8 operands of GEMMs.

Terms:

* *parameter*: the tensor that is currently registered as ``layer.weight``. FSDP2 exchanges it: it
  is the *sharded parameter* between uses and the *unsharded parameter* while the layer runs.
* *shard*: the parameter's local tensor, plain and in high precision.
* *known*: for each scheme, the global weight's statistics for the blocks of the shard.

Where the parameter is cast depends on how it is distributed:

* Not at all, or by tensor parallelism: the forward casts the shard, for the backward too
  (:meth:`Float8Weight.forward_casts`).
* By FSDP2 with float8 gathers: FSDP2 gathers the cast of the shard
  (:meth:`Float8Weight.gather_cast`). In the forward the parameter is a ``Float8Tensor``.
* By FSDP2 without float8 gathers: the forward casts the unsharded parameter for its own GEMM. The
  backward casts it again, because FSDP2 frees it in between.
* Nowhere, if it is stored in float8 (:mod:`fp8_dist.linear.stored`).

Statistics that need other ranks are taken from the weight's tensor if it knows them; see Note [What
is known of a weight] in :mod:`fp8_dist.tensor.known`. Others are measured. Compiled graphs and
selective activation checkpointing ask by operators (``runtime_ops``).
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8_dist.cast import Copies, cast_by, cast_copies
from fp8_dist.config import Float8LinearConfig
from fp8_dist.device import is_captured, keep_for_current_stream
from fp8_dist.linear.amax_history import FROZEN, PREPARED_INPUT, AmaxHistory
from fp8_dist.linear.checks import check_gathered
from fp8_dist.linear.observing import is_observed, observe
from fp8_dist.linear.operands import Recast, WeightCasts
from fp8_dist.linear.optimizer_steps import replaced_parameters
from fp8_dist.linear.parameter import gathers_float8
from fp8_dist.linear.runtime_ops import must_query, owner_of, query, register_handle
from fp8_dist.linear.stored import StoredWeight
from fp8_dist.mesh import Layout, has_pieces, local_tensor, with_local
from fp8_dist.recipe import Gemm, Operand, OperandCopies
from fp8_dist.scaling import (
    CastPlan,
    Quantized,
    Scales,
    Scheme,
    Statistics,
    by_scheme,
    common_start,
    empty_statistics,
    measure,
    reduced_statistics,
    scheme_named,
    whole_statistics,
)
from fp8_dist.tensor import Float8Tensor, quantized_as
from fp8_dist.tensor.known import AS_SHARDED, STALE, Kept, KnownWeight
from fp8_dist.text import warn_once
from fp8_dist.torch_internals import (
    backward_id,
    dtensor_local,
    innermost,
    is_plain,
    parameters_of_ddp,
    set_dtensor_local,
    storage_address,
)

_GEMMS: tuple[Gemm, Gemm] = ("output", "grad_input")  # those of a weight
# The remedy in messages about models without float8 weights.
CONVERT_FIRST = (
    "call convert_to_float8_training first (for experts, "
    "fp8_dist.moe.convert_experts_to_float8_training)"
)


class Float8Weight(StoredWeight):
    """A parameter of two dims or more that is cast to float8.

    A copy of the layer gets a new object.

    Attributes:
        config: the config of the layer.
        handle: identifies this object in operators (``runtime_ops``).
        under_fsdp: whether FSDP2 has exchanged the sharded parameter for an unsharded one.
        unsharded: what FSDP2 has gathered in high precision, if its scales may be known.
        scales_ready: on a GPU, an event of the stream that ran precompute or sync. After it, the
            scales of the weight are ready for other streams.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Float8LinearConfig,
        fqn: str,
        histories: dict[str, AmaxHistory] | None = None,
        name: str = "weight",
    ) -> None:
        super().__init__(module, name, fqn)
        self.config = config
        self._histories = {} if histories is None else histories
        self.handle = register_handle(self)
        # If set, no cast of the unsharded parameter may outlive it.
        self.under_fsdp = False
        self.unsharded: KnownWeight | None = None
        self.scales_ready: torch.cuda.Event | None = None

    def __reduce__(self) -> Any:
        return type(self), (self.module, self.config, self.fqn, self._histories, self.name)

    @property
    def is_dynamic(self) -> bool:
        """Whether it is cast with a DYNAMIC scale."""
        is_cast = bool(self.schemes) and not self.is_stored
        return is_cast and "weight" not in self.config.recipe.delayed

    @property
    def history(self) -> AmaxHistory | None:
        """The amax history, if the scale is DELAYED."""
        return self._histories.get("weight")

    def copies(self, gemms: tuple[Gemm, ...], device: torch.device) -> OperandCopies:
        """The float8 copies for both GEMMs of the weight, or for one of them."""
        return self.config.recipe.copies("weight", gemms, device)

    def casts_of(self, operand: Operand) -> dict[tuple[Gemm, ...], Scheme]:
        """The casts of an operand that observers see; see :class:`observing.Owner`."""
        recipe = self.config.recipe
        uses = [(gemm, scheme) for gemm, scheme in recipe.uses[operand].items() if scheme]
        if recipe.folds and operand == "grad_output":
            # Each cast has the scales of another operand folded in. The cast for grad_weight has
            # one scale per column.
            return {
                (gemm,): s if gemm == "grad_input" else s.for_row_contraction for gemm, s in uses
            }
        return {
            tuple(gemm for gemm, each in uses if each == scheme): scheme
            for scheme in recipe.schemes[operand]
        }

    def meshes(self) -> list[DeviceMesh]:
        """The meshes that the operands of the weight's layer are distributed over."""
        layout = self.layout()
        own = [] if layout is None else [layout.mesh]
        return own + [h.mesh for h in self._histories.values() if h.mesh is not None]

    def forward_casts(self, parameter: torch.Tensor, needs_grad_input: bool = True) -> WeightCasts:
        """Return the casts of the parameter that a forward and its backward take.

        ``needs_grad_input``: whether a backward, if one follows, computes the input's gradient.

        Collectives: those of :meth:`statistics`.
        """
        if not self.schemes:
            return WeightCasts()
        if (stored := self.stored(parameter)) is not None:
            return WeightCasts(stored, stored)
        local = local_tensor(parameter)
        if isinstance(local, Float8Tensor):  # FSDP2 gathered it
            check_gathered(self.schemes, local, self.fqn)
            gathered = quantized_as(local, self.schemes[0])
            return WeightCasts(gathered, gathered)
        if not torch.compiler.is_compiling():
            self._warn_if_flags_have_no_effect(parameter)
        both = torch.is_grad_enabled() and needs_grad_input and not self.under_fsdp
        plan, places = self.copies(_GEMMS if both else _GEMMS[:1], local.device)
        recast = None
        with torch.no_grad():
            if self.under_fsdp:
                float8, recast = self._casts_of_unsharded(parameter, plan)
            elif not plan.of:
                return WeightCasts()
            else:
                float8 = self.casts(parameter, plan)
        if is_observed() and float8:
            observe(self, "weight", KnownWeight.unwrap(local), float8)
        casts = [None if place is None else float8[place] for place in places]
        return WeightCasts(casts[0], casts[1] if len(casts) > 1 else None, recast)

    def casts(self, parameter: torch.Tensor, plan: CastPlan) -> Copies:
        """Cast a parameter; collectives as :meth:`statistics`."""
        layout, shard = self.layout(parameter), shard_of(parameter)
        tensor = shard if layout is None else layout.wrap(shard)
        if self.history is not None:
            return self.history.copies_of(tensor, plan, self._kind(parameter))[1]
        if isinstance(local_tensor(parameter), KnownWeight) and self.shared_schemes(layout):
            return cast_by(shard, plan, self.statistics(parameter, plan.schemes), layout)
        return cast_copies(tensor, plan, local=shard)[1]

    def _casts_of_unsharded(
        self, parameter: torch.Tensor, plan: CastPlan
    ) -> tuple[Copies, Recast | None]:
        """Cast what FSDP2 gathered in high precision for the output, and plan the second cast."""
        if not torch.compiler.is_compiling():
            self.note_unsharded(parameter)
        layout, shard = self.layout(parameter), shard_of(parameter)
        known = dict(zip(self.schemes, self.statistics(parameter, self.schemes), strict=True))
        float8: Copies = ()
        if plan.of:
            float8 = cast_by(shard, plan, [known[plan.schemes[0]]], layout)
        second = self.copies(_GEMMS[1:], shard.device).plan
        if not second.of:
            return float8, None
        (scheme,) = second.schemes
        return float8, Recast(known[scheme], scheme, scheme.start(layout), scheme.is_cut(layout))

    def statistics(
        self, parameter: torch.Tensor, schemes: Sequence[Scheme]
    ) -> Sequence[Statistics]:
        """The statistics of a parameter's values, known or measured, for some of the schemes.

        Collectives: if they are not known, an all-reduce for each scheme whose scales cover values
        of several ranks, of 4 bytes per scale (1 byte per block).
        """
        layout, local = self.layout(parameter), local_tensor(parameter)
        shard = KnownWeight.unwrap(local)
        if self.history is not None:
            tensor = shard if layout is None else layout.wrap(shard)
            return [self.history.statistics_of(tensor, self._kind(parameter))[0]]
        held = local if isinstance(local, KnownWeight) else self.unsharded
        if layout is None or held is None:
            return measured(shard, schemes, layout)
        if must_query():
            how = [scheme.key for scheme in schemes], common_start(schemes, layout)
            of = shard, held.known, held.valid, self.handle
            return by_scheme(schemes, weight_statistics.overload(*of, *how))[0]
        return self.found(held.check(parameter), schemes, layout)

    def found(
        self, held: KnownWeight, schemes: Sequence[Scheme], layout: Layout
    ) -> Sequence[Statistics]:
        """:meth:`statistics`, given the tensor that holds what is known."""
        shard, source, of = held.plain, held, layout
        if held.has(AS_SHARDED) and self.sharded is not None:
            local, sharded = local_tensor(self.sharded), self.layout(self.sharded)
            gathered = None if sharded is None else self.gathered_layout(sharded)
            if isinstance(local, KnownWeight) and gathered is not None:
                source, of = local.check(self.sharded), gathered
        known = source.recall(Kept(self.shared_schemes(layout), of), shard)
        missing = [scheme for scheme in schemes if scheme not in known]
        if missing:
            self._warn_if_stale(source)
            known |= zip(missing, measured(shard, missing, layout), strict=True)
        return [known[scheme] for scheme in schemes]

    def shared_schemes(self, layout: Layout | None) -> tuple[Scheme, ...]:
        """The schemes whose scales cover values of several ranks."""
        return tuple([scheme for scheme in self.schemes if any(scheme.axes(layout))])

    def is_kept(self, parameter: torch.Tensor) -> bool:
        """Whether precompute keeps the statistics of a parameter that is not unsharded."""
        layout = self.layout(parameter)
        if layout is None or gathers_float8(parameter):
            return layout is not None
        gathered = self.gathered_over is not None
        return bool(self.shared_schemes(self.gathered_layout(layout) if gathered else layout))

    def gather_cast(self, tensor: KnownWeight) -> tuple[Quantized, Scales | None]:
        """Return the cast of the sharded parameter that FSDP2 gathers, of its local tensor.

        The second result is the scales of the whole weight if the gather can't carry scales, else
        None. With CPU offload ``tensor`` is a copy, and the parameter holds what is known.

        Collectives: as :meth:`statistics`. If scales of the whole weight are needed and not known,
        those of :func:`fp8_dist.scaling.whole_statistics`.
        """
        parameter, shard = self.parameter(), tensor.plain.detach()
        own, held = local_tensor(parameter), tensor
        if isinstance(own, KnownWeight) and own.device != tensor.device:
            held = own
        if self.scales_ready is not None and not is_captured(shard):
            # FSDP2 gathers on a stream that only waits for the optimizer (set_post_optim_event).
            self.scales_ready.wait()
        layout, plan = self.layout(), CastPlan(self.schemes)
        scales, whole = None, self.needs_whole_scales(layout)
        with torch.inference_mode(False), torch.no_grad():  # autograd can't save inference tensors
            if self.history is not None and not must_query():
                whole_tensor = shard if layout is None else layout.wrap(shard)
                (found,) = self.history.copies_of(whole_tensor, plan, self._kind(parameter))[1]
            else:
                statistics: Statistics
                if must_query():
                    statistics = tuple(gather_statistics.overload(shard, self.handle, whole))
                else:
                    statistics = self.found_for_gather(held, shard, whole)
                if layout is not None and whole:
                    scales = plan.schemes[0].scales_from(statistics)
                    statistics = plan.schemes[0].local_part(statistics, layout)
                (found,) = cast_by(shard, plan, [statistics], layout)
        if is_observed():
            observe(self, "weight", shard, [found])
        if not is_captured(shard):
            # Precompute may drop tensors while this stream still reads them.
            keep_for_current_stream([*found.scales, held.known])
        return found, scales

    def found_for_gather(self, held: KnownWeight, shard: torch.Tensor, whole: bool) -> Statistics:
        """The statistics of a shard, or of the whole weight, known or measured, and then kept."""
        parameter, layout, (scheme,) = self.parameter(), self.layout(), self.schemes
        assert layout is not None
        if self.history is not None:
            return self.history.statistics_of(layout.wrap(shard), self._kind(parameter))[0]
        kept = Kept((scheme,), layout, whole)
        if known := held.check(parameter).recall(kept, shard):
            return known[scheme]
        self._warn_if_stale(held)
        if whole:
            (local,) = measure(shard, (scheme,), scheme.start(layout))
            statistics = whole_statistics(scheme, local, layout)
        else:
            (statistics,) = measured(shard, (scheme,), layout)
        if not is_captured(shard):
            held.store(kept, [statistics], parameter)
        return statistics

    def parameter_replaced(self, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        """Called before the layer's parameter is replaced, by FSDP2 or by other code."""
        now, then = Layout.of(old), Layout.of(new)
        gathered = now is not None and (then is None or then.mesh.ndim < now.mesh.ndim)
        self.under_fsdp |= gathered
        self.sharded, self.unsharded = old if gathered else None, None
        if self.sharded is not None and self.config.fsdp_float8_all_gather:
            self._warn_if_type_is_lost(self.sharded)
        if not gathered:
            self.bind(new)
        elif new is not None:
            self.note_unsharded(new)

    def note_sharded(self, parameter: torch.Tensor) -> None:
        """Called with the sharded parameter before FSDP2 first exchanges it.

        For a layer, whose class notices each exchange, :meth:`parameter_replaced` is enough.
        """

    def note_unsharded(self, parameter: torch.Tensor) -> None:
        """Let what FSDP2 gathered in high precision be known as long as the sharded weight is."""
        local = local_tensor(parameter)
        if is_plain(local) and self.shared_schemes(self.layout(parameter)):
            self.unsharded = KnownWeight.as_sharded(local, parameter)
            if isinstance(parameter, DTensor):  # then a write to it is noticed as well
                set_dtensor_local(parameter, self.unsharded)

    def wrapped(self, parameter: torch.Tensor) -> nn.Parameter:
        """Make a parameter on the same storage, of the type that FSDP2 gathers in float8."""
        local = self.gather_type.wrap(local_tensor(parameter.detach()), self.name)
        return nn.Parameter(with_local(parameter, local), requires_grad=parameter.requires_grad)

    def needs_whole_scales(self, layout: Layout | None) -> bool:
        """Whether FSDP2's gather needs scales that it can't gather with the weight's data."""
        (scheme,) = self.schemes
        if layout is None:
            return False
        gathered = self.gathered_layout(layout)
        moves = bool(scheme.moving_levels(layout, gathered))
        return moves and not scheme.scales_fit_gather(layout, gathered)

    def _kind(self, parameter: torch.Tensor) -> int:
        """How a history casts the parameter: a frozen one is scaled by its own amax.

        An optimizer step changes a weight only little, so that the scale from its history still
        fits. Merging adapters may change a frozen weight a lot.
        """
        return 1 if parameter.requires_grad else FROZEN

    def _warn_if_stale(self, held: KnownWeight) -> None:
        if held.has(STALE):
            warn_once(
                "stale scale",
                f"{self.fqn}: the weight was written to after the scales were precomputed, so they "
                "are computed again in this step, with one all-reduce per sharded weight. Call "
                "update_float8_scales(model) after such a change, or attach_update(optimizer, "
                "model) once, if an optimizer made it",
            )

    def record_amaxes(self, amaxes: dict[str, torch.Tensor], begins: bool | None = None) -> None:
        """Record the amaxes of a pass in its backward, by history; see Note [Passes that count].

        That of the weight is the one of its last cast.

        ``begins``: whether the pass begins to accumulate gradients. ``None``: if the weight is
        trained, its own gradient tells; otherwise nothing is known.
        """
        parameter, history = self.parameter(), self.history
        if begins is None and parameter.is_leaf and parameter.requires_grad:
            begins = not self.may_have_gradient()
        backward = None if begins is None else backward_id()
        if history is not None and history.last is not None:
            # It may be from FSDP2's stream, which waits for this one before it makes another.
            amaxes = {**amaxes, "weight": history.last}
        for name, value in amaxes.items():
            shared: Any = self.module.prepared_input if name == PREPARED_INPUT else None
            (shared or self._histories[name]).record(value, backward, bool(begins))

    def forget(self) -> None:
        """Forget what is known of the weight, and what histories recorded since the last sync."""
        for parameter in (self.parameter(), self.sharded):
            local = None if parameter is None else local_tensor(parameter)
            if isinstance(local, KnownWeight):
                local.forget()
        for history in self._histories.values():
            history.forget_recorded()

    def warn_if_not_synced(self) -> None:
        """Warn once if histories have recorded several steps without a sync."""
        steps = max(history.steps for history in self._histories.values())
        if steps > 1:
            warn_once(
                "stale history",
                f"{self.fqn}: {steps} steps have run since the amax histories of DELAYED scales "
                "were last updated; call sync_float8_amax_and_scale_history(model) once per step",
            )

    def _warn_if_type_is_lost(self, sharded: torch.Tensor) -> None:
        if not gathers_float8(sharded):
            warn_once(
                "high-precision gather",
                f"{self.fqn}: FSDP2 gathers this weight in high precision, although "
                f"enable_fsdp_float8_all_gather={self.config.enable_fsdp_float8_all_gather!r}: "
                "other code has rebuilt the parameter (a checkpoint loader, for instance), without "
                "its type. Call rewrap_float8_weights(model) after that, before fully_shard",
            )

    def _warn_if_flags_have_no_effect(self, parameter: torch.Tensor) -> None:
        flag = self.config.enable_fsdp_float8_all_gather
        wrapped = gathers_float8(parameter)
        if wrapped and flag == "auto":
            return  # "auto" also allows for models that FSDP2 does not shard
        # _warn_if_type_is_lost has warned of what FSDP2 has exchanged.
        lost = self.config.fsdp_float8_all_gather and not self.under_fsdp
        if wrapped or (lost and self.is_computed(parameter)):
            warn_once(
                "float8 gather without FSDP2",
                f"{self.fqn}: enable_fsdp_float8_all_gather={flag!r} has no effect on this layer: "
                "FSDP2 does not manage its weight, or other code computes it from the parameter "
                "(FSDP1, a parametrization such as SimpleFSDP's data_parallel). Call fully_shard "
                "on the model (after convert_to_float8_training), let the parametrization return "
                "cast_to_float8(parameter, ...).redistribute(...), or leave the flag off",
            )


def shard_of(parameter: torch.Tensor) -> torch.Tensor:
    """The local tensor of a weight, plain and in high precision."""
    return KnownWeight.unwrap(local_tensor(parameter))


def measured(
    shard: torch.Tensor, schemes: Sequence[Scheme], layout: Layout | None
) -> list[Statistics]:
    """Measure a weight for each scheme.

    Collectives: those of :func:`fp8_dist.scaling.reduced_statistics`, for each scheme.
    """
    local = measure(shard, schemes, common_start(schemes, layout))
    each = zip(schemes, local, strict=True)
    return [reduced_statistics(scheme, own, layout) for scheme, own in each]


@query(
    "weight_statistics(Tensor x, Tensor known, Tensor valid, Tensor handle, str[] schemes, "
    "int[] start) -> Tensor[]"
)
def weight_statistics(
    x: torch.Tensor,
    known: torch.Tensor,
    valid: torch.Tensor,
    handle: torch.Tensor,
    schemes: list[str],
    start: list[int],
) -> list[torch.Tensor]:
    """Operator of :meth:`Float8Weight.statistics`, for a forward; in a flat list.

    ``x, known, valid``: those of a :class:`KnownWeight`.
    """
    weight: Float8Weight = owner_of(handle)
    weight.compare("the first forward")
    layout = weight.layout()
    assert layout is not None
    held = KnownWeight(x, known=known, valid=valid)
    each = weight.found(held, [scheme_named(key) for key in schemes], layout)
    # A graph may write into results.
    return [statistic.clone() for own in each for statistic in own]


weight_statistics.register_fake(
    lambda x, known, valid, handle, schemes, start: empty_statistics(x, schemes, start)
)


# An operator of its own, because selective checkpointing must not save its results: FSDP2 may
# gather in a checkpointed forward and not in its recomputation.
@query("gather_statistics(Tensor x, Tensor handle, bool whole) -> Tensor[]")
def gather_statistics(x: torch.Tensor, handle: torch.Tensor, whole: bool) -> list[torch.Tensor]:
    """Operator of :meth:`Float8Weight.found_for_gather`."""
    weight: Float8Weight = owner_of(handle)
    own = local_tensor(weight.parameter())
    held = own if isinstance(own, KnownWeight) else KnownWeight(x)
    return [each.clone() for each in weight.found_for_gather(held, x, whole)]


def weights_of(module: nn.Module) -> Mapping[str, Float8Weight]:
    """The float8 parameters that a module itself has, by name."""
    weights: Mapping[str, Float8Weight] = getattr(module, "float8_weights", {})
    return weights


def save_weights(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace the float8 parameters in a module's ``state_dict``, unless it keeps variables.

    (A hook of modules that keep their class.)
    """
    for name, weight in weights_of(module).items():
        if state.get(prefix + name, own := weight.parameter()) is own:
            continue
        if weight.is_stored:
            state |= {prefix + key: value for key, value in weight.entries().items()}
        else:
            state[prefix + name] = weight.plain(own)


def load_weights(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Make the entries of a state dict fit the weights (a pre-hook of ``load_state_dict``)."""
    for weight in weights_of(module).values():
        if weight.is_stored:
            weight.load(state, prefix)
        else:
            weight.refuse_codes(state, prefix)


def wrap_weights(weights: Iterable[Float8Weight]) -> None:
    """Let FSDP2 gather weights in float8.

    A weight that is a DTensor stays the same parameter. A plain weight becomes a parameter on the
    same storage: an earlier one of its module and this type, if it is still in use, or a new one.
    """
    _change_type(weights, Float8Weight.gather_type.wrap)


def unwrap_weights(weights: Iterable[Float8Weight]) -> None:
    """Let FSDP2 gather weights in high precision: the inverse of :func:`wrap_weights`."""
    _change_type(weights, lambda tensor, name: KnownWeight.unwrap(tensor))


def hold_known(weights: Iterable[Float8Weight]) -> None:
    """Let the tensors of weights hold what precompute finds, if scales cover other ranks' values.

    Call it once the weights are distributed, before graphs are traced. Parameters that are DTensors
    stay the same. (Precompute does so for other code's DTensors, of which graphs are traced again.)
    """
    chosen = [w for w in weights if w.is_dynamic and w.shared_schemes(w.layout())]
    _change_type(chosen, lambda t, _: t if isinstance(t, KnownWeight) else KnownWeight(t))
    for weight in chosen:
        local, layout = local_tensor(weight.parameter()), weight.layout()
        if layout is not None and not has_pieces(layout.placements):
            assert isinstance(local, KnownWeight)
            local.reserve(Kept(weight.shared_schemes(layout), layout))


def warn_of_ddp(weights: Iterable[Float8Weight]) -> None:
    """Warn if DDP knows parameters that are about to be replaced: it would not reduce new ones."""
    known = parameters_of_ddp()
    if held := [weight for weight in weights if id(weight.parameter()) in known]:
        warnings.warn(
            f"{held[0].fqn}.{held[0].name} becomes another parameter, whose gradient the "
            "DistributedDataParallel that was made before does not reduce: wrap the model in a new "
            "one, or convert it before it is wrapped",
            stacklevel=4,
        )


def _change_type(
    weights: Iterable[Float8Weight], of: Callable[[torch.Tensor, str], torch.Tensor]
) -> None:
    """Replace the local tensor of each weight by ``of(tensor, name)``, on the same storage."""
    new: dict[int, torch.Tensor] = {}  # by the id of the parameter that each one replaces
    plain: list[tuple[Float8Weight, torch.Tensor]] = []
    earlier = {(module, name, _place(old)): old for module, name, old in replaced_parameters()}
    for weight in weights:
        old = weight.parameter()
        local = dtensor_local(old) if isinstance(old, DTensor) else old.detach()
        tensor = of(local, weight.name)
        if tensor is local:
            continue
        if isinstance(old, DTensor):
            set_dtensor_local(old, tensor)
            continue
        plain.append((weight, tensor))
    warn_of_ddp([weight for weight, _ in plain])
    for weight, tensor in plain:
        old = weight.parameter()
        if id(old) not in new:  # modules may share a parameter
            made = earlier.get((weight.module, weight.name, _place(tensor)), nn.Parameter(tensor))
            made.requires_grad_(old.requires_grad)
            made.grad = old.grad
            new[id(old)] = made
        weight.replace(new[id(old)])


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """The key of the values of a parameter in memory, among parameters of one type."""
    plain = innermost(tensor)
    at = storage_address(plain), plain.storage_offset(), plain.shape, plain.stride()
    return plain is tensor, plain.dtype, *at


def checked_module(module: nn.Module) -> nn.Module:
    """Return ``module``; raise TypeError if it is not an nn.Module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a model (an nn.Module), got a {type(module).__name__}")
    return module


def float8_weights(module: nn.Module) -> dict[str, Float8Weight]:
    """All float8 parameters in ``module`` by FQN, in the order of ``named_modules()``.

    Raises:
        TypeError: ``module`` is not an nn.Module.
    """
    return {
        f"{fqn}.{name}" if fqn else name: weight
        for fqn, part in checked_module(module).named_modules()
        for name, weight in weights_of(part).items()
        if weight.module is part  # a module of torch.compile has the attributes of the one inside
    }


def weights_of_model(module: nn.Module, caller: str) -> dict[str, Float8Weight]:
    """Return the float8 weights of a module by FQN, or raise ValueError if there are none."""
    weights = float8_weights(module)
    if not weights:
        raise ValueError(f"{caller}: the module has no converted layer; {CONVERT_FIRST}")
    return weights


def note_made(weights: Iterable[Float8Weight]) -> None:
    """Let later gathers wait for the scales and casts of weights that this stream computes."""
    if not torch.cuda.is_available():
        return
    if on_gpu := [weight for weight in weights if weight.device.type == "cuda"]:
        event = torch.cuda.current_stream().record_event()
        for weight in on_gpu:
            weight.scales_ready = event


def weights_by_layer(module: nn.Module) -> dict[str, Float8Weight]:
    """All float8 parameters in ``module``, by the name of the layer whose ``weight`` it is.

    A parameter of another name, such as one of experts, has its FQN.
    """
    weights = float8_weights(module)
    return {
        fqn.removesuffix("weight").removesuffix(".") if weight.name == "weight" else fqn: weight
        for fqn, weight in weights.items()
    }


def float8_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The modules in ``module`` that have float8 parameters, by name."""
    return {fqn: part for fqn, part in module.named_modules() if weights_of(part)}
