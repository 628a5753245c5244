"""The weight of a float8 layer: its parameter, layout and replacement, and FSDP2's gathers.

Terms:

* *parameter*: the tensor that is currently registered as ``layer.weight``. FSDP2 swaps it: the
  *sharded parameter* is registered between uses, the *unsharded parameter* while the layer runs.
* *shard*: the parameter's local tensor, plain and in high precision.

:mod:`fp8_dist.weight.casts` says where the parameter is cast.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8_dist import fsdp_internals, mesh
from fp8_dist import torch_internals as internals
from fp8_dist.config import Float8LinearConfig
from fp8_dist.mesh import Layout, local_tensor
from fp8_dist.operand.history import PREPARED_INPUT, AmaxHistory
from fp8_dist.operand.state import State, register_handle
from fp8_dist.scaling import (
    CastPlan,
    Scheme,
    Statistics,
    shared_schemes,
)
from fp8_dist.tensor import Float8Tensor
from fp8_dist.text import kind_of, warn_once
from fp8_dist.weight.agreement import check_placed
from fp8_dist.weight.casts import WeightCasts
from fp8_dist.weight.known import AS_SHARDED, Kept, Known, KnownWeight
from fp8_dist.weight.local_placements import LocalPlacements
from fp8_dist.weight.optimizer_steps import note_replaced
from fp8_dist.weight.stored import StoredFloat8
from fp8_dist.weight.stored_weight import StoredWeight, bind
from fp8_dist.weight.wrapper import WrapperParameter, padded_size


@dataclass(frozen=True, eq=False)
class Gather:
    """How FSDP2 gathers a weight of one scheme in float8, and how an update prepares it.

    It is settled when the weight is sharded. Two plans are the same if they are one object.

    Attributes:
        kept: which statistics are cached. (Those of DELAYED scales are in the history.)
        plan: the cast of the shard, on its layout. It is packed where the gather carries packed
            data.
        arrives: the layout of the unsharded parameter.
        moving: the levels whose scales the gather carries.
        size: the size of the local part of the unsharded parameter.
        padded: the size of the data in the gather; empty if FSDP2 does not manage the weight.
        keeps_casts: whether an update keeps the cast, which the layer that FSDP2 asks takes.
        is_cast_with_others: whether one launch can cast the shard with others of this cast.
        scale_shape, scale_count: if so, the shape of the statistics and scales of the shard, and
            their number.
        reduced_over: the mesh axes over which ranks reduce the statistics, if the shard can also be
            measured with others; else None.
    """

    kept: Kept
    plan: CastPlan
    arrives: Layout
    moving: tuple[int, ...]
    size: torch.Size
    padded: tuple[int, ...]
    keeps_casts: bool
    is_cast_with_others: bool
    scale_shape: tuple[int, ...]
    scale_count: int
    reduced_over: tuple[int, ...] | None

    @staticmethod
    def of(
        schemes: tuple[Scheme, ...],
        layout: Layout,
        arrives: Layout,
        shard: torch.Tensor,
        fsdp: fsdp_internals.FsdpParameter | None,
        keeps_casts: bool,
    ) -> "Gather":
        """Plan the gather of a parameter from one layout to another.

        Args:
            shard: this rank's shard.
            fsdp: FSDP2's object for the parameter.
        """
        (scheme,) = schemes
        moving = scheme.moving_levels(layout, arrives)
        whole = bool(moving) and not scheme.scales_fit_gather(layout, arrives)
        kept = Kept(schemes, layout, whole)
        plan = CastPlan(schemes, packed=scheme.packs(layout, arrives)).on(layout)
        size, padded = shard.shape, tuple[int, ...]()
        if fsdp is not None:
            size = fsdp.size
            padded = padded_size(shard, size, fsdp.mesh.size())
            if plan.packed:
                padded = (*padded[:-1], padded[-1] // 2)
        begins_at_block = not any(kept.start())
        is_cast_with_others = scheme.casts_each and not whole and begins_at_block
        scale_shape: tuple[int, ...] = ()
        reduced_over = None
        if is_cast_with_others:
            scale_shape = tuple(scheme.levels[0].shape(shard.shape))
            (axes,) = scheme.axes(layout)
            # Other statistics that ranks share have to be placed among those of the whole weight.
            if scheme.levels[0].is_scalar or not axes:
                reduced_over = axes
        return Gather(
            kept=kept,
            plan=plan,
            arrives=arrives,
            moving=() if whole else moving,
            size=size,
            padded=padded,
            keeps_casts=keeps_casts,
            is_cast_with_others=is_cast_with_others,
            scale_shape=scale_shape,
            scale_count=math.prod(scale_shape),
            reduced_over=reduced_over,
        )


class ScalesReady(NamedTuple):
    """When the scales and casts of an update are ready on a GPU.

    Attributes:
        event: the event to wait for.
        capture: the number of the capture of a CUDA graph that it was recorded in (0: none).
        waiting: the streams that wait for it already.
    """

    event: torch.cuda.Event
    capture: int
    waiting: set[torch.cuda.Stream]

    def wait(self, stream: torch.cuda.Stream, capture: int) -> None:
        """Let a stream wait for the event, if it was recorded in the capture that is under way."""
        if capture == self.capture and stream not in self.waiting:
            self.event.wait(stream)
            self.waiting.add(stream)


class Float8Weight(WeightCasts):
    """A parameter of two dims or more that is multiplied in float8.

    It is in high precision and cast at use, or frozen and :meth:`stored` in float8. A copy of the
    layer gets a new object. The reference to the module is weak.

    Attributes:
        config: the config of the layer.
        name, fqn: the name of the parameter in the module, and the name of the module.
        histories: the amax histories of the layer's DELAYED operands.
        history: the one of the weight, if its scale is DELAYED.
        scales_name: the name of the parameter that has the scales of a stored weight.
        handle: identifies this object in operators (:mod:`fp8_dist.operand.state`).
        fsdp: FSDP2's object for the parameter, from ``fully_shard`` on. ``fp8_dist.fsdp`` sets it.
        unsharded: the local tensor of FSDP2's unsharded parameter in high precision, if its
            statistics are cached.
        scales_ready: on a GPU, when the scales of precompute or sync are ready.
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
        self.histories = {} if histories is None else histories
        self.history = self.histories.get("weight")
        self.handle = register_handle(self)
        self.is_compared = False
        self.fsdp: fsdp_internals.FsdpParameter | None = None
        self.unsharded: KnownWeight | None = None
        self.scales_ready: ScalesReady | None = None
        self._gather: tuple[tuple[Any, ...], Gather] | None = None  # what it depends on, the plan
        self._model: weakref.ref[nn.Module] | None = None  # see note_model()

    def __reduce__(self) -> Any:
        arguments = self.module, self.config, self.fqn, self.histories, self.name
        # The parameter, too, because a copied module may get it later than this object.
        return type(self), arguments, self.module._parameters.get(self.name)

    def __setstate__(self, parameter: torch.Tensor) -> None:
        bind(self, parameter)

    def compare(self, caller: str) -> None:
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
        """Whether the weight is a parameter of the module, neither parametrized nor flattened.

        Outside of a forward, a parametrization may not run: its parameters are sharded.
        """
        parameter = self.module._parameters.get(self.name)
        return parameter is not None and parameter.ndim >= 2

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
        sharded = None if self.fsdp is None else self.layout(self.master())
        return self.layout(weight) if sharded is None else self.gathered_layout(sharded)

    @property
    def is_in_fsdp(self) -> bool:
        return self.fsdp is not None

    @property
    def gathered_as(self) -> torch.dtype | None:
        """The dtype of FSDP2's gather; None: the weight's own, float8, or there is no gather."""
        return None if self.fsdp is None else self.fsdp.gathered_as

    @property
    def device(self) -> torch.device:
        """The device on which the scales are used: with CPU offload, that of the mesh."""
        parameter = self.parameter()
        device = local_tensor(parameter).device
        if device.type == "cuda":  # what is offloaded is on the CPU
            return device
        layout = self.layout(parameter)
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
        return f"{kind_of(local)}, which implements its own matmul (dequantize it first)"

    def why_not_captured(self) -> str:
        """The reason why a CUDA graph can't train the weight, with a remedy; empty if it can."""
        if self.histories:
            return "has amax histories in Python; use a recipe without DELAYED scales"
        if self.shard().device != self.device:
            return "is on the CPU; leave out CPUOffloadPolicy"
        return ""

    @internals.normal_tensors()  # as an inference tensor, a DTensor can't be detached
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
        if (stored := self.stored()) is not None:
            return stored.dequantized()
        if weight is None:
            return self.plain(self.parameter())
        return self.plain(weight if self.fsdp is None else self.fsdp.sharded)

    @property
    def is_stored(self) -> bool:
        """Whether the weight is stored in float8."""
        parameter = self.module._parameters.get(self.name)
        return parameter is not None and isinstance(local_tensor(parameter), StoredFloat8)

    def stored(self, parameter: torch.Tensor | None = None) -> StoredWeight | None:
        """Return the stored weight, sharded or unsharded; None if it is not stored."""
        parameter = self.parameter() if parameter is None else parameter
        if not isinstance(local_tensor(parameter), StoredFloat8):
            return None
        return self.stored_as(parameter)

    def scales_of_stored(self) -> torch.Tensor:
        return self.module.get_parameter(self.scales_name)

    def held_in(self, local: StoredFloat8, is_written: bool) -> StoredWeight | None:
        """Return the stored weight if its data is in ``local``; None for parts and copies of it.

        ``is_written``: whether it is to be changed. Only the sharded parameter can be.
        """
        # One that is parametrized, by adapters, is among the parameters of the module, too.
        for parameter in [self.master()] if is_written else self.module.parameters():
            data = local_tensor(parameter)
            if isinstance(data, StoredFloat8) and data.plain.is_set_to(local.plain):
                return self.stored(parameter)
        return None

    @property
    def is_dynamic(self) -> bool:
        """Whether the weight is cast with a DYNAMIC scale."""
        return self._has_dynamic_scheme and not self.is_stored

    @property
    def _has_dynamic_scheme(self) -> bool:
        recipe = self.config.recipe
        return bool(recipe.schemes["weight"]) and "weight" not in recipe.delayed

    def meshes(self) -> list[DeviceMesh]:
        """The meshes that the operands of the weight's layer are distributed over.

        For a computed weight, these are the meshes of all parameters of its module.
        """
        is_computed = not self.is_registered
        of_weight = map(Layout.of, self.module.parameters()) if is_computed else [self.layout()]
        layouts = *of_weight, *self.histories.values()
        return [x.mesh for x in layouts if x is not None and x.mesh is not None]

    def note_forward(self, parameter: torch.Tensor) -> None:
        if torch.compiler.is_compiling():  # for torch.export
            return
        if self.config.enable_fsdp_float8_all_gather:
            self._warn_if_flag_has_no_effect(parameter)
        if self.fsdp is not None:
            self.note_unsharded(parameter)

    def known(self, weight: KnownWeight, layout: Layout) -> Known:
        kept = Kept.in_forward(self.schemes, layout)
        if weight.state() == AS_SHARDED:
            sharded, sharded_kept = local_tensor(self.master()), self.kept()
            if isinstance(sharded, KnownWeight) and sharded_kept is not None:
                weight, kept = sharded.check(self.master()), sharded_kept
        return Known(self, weight, kept)

    def gather_state(self, weight: KnownWeight, parameter: torch.Tensor, kept: Kept) -> State:
        """The state that decides the statistics of FSDP2's gather.

        Args:
            weight: the local tensor that has the cache.
            parameter: the sharded parameter.
            kept: which statistics are cached.
        """
        if (history := self.history) is not None:
            state = history if parameter.requires_grad else history.frozen
            state.is_gather = True
            return state
        return Known(self, weight.check(parameter), kept, parameter)

    def look_up(
        self,
        x: torch.Tensor,
        schemes: Sequence[Scheme],
        groups: Sequence[str],
        cache: Sequence[torch.Tensor],
        is_gather: bool,
    ) -> Sequence[Statistics]:
        """:meth:`Known.read`, called by an operator (Note [Look-ups at run time])."""
        plan = CastPlan(tuple(schemes))
        if is_gather:
            parameter = self.master()
            local = local_tensor(parameter)
            weight = local if isinstance(local, KnownWeight) else KnownWeight(x)
            state = self.gather_state(weight, parameter, self.gather(parameter).kept)
            assert isinstance(state, Known)  # a history has a handle of its own
            return state.read(x, plan)
        self.compare("the first forward")
        weight, layout = KnownWeight(x, known=cache[0], valid=cache[1]), self.layout()
        assert layout is not None
        return self.known(weight, layout).read(x, plan)

    def kept(self) -> Kept | None:
        """Which statistics of the sharded parameter precompute and gathers cache; None if none.

        If FSDP2 gathers in high precision, they are statistics of the unsharded parameter.
        """
        if not self.is_registered or not self._has_dynamic_scheme:
            return None
        parameter = self.master()
        local = local_tensor(parameter)
        if isinstance(local, StoredFloat8):
            return None
        if hasattr(type(local), "fsdp_pre_all_gather"):
            return self.gather(parameter).kept
        if (layout := self.layout(parameter)) is None:
            return None
        arrives = self.gathered_layout(layout) or layout
        shared = shared_schemes(self.schemes, arrives)
        return Kept(shared, arrives) if shared else None

    def gather(self, parameter: torch.Tensor | None = None) -> Gather:
        """Return the plan of FSDP2's float8 gather, made again if layout or config changed.

        ``parameter``: the sharded parameter, if the caller has it.
        """
        if parameter is None:
            parameter = self.master()
        assert isinstance(parameter, DTensor)
        declared = getattr(self._module(), "local_placements", None)
        depends_on = internals.dtensor_spec(parameter), declared, self.fsdp, self.config
        # (Comparing layouts would take longer than making the plan.)
        if self._gather is None or any(map(is_not, self._gather[0], depends_on)):
            layout = self.layout(parameter)
            assert layout is not None
            is_stored = isinstance(local_tensor(parameter), StoredFloat8)
            schemes = (self.held_scheme(parameter),) if is_stored else self.schemes
            arrives = self.gathered_layout(layout) or layout
            fsdp, shard = self.fsdp, self.shard(parameter)
            # FSDP2 passes the first of the modules that share a parameter to the hook.
            is_asked = fsdp is not None and fsdp.module is self.module
            keeps_casts = is_asked and self.config.keep_fsdp_float8_cast
            self._gather = (
                depends_on,
                Gather.of(schemes, layout, arrives, shard, fsdp, keeps_casts),
            )
        return self._gather[1]

    def is_exchanged(self, new: torch.Tensor | None) -> bool:
        """Whether FSDP2 replaces the parameter, and :meth:`parameter_replaced` has nothing to do.

        That is so of a parameter that is gathered in float8, twice per gather.
        """
        if new is None or self.fsdp is None or self.unsharded is not None:
            return False
        if new is self.fsdp.sharded:
            return True
        is_gathered = new is self.fsdp.unsharded
        return is_gathered and isinstance(local_tensor(new), (Float8Tensor, KnownWeight))

    def parameter_replaced(self, new: torch.Tensor | None) -> None:
        """Prepare for the replacement of the layer's parameter, by FSDP2 or by other code."""
        self.unsharded = None
        if new is not None and self.fsdp is not None and new is self.fsdp.unsharded:
            self.note_unsharded(new)

    def check_sharded(self) -> None:
        """Raise ValueError if FSDP2 has sharded the parameter in a way that does not work."""

    def note_unsharded(self, parameter: torch.Tensor) -> None:
        """Make later look-ups of the unsharded parameter's statistics use the sharded one."""
        local = local_tensor(parameter)
        if self.fsdp is None or not internals.is_plain(local):
            return
        if shared_schemes(self.schemes, self.layout(parameter)):
            self.unsharded = KnownWeight.as_sharded(local, parameter)
            if isinstance(parameter, DTensor):  # so that writes to it are noticed too
                internals.set_dtensor_local(parameter, self.unsharded)

    def record_amaxes(self, amaxes: dict[str, torch.Tensor], begins: bool | None = None) -> None:
        has_backward = internals.backward_id() >= 0
        if not has_backward and self._is_evaluated():
            return
        parameter, history = self.parameter(), self.history
        if begins is None and parameter.is_leaf and parameter.requires_grad:
            in_fsdp = [] if self.fsdp is None else [self.fsdp]
            begins = not fsdp_internals.have_gradients([parameter, self.master()], in_fsdp)
        backward = None if begins is None else internals.backward_id()
        if history is not None and history.last is not None:
            # FSDP2's stream may have made it. It waits for this stream before it makes the next.
            amaxes = {"weight": history.last, **amaxes}  # that of a graph is of this pass
        for name, value in amaxes.items():
            shared: Any = self.module.prepared_input if name == PREPARED_INPUT else None
            (shared or self.histories[name]).record(value, backward, bool(begins))
            if shared and (own := self.histories.get("input")) is not None:
                own.is_replaced = own is not shared

    def note_model(self, model: nn.Module) -> None:
        """Remember the model that is converted or updated, if it is in training mode."""
        self._model = weakref.ref(model) if model.training else None

    def _is_evaluated(self) -> bool:
        """Whether the model was in training mode when it was last updated, and is not now.

        The mode of the layer does not tell: parts that are not trained may be in evaluation mode
        while the others train. Nor does that of a model which trains in evaluation mode.
        """
        model = None if self._model is None else self._model()
        return model is not None and not model.training

    def forget(self) -> None:
        """Drop the cached statistics, and what histories recorded since the last sync."""
        if self.is_registered and isinstance(local := local_tensor(self.master()), KnownWeight):
            local.forget()
        for history in self.histories.values():
            history.current, history.steps = None, 0

    def _warn_if_flag_has_no_effect(self, parameter: torch.Tensor) -> None:
        flag = self.config.enable_fsdp_float8_all_gather
        if self.scales_name in self.module._parameters:  # or adapters are added to a stored weight
            return
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
