"""A quantizer for ``from_pretrained(..., quantization_config=Fp8DistConfig())``.

In transformers, a quantizer changes the layers of a model before its weights are loaded. This one
makes float8 training layers, whose weights stay in high precision.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn as nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp8_dist.config import Float8LinearConfig
from fp8_dist.linear.weights import float8_weights
from fp8_dist.model.convert import convert_to_float8_training
from fp8_dist.model.filters import LayerFilter
from fp8_dist.model.freeze import freeze_to_float8
from fp8_dist.model.load import Float8Entry, float8_entries
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training, float8_experts
from fp8_dist.tensor.stored import StoredScales
from fp8_dist.text import is_part

METHOD = "fp8_dist"

if _RENAMES := bool(find_spec("transformers.conversion_mapping")):  # in transformers 5
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key


@register_quantization_config(METHOD)
class Fp8DistConfig(QuantizationConfigMixin):
    """A config that loads a model with float8 layers, for training.

    ::

        AutoModelForCausalLM.from_pretrained(path, quantization_config=Fp8DistConfig("tensorwise"))

    The weights stay in the dtype in which they are loaded. The model is converted on the meta
    device, before transformers distributes it (``distributed_config``) and loads its weights.
    ``save_pretrained`` writes the same files as for the unconverted model, and ``config.json``
    contains nothing of this config. (With ``freeze``, it writes what ``docs/frozen.md`` says.)

    Args:
        recipe: the name of a recipe, as in ``Float8LinearConfig.from_recipe_name``.
        modules_to_not_convert: names of modules whose layers stay in high precision, besides the
            layers that :func:`fp8_dist.skip_head` leaves out. Names are full names
            (``"model.layers.0"``) or consecutive parts of them (``"down_proj"``, ``"mlp"``,
            ``"layers.0.mlp"``).
        enable_fsdp_float8_all_gather: as in ``Float8LinearConfig``.
        experts_recipe: the name of a recipe of :class:`fp8_dist.moe.Float8ExpertsConfig`, with
            which experts are converted too. Default: experts stay in high precision.
        scale_format: of the recipe ``blockwise``: ``"ue8m0"`` or ``"fp32"``.
        freeze: store the weights of the float8 layers in float8, frozen
            (:func:`fp8_dist.freeze_to_float8`). An FP8 checkpoint is loaded without a copy in high
            precision. Then pass a ``config`` whose ``quantization_config``, with which transformers
            would make its own layers, was set to ``None`` (``docs/frozen.md``).

    Raises:
        TypeError: ``modules_to_not_convert`` is a string.
        ValueError: no recipe has this name, or its weights can't be gathered in float8 as
            requested. ``from_pretrained`` raises it if a name in ``modules_to_not_convert`` matches
            no module, if a checkpoint has weights in float8 that ``freeze`` does not store, or
            that have no scales or others than the recipe, if it has integers for a weight, or
            scales for one in high precision, or if ``convert_to_float8_training`` refuses the
            model.
        NotImplementedError: ``from_pretrained`` raises it for transformers' own tensor parallelism
            (``DistributedConfig(tp_size=2)``; :func:`hf_tp_plan` makes a plan), and if ``freeze``
            meets weights that ``device_map`` offloads, a distributed model, or experts of an FP8
            checkpoint (:func:`fp8_dist.load_float8_checkpoint` loads the last two).
    """

    def __init__(
        self,
        recipe: str = "tensorwise",
        modules_to_not_convert: list[str] | None = None,
        enable_fsdp_float8_all_gather: bool | Literal["auto"] = "auto",
        quant_method: str = METHOD,
        experts_recipe: str | None = None,
        scale_format: Literal["ue8m0", "fp32"] = "ue8m0",
        freeze: bool = False,
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
        self.scale_format, self.freeze = scale_format, freeze
        self.layer_config()
        self.experts_config()

    def layer_config(self) -> Float8LinearConfig:
        """Return the config of the layers."""
        config = Float8LinearConfig.from_recipe_name(self.recipe, scale_format=self.scale_format)
        return replace(config, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather)

    def experts_config(self) -> Float8ExpertsConfig | None:
        """Return the config of experts; ``None`` if they stay in high precision."""
        if self.experts_recipe is None:
            return None
        config = Float8ExpertsConfig.from_recipe_name(self.experts_recipe)
        return replace(config, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather)


@register_quantizer(METHOD)
class Fp8DistQuantizer(HfQuantizer):
    """The quantizer that ``from_pretrained`` uses for :class:`Fp8DistConfig`."""

    requires_calibration = False
    renaming: Any = None  # of scales that have other names in the checkpoint
    quantization_config: Fp8DistConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """Convert the layers on the meta device."""
        config = self.quantization_config
        names = config.modules_to_not_convert or []
        _check_names(model, names)
        if (experts := config.experts_config()) is not None:
            convert_experts_to_float8_training(
                model,
                config=experts,
                module_filter_fn=lambda _, fqn: not any(is_part(name, fqn) for name in names),
            )
        layers, layer_filter = config.layer_config(), LayerFilter(model, names)
        convert_to_float8_training(model, config=layers, module_filter_fn=layer_filter)
        state, name_of = model.state_dict(), _renaming(model)
        files = kwargs.get("checkpoint_files") or []
        stored = float8_entries(files, lambda key: state.get(name_of(key)))
        if config.freeze:
            self._freeze(model, stored)
        elif stored:
            raise ValueError(
                f"Fp8DistConfig: {next(iter(stored))} is in float8 in the checkpoint, and would be "
                "loaded without its scales; pass freeze=True, or, to train the weights, make the "
                "model, convert it, and call load_float8_checkpoint"
            )

    def _freeze(self, model: PreTrainedModel, stored: dict[str, Float8Entry]) -> None:
        """Prepare layers for the entries in float8 that a checkpoint has for them."""
        if getattr(model.config, "distributed_config", None) is not None:
            raise NotImplementedError(
                "Fp8DistConfig: freeze=True loads models that are not distributed; make the model "
                "on the meta device, freeze and distribute it, and call load_float8_checkpoint"
            )
        weights = float8_weights(model)
        for weight in weights.values():
            weight.parameter().requires_grad_(False)
        name_of = _renaming(model, converts=False)
        entries = {name_of(key): entry for key, entry in stored.items()}
        found = {weights[fqn].module for fqn in entries if fqn in weights}
        if experts := [fqn for fqn, part in float8_experts(model).items() if stored]:
            raise NotImplementedError(
                f"Fp8DistConfig: freeze=True can't load the experts {experts[0]} of an FP8 "
                "checkpoint; make the model on the meta device, and call load_float8_checkpoint"
            )
        if lost := [fqn for fqn in entries if fqn not in weights]:
            raise ValueError(
                f"Fp8DistConfig: {lost[0]} is in float8 in the checkpoint, and its layer is not "
                "converted; leave it out of modules_to_not_convert, or call load_float8_checkpoint"
            )
        for fqn, entry in entries.items():
            if entry.dtype not in [scheme.dtype for scheme in weights[fqn].schemes]:
                raise ValueError(
                    f"Fp8DistConfig: {fqn} is in {entry.dtype} in the checkpoint, and the recipe "
                    "stores another dtype; call load_float8_checkpoint on a model that is not "
                    "frozen"
                )
        if found:
            freeze_to_float8(model, module_filter_fn=lambda module, _: module in found)
        for fqn, entry in entries.items():
            # transformers compares shapes; Float8Weight.restore decides what they mean.
            weight, shaped = weights[fqn], torch.empty(entry.shape, device="meta")
            scales = StoredScales(shaped, torch.float32, torch.float32)
            own = nn.Parameter(scales, requires_grad=False)
            weight.module.register_parameter(weight.scales_name, own)
            if not entry.scales.endswith("_inv"):
                self.renaming = WeightRenaming(r"\.weight_scale", ".weight_scale_inv")

    def update_weight_conversions(self, weight_conversions: Any, model: PreTrainedModel) -> Any:
        """Load the scales ``weight_scale``, as in compressed-tensors' checkpoints, too."""
        found = super().update_weight_conversions(weight_conversions, model)
        return [self.renaming, *found] if self.renaming else found

    def update_parallel_plan(self, model: PreTrainedModel, plan: dict[str, str]) -> None:
        """Refuse transformers' own tensor parallelism, which passes layers local tensors."""
        distributed = getattr(model.config, "distributed_config", None)
        if distributed is not None and distributed.tp_size != 1:
            raise NotImplementedError(
                "Fp8DistConfig: transformers' tensor parallelism (tp_size) does not tell float8 "
                "layers what their scales cover; load the model without it, and call "
                "apply_tp_plan(model, mesh, hf_tp_plan(model)). ep_size divides experts, and "
                "fsdp_size shards all weights"
            )

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> Any:
        """Store weights in float8 if asked to, and remove all marks of quantization."""
        if self.quantization_config.freeze:
            for fqn, weight in float8_weights(model).items():
                if weight.parameter().is_meta:
                    raise NotImplementedError(
                        f"Fp8DistConfig: freeze=True can't store {fqn}, which device_map has "
                        "offloaded; load the model on one device, or pass freeze=False"
                    )
                weight.parameter().requires_grad_(False)
                weight.restore(model.dtype)
            freeze_to_float8(model)
        if self.renaming:  # save_pretrained would reverse it
            conversions = model._weight_conversions
            model._weight_conversions = [each for each in conversions if each is not self.renaming]
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


def _renaming(model: PreTrainedModel, converts: bool = True) -> Callable[[str], str]:
    """Return a function from names in a checkpoint to those that transformers gives them.

    With ``converts``, entries have the names of the tensors that they are parts of.
    """
    if not _RENAMES:
        return str
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if each not in renamings] if converts else []
    prefix, state = model.base_model_prefix, model.state_dict()

    def name_of(key: str) -> str:
        name, _ = rename_source_key(key, renamings, converters, prefix, state)
        return name if name in state else rename_source_key(key, [], [], prefix, state)[0]

    return name_of


def _check_names(model: nn.Module, names: list[str]) -> None:
    modules = [fqn for fqn, _ in model.named_modules()]
    if unknown := [name for name in names if not any(is_part(name, fqn) for fqn in modules)]:
        raise ValueError(
            f"Fp8DistConfig.modules_to_not_convert: {', '.join(unknown)}: no module of the "
            f"{type(model).__name__} has such a name. Take names, or consecutive parts of names, "
            "of model.named_modules()"
        )
