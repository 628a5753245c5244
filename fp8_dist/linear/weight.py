"""The weight of a ``Float8Linear``: what it is cast to, with which scales, and what is kept.

A weight is cast from what is stored, with the scales of the global weight: those that precompute
left, those of an earlier use, or new ones. Where FSDP2 gathers it in float8 the layer is asked for
the cast of its shard; elsewhere the forward casts what it finds.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8_dist.cast import quantize_local, scaling_over
from fp8_dist.config import CastSpec, Float8LinearConfig
from fp8_dist.kernels import Scaling
from fp8_dist.linear.amax_history import AmaxHistory
from fp8_dist.linear.checks import check_gathered
from fp8_dist.linear.operands import WeightCasts
from fp8_dist.linear.scale_query import known_scalings
from fp8_dist.linear.weight_cache import Source, WeightCache
from fp8_dist.mesh.layout import Layout, local_tensor
from fp8_dist.tensor import Float8Tensor, Quantized
from fp8_dist.torch_internals import is_selectively_checkpointed
from fp8_dist.warn import warn_once


class FSDPWeightType(Protocol):
    """A tensor type whose all-gather FSDP2 runs in float8 (``fp8_dist.fsdp`` has the one)."""

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """A local tensor of this type on the same storage."""

    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """The plain local tensor; any other tensor is returned as it is."""


class CastsItsWeight(nn.Linear):
    """The part of :class:`fp8_dist.Float8Linear` that casts its weight."""

    config: Float8LinearConfig
    fqn: str
    weight_cache: WeightCache
    histories: dict[str, AmaxHistory]
    _name: torch.Tensor
    _weight_is_fsdps: bool

    # Set by fp8_dist.fsdp: this package knows that there is such a type, not what it does.
    fsdp_weight_type: ClassVar[FSDPWeightType]

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 exchanges parameters in this way where a module class has a __setattr__.
        if name == "weight" and "weight_cache" in self.__dict__:
            old = self._parameters.get("weight")
            now, then = Layout.of(old), Layout.of(value)
            gathered = now is not None and (then is None or then.mesh.ndim < now.mesh.ndim)
            self._weight_is_fsdps |= gathered
            self.weight_cache.parameter_replaced(value, old if gathered else None)
        super().__setattr__(name, value)

    def local_shard(self) -> torch.Tensor:
        """The plain local tensor of the weight, as it is now (no copy, no collectives)."""
        return self.fsdp_weight_type.unwrap(local_tensor(self.weight))

    def meshes(self) -> list[DeviceMesh]:
        """The meshes that the layer's operands are distributed over."""
        layout = Layout.of(self.weight)
        own = [] if layout is None else [layout.mesh]
        return own + [h.mesh for h in self.histories.values() if h.mesh is not None]

    def cast_weight(
        self, source: Source, shard: torch.Tensor | None = None
    ) -> tuple[Quantized, ...]:
        """The local shard of the weight in each of its casts, with the scales of the global weight.

        What ``precompute_float8_dynamic_scale`` or an earlier call left in ``weight_cache`` is
        used if it is fresh.

        Args:
            source: who asks. (What is computed here is remembered for a parameter only: a tensor
                in its place, such as FSDP1's view of what it gathered, changes unnoticed.)
            shard: the local shard, if it is at hand; perhaps moved off the parameter's device (CPU
                offload).

        Returns:
            One for each of ``config.casts("weight")``.

        Collectives: for each cast one all-reduce of 4 bytes per scale, if what a scale covers is
        sharded and the scales are not known.
        """
        weight = self.weight
        shard = self.local_shard() if shard is None else shard
        return self._cast_of(weight, local_tensor(weight), shard, source)

    def _cast_of(
        self, weight: torch.Tensor, local: torch.Tensor, shard: torch.Tensor, source: Source
    ) -> tuple[Quantized, ...]:
        """:meth:`cast_weight` of a weight with this local tensor."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # training may save what is kept
                return self._cast_of(weight, local, shard, source)
        cache, shard = self.weight_cache, shard.detach()
        fresh, asked = cache.is_fresh(weight, local), is_selectively_checkpointed()
        if fresh and cache.float8 is not None and cache.float8[0].qdata.device == shard.device:
            if asked:
                # A recomputation takes what was saved in turn: so it asks as the forward did.
                self._known_scalings(source, shard)
            return cache.float8
        if fresh or asked:
            # What was known before may be stale unnoticed, and too large.
            float8 = self._quantized(shard, self._known_scalings(source, shard))
        else:
            float8 = self._newly_cast(weight, local, shard, source)
        kept = _is_parameter(weight) and self.config.cache_float8_shards
        cache.float8 = float8 if kept and shard.device == weight.device else None
        return float8

    def scalings_at_run_time(self, x: torch.Tensor, source: Source) -> Sequence[Scaling]:
        """The scales of the weight's shard ``x`` for its casts, as its values are now."""
        cache, weight = self.weight_cache, self.weight
        local = local_tensor(weight)
        if not cache.is_fresh(weight, local):
            return self._new_scalings(weight, local, x, source)
        assert cache.scaling is not None
        return [cache.scaling[cast] for cast in self.config.casts("weight")]

    def _newly_cast(
        self, weight: torch.Tensor, local: torch.Tensor, shard: torch.Tensor, source: Source
    ) -> tuple[Quantized, ...]:
        """The shard in each of its casts, with scales that are found out now."""
        if isinstance(weight, DTensor) or self.histories:
            found = self._new_scalings(weight, local, shard, source)
            return self._quantized(shard, found, fits=True)
        known, made = {}, []
        for cast in self.config.casts("weight"):
            m, scale = scaling_over(shard, cast, self.config.round_scales_to_power_of_2)
            qdata = quantize_local(shard, m, cast, fits=True)
            made.append(Quantized(qdata, scale, cast.granularity))
            known[cast] = (m, scale)
        self._remember(weight, local, known, source)
        return tuple(made)

    def _new_scalings(
        self, weight: torch.Tensor, local: torch.Tensor, shard: torch.Tensor, source: Source
    ) -> Sequence[Scaling]:
        casts = self.config.casts("weight")
        known = {cast: self._dynamic_scaling(weight, shard, cast) for cast in casts}
        self._remember(weight, local, known, source)
        return list(known.values())

    def _remember(
        self,
        weight: torch.Tensor,
        local: torch.Tensor,
        known: dict[CastSpec, Scaling],
        source: Source,
    ) -> None:
        """Keep the scalings of a weight with this local tensor, of which nothing was known."""
        self.weight_cache.warn_if_stale(weight, self.fqn)
        if source != "evaluation" and _is_parameter(weight):
            self.weight_cache.store(weight, known, source, local)

    def _weight_casts(self, weight: torch.Tensor) -> WeightCasts:
        """The local weight in each of its casts, for this forward."""
        casts = self.config.casts("weight")
        if not casts:
            return WeightCasts()
        local = local_tensor(weight)
        if isinstance(local, Float8Tensor):  # FSDP2 gathered it
            check_gathered(self.config, local, self.fqn)
            scale = self._recorded(local.scale)
            return WeightCasts((Quantized(local.qdata, scale, local.granularity),))
        compiling = torch.compiler.is_compiling()
        source: Source = "evaluation" if compiling and not torch.is_grad_enabled() else "forward"
        plain = self.fsdp_weight_type.unwrap(local)
        if not compiling:
            self._warn_if_flags_have_no_effect(weight, plain is not local)
        if self._weight_is_fsdps:
            return self._casts_of_gathered(source, plain)
        if compiling:
            with torch.no_grad():
                float8 = self._quantized(plain, self._known_scalings(source, plain))
        else:
            float8 = self._cast_of(weight, local, plain, source)
        if "weight" in self.histories:
            float8 = tuple(q._replace(scale=self._recorded(q.scale)) for q in float8)
        return WeightCasts(float8)

    def _casts_of_gathered(self, source: Source, gathered: torch.Tensor) -> WeightCasts:
        """Casts of a weight that FSDP2 gathered in high precision: the output's; scales of all."""
        of_output, of_grad_input = (
            self.config.cast("weight", gemm) for gemm in ("output", "grad_input")
        )
        casts: list[Quantized] = []
        recast = None
        with torch.inference_mode(False), torch.no_grad():
            known = zip(
                self.config.casts("weight"), self._known_scalings(source, gathered), strict=True
            )
            for cast, (m, scale) in known:
                if cast == of_output:
                    casts.append(
                        Quantized(quantize_local(gathered, m, cast), scale, cast.granularity)
                    )
                if cast == of_grad_input:
                    recast = (m, scale)
        casts = [q._replace(scale=self._recorded(q.scale)) for q in casts]
        if recast is not None:
            recast = (recast[0], self._recorded(recast[1]))
        return WeightCasts(tuple(casts), recast)

    def _quantized(
        self, shard: torch.Tensor, scalings: Sequence[Scaling], fits: bool = False
    ) -> tuple[Quantized, ...]:
        """The shard in each of its casts; ``fits``: the scalings are those of its own amaxes."""
        casts = zip(self.config.casts("weight"), scalings, strict=True)
        return tuple(
            [
                Quantized(
                    quantize_local(shard, m, cast, fits=fits and not cast.delayed),
                    scale,
                    cast.granularity,
                )
                for cast, (m, scale) in casts
            ]
        )

    def _known_scalings(self, source: Source, shard: torch.Tensor) -> Sequence[Scaling]:
        return known_scalings(self, self._name, shard, self.config.casts("weight"), source)

    def _dynamic_scaling(
        self, weight: torch.Tensor, shard: torch.Tensor, cast: CastSpec
    ) -> Scaling:
        """The scales of the local shard for a cast of the weight, from its values or history."""
        if cast.delayed:
            layout = Layout.of(weight)
            tensor = shard if layout is None else layout.wrap(shard)
            return self.histories["weight"].scaling_of(tensor, record=False)
        power_of_2 = self.config.round_scales_to_power_of_2
        return scaling_over(weight, cast, power_of_2, local=shard)

    def _recorded(self, scale: torch.Tensor) -> torch.Tensor:
        """The weight's scale as a training step takes it: a delayed one records its amax then.

        (Not when the weight is cast: FSDP2 gathers without gradients in training too.)
        """
        if "weight" not in self.histories or not torch.is_grad_enabled():
            return scale
        return self.histories["weight"].recorded(scale)

    def _warn_if_flags_have_no_effect(self, weight: torch.Tensor, wrapped: bool) -> None:
        if wrapped:
            warn_once(
                "float8 gather without FSDP2",
                f"{self.fqn}: enable_fsdp_float8_all_gather=True has no effect on this layer: "
                "FSDP2 does not manage its weight. Call fully_shard on the model (after "
                "convert_to_float8_training), or leave the flag off",
            )
        elif self.weight_cache.precomputed_for_another(weight):
            warn_once(
                "precompute without float8 gather",
                f"{self.fqn}: the precomputed scale is not used, because the weight of this "
                "forward is not the parameter that it was computed from: FSDP2 gathered it in "
                "high precision (set enable_fsdp_float8_all_gather=True), or functional_call "
                "replaced it",
            )


def _is_parameter(tensor: torch.Tensor) -> bool:
    # (Parameter's own isinstance is slow.)
    return type(tensor) is nn.Parameter or isinstance(tensor, nn.Parameter)
