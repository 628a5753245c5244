"""transformers' own tensor parallelism (``DistributedConfig(tp_size=...)``) over float8 layers.

In training it passes DTensors to layers, which tell them what their scales cover. Without gradients
it passes local tensors to every ``nn.Linear`` instead. The styles here pass DTensors to float8
layers in both cases.
"""

import re
from importlib.util import find_spec
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fp8_dist.linear import Float8Linear, float8_layers

# Names of transformers' styles for linear layers, and of the styles that replace them.
_FLOAT8_NAMES: dict[str, str] = {}
# Styles under which a layer's weight stays whole on each rank.
_WHOLE = ("replicate", "replicated_with_grad_allreduce")

if find_spec("transformers.distributed.parallel_utils"):  # in later releases of transformers 5
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel

    class Float8Colwise(ColwiseParallel):
        """Column-parallel; a float8 layer takes and returns DTensors, in evaluation too."""

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
        """Row-parallel; a float8 layer takes and returns DTensors, in evaluation too."""

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


def use_float8_styles(plan: dict[str, str]) -> None:
    """Replace transformers' styles for linear layers in a plan, in place."""
    plan.update({key: _FLOAT8_NAMES.get(style, style) for key, style in plan.items()})


def restore_styles(plan: dict[str, str]) -> None:
    """Restore a plan in place: transformers looks for ``"colwise"`` when it makes a KV cache."""
    plain = {float8: name for name, float8 in _FLOAT8_NAMES.items()}
    plan.update({key: plain.get(style, style) for key, style in plan.items()})


def check_plan(model: PreTrainedModel) -> None:
    """Check that no plan passes local tensors to float8 layers: their scales would be per rank.

    Raises:
        NotImplementedError: a converted layer has a style that is unknown here, or this release of
            transformers has no styles that could be replaced.
        ValueError: ``DistributedConfig(tp_plan=...)`` sets a style for unconverted layers.
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
    keys = {fqn: re.sub(r"\.\d+(?=\.|$)", ".*", fqn) for fqn in float8_layers(model)}
    styles = {fqn: plan.get(key) for fqn, key in keys.items()}
    if unknown := [
        f"{fqn} ({style})" for fqn, style in styles.items() if style not in (None, *known)
    ]:
        raise NotImplementedError(
            "Fp8DistConfig: these layers have a tensor-parallel style that float8 does not know: "
            f"{', '.join(unknown)}. Name them in modules_to_not_convert"
        )
