"""Replacement of torchtitan's linear layers with Float8Linear, before a model is built."""

from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.components.quantization.utils import module_filter_fn
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module

from fp8_dist import Float8Linear, Float8LinearConfig, rewrap_float8_weights


class TitanFloat8Linear(Float8Linear, Module):
    """A Float8Linear that torchtitan builds from a config and parallelizes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        float8: Float8LinearConfig
        fqn: str

    def __init__(self, config: Config) -> None:
        super().__init__(
            config.in_features, config.out_features, bias=config.bias, config=config.float8
        )
        self.fqn = config.fqn

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the parameters, and keep the type of weight that FSDP2 gathers in float8."""
        super().parallelize(parallel_dims)
        if self.config.fsdp_float8_all_gather:
            rewrap_float8_weights(self)


class Float8Converter(QuantizationConverter):
    """A converter from torchtitan's Linear to Float8Linear, with the filter that torchtitan uses.

    Layers whose sizes are not multiples of 16 stay unconverted.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """The config of the conversion.

        Attributes:
            recipe_name: the name of a recipe, as in ``Float8LinearConfig.from_recipe_name``. FSDP2
                gathers weights in float8 where the recipe allows it.
            filter_fqns: layers whose name contains one of these strings stay unconverted.
        """

        recipe_name: str = "tensorwise"
        filter_fqns: list[str] = field(default_factory=lambda: ["lm_head"])

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replace the configs of linear layers in a model's config, in place.

        Raises:
            ValueError: the recipe is unknown, or there is no layer to convert.
        """
        recipe = Float8LinearConfig.from_recipe_name(self.config.recipe_name)
        float8 = replace(recipe, enable_fsdp_float8_all_gather="auto")
        found = False
        for fqn, linear, parent, name in list(model_config.traverse(Linear.Config)):
            # Subclasses of the config belong to layers that compute something else.
            if type(linear) is not Linear.Config:
                continue
            if not module_filter_fn(linear, fqn, self.config.filter_fqns):
                continue
            found = True
            new = TitanFloat8Linear.Config(
                in_features=linear.in_features,
                out_features=linear.out_features,
                bias=linear.bias,
                param_init=linear.param_init,
                sharding_config=linear.sharding_config,
                float8=float8,
                fqn=fqn,
            )
            if isinstance(parent, list):
                parent[name] = new
            else:
                setattr(parent, name, new)
        if not found:
            raise ValueError(
                "Float8Converter: the model has no linear layer to convert; its layers are not "
                f"torchtitan's Linear, have sizes that are no multiples of 16, or have one of "
                f"{self.config.filter_fqns} in their names"
            )
        return model_config
