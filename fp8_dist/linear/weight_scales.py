"""The scales that a weight is cast with: those that are known, or new ones.

:class:`WeightScales` asks the cache of the layer first. In compiled graphs and under selective
activation checkpointing it is itself asked by operators (``scale_query``).
"""

import weakref

import torch
import torch.nn as nn

from fp8_dist.cast import scaling_over
from fp8_dist.config import CastSpec, Float8LinearConfig
from fp8_dist.granularity import Granularity
from fp8_dist.kernels import Scaling
from fp8_dist.linear.amax_history import AmaxHistory
from fp8_dist.linear.scale_query import copies, must_query, owner_of, query, register_handle
from fp8_dist.linear.weight_cache import ScaleState, WeightCache
from fp8_dist.mesh import Layout


class WeightScales:
    """Finds the scaling of a layer's weight for each of ``config.casts("weight")``.

    Args:
        layer: the layer, referred to weakly; its ``weight`` is read whenever it is needed.
        config: the layer's.
        fqn: the layer's name, for messages.
        histories: the layer's amax histories, by operand.

    Attributes:
        cache: what is known of the parameter's values.
    """

    def __init__(
        self,
        layer: nn.Linear,
        config: Float8LinearConfig,
        fqn: str,
        histories: dict[str, AmaxHistory],
    ) -> None:
        self.cache = WeightCache()
        self._layer = weakref.ref(layer)
        self._config = config
        self._fqn = fqn
        self._histories = histories
        self._handle = register_handle(self)

    def parameter(self) -> torch.Tensor:
        """The layer's weight, as it is registered now."""
        layer = self._layer()
        assert layer is not None, f"{self._fqn} was freed"
        return layer.weight

    def find(self, shard: torch.Tensor, source: ScaleState | None) -> list[Scaling]:
        """The scaling of the shard for each cast, by an operator where one is needed.

        One call finds the scalings for all casts. In a graph, a call for the casts of the backward
        would move to the backward, where FSDP2 has gathered the weight anew and nothing is known.

        Args:
            shard: the parameter's shard, perhaps on another device.
            source: who asks, FROM_GATHER or FROM_FORWARD; None: what is found is not kept.

        Collectives: for each cast one all-reduce of 4 bytes per scale, if what a scale covers is
        sharded and the scales are not known.
        """
        if must_query():
            names = [cast.granularity.name for cast in self._config.casts("weight")]
            if source is ScaleState.FROM_GATHER:
                flat = shard_scalings.overload(shard, self._handle, names)
            else:
                flat = weight_scalings.overload(shard, self._handle, names, source is not None)
            return list(zip(flat[::2], flat[1::2], strict=True))
        device = shard.device
        return [(m.to(device), scale.to(device)) for m, scale in self.answer(shard, source)]

    def answer(self, shard: torch.Tensor, source: ScaleState | None) -> list[Scaling]:
        """:meth:`find`, without the operator."""
        parameter = self.parameter()
        known = self.cache.fresh_scaling(parameter)
        if known is None:
            return self.compute(parameter, shard, source)
        return [known[cast] for cast in self._config.casts("weight")]

    def compute(
        self, parameter: torch.Tensor, shard: torch.Tensor, source: ScaleState | None
    ) -> list[Scaling]:
        """The scaling for each cast from the parameter's values or history; the cache is told.

        (Not of a tensor in the parameter's place, such as FSDP1's view of what it gathered: it
        changes unnoticed.)
        """
        casts = self._config.casts("weight")
        known = {cast: self._scaling_of(parameter, shard, cast) for cast in casts}
        self.cache.warn_if_stale(parameter, self._fqn)
        if source is not None and is_parameter(parameter):
            self.cache.store(parameter, known, source)
        return list(known.values())

    def _scaling_of(self, parameter: torch.Tensor, shard: torch.Tensor, cast: CastSpec) -> Scaling:
        """The scaling for one cast, from the parameter's values or history."""
        if cast.delayed:
            layout = Layout.of(parameter)
            tensor = shard if layout is None else layout.wrap(shard)
            return self._histories["weight"].scaling_of(tensor, record=False)
        power_of_2 = self._config.round_scales_to_power_of_2
        return scaling_over(parameter, cast, power_of_2, local=shard)


def is_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is an ``nn.Parameter``."""
    # (Parameter's own isinstance is slow.)
    return type(tensor) is nn.Parameter or isinstance(tensor, nn.Parameter)


@query("weight_scalings(Tensor x, Tensor handle, str[] granularities, bool keep) -> Tensor[]")
def weight_scalings(
    x: torch.Tensor, handle: torch.Tensor, granularities: list[str], keep: bool
) -> list[torch.Tensor]:
    """:meth:`WeightScales.find` where a forward asks."""
    source = ScaleState.FROM_FORWARD if keep else None
    return copies(owner_of(handle).answer(x, source), x.device)


# FSDP2 may gather in a checkpointed forward and not in its recomputation, which therefore mustn't
# count on the results of one: so this is another operator.
@query("shard_scalings(Tensor x, Tensor handle, str[] granularities) -> Tensor[]")
def shard_scalings(
    x: torch.Tensor, handle: torch.Tensor, granularities: list[str]
) -> list[torch.Tensor]:
    """:meth:`WeightScales.find` where FSDP2 asks."""
    return copies(owner_of(handle).answer(x, ScaleState.FROM_GATHER), x.device)


@weight_scalings.register_fake
def _weight_scalings_fake(
    x: torch.Tensor, handle: torch.Tensor, granularities: list[str], keep: bool
) -> list[torch.Tensor]:
    return _shard_scalings_fake(x, handle, granularities)


@shard_scalings.register_fake
def _shard_scalings_fake(
    x: torch.Tensor, handle: torch.Tensor, granularities: list[str]
) -> list[torch.Tensor]:
    shapes = [Granularity.named(name).scale_shape(x.shape) for name in granularities]
    return [x.new_empty(shape, dtype=torch.float32) for shape in shapes for _ in range(2)]
