"""A model that is named MODULE:FUNCTION, in the place of the reference Llama."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel.style import ParallelStyle

from fp8_dist import skip_head
from fp8_dist.doctor.models import build_model
from fp8_dist.integrations.transformers import hf_tp_plan
from fp8_dist.tensor_parallel import apply_tp_plan
from fp8_dist.transport import Encoding
from scripts.common.models import convert


class Unfit(Exception):
    """A step of the model can't be planned."""


def make(name: str) -> nn.Module:
    """The model on the meta device, without a cache of keys and values."""
    model, _ = build_model(name)
    if hasattr(config := getattr(model, "config", None), "use_cache"):
        config.use_cache = False
    return model.to("meta")


def longest(model: nn.Module) -> int | None:
    """The number of tokens that a model of transformers takes at most."""
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


def converted(
    variant: str, name: str, tp: int, reduce_transport: Encoding
) -> tuple[nn.Module, dict[str, ParallelStyle]]:
    """The model in a candidate's recipe, and its tensor-parallel plan.

    Raises:
        ValueError, NotImplementedError: it can't be converted, or declares no plan.
    """
    model = make(name)
    convert(variant, model, True, skip_head(model))
    plan = hf_tp_plan(model, reduce_transport=reduce_transport) if tp > 1 else {}
    return model, plan


def build(variant: str, name: str, mesh: DeviceMesh, reduce_transport: Encoding) -> nn.Module:
    """The model on a mesh, as `scripts.common.models.build` makes the reference Llama."""
    model, plan = converted(variant, name, mesh["tp"].size(), reduce_transport)
    if plan:
        apply_tp_plan(model, mesh["tp"], plan)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in (*blocks(model), model):
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules in the outermost lists of modules."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        return list(model.children())
    return [block for child in model.children() for block in blocks(child)]


def logits_of(output: Any) -> Tensor:
    """The logits `[b, s, v]` in what a model returns."""
    return output if isinstance(output, Tensor) else output.logits
