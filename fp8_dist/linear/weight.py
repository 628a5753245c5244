"""The weight of a ``Float8Linear``, from what is stored to what its GEMMs multiply.

Terms:

* *parameter*: what is registered as ``layer.weight`` now. FSDP2 exchanges it: it is the *sharded
  parameter* between uses and the *unsharded parameter* while the layer runs.
* *shard*: the parameter's local tensor, plain and in high precision.
* *scaling*: (quantization multiplier, scale) of the shard for one cast. The amax is that of the
  global weight, or of its global rows or columns.
* *casts*: the shard in float8, one for each of ``config.casts("weight")``.

What becomes of it depends on who owns the parameter:

* nobody, or tensor parallelism: the forward casts the shard; the GEMMs of the forward and of the
  backward take these casts (:meth:`Float8Weight.forward_casts`);
* FSDP2 with float8 gathers: FSDP2 asks for the cast of the shard and gathers that
  (:meth:`Float8Weight.gather_casts`). The forward finds a ``Float8Tensor`` as the parameter;
* FSDP2 without: it gathers in high precision. The forward casts what it finds for its own GEMM;
  the backward casts again, because FSDP2 frees the unsharded parameter in between.

Scalings come from ``cache`` where it knows those of the values that the parameter has now: from
precompute, or from an earlier use. Otherwise they are computed, and the cache is told.
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
import torch.nn as nn

from fp8_dist.cast import quantize_local
from fp8_dist.config import CastSpec, Float8LinearConfig
from fp8_dist.kernels import Scaling
from fp8_dist.linear.amax_history import AmaxHistory
from fp8_dist.linear.checks import check_gathered
from fp8_dist.linear.operands import WeightCasts
from fp8_dist.linear.weight_cache import ScaleState
from fp8_dist.linear.weight_scales import WeightScales, is_parameter
from fp8_dist.mesh import Layout, local_tensor
from fp8_dist.tensor import Float8Tensor, Quantized, granularity_of
from fp8_dist.torch_internals import is_selectively_checkpointed
from fp8_dist.warn import warn_once


class GatherType(Protocol):
    """A tensor type whose all-gather FSDP2 runs in float8 (``fp8_dist.fsdp`` has the one)."""

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """A local tensor of this type on the same storage."""

    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """The plain local tensor; any other tensor is returned as it is."""


class Float8Weight:
    """The weight of one layer, which owns this object.

    A copy of the layer gets a new one, which knows nothing yet.

    Args:
        layer: the layer, referred to weakly.
        config: the layer's.
        fqn: the layer's name, for messages.
        histories: the layer's amax histories, by operand.

    Attributes:
        cache: scalings and float8 casts, while they are known to be fresh.
    """

    # The type of weights that FSDP2 gathers in float8, see fp8_dist/__init__.py.
    gather_type: ClassVar[GatherType]

    def __init__(
        self,
        layer: nn.Linear,
        config: Float8LinearConfig,
        fqn: str,
        histories: dict[str, AmaxHistory],
    ) -> None:
        self._scales = WeightScales(layer, config, fqn, histories)
        self.cache = self._scales.cache
        self._config = config
        self._fqn = fqn
        self._histories = histories
        # FSDP2 exchanges the parameter: nothing made of an unsharded one may outlive it.
        self._is_exchanged = False

    @classmethod
    def register_gather_type(cls, gather_type: GatherType) -> None:
        """Set the type that weights get which FSDP2 gathers in float8."""
        cls.gather_type = gather_type

    def shard(self) -> torch.Tensor:
        """The shard, as it is now (no copy, no collectives)."""
        return self.gather_type.unwrap(local_tensor(self._scales.parameter()))

    def forward_casts(self, parameter: torch.Tensor) -> WeightCasts:
        """The casts of the parameter that a forward takes.

        Collectives: for each cast one all-reduce of 4 bytes per scale, if what a scale covers is
        sharded and the scales are not known.
        """
        casts = self._config.casts("weight")
        if not casts:
            return WeightCasts()
        local = local_tensor(parameter)
        if isinstance(local, Float8Tensor):  # FSDP2 gathered it
            check_gathered(self._config, local, self._fqn)
            scale = self._recorded(local.scale)
            return WeightCasts((Quantized(local.qdata, scale, granularity_of(local)),))
        compiling = torch.compiler.is_compiling()
        # No end_of_evaluation follows in a graph: what it finds without gradients is not kept.
        keeps = torch.is_grad_enabled() or not compiling
        source = ScaleState.FROM_FORWARD if keeps else None
        shard = self.gather_type.unwrap(local)
        if not compiling:
            self._warn_if_flags_have_no_effect(parameter, shard is not local)
        if self._is_exchanged:
            return self._casts_of_unsharded(shard, source)
        if compiling:
            with torch.no_grad():
                float8 = self._quantized(shard, self._scales.find(shard, source))
        else:
            float8 = self._casts(parameter, shard, ScaleState.FROM_FORWARD)
        if "weight" in self._histories:
            float8 = tuple(q._replace(scale=self._recorded(q.scale)) for q in float8)
        return WeightCasts(float8)

    def gather_casts(self, shard: torch.Tensor) -> tuple[Quantized, ...]:
        """The casts of the sharded parameter, for FSDP2 to gather.

        Args:
            shard: its shard, perhaps moved off the parameter's device (CPU offload).

        Collectives: as :meth:`forward_casts`.
        """
        return self._casts(self._scales.parameter(), shard, ScaleState.FROM_GATHER)

    def parameter_replaced(self, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
        """The layer's parameter is about to be replaced: by FSDP2, or by anyone."""
        now, then = Layout.of(old), Layout.of(new)
        gathered = now is not None and (then is None or then.mesh.ndim < now.mesh.ndim)
        self._is_exchanged |= gathered
        self.cache.parameter_replaced(new, old if gathered else None)

    def plain(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter on the same storage as a plain tensor or DTensor, detached."""
        layout = Layout.of(parameter)
        local = self.gather_type.unwrap(local_tensor(parameter.detach()))
        return local if layout is None else layout.wrap(local)

    def wrapped(self, parameter: torch.Tensor) -> nn.Parameter:
        """A parameter on the same storage as one that FSDP2 gathers in float8."""
        layout = Layout.of(parameter)
        local = self.gather_type.wrap(local_tensor(parameter.detach()))
        wrapped = local if layout is None else layout.wrap(local)
        return nn.Parameter(wrapped, requires_grad=parameter.requires_grad)

    def _casts(
        self, parameter: torch.Tensor, shard: torch.Tensor, source: ScaleState
    ) -> tuple[Quantized, ...]:
        """The casts of a parameter's shard, outside of graphs; kept where they may be."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # training may save what is kept
                return self._casts(parameter, shard, source)
        cache, shard = self.cache, shard.detach()
        fresh, asked = cache.is_fresh(parameter), is_selectively_checkpointed()
        float8 = cache.float8 if fresh else None
        if float8 is not None and float8[0].qdata.device == shard.device:
            if asked:
                # A recomputation takes what was saved in turn: so it asks as the forward did.
                self._scales.find(shard, source)
            return float8
        if fresh or asked:
            # What was known before may be stale unnoticed, and too large.
            float8 = self._quantized(shard, self._scales.find(shard, source))
        else:
            scalings = self._scales.compute(parameter, shard, source)
            float8 = self._quantized(shard, scalings, fits=True)
        keeps = is_parameter(parameter) and self._config.cache_float8_shards
        cache.float8 = float8 if keeps and shard.device == parameter.device else None
        return float8

    def _casts_of_unsharded(self, shard: torch.Tensor, source: ScaleState | None) -> WeightCasts:
        """Of a parameter that FSDP2 gathered in high precision: the output's cast.

        And the scaling of the cast that the backward makes.
        """
        of_output = self._config.cast("weight", "output")
        of_grad_input = self._config.cast("weight", "grad_input")
        casts: list[Quantized] = []
        recast = None
        with torch.inference_mode(False), torch.no_grad():
            scalings = self._scales.find(shard, source)
            for cast, scaling in zip(self._config.casts("weight"), scalings, strict=True):
                if cast == of_output:
                    casts.append(_quantized(shard, scaling, cast))
                if cast == of_grad_input:
                    recast = scaling
        casts = [q._replace(scale=self._recorded(q.scale)) for q in casts]
        if recast is not None:
            recast = (recast[0], self._recorded(recast[1]))
        return WeightCasts(tuple(casts), recast)

    def _quantized(
        self, shard: torch.Tensor, scalings: Sequence[Scaling], fits: bool = False
    ) -> tuple[Quantized, ...]:
        """The shard in each of its casts; ``fits``: the scalings are those of its own amaxes."""
        return tuple(
            [
                _quantized(shard, scaling, cast, fits and not cast.delayed)
                for cast, scaling in zip(self._config.casts("weight"), scalings, strict=True)
            ]
        )

    def _recorded(self, scale: torch.Tensor) -> torch.Tensor:
        """The weight's scale as a training step takes it: a delayed one records its amax then.

        (Not when the weight is cast: FSDP2 gathers without gradients in training too.)
        """
        if "weight" not in self._histories or not torch.is_grad_enabled():
            return scale
        return self._histories["weight"].recorded(scale)

    def _warn_if_flags_have_no_effect(self, parameter: torch.Tensor, wrapped: bool) -> None:
        if wrapped and self._config.enable_fsdp_float8_all_gather == "auto":
            return  # "auto" also stands for models that FSDP2 does not shard
        if wrapped:
            warn_once(
                "float8 gather without FSDP2",
                f"{self._fqn}: enable_fsdp_float8_all_gather=True has no effect on this layer: "
                "FSDP2 does not manage its weight. Call fully_shard on the model (after "
                "convert_to_float8_training), or leave the flag off",
            )
        elif self.cache.precomputed_for_another(parameter):
            warn_once(
                "precompute without float8 gather",
                f"{self._fqn}: the precomputed scale is not used, because the weight of this "
                "forward is not the parameter that it was computed from: FSDP2 gathered it in "
                "high precision (set enable_fsdp_float8_all_gather=True), or functional_call "
                "replaced it",
            )


def _quantized(
    shard: torch.Tensor, scaling: Scaling, cast: CastSpec, fits: bool = False
) -> Quantized:
    multiplier, scale = scaling
    qdata = quantize_local(shard, multiplier, cast, fits=fits)
    return Quantized(qdata, scale, cast.granularity)
