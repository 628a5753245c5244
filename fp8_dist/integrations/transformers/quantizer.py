"""``from_pretrained(..., quantization_config=Fp8DistConfig())``: float8 layers from the start.

In transformers, a quantizer changes a model's layers before its weights are loaded. This one makes
training layers, whose weights stay in high precision. The model is not marked as quantized, and is
saved like any other.
"""

from dataclasses import replace
from typing import Any, Literal

import torch.nn as nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp8_dist.config import Float8LinearConfig
from fp8_dist.fsdp import rewrap_float8_weights
from fp8_dist.integrations.transformers.native_tp import (
    check_plan,
    restore_styles,
    use_float8_styles,
)
from fp8_dist.model.convert import convert_to_float8_training
from fp8_dist.model.filters import LayerFilter
from fp8_dist.names import is_part

METHOD = "fp8_dist"


@register_quantization_config(METHOD)
class Fp8DistConfig(QuantizationConfigMixin):
    """Config for loading a model with float8 layers, for training.

    ::

        AutoModelForCausalLM.from_pretrained(path, quantization_config=Fp8DistConfig("tensorwise"))

    The weights stay in the dtype in which they are loaded. The model is converted on the meta
    device, before transformers distributes it (``distributed_config``) and loads its weights.
    ``save_pretrained`` writes the same as for the unconverted model: ``config.json`` contains
    nothing of this configuration.

    Args:
        recipe: the name of a recipe, as for ``Float8LinearConfig.from_recipe_name``.
        modules_to_not_convert: names of modules whose layers stay in high precision, besides the
            layers that :func:`fp8_dist.skip_head` leaves out: whole names (``"model.layers.0"``)
            or consecutive parts of them (``"down_proj"``, ``"mlp"``, ``"layers.0.mlp"``).
        enable_fsdp_float8_all_gather: as in ``Float8LinearConfig``.

    Raises:
        TypeError: ``modules_to_not_convert`` is a string.
        ValueError: no recipe has this name, or its weights can't be gathered in float8 as
            requested. ``from_pretrained`` raises it if a name in ``modules_to_not_convert`` matches
            no module, ``convert_to_float8_training`` or ``rewrap_float8_weights`` refuses the
            model, or ``DistributedConfig(tp_plan={...})`` sets a style for unconverted layers.
        NotImplementedError: in ``from_pretrained``, transformers' tensor parallelism has a style
            that passes local tensors to a converted layer (``packed_colwise``).
    """

    def __init__(
        self,
        recipe: str = "tensorwise",
        modules_to_not_convert: list[str] | None = None,
        enable_fsdp_float8_all_gather: bool | Literal["auto"] = "auto",
        quant_method: str = METHOD,
    ) -> None:
        if isinstance(modules_to_not_convert, str):
            raise TypeError(
                "Fp8DistConfig.modules_to_not_convert takes a list of names, got a string: "
                f"write [{modules_to_not_convert!r}]"
            )
        self.quant_method = quant_method  # type: ignore[assignment]  # transformers' own are an enum
        self.recipe = recipe
        self.modules_to_not_convert = modules_to_not_convert
        self.enable_fsdp_float8_all_gather = enable_fsdp_float8_all_gather
        self.layer_config()

    def layer_config(self) -> Float8LinearConfig:
        """Return the config of the layers."""
        config = Float8LinearConfig.from_recipe_name(self.recipe)
        return replace(config, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather)


@register_quantizer(METHOD)
class Fp8DistQuantizer(HfQuantizer):
    """Quantizer that ``from_pretrained`` uses for :class:`Fp8DistConfig`."""

    requires_calibration = False
    quantization_config: Fp8DistConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """Convert the layers, on the meta device."""
        names = self.quantization_config.modules_to_not_convert or []
        _check_names(model, names)
        config = self.quantization_config.layer_config()
        layer_filter = LayerFilter(model, names)
        convert_to_float8_training(model, config=config, module_filter_fn=layer_filter)

    def update_parallel_plan(self, model: PreTrainedModel, plan: dict[str, str]) -> None:
        """Use styles for float8 layers, before transformers distributes the converted model."""
        use_float8_styles(plan)
        check_plan(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> Any:
        """Wrap the weights that loading has rebuilt, and remove all marks of quantization."""
        rewrap_float8_weights(model)
        restore_styles(model.tp_plan)
        self.remove_quantization_config(model)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config.__dict__.pop("_is_quantized", None)
        return model

    # The rest is transformers' interface of a quantizer, which it does not use after loading.

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained."""
        return True


def _check_names(model: nn.Module, names: list[str]) -> None:
    modules = [fqn for fqn, _ in model.named_modules()]
    unknown = [name for name in names if not any(is_part(name, fqn) for fqn in modules)]
    if unknown:
        raise ValueError(
            f"Fp8DistConfig.modules_to_not_convert: {', '.join(unknown)}: no module of the "
            f"{type(model).__name__} has such a name. Take names, or consecutive parts of names, "
            "of model.named_modules()"
        )
