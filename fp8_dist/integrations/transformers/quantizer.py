"""A quantizer for ``from_pretrained(..., quantization_config=Fp8DistConfig())``.

In transformers, a quantizer changes the layers of a model before its weights are loaded. This one
makes float8 training layers, whose weights stay in high precision.
"""

from typing import Any, Literal

from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp8_dist.config import Float8LinearConfig
from fp8_dist.model.convert import convert_to_float8_training
from fp8_dist.model.filters import LayerFilter, name_parts
from fp8_dist.model.load import float8_keys
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training
from fp8_dist.text import did_you_mean, is_part

METHOD = "fp8_dist"


@register_quantization_config(METHOD)
class Fp8DistConfig(QuantizationConfigMixin):
    """A config that loads a model with float8 layers, for training.

    ::

        AutoModelForCausalLM.from_pretrained(path, quantization_config=Fp8DistConfig("tensorwise"))

    The weights stay in the dtype in which they are loaded. The model is converted on the meta
    device, before transformers distributes it (``distributed_config``) and loads its weights.
    ``save_pretrained`` writes the same files as for the unconverted model, and ``config.json``
    does not mention this config.

    Args:
        recipe: the name of a recipe, as in ``Float8LinearConfig.from_recipe_name``.
        modules_to_not_convert: names of modules whose layers stay in high precision, besides the
            layers that :func:`fp8_dist.skip_head` leaves out. Names are full names
            (``"model.layers.0"``) or else consecutive parts of them (``"down_proj"``, ``"mlp"``,
            ``"layers.0.mlp"``).
        enable_fsdp_float8_all_gather: as in ``Float8LinearConfig``.
        experts_recipe: the name of a recipe of :class:`fp8_dist.moe.Float8ExpertsConfig`, by which
            to convert experts, too. Default: experts stay in high precision.

    Raises:
        TypeError: ``modules_to_not_convert`` is a string.
        ValueError: no recipe has this name, or its weights can't be gathered in float8 as
            requested. ``from_pretrained`` raises it if a name in ``modules_to_not_convert`` matches
            no module, if the checkpoint has weights in float8
            (:func:`fp8_dist.load_float8_checkpoint` loads them), or if
            ``convert_to_float8_training`` refuses the model.
        NotImplementedError: ``from_pretrained`` raises it for transformers' own tensor parallelism
            (``DistributedConfig(tp_size=2)``; :func:`hf_tp_plan` makes a plan).
    """

    def __init__(
        self,
        recipe: str = "tensorwise",
        modules_to_not_convert: list[str] | None = None,
        enable_fsdp_float8_all_gather: bool | Literal["auto"] = "auto",
        quant_method: str = METHOD,
        experts_recipe: str | None = None,
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
        self.experts_recipe = experts_recipe
        self.configs()  # raises what they raise

    def configs(self) -> tuple[Float8LinearConfig, Float8ExpertsConfig | None]:
        """Return the configs of layers and experts; ``None`` for experts in high precision."""
        gather: Any = {"enable_fsdp_float8_all_gather": self.enable_fsdp_float8_all_gather}
        layers = Float8LinearConfig.from_recipe_name(self.recipe, **gather)
        if self.experts_recipe is None:
            return layers, None
        return layers, Float8ExpertsConfig.from_recipe_name(self.experts_recipe, **gather)


@register_quantizer(METHOD)
class Fp8DistQuantizer(HfQuantizer):
    """The quantizer that ``from_pretrained`` uses for :class:`Fp8DistConfig`."""

    requires_calibration = False
    quantization_config: Fp8DistConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """Convert the layers on the meta device."""
        config = self.quantization_config
        names = config.modules_to_not_convert or []
        modules = [fqn for fqn, _ in model.named_modules()]
        if unknown := [name for name in names if not any(is_part(name, fqn) for fqn in modules)]:
            raise ValueError(
                f"Fp8DistConfig.modules_to_not_convert: {', '.join(unknown)}: no module of the "
                f"{type(model).__name__} has such a name. Take names, or consecutive parts of "
                f"names, of model.named_modules(){did_you_mean(unknown[0], name_parts(modules), 3)}"
            )
        admits = LayerFilter(model, names, "modules_to_not_convert: ")
        layers, experts = config.configs()
        if experts is not None:
            convert_experts_to_float8_training(
                model,
                config=experts,
                module_filter_fn=lambda _, fqn: not admits.named(fqn),
            )
        convert_to_float8_training(model, config=layers, module_filter_fn=admits)
        if coded := float8_keys(kwargs.get("checkpoint_files") or []):
            raise ValueError(
                f"Fp8DistConfig: {coded[0]} is in float8 in the checkpoint, and would be loaded "
                "without its scales; make the model, convert it (to keep the weights in float8, "
                "freeze it too), and call load_float8_checkpoint"
            )

    def update_parallel_plan(self, model: PreTrainedModel, plan: dict[str, str]) -> None:
        """Refuse transformers' own tensor parallelism, which passes layers local tensors."""
        distributed = getattr(model.config, "distributed_config", None)
        if distributed is not None and distributed.tp_size != 1:
            raise NotImplementedError(
                "Fp8DistConfig: transformers' tensor parallelism (tp_size) does not tell float8 "
                "layers what their scales cover; load the model without it, and call "
                "apply_tp_plan(model, mesh, hf_tp_plan(model))"
            )

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> Any:
        """Remove what marks the model and its config as quantized."""
        self.remove_quantization_config(model)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config.__dict__.pop("_is_quantized", None)
        return model

    # transformers requires these members of a quantizer, but does not use them after loading.

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True
