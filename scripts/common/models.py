"""The reference Llama on a mesh, for each candidate (names: scripts/common/candidates.py)."""

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle

from fp8_dist import convert_to_float8_training, update_float8_scales
from fp8_dist.tensor_parallel import apply_tp_plan, llama_tp_plan
from fp8_dist.transport import Encoding
from scripts.common import candidates
from scripts.common.candidates import BF16, config_of, is_torchaos
from scripts.common.llama import Block, Llama, LlamaConfig

TP = "tp"
GATHERED_PEER = "torchao tensorwise"  # torchao's only recipe whose weights FSDP2 gathers in float8


def build(
    name: str,
    sizes: LlamaConfig,
    mesh: DeviceMesh | None = None,
    device: torch.device | str = "cpu",
    *,
    shard: bool | None = None,
    compiled: bool = False,
    seed: int = 0,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    reduce_transport: Encoding = None,
    **float8: Any,
) -> Llama:
    """Makes a candidate's model: converted but for the head, parallel, compiled, initialized.

    Args:
        name: the candidate.
        sizes: of the model.
        mesh: TP with sequence parallelism over its axis "tp", FSDP2 over the others. None: one
            process.
        device: where the model is; on "meta" it stays without values.
        shard: with FSDP2: fp32 parameters, which are gathered in float8 or `param_dtype`. Otherwise
            parameters are bf16. None: if the axes but "tp" have more than one rank.
        compiled: torch.compile each block.
        seed: of the parameters, which are the same for all candidates and meshes.
        param_dtype: of what FSDP2 gathers, which is that of all computation but float8's.
        reduce_dtype: in which FSDP2 reduces gradients.
        reduce_transport: how the sums of tensor parallelism's reduce-scatters travel, in our
            recipes.
        float8: fields of the library's config that differ from the recipe's.
    """
    tp = 1 if mesh is None else mesh[TP].size()
    if shard is None:
        shard = mesh is not None and mesh.size() > tp
    with torch.device("meta"):
        model = Llama(sizes)
    convert(name, model, shard, **float8)
    if mesh is not None and tp > 1:
        apply_tp_plan(model, mesh[TP], tp_plan(name, model, reduce_transport))
    if compiled:
        compile_blocks(name, model)
    if shard:
        assert mesh is not None
        # Casting the inputs of a block would only round the rotary tables.
        policy = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )
        for module in (*model.layers, model):
            fully_shard(module, mesh=data_parallel_mesh(mesh), mp_policy=policy)
    else:
        model.bfloat16()
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        model.init_weights(seed)
    return model


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes that FSDP2 shards, or replicates, over: all but "tp"."""
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[tuple(name for name in names if name != TP)]


def convert(name: str, model: nn.Module, shard: bool = False, **changes: Any) -> None:
    """Converts all linear layers of a model but its head, in place.

    shard: FSDP2 will gather the weights, in float8 where the recipe allows it. changes: fields of
    the config that differ from the recipe's.
    """
    if name == BF16:
        return
    call, gather = convert_to_float8_training, "auto" if shard else False
    if is_torchaos(name):
        call = candidates.torchao.convert_to_float8_training
        gather = shard and name == GATHERED_PEER
    config = config_of(name, enable_fsdp_float8_all_gather=gather, **changes)
    call(model, module_filter_fn=lambda _, fqn: fqn != "output", config=config)


def after_step(name: str, sharded: bool) -> Callable[[nn.Module], None]:
    """The function to call with the model, on all ranks, after the optimizer's step.

    sharded: whether FSDP2 shards the model.
    """
    if name in candidates.OURS:
        return update_float8_scales
    if name == GATHERED_PEER and sharded:
        return candidates.torchao.precompute_float8_dynamic_scale_for_fsdp
    return lambda model: None


def compile_blocks(name: str, model: Llama) -> None:
    """Compiles each block, with a forward whose code belongs to the candidate alone.

    Dynamo searches all graphs of a code object, and limits their number.
    """
    code = Block.forward.__code__.replace(co_name=f"forward_{name.replace(' ', '_')}")
    forward = FunctionType(code, Block.forward.__globals__)
    for block in model.layers:
        block.forward = MethodType(forward, block)
        block.compile(fullgraph=True, dynamic=False)


def tp_plan(
    name: str, model: nn.Module, reduce_transport: Encoding = None
) -> dict[str, ParallelStyle]:
    """The tensor-parallel plan of a converted model.

    torchao's float8 styles cast tensorwise whatever the recipe: its other recipes get torch's.
    """
    plan = llama_tp_plan(model, reduce_transport=reduce_transport)
    if name != GATHERED_PEER:
        return plan
    styles = candidates.torchao_styles
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
    """gloo refuses float8: torchao gathers it as uint8, which is as large, at no other cost."""
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default

    def as_bytes(data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return gather(data.view(torch.uint8), *args, **kwargs).view(data.dtype)

    def handler(op: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        return candidates.torchao_ops.allgather_fp8(as_bytes, args, kwargs)

    candidates.torchao_ops.FLOAT8_OPS_TABLE[gather] = handler
