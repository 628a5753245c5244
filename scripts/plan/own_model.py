"""A user's model, given as MODULE:FUNCTION, in place of the reference Llama."""

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel.style import ParallelStyle

from fp8_dist import convert_to_linear, skip_head
from fp8_dist.doctor.models import build_model, function_named
from fp8_dist.tensor_parallel import apply_tp_plan
from fp8_dist.text import kind_of
from fp8_dist.transport import Encoding
from scripts.common.models import convert
from scripts.common.recipes import BF16


class Unfit(Exception):
    """A step of the model can't be planned."""


@dataclass(frozen=True)
class OwnModel:
    """A model of the user.

    Attributes:
        name: MODULE:FUNCTION that makes it.
        layers: the number of blocks that are kept; None: all.
        tp_plan: MODULE:FUNCTION that makes its tensor-parallel plan; "": the plan that a
            transformers model declares.
        skip: names of layers that stay in bf16, besides the head.
    """

    name: str
    layers: int | None = None
    tp_plan: str = ""
    skip: tuple[str, ...] = ()


def make(own: OwnModel) -> nn.Module:
    """The model on the meta device, with its KV cache switched off.

    Raises:
        ValueError: the model can't be built, takes other inputs than tokens, or has too few blocks.
    """
    model, _ = build_model(own.name)
    try:
        inspect.signature(model.forward).bind("tokens")
    except TypeError as error:
        raise ValueError(
            f"--model {own.name}: a plan gives the model one input, tokens [b, s], but its forward "
            f"takes {inspect.signature(model.forward)}: {error}. Return a module that makes the "
            "other inputs from tokens"
        ) from None
    if hasattr(config := getattr(model, "config", None), "use_cache"):
        config.use_cache = False
    if own.layers is not None:
        keep_first(model, own.layers)
    return model.to("meta")


def keep_first(model: nn.Module, count: int) -> None:
    """Remove all but the first blocks from each of the outermost ModuleLists of a model.

    Raises:
        ValueError: a list is too short, or there is none.
    """
    found = lists(model)
    shortest = min((len(each) for each in found), default=0)
    if count > shortest:
        raise ValueError(f"--layers {count}: the ModuleLists of the model have {shortest} blocks")
    for each in found:
        del each[count:]


def lists(model: nn.Module) -> list[nn.ModuleList]:
    """The outermost ModuleLists of a model."""
    if isinstance(model, nn.ModuleList):
        return [model]
    return [found for child in model.children() for found in lists(child)]


def longest(model: nn.Module) -> int | None:
    """The longest sequence that a transformers model takes, in tokens; None if it declares none."""
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


def converted(
    variant: str, own: OwnModel, tp: int, reduce_transport: Encoding
) -> tuple[nn.Module, dict[str, ParallelStyle]]:
    """The model converted as a candidate is, and its tensor-parallel plan.

    A plan of the user's own is for a converted model, so for bf16 the model is converted, too.

    Raises:
        ValueError, NotImplementedError: the model can't be converted, or has no plan.
    """
    model, has_plan = make(own), bool(own.tp_plan) and tp > 1
    recipe = "tensorwise" if has_plan and variant == BF16 else variant
    convert(recipe, model, True, skip_head(model, *own.skip))
    if tp == 1:
        return model, {}
    transport = {} if reduce_transport is None else {"reduce_transport": reduce_transport}
    if has_plan:
        return model, own_plan(own.tp_plan, model, transport)
    integration = import_module("fp8_dist.integrations.transformers")  # is optional
    try:
        return model, integration.hf_tp_plan(model, **transport)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            "name a function that makes the model's tensor-parallel plan by --tp-plan, because "
            f"{error}"
        ) from error


def own_plan(name: str, model: nn.Module, options: dict[str, Any]) -> dict[str, ParallelStyle]:
    """Call the function of `--tp-plan`.

    Raises:
        ValueError: it can't be imported, raises an error, or returns no plan.
    """
    function = function_named("--tp-plan", name)
    try:
        plan = function(model, **options)
    except Exception as error:  # of the user's code
        raise ValueError(f"--tp-plan {name}: {type(error).__name__}: {error}") from error
    if not isinstance(plan, dict) or not plan:
        what = "an empty dict" if plan == {} else kind_of(plan)
        raise ValueError(f"--tp-plan {name}: it returned {what}, not names with parallel styles")
    return plan


def build(variant: str, own: OwnModel, mesh: DeviceMesh, reduce_transport: Encoding) -> nn.Module:
    """The model on a mesh: the counterpart of `scripts.common.models.build`."""
    model, plan = converted(variant, own, mesh["tp"].size(), reduce_transport)
    if plan:
        apply_tp_plan(model, mesh["tp"], plan)
    if variant == BF16:
        convert_to_linear(model)
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
