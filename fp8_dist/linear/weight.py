"""The weight of a ``Float8Linear``, from the parameter to the float8 operands of GEMMs.

Terms:

* *parameter*: the tensor that is currently registered as ``layer.weight``. FSDP2 swaps it: the
  *sharded parameter* is registered between uses, the *unsharded parameter* while the layer runs.
* *shard*: the parameter's local tensor, plain and in high precision.

Where the parameter is cast depends on how it is distributed:

* On one device, or with tensor parallelism: the forward casts the shard, also for the backward
  (:meth:`Float8Weight.forward_casts`).
* With FSDP2 and float8 gathers: FSDP2 gathers the cast of the shard
  (:meth:`Float8Weight.gather_cast`). In the forward the parameter is a ``Float8Tensor``.
* With FSDP2 without float8 gathers: the forward casts the unsharded parameter for its own GEMM. The
  backward casts it again, because FSDP2 frees it in between.
* Stored in float8: it is not cast (:mod:`fp8_dist.linear.stored`).

Statistics that need other ranks are looked up in the weight's tensor; see Note [What is known of a
weight] in :mod:`fp8_dist.tensor.known`. Others are measured. In compiled graphs and under selective
activation checkpointing a custom op looks them up or measures them (``runtime_ops``).
"""

import weakref
from collections.abc import Sequence
from functools import partial
from operator import is_not
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fp8_dist import fsdp_internals, mesh, scaling
from fp8_dist import torch_internals as internals
from fp8_dist.cast import Copies, cast_by, cast_local_copies
from fp8_dist.config import Float8LinearConfig
from fp8_dist.device import QueuedWork, is_captured, is_float8, keep_for
from fp8_dist.linear.agreement import check_placed
from fp8_dist.linear.amax_history import FROZEN, PREPARED_INPUT, AmaxHistory
from fp8_dist.linear.checks import check_gathered
from fp8_dist.linear.local_placements import LocalPlacements
from fp8_dist.linear.observing import Source, is_observed, observe
from fp8_dist.linear.operands import Recast, WeightCasts
from fp8_dist.linear.optimizer_steps import note_replaced
from fp8_dist.linear.runtime_ops import needs_op, owner_of, query, register_handle
from fp8_dist.linear.stored import StoredWeight, as_stored
from fp8_dist.mesh import Layout, local_tensor
from fp8_dist.recipe import Gemm, Operand, OperandCopies
from fp8_dist.scaling import CastPlan, Quantized, Scales, Scheme, Statistics
from fp8_dist.tensor import Float8Tensor, known, quantized_as
from fp8_dist.tensor.known import Kept, KnownWeight
from fp8_dist.tensor.stored import PackedFloat8, StoredFloat8, StoredScales
from fp8_dist.tensor.wrapper import WrapperParameter
from fp8_dist.text import warn_once

_GEMMS: tuple[Gemm, Gemm] = ("output", "grad_input")  # the GEMMs that take a weight


class GatherPlan:
    """How FSDP2 gathers a weight of one scheme in float8.

    Attributes:
        layout: the layout of the sharded parameter.
        arrives: the layout of the unsharded parameter.
        kept: which statistics are cached. (Those of DELAYED scales are in the history.)
        cast: the cast of the shard.
        position: start and ``splits_blocks`` of the shard, as in :class:`Quantized`.
        position_of_whole: start and ``splits_blocks`` of the unsharded parameter.
        moving: the levels whose scales the gather carries.
        packs: whether the gather carries packed data (:meth:`Scheme.pack`).
    """

    def __init__(self, schemes: tuple[Scheme, ...], layout: Layout, arrives: Layout) -> None:
        (scheme,) = schemes
        self.layout, self.arrives = layout, arrives
        moving = scheme.moving_levels(layout, arrives)
        whole = bool(moving) and not scheme.scales_fit_gather(layout, arrives)
        self.moving = () if whole else moving
        self.kept, self.cast = Kept(schemes, layout, whole), CastPlan(schemes)
        self.position = scheme.start(layout), scheme.splits_blocks(layout)
        self.position_of_whole = scheme.start(arrives), scheme.splits_blocks(arrives)
        self.packs = scheme.packs(layout, arrives)


class Float8Weight:
    """A parameter of two dims or more that is multiplied in float8.

    It is in high precision and cast at use, or frozen and :meth:`stored` in float8. A copy of the
    layer gets a new object. The reference to the module is weak.

    Attributes:
        config: the config of the layer.
        name, fqn: the name of the parameter in the module, and the name of the module.
        scales_name: the name of the parameter that has the scales of a stored weight.
        handle: identifies this object in operators (``runtime_ops``).
        is_compared: whether the layer was compared between ranks (``agreement``).
        fsdp: FSDP2's object for the parameter, from ``fully_shard`` on. ``fp8_dist.fsdp`` sets it.
        unsharded: the local tensor of FSDP2's unsharded parameter in high precision, if its
            statistics are cached.
        scales_ready: on a GPU, the event after which the scales of precompute or sync are ready.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Float8LinearConfig,
        fqn: str,
        histories: dict[str, AmaxHistory] | None = None,
        name: str = "weight",
    ) -> None:
        self._module = weakref.ref(module)
        self.config, self.fqn = config, fqn
        self.name, self.scales_name = name, f"{name}_scale_inv"
        self._histories = {} if histories is None else histories
        self.handle = register_handle(self)
        self.is_compared = False
        self.fsdp: fsdp_internals.FsdpParameter | None = None
        self.unsharded: KnownWeight | None = None
        self.scales_ready: QueuedWork | None = None
        self._plan: tuple[tuple[Any, ...], GatherPlan] | None = None  # its inputs, the plan

    def __reduce__(self) -> Any:
        return type(self), (self.module, self.config, self.fqn, self._histories, self.name)

    def compare(self, caller: str) -> None:
        """Compare the layer between the ranks of its mesh, once, if other code has placed it."""
        layout = None if self.is_compared else self.layout()
        if layout is not None:
            check_placed({self.fqn: self.module}, layout.mesh, f"{caller} of {self.fqn}")

    @property
    def module(self) -> nn.Module:
        """The module that has the parameter."""
        module = self._module()
        assert module is not None, f"{self.fqn} was freed"
        return module

    def parameter(self) -> torch.Tensor:
        """The parameter that is currently registered."""
        module = self.module
        parameter = module._parameters.get(self.name)  # faster than getattr
        return getattr(module, self.name) if parameter is None else parameter

    def master(self) -> torch.Tensor:
        """The parameter that an optimizer updates: the sharded one, if FSDP2 gathers it."""
        return self.parameter() if self.fsdp is None else self.fsdp.sharded

    def replace(self, new: torch.Tensor) -> None:
        """Replace the parameter; the new one gets its attributes and hooks.

        If the new one is trained, later steps of optimizers that hold the old one raise.
        """
        old = self.parameter()
        if new is not old:
            internals.carry_attributes(old, new)
            note_replaced(old, new, self.module, self.name, self.fqn)
        setattr(self.module, self.name, new)

    @property
    def is_registered(self) -> bool:
        """Whether the weight is a parameter of the module, neither parametrized nor flattened."""
        return self.name in self.module._parameters and self.parameter().ndim >= 2

    def shard(self, parameter: torch.Tensor | None = None) -> torch.Tensor:
        """The local tensor of a parameter, plain, without a copy or collectives."""
        parameter = self.parameter() if parameter is None else parameter
        return KnownWeight.unwrap(local_tensor(parameter))

    def layout(self, parameter: torch.Tensor | None = None) -> Layout | None:
        """The declared layout of a parameter (by default the layer's), or that of its DTensor."""
        parameter = self.parameter() if parameter is None else parameter
        declared: LocalPlacements | None = getattr(self.module, "local_placements", None)
        if declared is None:
            return Layout.of(parameter)
        return mesh.layout_over(parameter, declared.mesh, declared.weight, self.fqn)

    def gathered_layout(self, sharded: Layout) -> Layout | None:
        """The layout of the unsharded parameter, given that of the sharded one.

        Both are the same if FSDP2 replicates the parameter (``replicate``).
        """
        return None if self.fsdp is None else sharded.replicated_over(self.fsdp.mesh)

    def forward_layout(self, weight: torch.Tensor) -> Layout | None:
        """The layout of a forward's weight; with FSDP2, replicated over the mesh that shards it."""
        sharded = None if self.fsdp is None else self.layout(self.master())
        return self.layout(weight) if sharded is None else self.gathered_layout(sharded)

    @property
    def gathered_as(self) -> torch.dtype | None:
        """The dtype of FSDP2's gather; None: the weight's own, float8, or there is no gather."""
        return None if self.fsdp is None else self.fsdp.gathered_as

    @property
    def device(self) -> torch.device:
        """The device on which the scales are used: with CPU offload, that of the mesh."""
        layout, device = self.layout(), self.shard().device
        if layout is None or layout.mesh.device_type == device.type:
            return device
        return torch.device(layout.mesh.device_type)

    @staticmethod
    def why_not(tensor: torch.Tensor | None) -> str:
        """The reason why a tensor can't be a layer's weight, as a phrase; empty if it can.

        A tensor subclass with its own matmul, such as the quantized weights of torchao, can't.
        """
        local: Any = internals.dtensor_local(tensor) if isinstance(tensor, DTensor) else tensor
        supported = Float8Tensor | WrapperParameter | internals.AsyncCollectiveTensor
        if isinstance(local, supported) or not hasattr(local, "__tensor_flatten__"):
            return ""
        return f"a {type(local).__name__}, which implements its own matmul (dequantize it first)"

    def plain(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter as a plain tensor or DTensor on the same storage, detached.

        The result shares the version counters, including that of the local tensor, so writes to it
        are noticed. If FSDP2 has gathered the parameter in float8, it is the sharded parameter.
        """
        if isinstance(local_tensor(parameter), Float8Tensor):
            parameter = self.master()
        local = self.shard(parameter).detach()
        if not isinstance(parameter, DTensor):
            return local
        plain: Any = parameter.detach()
        internals.set_dtensor_local(plain, local)
        return plain

    def high_precision(self, weight: torch.Tensor | None = None) -> torch.Tensor:
        """The parameter in high precision, detached.

        ``weight``: the weight of a forward, which other code may have computed from the parameter.
        With FSDP2, the result is the sharded parameter.

        Collectives: for a stored weight, those of :meth:`StoredWeight.dequantized`.
        """
        if (stored := self.stored()) is not None:
            return stored.dequantized()
        if weight is None:
            return self.plain(self.parameter())
        return self.plain(weight if self.fsdp is None else self.fsdp.sharded)

    @property
    def is_stored(self) -> bool:
        """Whether the weight is stored in float8."""
        return isinstance(local_tensor(self.parameter()), StoredFloat8)

    def stored(self, parameter: torch.Tensor | None = None) -> StoredWeight | None:
        """Return the stored weight, sharded or unsharded; None if it is not stored."""
        parameter = self.parameter() if parameter is None else parameter
        if not isinstance(local_tensor(parameter), StoredFloat8):
            return None
        (scheme,), scales = self.schemes, self.module.get_parameter(self.scales_name)
        names = self.fqn, self.name, self.scales_name
        return StoredWeight(*names, parameter, scales, self.layout(parameter), scheme)

    def store(self, qdata: torch.Tensor, scales: torch.Tensor, packs: bool) -> None:
        """Replace the weight by two new parameters, for its data and its scales.

        ``packs``: whether the data is packed.
        """
        (scheme,), dtype = self.schemes, self.parameter().dtype
        held = as_stored(scales if scales.ndim else scales.view(1), scheme)
        data = StoredFloat8(qdata, dtype, scheme.key)
        if packs:
            data = PackedFloat8(scheme.pack(qdata).view(torch.uint8), dtype, scheme.key, False)
        stored_scales = StoredScales(held, torch.float32, torch.float32)
        self.share(
            nn.Parameter(data, requires_grad=False),
            nn.Parameter(stored_scales, requires_grad=False),
        )

    def share(self, data: torch.Tensor, scales: nn.Parameter) -> None:
        """Register the parameters of a stored weight, which another layer may share."""
        self.module.register_parameter(self.scales_name, scales)
        self.replace(data)
        self.bind(self.parameter())

    def bind(self, parameter: torch.Tensor | None) -> None:
        """Pass in-place additions to the parameter on to this object (``StoredFloat8.write``)."""
        local = None if parameter is None else local_tensor(parameter)
        if isinstance(local, StoredFloat8):
            local.write = partial(Float8Weight._add, weakref.proxy(self))

    def _add(self, func: Any, *args: Any, **kwargs: Any) -> None:
        warn_once(
            "merged into float8",
            f"{self.fqn}: a sum with a weight that is stored in float8 is cast to float8 again, "
            "and so is the difference when it is taken back: merging and unmerging an adapter "
            "does not restore the weight's bits",
        )
        stored = self.stored()
        assert stored is not None
        total = stored.dequantized()
        func(local_tensor(total), *args, **kwargs)
        stored.write(total)

    def place_scales(self, scales: torch.Tensor) -> None:
        """Distribute the scales of a stored weight like its data, which is on a 1-D mesh.

        They are replicated if ranks share scales.
        """
        layout, (scheme,) = self.layout(), self.schemes
        assert layout is not None
        (placement,), (level,), ndim = layout.placements, scheme.levels, len(layout.shape)
        dim = mesh.sharded_dim(placement, ndim)
        block = None if dim is None or level.is_scalar else level.block(dim, ndim)
        # Ranks with several pieces have whole blocks (Scheme.start has checked them).
        has_pieces = mesh.has_strided_placements(layout.placements)
        if block is None or (block > 1 and scheme.splits_blocks(layout) and not has_pieces):
            placement = Replicate()
        placed = distribute_tensor(scales.detach(), layout.mesh, [placement])
        self.module.register_parameter(self.scales_name, nn.Parameter(placed, requires_grad=False))
        self.bind(self.parameter())

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes of the weight, in the order of its GEMMs."""
        return self.config.recipe.schemes["weight"]

    @property
    def is_dynamic(self) -> bool:
        """Whether the weight is cast with a DYNAMIC scale."""
        is_cast = bool(self.schemes) and not self.is_stored
        return is_cast and "weight" not in self.config.recipe.delayed

    @property
    def history(self) -> AmaxHistory | None:
        """The amax history, if the scale is DELAYED."""
        return self._histories.get("weight")

    def copies(self, gemms: tuple[Gemm, ...], device: torch.device) -> OperandCopies:
        """Return the float8 copies for both GEMMs of the weight, or for one of them."""
        return self.config.recipe.copies("weight", gemms, device)

    def casts_of(self, operand: Operand) -> dict[tuple[Gemm, ...], Scheme]:
        """The casts of an operand that observers see; see :class:`observing.Owner`."""
        return self.config.recipe.casts[operand]

    def meshes(self) -> list[DeviceMesh]:
        """The meshes that the operands of the weight's layer are distributed over."""
        layouts = [self.layout(), *self._histories.values()]
        return [x.mesh for x in layouts if x is not None and x.mesh is not None]

    def forward_casts(self, parameter: torch.Tensor, needs_grad_input: bool = True) -> WeightCasts:
        """Return the float8 copies of the parameter for a forward and its backward.

        ``needs_grad_input``: whether a backward, if one follows, computes the input's gradient.

        Collectives: those of :meth:`statistics`.

        Raises:
            TypeError: the parameter was replaced by plain float8 data.
            ValueError: as :meth:`StoredWeight.quantized`; or what FSDP2 gathered was cast for
                another config than the layer's.
        """
        if not self.schemes:
            return WeightCasts()
        if (stored := self.stored(parameter)) is not None:
            quantized = stored.quantized()
            if stored.is_packed:
                return WeightCasts(quantized, recast=Recast(quantized.scales, *quantized[2:]))
            return WeightCasts(quantized, quantized)
        local = local_tensor(parameter)
        if is_float8(local.dtype):
            raise TypeError(
                f"{self.fqn}: {self.name} is data of {local.dtype} without its scales, from a "
                "state dict that was assigned or passed to functional_call; load it with "
                "load_state_dict after freeze_to_float8"
            )
        if isinstance(local, Float8Tensor):  # FSDP2 gathered it
            check_gathered(self.schemes, local, self.fqn)
            gathered = quantized_as(local, self.schemes[0])
            return WeightCasts(gathered, gathered)
        if not torch.compiler.is_compiling():
            self._warn_if_flag_has_no_effect(parameter)
        both = torch.is_grad_enabled() and needs_grad_input and self.fsdp is None
        plan, places = self.copies(_GEMMS if both else _GEMMS[:1], local.device)
        copies: Copies = ()
        recast = None
        with torch.no_grad():
            if self.fsdp is not None:  # no cast of the unsharded parameter may outlive it
                copies, recast = self._casts_of_unsharded(parameter, plan)
            elif plan.of:
                copies = self.casts(parameter, plan)
        if is_observed() and copies:
            observe(self, "weight", Source(local, self.forward_layout(parameter)), copies)
        casts = [None if place is None else copies[place] for place in places]
        return WeightCasts(casts[0], casts[1] if both else None, recast)

    def casts(self, parameter: torch.Tensor, plan: CastPlan) -> Copies:
        """Cast a parameter; collectives as :meth:`statistics`."""
        layout, shard = self.layout(parameter), self.shard(parameter)
        if self.history is not None:
            return self.history.copies_of(shard, layout, plan, self._kind(parameter))[0]
        if isinstance(local_tensor(parameter), KnownWeight) and self.shared_schemes(layout):
            return cast_by(shard, plan, self.statistics(parameter, plan.schemes), layout)
        return cast_local_copies(shard, plan, layout)

    def _casts_of_unsharded(
        self, parameter: torch.Tensor, plan: CastPlan
    ) -> tuple[Copies, Recast | None]:
        """Cast the unsharded parameter for the output, and plan the cast for grad_input."""
        if not torch.compiler.is_compiling():
            self.note_unsharded(parameter)
        layout, shard = self.layout(parameter), self.shard(parameter)
        statistics = dict(zip(self.schemes, self.statistics(parameter, self.schemes), strict=True))
        copies: Copies = ()
        if plan.of:
            copies = cast_by(shard, plan, [statistics[plan.schemes[0]]], layout)
        second = self.copies(_GEMMS[1:], shard.device).plan
        if not second.of:
            return copies, None
        (scheme,) = second.schemes
        position = scheme.start(layout), scheme.splits_blocks(layout)
        return copies, Recast(statistics[scheme], scheme, *position)

    def statistics(
        self, parameter: torch.Tensor, schemes: Sequence[Scheme]
    ) -> Sequence[Statistics]:
        """The statistics of a parameter for some of the schemes, cached or measured.

        Collectives: if they are not cached, an all-reduce for each scheme whose scales cover values
        of several ranks, of 4 bytes per scale (1 byte per block).
        """
        layout, local = self.layout(parameter), local_tensor(parameter)
        shard = KnownWeight.unwrap(local)
        if self.history is not None:
            return [self.history.statistics_of(shard, layout, self._kind(parameter))[0]]
        weight = local if isinstance(local, KnownWeight) else self.unsharded
        if layout is None or weight is None:
            return measured(shard, schemes, layout)
        if needs_op():
            keys, start = [scheme.key for scheme in schemes], scaling.common_start(schemes, layout)
            cached = shard, weight.known, weight.valid, self.handle
            return scaling.by_scheme(schemes, weight_statistics.overload(*cached, keys, start))[0]
        return self.statistics_for_forward(weight.check(parameter), schemes, layout)

    def statistics_for_forward(
        self, weight: KnownWeight, schemes: Sequence[Scheme], layout: Layout
    ) -> list[Statistics]:
        """:meth:`statistics`, given the parameter's local tensor."""
        cache, kept = weight, Kept(self.shared_schemes(layout), layout)
        if weight.has(known.AS_SHARDED):
            sharded, sharded_kept = local_tensor(self.master()), self.kept()
            if isinstance(sharded, KnownWeight) and sharded_kept is not None:
                cache, kept = sharded.check(self.master()), sharded_kept
        return self._look_up_or_measure(cache, kept, weight.plain, schemes)

    def statistics_for_gather(self, cache: KnownWeight, shard: torch.Tensor) -> Statistics:
        """Return the statistics of a shard, or of the whole weight; cache them if DYNAMIC."""
        parameter, plan = self.master(), self.gather_plan()
        if self.history is not None:
            return self.history.statistics_of(shard, plan.layout, self._kind(parameter))[0]
        cache.check(parameter)
        return self._look_up_or_measure(cache, plan.kept, shard, self.schemes, parameter)[0]

    def _look_up_or_measure(
        self,
        cache: KnownWeight,
        kept: Kept,
        shard: torch.Tensor,
        schemes: Sequence[Scheme],
        parameter: torch.Tensor | None = None,
    ) -> list[Statistics]:
        """Look statistics up in ``cache``, or measure the shard.

        ``parameter``: the parameter that owns ``cache``. If given, new statistics are cached.
        """
        statistics = cache.recall(kept, shard)
        if missing := [scheme for scheme in schemes if scheme not in statistics]:
            is_shared = kept.whole or bool(self.shared_schemes(kept.layout))
            if is_shared:
                self._warn_if_stale(cache)
            new = measured(shard, missing, kept.layout, kept.whole)
            statistics |= zip(missing, new, strict=True)
            trains = is_shared and self.module.training
            if parameter is not None and not is_captured(shard):
                # (Statistics that an evaluation computes after a step also serve the next step.)
                source = known.TRAINED if trains or cache.has(known.OUTDATED) else known.EVALUATED
                cache.store(kept, [statistics[s] for s in kept.schemes], parameter, source)
            elif trains and not is_captured(shard):
                cache.note_training()
        return [statistics[scheme] for scheme in schemes]

    def shared_schemes(self, layout: Layout | None) -> tuple[Scheme, ...]:
        """The schemes whose scales cover values of several ranks."""
        return tuple([scheme for scheme in self.schemes if any(scheme.axes(layout))])

    def kept(self) -> Kept | None:
        """Which statistics of the sharded parameter precompute and gathers cache; None if none.

        If FSDP2 gathers in high precision, they are statistics of the unsharded parameter.
        """
        parameter = self.master()
        layout = self.layout(parameter)
        if layout is None or not self.is_dynamic:
            return None
        if hasattr(local_tensor(parameter), "fsdp_pre_all_gather"):
            return self.gather_plan().kept
        arrives = self.gathered_layout(layout) or layout
        shared = self.shared_schemes(arrives)
        return Kept(shared, arrives) if shared else None

    def gather_plan(self) -> GatherPlan:
        """Return the plan of FSDP2's float8 gather, made again if layout or config changed."""
        parameter = self.master()
        assert isinstance(parameter, DTensor)
        declared = getattr(self.module, "local_placements", None)
        depends_on = internals.dtensor_spec(parameter), declared, self.fsdp, self.config
        # (Comparing layouts would take longer than making the plan.)
        if self._plan is None or any(map(is_not, self._plan[0], depends_on)):
            layout = self.layout(parameter)
            assert layout is not None
            plan = GatherPlan(self.schemes, layout, self.gathered_layout(layout) or layout)
            self._plan = depends_on, plan
        return self._plan[1]

    def gather_cast(self, tensor: KnownWeight) -> tuple[Quantized, Scales | None]:
        """Cast the local tensor of the sharded parameter for FSDP2's gather.

        The data is packed if the plan says so. The second result is the scales of the whole weight
        if the gather can't carry scales, else None. With CPU offload ``tensor`` is a copy, and the
        parameter has the cached statistics.

        Collectives: as :meth:`statistics`. If scales of the whole weight are needed and not cached,
        those of :func:`fp8_dist.scaling.global_statistics`.
        """
        parameter, shard, plan = self.master(), tensor.plain.detach(), self.gather_plan()
        local, cache = local_tensor(parameter), tensor
        if isinstance(local, KnownWeight) and local.device != tensor.device:
            cache = local
        waits = shard.is_cuda and not is_captured(shard)
        stream = torch.cuda.current_stream(shard.device) if waits else None
        if self.scales_ready is not None and stream is not None:
            # FSDP2 gathers on a stream that only waits for the optimizer (set_post_optim_event).
            self.scales_ready.wait(stream)
        (scheme,), scales = self.schemes, None
        # Autograd can't save inference tensors. (It records no operators on a detached shard.)
        with torch.inference_mode(False):
            if self.history is not None and not needs_op():
                how = plan.layout, plan.cast, self._kind(parameter)
                (quantized,), _ = self.history.copies_of(shard, *how)
            else:
                statistics: Statistics
                if needs_op():
                    statistics = tuple(gather_statistics.overload(shard, self.handle))
                else:
                    statistics = self.statistics_for_gather(cache, shard)
                if plan.kept.whole:
                    scales = scheme.scales_from(statistics)
                    statistics = scheme.local_part(statistics, plan.layout)
                start = plan.position[0]
                if plan.packs and not is_observed():
                    shard_scales, qdata = scheme.cast_packed(shard, statistics, start)
                else:
                    (shard_scales,), (qdata,) = scaling.cast(shard, plan.cast, [statistics], start)
                quantized = Quantized(qdata, shard_scales, scheme, *plan.position)
        if is_observed():
            observe(self, "weight", Source(shard, plan.layout), [quantized])
            if plan.packs:
                quantized = quantized._replace(qdata=scheme.pack(quantized.qdata))
        if stream is not None:
            # Precompute and sync may drop tensors while this stream still reads them.
            keep_for(stream, cache.known)
            for scale in quantized.scales if self.history is not None else ():
                keep_for(stream, scale)
        return quantized, scales

    def parameter_replaced(self, new: torch.Tensor | None) -> None:
        """Prepare for the replacement of the layer's parameter, by FSDP2 or by other code."""
        self.unsharded = None
        if new is not None and self.fsdp is not None and new is self.fsdp.unsharded:
            self.note_unsharded(new)
        else:
            self.bind(new)

    def check_sharded(self) -> None:
        """Raise ValueError if FSDP2 has sharded the parameter in a way that does not work."""

    def note_unsharded(self, parameter: torch.Tensor) -> None:
        """Make later look-ups of the unsharded parameter's statistics use the sharded one."""
        local = local_tensor(parameter)
        if internals.is_plain(local) and self.shared_schemes(self.layout(parameter)):
            self.unsharded = KnownWeight.as_sharded(local, parameter)
            if isinstance(parameter, DTensor):  # so that writes to it are noticed too
                internals.set_dtensor_local(parameter, self.unsharded)

    def _kind(self, parameter: torch.Tensor) -> int:
        """The ``shared`` of :meth:`AmaxHistory.copies_of`: 1 for a trained weight, else FROZEN.

        An optimizer step changes a weight only little, so the scale from its history still fits.
        Merging adapters may change a frozen weight a lot.
        """
        return 1 if parameter.requires_grad else FROZEN

    def _warn_if_stale(self, cache: KnownWeight) -> None:
        """Warn once about an all-reduce that an update of scales would have avoided."""
        if self.module.training and (cache.has(known.STALE) or cache.has(known.OUTDATED)):
            warn_once(
                "stale scale",
                f"{self.fqn}: the weight was written to after its scales were computed, and no "
                "update of scales has followed, so they are computed again in this step, with one "
                "all-reduce per sharded weight. Call attach_update(optimizer, model) once, or "
                "update_float8_scales(model) (precompute_float8_dynamic_scale) after each "
                "optimizer.step() and other changes",
            )

    def record_amaxes(self, amaxes: dict[str, torch.Tensor], begins: bool | None = None) -> None:
        """Record a pass's amaxes, keyed by history, in its backward; see Note [Passes that count].

        The weight's amax is that of its last cast.

        ``begins``: whether the pass begins to accumulate gradients. ``None``: decided by the
        weight's own gradient if the weight is a trained leaf, else unknown.
        """
        parameter, history = self.parameter(), self.history
        if begins is None and parameter.is_leaf and parameter.requires_grad:
            in_fsdp = [] if self.fsdp is None else [self.fsdp]
            begins = not fsdp_internals.have_gradients([parameter, self.master()], in_fsdp)
        backward = None if begins is None else internals.backward_id()
        if history is not None and history.last is not None:
            # FSDP2's stream may have made it. It waits for this stream before it makes the next.
            amaxes = {**amaxes, "weight": history.last}
        for name, value in amaxes.items():
            shared: Any = self.module.prepared_input if name == PREPARED_INPUT else None
            (shared or self._histories[name]).record(value, backward, bool(begins))
            if shared and (own := self._histories.get("input")) is not None:
                own.is_replaced = own is not shared

    def forget(self) -> None:
        """Drop the cached statistics, and what histories recorded since the last sync."""
        if isinstance(local := local_tensor(self.master()), KnownWeight):
            local.forget()
        for history in self._histories.values():
            history.current, history.steps = None, 0

    def warn_if_not_synced(self) -> None:
        """Warn once if histories have recorded several steps without a sync."""
        steps = max(history.steps for history in self._histories.values())
        if steps > 1:
            warn_once(
                "stale history",
                f"{self.fqn}: {steps} steps have run since the amax histories of DELAYED scales "
                "were last updated; call update_float8_scales(model) after each optimizer step, or "
                "attach_update(optimizer, model) once",
            )

    def _warn_if_flag_has_no_effect(self, parameter: torch.Tensor) -> None:
        flag = self.config.enable_fsdp_float8_all_gather
        is_computed = self.module._parameters.get(self.name) is not parameter
        # "auto" also allows for models that nothing shards.
        if flag is True or (self.config.fsdp_float8_all_gather and is_computed):
            warn_once(
                "float8 gather without FSDP2",
                f"{self.fqn}: enable_fsdp_float8_all_gather={flag!r} has no effect on this layer: "
                "FSDP2 does not manage its weight, or other code computes it from the parameter "
                "(FSDP1, a parametrization such as SimpleFSDP's data_parallel). Call fully_shard "
                "on the model (after convert_to_float8_training), let the parametrization return "
                "cast_to_float8(parameter, ...).redistribute(...), or leave the flag off",
            )


def measured(
    shard: torch.Tensor, schemes: Sequence[Scheme], layout: Layout | None, whole: bool = False
) -> list[Statistics]:
    """Measure a weight for each scheme; ``whole``: return the statistics of the whole weight.

    Collectives: those of :func:`fp8_dist.scaling.reduced_statistics`, for each scheme; or of
    :func:`fp8_dist.scaling.global_statistics`.
    """
    local = scaling.measure(shard, schemes, scaling.common_start(schemes, layout))
    reduce: Any = scaling.global_statistics if whole else scaling.reduced_statistics
    pairs = zip(schemes, local, strict=True)
    return [reduce(scheme, statistics, layout) for scheme, statistics in pairs]


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
    """Operator of :meth:`Float8Weight.statistics`, with a flat list as its result.

    ``x, known, valid``: the tensors of a :class:`KnownWeight`.
    """
    weight: Float8Weight = owner_of(handle)
    weight.compare("the first forward")
    layout = weight.layout()
    assert layout is not None
    local = KnownWeight(x, known=known, valid=valid)
    found = weight.statistics_for_forward(local, list(map(scaling.scheme_named, schemes)), layout)
    # Return copies, because a graph may write to an operator's results.
    return [statistic.clone() for statistics in found for statistic in statistics]


weight_statistics.register_fake(
    lambda x, known, valid, handle, schemes, start: scaling.empty_statistics(x, schemes, start)
)


# An operator of its own, because selective checkpointing must not save its results: FSDP2 may
# gather in a checkpointed forward and not in its recomputation.
@query("gather_statistics(Tensor x, Tensor handle) -> Tensor[]")
def gather_statistics(x: torch.Tensor, handle: torch.Tensor) -> list[torch.Tensor]:
    """Operator of :meth:`Float8Weight.statistics_for_gather`."""
    weight: Float8Weight = owner_of(handle)
    local = local_tensor(weight.master())
    cache = local if isinstance(local, KnownWeight) else KnownWeight(x)
    return [statistic.clone() for statistic in weight.statistics_for_gather(cache, x)]
