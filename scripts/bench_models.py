"""The models whose training steps the benchmarks time: a Llama on a mesh, for each candidate.

Names of candidates are those of bench_peers. On a data-parallel axis FSDP2 shards fp32 masters and
computes in bf16; without one parameters are bf16. A tensor-parallel axis brings sequence
parallelism. Weights, inputs and output gradients are gathered in float8 where the library can.
"""

import dataclasses
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import bench_peers
import torch
from bench_peers import BF16, is_torchaos, torchao_config
from llama import Block, Llama, LlamaConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle

from fp8_dist import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    convert_to_float8_training,
    precompute_float8_dynamic_scale,
    sync_float8_amax_and_scale_history,
)
from fp8_dist.dtypes import is_float8
from fp8_dist.tensor_parallel import apply_tp_plan, llama_tp_plan

AfterStep = Callable[[nn.Module], None]


def not_output(_: nn.Module, name: str) -> bool:
    """The head stays in high precision."""
    return name != "output"


def build(
    name: str,
    config: LlamaConfig,
    mesh: DeviceMesh | None,
    device: torch.device,
    compiled: bool = False,
) -> tuple[Llama, AfterStep]:
    """A candidate's model from the same seed, and what is called after its optimizer's step.

    Args:
        name: of the candidate.
        config: the model's sizes.
        mesh: axes "dp" and "tp", each perhaps of one rank; None: one process.
        device: where the model is.
        compiled: torch.compile each block.
    """
    dp, tp = (1, 1) if mesh is None else (mesh["dp"].size(), mesh["tp"].size())
    with device:
        model = Llama(config)
    after = _convert(name, model, sharded=dp > 1)
    if mesh is not None and tp > 1:
        apply_tp_plan(model, mesh["tp"], tp_plan(name, model))
    if compiled:
        _compile(name, model)
    if dp == 1:
        return model.bfloat16(), after
    assert mesh is not None
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    return model, after


def _compile(name: str, model: Llama) -> None:
    """Compiles each block, with a forward whose code is the candidate's own.

    The graphs of one code are searched one after the other, and there is a limit to their number.
    """
    code = Block.forward.__code__.replace(co_name=f"forward_{name.replace(' ', '_')}")
    forward = FunctionType(code, Block.forward.__globals__)
    for block in model.layers:
        block.forward = MethodType(forward, block)
        block.compile(fullgraph=True, dynamic=False)


def _convert(name: str, model: nn.Module, sharded: bool) -> AfterStep:
    """Converts a model, its weights to be gathered in float8 if `sharded` and possible."""
    if name == BF16:
        return _nothing
    if is_torchaos(name):
        gather = sharded and name == "torchao tensorwise"  # it refuses it for the others
        config: Any = torchao_config(name, enable_fsdp_float8_all_gather=gather)
        bench_peers.torchao.convert_to_float8_training(
            model, module_filter_fn=not_output, config=config
        )
        precompute = bench_peers.torchao.precompute_float8_dynamic_scale_for_fsdp
        return precompute if gather else _nothing
    ours = Float8LinearConfig.from_recipe_name(name)
    travels = ours.gather_cast("weight") is not None
    ours = dataclasses.replace(ours, enable_fsdp_float8_all_gather=sharded and travels)
    convert_to_float8_training(model, module_filter_fn=not_output, config=ours)
    if name == Float8LinearRecipeName.DELAYED.value:
        return sync_float8_amax_and_scale_history
    # A weight that FSDP2 gathers in high precision is scaled when it has been gathered.
    return _nothing if sharded and not travels else precompute_float8_dynamic_scale


def _nothing(_: nn.Module) -> None:
    """What most candidates call after a step."""


def tp_plan(name: str, model: nn.Module) -> dict[str, ParallelStyle]:
    """The tensor-parallel plan of a candidate, with sequence parallelism.

    torchao's float8 styles cast tensorwise whatever the recipe: its other recipes get torch's.
    """
    plan = llama_tp_plan(model)
    if name != "torchao tensorwise":
        return plan
    styles = bench_peers.float8_tensor_parallel
    for path, _ in model.named_modules():
        part = path.rpartition(".")[2]
        if part in ("attention", "feed_forward"):
            plan[path] = styles.PrepareFloat8ModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
        elif part in ("wq", "wk", "wv", "w1", "w3"):
            plan[path] = styles.Float8ColwiseParallel()
        elif part in ("wo", "w2"):
            plan[path] = styles.Float8RowwiseParallel(output_layouts=Shard(1))
    _let_gloo_gather()
    return plan


def _let_gloo_gather() -> None:
    """gloo refuses float8: lets torchao gather it as uint8, which is as large, at no other cost."""
    table = bench_peers.float8_ops.FLOAT8_OPS_TABLE
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default

    def as_bytes(data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert is_float8(data.dtype)
        return gather(data.view(torch.uint8), *args, **kwargs).view(data.dtype)

    def handler(op: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        return bench_peers.float8_ops.allgather_fp8(as_bytes, args, kwargs)

    table[gather] = handler
