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

Statistics that ``cache`` has for the parameter's values are used; others are computed. Compiled
graphs and selective activation checkpointing query them by operators (``runtime_ops``). On a GPU a
graph measures a weight that is not distributed itself.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8_dist.cast import Copies, cast_by, cast_copies, statistics_of
from fp8_dist.config import Float8LinearConfig
from fp8_dist.device import fuses_casts, is_captured, keep_for_current_stream
from fp8_dist.linear.amax_history import PREPARED_INPUT, AmaxHistory
from fp8_dist.linear.checks import check_gathered
from fp8_dist.linear.observing import is_observed, observe
from fp8_dist.linear.operands import Recast, WeightCasts
from fp8_dist.linear.optimizer_steps import replaced_parameters
from fp8_dist.linear.runtime_ops import (
    must_query,
    queried_copies,
    queried_statistics,
    register_handle,
)
from fp8_dist.linear.stored import StoredWeight
from fp8_dist.linear.weight_cache import Known, ScaleState, WeightCache
from fp8_dist.mesh import Layout, local_tensor, with_local
from fp8_dist.recipe import Gemm, Operand, OperandCopies
from fp8_dist.scaling import (
    CastPlan,
    Quantized,
    Scales,
    Scheme,
    Statistics,
    measure,
    whole_statistics,
)
from fp8_dist.tensor import Float8Tensor, quantized_as
from fp8_dist.text import warn_once
from fp8_dist.torch_internals import (
    backward_id,
    dtensor_local,
    innermost,
    is_exporting,
    is_selectively_checkpointed,
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

    A copy of the layer gets a new object with an empty cache.

    Attributes:
        config: the config of the layer.
        handle: identifies this object in operators (``runtime_ops``).
        cache: statistics, while they are known to be fresh.
        under_fsdp: whether FSDP2 has exchanged the sharded parameter for an unsharded one.
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
        self.cache, self.config = WeightCache(), config
        self._histories = {} if histories is None else histories
        self.handle = register_handle(self)
        # If set, no cast of the unsharded parameter may outlive it.
        self.under_fsdp = False
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

        Collectives: for each cast, an all-reduce of 4 bytes per scale (1 byte per block), if the
        values of one scale are sharded and the scales are not known.
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
        compiling = torch.compiler.is_compiling()
        shard = self.gather_type.unwrap(local)
        if not compiling:
            self._warn_if_flags_have_no_effect(parameter, shard is not local)
        both = torch.is_grad_enabled() and needs_grad_input and not self.under_fsdp
        plan, places = self.copies(_GEMMS if both else _GEMMS[:1], shard.device)
        float8: Copies = ()
        recast = None
        if self.under_fsdp:
            float8, recast = self._casts_of_unsharded(shard, plan)
        elif not plan.of:
            return WeightCasts()
        elif not compiling:
            _, float8 = self.cast_shard(parameter, shard, plan)
        else:
            layout = self.layout(parameter)
            # On a GPU, a graph that measures a weight without a query can be replayed as a CUDA
            # graph, and costs the host less. An exported graph outlives this object. A query of a
            # weight that is not the parameter would take the parameter's layout.
            measures = fuses_casts(local) or self.is_computed(parameter)
            measures = measures and self.history is None and layout is None
            with torch.no_grad():
                if measures or is_exporting():
                    tensor = shard if layout is None else layout.wrap(shard)
                    float8 = cast_copies(tensor, plan, local=shard)[1]
                else:
                    float8 = queried_copies(self, shard, plan)
        if is_observed() and float8:
            observe(self, "weight", shard, float8)
        casts = [None if place is None else float8[place] for place in places]
        return WeightCasts(casts[0], casts[1] if len(casts) > 1 else None, recast)

    def gather_cast(self, shard: torch.Tensor) -> tuple[Quantized, Scales | None]:
        """Return the cast of the sharded parameter that FSDP2 gathers.

        The second result is the scales of the whole weight if the gather can't carry scales, else
        None. ``shard`` may have been moved off the parameter's device (CPU offload).

        Collectives: as :meth:`forward_casts`. If scales of the whole weight are needed and not
        known, those of :func:`fp8_dist.scaling.whole_statistics`.
        """
        if self.scales_ready is not None and not is_captured(shard):
            # FSDP2 gathers on a stream that only waits for the optimizer (set_post_optim_event).
            self.scales_ready.wait()
        (scheme,), layout, whole = self.schemes, self.layout(), None
        plan = CastPlan((scheme,))
        needs_whole = layout is not None and self.needs_whole_scales(layout)
        if layout is not None and needs_whole and is_captured(shard):
            statistics = self._whole_statistics(shard, scheme, layout)
            whole = scheme.scales_from(statistics)
            (found,) = cast_by(shard, plan, [scheme.local_part(statistics, layout)], layout)
        else:
            _, (found,) = self.cast_shard(self.parameter(), shard, plan, gathers=True)
            whole = self.cache.whole_scales if needs_whole else None
            if layout is not None and needs_whole and whole is None:
                whole = scheme.scales_from(self._whole_statistics(shard, scheme, layout))
                self.cache.whole_scales = whole
        if is_observed():
            observe(self, "weight", shard, [found])
        if not is_captured(shard):
            # The cache may drop its tensors while this stream still reads them.
            kept = (self.cache.known or {}).get(scheme, ())
            keep_for_current_stream([*found.scales, *kept])
        return found, whole

    def parameter_replaced(self, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        """Called before the layer's parameter is replaced, by FSDP2 or by other code."""
        now, then = Layout.of(old), Layout.of(new)
        gathered = now is not None and (then is None or then.mesh.ndim < now.mesh.ndim)
        self.under_fsdp |= gathered
        self.sharded = old if gathered else None
        if self.sharded is not None and self.config.fsdp_float8_all_gather:
            self._warn_if_type_is_lost(local_tensor(self.sharded))
        self.cache.parameter_replaced(new, self.sharded)
        if not gathered:
            self.bind(new)

    def note_sharded(self, parameter: torch.Tensor) -> None:
        """Called with the sharded parameter before FSDP2 first exchanges it.

        For a layer, whose class notices each exchange, :meth:`parameter_replaced` is enough.
        """

    def wrapped(self, parameter: torch.Tensor) -> nn.Parameter:
        """Make a parameter on the same storage, of the type that FSDP2 gathers in float8."""
        local = self.gather_type.wrap(local_tensor(parameter.detach()), self.name)
        return nn.Parameter(with_local(parameter, local), requires_grad=parameter.requires_grad)

    def cast_shard(
        self,
        parameter: torch.Tensor,
        shard: torch.Tensor,
        plan: CastPlan,
        gathers: bool = False,
        is_own: bool = True,
    ) -> tuple[Known, Copies]:
        """Cast a shard by its statistics, known or new; not in graphs. Return both.

        ``gathers``, ``is_own``: as in :meth:`known_for`.
        """
        with torch.inference_mode(False):  # autograd can't save inference tensors
            shard, layout = shard.detach(), self.layout(parameter)
            fresh = is_own and self.is_fresh(parameter, shard)
            of_whole = gathers and self.needs_whole_scales(layout)
            if fresh or of_whole or is_selectively_checkpointed():
                # The weight may have changed unnoticed, so its values may exceed known statistics.
                known = self._known(shard, plan.schemes, gathers)
                return known, cast_by(shard, plan, [known[s] for s in plan.schemes], layout)
            tensor = shard if layout is None else layout.wrap(shard)
            if self.history is not None:
                history = self._history_of(parameter)
                found, float8, history.last = history.copies_of(tensor, plan)
                each: Sequence[Statistics] = [found]
            else:
                each, float8 = cast_copies(tensor, plan, local=shard)
            known = dict(zip(plan.schemes, each, strict=True))
            self._note(parameter, shard, known, gathers, None)
            return known, float8

    def needs_whole_scales(self, layout: Layout | None) -> bool:
        """Whether FSDP2's gather needs scales that it can't gather with the weight's data."""
        (scheme,) = self.schemes
        if layout is None:
            return False
        gathered = self.gathered_layout(layout)
        moves = bool(scheme.moving_levels(layout, gathered))
        return moves and not scheme.scales_fit_gather(layout, gathered)

    def _casts_of_unsharded(
        self, shard: torch.Tensor, plan: CastPlan
    ) -> tuple[Copies, Recast | None]:
        """Cast what FSDP2 gathered in high precision for the output, and plan the second cast."""
        layout, second = self.layout(), self.copies(_GEMMS[1:], shard.device).plan
        with torch.inference_mode(False), torch.no_grad():
            known = self._known(shard, self.schemes)
            float8: Copies = ()
            if plan.of:
                float8 = cast_by(shard, plan, [known[plan.schemes[0]]], layout)
        if not second.of:
            return float8, None
        (scheme,) = second.schemes
        return float8, Recast(known[scheme], scheme, scheme.start(layout), scheme.is_cut(layout))

    def _known(
        self, shard: torch.Tensor, schemes: Sequence[Scheme], gathers: bool = False
    ) -> Known:
        """:meth:`known_for` on the device of the shard, by an operator where required."""
        if must_query():
            return queried_statistics(self, shard, gathers)
        found, device = self.known_for(shard, schemes, gathers), shard.device
        return {s: tuple([n.to(device) for n in own]) for s, own in found.items()}

    def known_for(
        self,
        shard: torch.Tensor,
        schemes: Sequence[Scheme],
        gathers: bool = False,
        is_own: bool = True,
    ) -> Known:
        """Return the statistics of a shard, known or new, from its values or from a history.

        Args:
            schemes: those that are needed. A forward without grad_input needs one of two.
            gathers: whether FSDP2's gather needs them. Then new ones are kept.
            is_own: whether the shard is the parameter's; otherwise nothing is known.
        """
        parameter, known, whole = self.parameter(), dict[Scheme, Statistics](), None
        if is_own and self.is_fresh(parameter, shard):
            known |= self.cache.known or {}
        missing = [scheme for scheme in schemes if scheme not in known]
        for scheme in missing:
            known[scheme], whole = self._statistics_of(parameter, shard, scheme, gathers)
        if missing:
            self._note(parameter, shard, known, gathers, whole)
        return known

    def is_fresh(self, parameter: torch.Tensor, shard: torch.Tensor) -> bool:
        """Whether what is known of a parameter may be used.

        It may not be used while a CUDA graph is captured. The graph must contain the computation of
        scales and casts, because it is replayed with other values.
        """
        if is_captured(shard) or self.may_change_unnoticed(parameter):
            return False
        return self.cache.is_fresh(parameter)

    def _note(
        self,
        parameter: torch.Tensor,
        shard: torch.Tensor,
        new: Known,
        gathers: bool,
        whole: Scales | None,
    ) -> None:
        """Note that the statistics of a parameter's values were computed; a gather keeps them."""
        if is_captured(shard):
            return  # the statistics belong to the graph
        self.cache.warn_if_stale(parameter, self.fqn)
        if gathers and self.history is None:  # what follows from a history costs little to find
            self.cache.store(parameter, new, ScaleState.FROM_GATHER, whole)

    def _statistics_of(
        self,
        parameter: torch.Tensor,
        shard: torch.Tensor,
        scheme: Scheme,
        gathers: bool,
    ) -> tuple[Statistics, Scales | None]:
        """The statistics of a shard, and the scales of the whole weight if a gather needs them."""
        layout = self.layout(parameter)
        if self.history is not None:
            tensor = shard if layout is None else layout.wrap(shard)
            history = self._history_of(parameter)
            statistics, history.last = history.statistics_of(tensor)
            return statistics, None
        if not gathers or not self.needs_whole_scales(layout):
            return statistics_of(shard, scheme, layout), None
        assert layout is not None
        whole = self._whole_statistics(shard, scheme, layout)
        return scheme.local_part(whole, layout), scheme.scales_from(whole)

    def _whole_statistics(self, shard: torch.Tensor, scheme: Scheme, layout: Layout) -> Statistics:
        (local,) = measure(shard.detach(), (scheme,), scheme.start(layout))
        return whole_statistics(scheme, local, layout)

    def _history_of(self, parameter: torch.Tensor) -> AmaxHistory:
        """The amax history of the parameter; a frozen one is scaled by its own amax.

        An optimizer step changes a weight only little, so that the scale from its history still
        fits. Merging adapters may change a frozen weight a lot.
        """
        history = self.history
        assert history is not None
        if not parameter.requires_grad:
            history.statistic = None
        return history

    def record_amaxes(self, amaxes: dict[str, torch.Tensor], begins: bool | None = None) -> None:
        """Record the amaxes of a pass in its backward, by history; see Note [Passes that count].

        That of the weight is the one of its last cast.

        ``begins``: whether the pass begins to accumulate gradients. ``None``: if the weight is
        trained, its own gradient tells; otherwise nothing is known.
        """
        self.cache.watch(self.parameter() if self.sharded is None else self.sharded)
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

    def forget_recorded(self) -> None:
        """Drop the amaxes that were recorded since the last sync."""
        for history in self._histories.values():
            history.current = None

    def _warn_if_type_is_lost(self, local: torch.Tensor) -> None:
        if self.gather_type.unwrap(local) is local:
            warn_once(
                "high-precision gather",
                f"{self.fqn}: FSDP2 gathers this weight in high precision, although "
                f"enable_fsdp_float8_all_gather={self.config.enable_fsdp_float8_all_gather!r}: "
                "other code has rebuilt the parameter (a checkpoint loader, for instance), without "
                "its type. Call rewrap_float8_weights(model) after that, before fully_shard",
            )

    def _warn_if_flags_have_no_effect(self, parameter: torch.Tensor, wrapped: bool) -> None:
        flag = self.config.enable_fsdp_float8_all_gather
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
    _change_type(weights, lambda tensor, name: Float8Weight.gather_type.unwrap(tensor))


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
            weight.cache.reset()
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
