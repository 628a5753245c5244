"""torchtitan's experts in float8: their grouped GEMMs, and messages of tokens as float8 rows.

torchtitan's routed experts call a dispatcher, then the experts, then the dispatcher again, and pass
rows in high precision between them. Here the float8 rows that arrive are multiplied directly, so
the experts call the dispatch of :mod:`fp8_dist.moe` themselves. torchtitan's dispatcher only
provides the mesh.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from fp8_dist.moe import Float8ExpertsConfig, route
from fp8_dist.moe.experts import add_weights, weight_of
from fp8_dist.moe.functions import combined_product, grouped_product

_UP, _DOWN = ("w1_EFD", "w3_EFD"), "w2_EDF"
_DISPATCHERS = (AllToAllTokenDispatcher.Config, LocalTokenDispatcher.Config)


class TitanFloat8GroupedExperts(GroupedExperts):
    """Grouped experts in float8, whose forward takes tokens before the dispatch."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        float8: Float8ExpertsConfig
        fqn: str

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        add_weights(self, (*_UP, _DOWN), config.float8, config.fqn)

    @torch.compiler.disable(reason="fp8_dist: the host reads how many rows an expert has")
    def forward(self, x: Tensor, expert_ids: Tensor, group: ProcessGroup | None) -> Tensor:
        """Compute the outputs ``[T, K, D]`` of ``expert_ids``, ``[T, K]``, for ``x``, ``[T, D]``.

        ``group``: the ranks of expert parallelism.

        Collectives: with a group, those of ``route``, ``dispatch_linear`` and ``linear_combine``.
        """
        config: Float8ExpertsConfig = self.float8_experts_config
        routing = route(expert_ids, self.num_experts, group)
        up = [weight_of(self, name) for name in _UP]
        gate, hidden = grouped_product(x, up, routing, config)
        down = weight_of(self, _DOWN)
        return combined_product(F.silu(gate) * hidden, down, routing, config)

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the weights.

        Raises:
            NotImplementedError: tensor parallelism would divide each expert.
        """
        if parallel_dims.tp_enabled and not parallel_dims.ep_enabled:
            raise NotImplementedError(
                f"{self.float8_weights[_DOWN].fqn}: torchtitan's tensor parallelism divides each "
                "expert between ranks, which is not supported; set "
                "parallelism.expert_parallel_degree, or name the experts in filter_fqns"
            )
        super().parallelize(parallel_dims)


class TitanFloat8RoutedExperts(RoutedExperts):
    """Routed experts whose tokens travel in float8."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """Compute the outputs ``[B, L, D]``, weighted by the scores and summed in fp32."""
        mesh = getattr(self.token_dispatcher, "ep_mesh", None)
        ids = topk_expert_ids_BLK.flatten(0, 1)
        slots = self.inner_experts(x_BLD.flatten(0, 1), ids, mesh and mesh.get_group())
        scores = topk_scores_BLK.flatten(0, 1).unsqueeze(-1)
        return (slots.to(torch.float32) * scores).sum(1).to(x_BLD.dtype).view(x_BLD.shape)


def fields_of(config: Any) -> dict[str, Any]:
    """Return the fields of a config, by name, as arguments for a config of a subclass."""
    return {f.name: getattr(config, f.name) for f in fields(config)}


class Float8ExpertsConverter(QuantizationConverter):
    """A converter from torchtitan's routed experts to experts in float8."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """The config of the conversion."""

        recipe_name: str = "rowwise_folded"  # as in Float8ExpertsConfig.from_recipe_name
        combine: str = "high_precision"  # as in Float8ExpertsConfig
        # Experts whose name contains one of these strings stay unconverted.
        filter_fqns: list[str] = field(default_factory=list)

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replace the configs of routed experts in a model's config, in place.

        Raises:
            ValueError: the recipe is unknown, or there are no experts to convert.
            NotImplementedError: the experts or their dispatcher are not of a class of torchtitan
                that this converter knows.
        """
        float8 = Float8ExpertsConfig(self.config.recipe_name, self.config.combine)  # type: ignore[arg-type]
        has_converted = False
        for fqn, routed, parent, name in list(model_config.traverse(RoutedExperts.Config)):
            if any(text in fqn for text in self.config.filter_fqns):
                continue
            has_converted = True
            inner, dispatcher = routed.inner_experts, routed.token_dispatcher
            is_known = type(routed) is RoutedExperts.Config and type(dispatcher) in _DISPATCHERS
            if not is_known or type(inner) is not GroupedExperts.Config:
                raise NotImplementedError(
                    f"Float8ExpertsConverter: {fqn} has {type(inner).__qualname__} and "
                    f"{type(dispatcher).__qualname__}, but only torchtitan's GroupedExperts with "
                    'its "standard" moe_comm_backend can be converted; name it in filter_fqns'
                )
            experts = TitanFloat8GroupedExperts.Config(
                **fields_of(inner), float8=float8, fqn=f"{fqn}.inner_experts"
            )
            changed = fields_of(routed) | {"inner_experts": experts}
            setattr(parent, name, TitanFloat8RoutedExperts.Config(**changed))
        if not has_converted:
            raise ValueError(
                "Float8ExpertsConverter: the model has no routed experts to convert, or "
                f"all have one of {self.config.filter_fqns} in their names"
            )
        return model_config
