"""A user's model, given as MODULE:FUNCTION, in place of the reference Llama."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel.style import ParallelStyle

from fp8_dist import skip_head
from fp8_dist.doctor.models import build_model
from fp8_dist.tensor_parallel import apply_tp_plan
from fp8_dist.transport import Encoding
from scripts.common.models import convert


class Unfit(Exception):
    """A step of the model can't be planned."""


def make(name: str) -> nn.Module:
    """The model on the meta device, with its KV cache switched off."""
    model, _ = build_model(name)
    if hasattr(config := getattr(model, "config", None), "use_cache"):
        config.use_cache = False
    return model.to("meta")


def longest(model: nn.Module) -> int | None:
    """The longest sequence that a transformers model takes, in tokens; None if it declares none."""
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


def converted(
    variant: str, name: str, tp: int, reduce_transport: Encoding
) -> tuple[nn.Module, dict[str, ParallelStyle]]:
    """The model converted as a candidate is, and its tensor-parallel plan.

    Raises:
        ValueError, NotImplementedError: the model can't be converted, or declares no plan.
    """
    model = make(name)
    convert(variant, model, True, skip_head(model))
    if tp == 1:
        return model, {}
    integration = import_module("fp8_dist.integrations.transformers")  # is optional
    return model, integration.hf_tp_plan(model, reduce_transport=reduce_transport)


def build(variant: str, name: str, mesh: DeviceMesh, reduce_transport: Encoding) -> nn.Module:
    """The model on a mesh: the counterpart of `scripts.common.models.build`."""
    model, plan = converted(variant, name, mesh["tp"].size(), reduce_transport)
    if plan:
        apply_tp_plan(model, mesh["tp"], plan)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in (*blocks(model), model):
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules in the outermost ModuleLists and ModuleDicts."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        return list(model.children())
    return [block for child in model.children() for block in blocks(child)]


def logits_of(output: Any) -> Tensor:
    """The logits `[b, s, v]` from the output of a model."""
    return output if isinstance(output, Tensor) else output.logits
