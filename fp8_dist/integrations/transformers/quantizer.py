"""A quantizer for ``from_pretrained(..., quantization_config=Fp8DistConfig())``.

In transformers, a quantizer changes the layers of a model before its weights are loaded. This one
makes float8 training layers, whose weights stay in high precision.

In training, transformers' own tensor parallelism (``DistributedConfig(tp_size=...)``) passes
DTensors to layers, which tell float8 layers what their scales cover. Without gradients, it passes
local tensors to every ``nn.Linear``; the styles here pass DTensors to float8 layers then, too.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp8_dist.config import Float8LinearConfig
from fp8_dist.fsdp import rewrap_float8_weights
from fp8_dist.integrations.transformers.tp_plan import without_numbers
from fp8_dist.linear import Float8Linear, float8_layers
from fp8_dist.linear.weight import float8_weights
from fp8_dist.model.convert import convert_to_float8_training
from fp8_dist.model.filters import LayerFilter
from fp8_dist.model.freeze import freeze_to_float8
from fp8_dist.model.load import Float8Entry, float8_entries
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training, float8_experts
from fp8_dist.tensor.stored import StoredScales
from fp8_dist.text import is_part

METHOD = "fp8_dist"

# The names of transformers' styles for linear layers, and the names of the float8 styles for them.
_FLOAT8_NAMES: dict[str, str] = {}
# Styles that replicate a layer's weight on all ranks.
_WHOLE = ("replicate", "replicated_with_grad_allreduce")

if _RENAMES := bool(find_spec("transformers.conversion_mapping")):  # in transformers 5
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

if find_spec("transformers.distributed.parallel_utils"):  # in later releases of transformers 5
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel

    class Float8Colwise(ColwiseParallel):
        """Column parallelism; a float8 layer takes and returns DTensors also in evaluation."""

        def should_use_local_tensors(self, module: nn.Module) -> bool:
            return not isinstance(module, Float8Linear) and super().should_use_local_tensors(module)

        def transform_inputs_pre_forward(
            self, module: nn.Module, args: Any, kwargs: Any, mesh: DeviceMesh
        ) -> Any:
            x, *others = args
            if isinstance(module, Float8Linear) and not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, [self.input_layouts], run_check=False)
            return super().transform_inputs_pre_forward(module, (x, *others), kwargs, mesh)

    class Float8Rowwise(RowwiseParallel):
        """Row parallelism; a float8 layer takes and returns DTensors also in evaluation."""

        def should_use_local_tensors(self, module: nn.Module) -> bool:
            return not isinstance(module, Float8Linear) and super().should_use_local_tensors(module)

    for _name, _style in list(ALL_PARALLEL_STYLES.items()):
        for _plain, _float8 in ((ColwiseParallel, Float8Colwise), (RowwiseParallel, Float8Rowwise)):
            if type(_style) is _plain:
                _FLOAT8_NAMES[_name] = f"fp8_dist_{_name}"
                ALL_PARALLEL_STYLES.register(
                    _FLOAT8_NAMES[_name],
                    _float8(
                        input_layouts=_style.input_layouts,
                        output_layouts=_style.output_layouts,
                        use_local_output=_style.use_local_output,
                    ),
                )


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
            scales for one in high precision, if ``convert_to_float8_training`` or
            ``rewrap_float8_weights`` refuses the model, or if ``DistributedConfig(tp_plan={...})``
            sets a style for unconverted layers.
        NotImplementedError: ``from_pretrained`` raises it if transformers' tensor parallelism has a
            style that passes local tensors to converted layers or experts (``packed_colwise``,
            ``moe_tp_experts``) or, in older releases, no styles that can be replaced; if ``freeze``
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
    renames = False  # whether scales have other names in the checkpoint
    quantization_config: Fp8DistConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """Convert the layers on the meta device."""
        _check_names(model, self.quantization_config.modules_to_not_convert or [])
        self._convert(model)
        state, name_of = model.state_dict(), _renaming(model)
        files = kwargs.get("checkpoint_files") or []
        stored = float8_entries(files, lambda key: state.get(name_of(key)))
        if self.quantization_config.freeze:
            self._freeze(model, stored)
        elif stored:
            raise ValueError(
                f"Fp8DistConfig: {next(iter(stored))} is in float8 in the checkpoint, and would be "
                "loaded without its scales; pass freeze=True, or, to train the weights, make the "
                "model, convert it, and call load_float8_checkpoint"
            )

    def _convert(self, model: PreTrainedModel) -> None:
        names = self.quantization_config.modules_to_not_convert or []
        experts = self.quantization_config.experts_config()
        if experts is not None:
            convert_experts_to_float8_training(
                model,
                config=experts,
                module_filter_fn=lambda _, fqn: not any(is_part(name, fqn) for name in names),
            )
        config = self.quantization_config.layer_config()
        layer_filter = LayerFilter(model, names)
        convert_to_float8_training(model, config=config, module_filter_fn=layer_filter)

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
            # transformers compares shapes; StoredWeight.restore decides what they mean.
            weight, scales = weights[fqn], torch.empty(entry.shape, device="meta")
            scales = nn.Parameter(
                StoredScales(scales, torch.float32, torch.float32), requires_grad=False
            )
            weight.module.register_parameter(weight.scales_name, scales)
            if not entry.scales.endswith("_inv"):
                self.renames = True

    def update_weight_conversions(self, weight_conversions: Any, model: PreTrainedModel) -> Any:
        """Load the scales ``weight_scale``, as in compressed-tensors' checkpoints, too."""
        found = super().update_weight_conversions(weight_conversions, model)
        if not self.renames:
            return found
        self.renaming = WeightRenaming(r"\.weight_scale", ".weight_scale_inv")
        return [self.renaming, *found]

    def update_parallel_plan(self, model: PreTrainedModel, plan: dict[str, str]) -> None:
        """Use styles for float8 layers. transformers distributes the converted model afterwards."""
        _replace_styles(plan, _FLOAT8_NAMES)
        _check_plan(model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> Any:
        """Wrap the weights, which loading has replaced, and remove all marks of quantization."""
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
        rewrap_float8_weights(model)
        if self.renames:  # save_pretrained would reverse it
            conversions = model._weight_conversions
            model._weight_conversions = [each for each in conversions if each is not self.renaming]
        # Restore the names, because transformers looks for ``"colwise"`` when it makes a KV cache.
        _replace_styles(model.tp_plan, {new: name for name, new in _FLOAT8_NAMES.items()})
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
    unknown = [name for name in names if not any(is_part(name, fqn) for fqn in modules)]
    if unknown:
        raise ValueError(
            f"Fp8DistConfig.modules_to_not_convert: {', '.join(unknown)}: no module of the "
            f"{type(model).__name__} has such a name. Take names, or consecutive parts of names, "
            "of model.named_modules()"
        )


def _replace_styles(plan: dict[str, str], names: dict[str, str]) -> None:
    plan.update({key: names.get(style, style) for key, style in plan.items()})


def _check_plan(model: PreTrainedModel) -> None:
    """Check that no style passes local tensors to float8 layers, whose scales would be per rank.

    Expert parallelism takes precedence over the styles of experts, and passes whole experts.
    """
    distributed = getattr(model.config, "distributed_config", None)
    if distributed is None or distributed.tp_size == 1:
        return
    if not _FLOAT8_NAMES:
        raise NotImplementedError(
            "Fp8DistConfig: the tensor parallelism of this release of transformers is not known "
            "here; take a later release (5.23), or apply a plan of fp8_dist to the loaded model"
        )
    override = distributed.tp_plan if isinstance(distributed.tp_plan, dict) else {}
    if plain := {key: style for key, style in override.items() if style in _FLOAT8_NAMES}:
        remedy = {key: _FLOAT8_NAMES[style] for key, style in plain.items()}
        raise ValueError(
            f"Fp8DistConfig: DistributedConfig.tp_plan: {plain} are styles for layers that are not "
            f"converted; write {remedy}"
        )
    plan = model.tp_plan | override
    known = {*_FLOAT8_NAMES.values(), *_WHOLE}
    experts = float8_experts(model) if distributed.ep_size == 1 else {}
    names = [*float8_layers(model), *experts]
    styles = {fqn: plan.get(without_numbers(fqn)) for fqn in names}
    if unknown := [
        f"{fqn} ({style})" for fqn, style in styles.items() if style not in (None, *known)
    ]:
        raise NotImplementedError(
            "Fp8DistConfig: these layers have a tensor-parallel style that float8 does not know: "
            f"{', '.join(unknown)}. Name them in modules_to_not_convert; experts can also be "
            "divided by ep_size"
        )
