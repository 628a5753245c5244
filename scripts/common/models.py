"""The reference Llama on a mesh, for each candidate (names: scripts/common/candidates.py).

The axes of a mesh are "tp", "ep" (for a mixture of experts), and any others for data parallelism.
Ranks of "ep" have different sequences. In token-wise modules, which compute each token on its own,
ranks of "tp" have different parts of a sequence. So experts are divided over both axes, and FSDP2
shards the other token-wise modules, such as routers, over all axes.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from fp8_dist import convert_to_float8_training, update_float8_scales
from fp8_dist.fsdp import average_gradients_over
from fp8_dist.mesh import local_tensor
from fp8_dist.moe import Float8ExpertsConfig, convert_experts_to_float8_training
from fp8_dist.tensor_parallel import Float8ExpertParallel, apply_tp_plan, llama_tp_plan
from fp8_dist.tensor_parallel.plans import (
    EmbeddingRowwiseParallel,
    colwise_style,
    prepare_style,
    residual_style,
)
from fp8_dist.torch_internals import has_bf16_instructions
from fp8_dist.transport import Encoding
from scripts.common import candidates
from scripts.common.candidates import config_of, is_torchaos, recipe_and_format
from scripts.common.llama import Attention, FeedForward, LatentAttention, Llama, LlamaConfig
from scripts.common.mixture import Experts, GatherSequence, MixtureOfExperts, Router
from scripts.common.recipes import BF16

TP, EP = "tp", "ep"
GATHERED_PEER = "torchao tensorwise"  # torchao's only recipe whose weights FSDP2 gathers in float8

# Each new mesh of NCCL has communicators of its own, of 0.5 GB and more (nccl#864, nccl#964).
device_mesh = cache(init_device_mesh)


def build(
    name: str,
    sizes: LlamaConfig,
    mesh: DeviceMesh | None = None,
    device: torch.device | str = "cpu",
    *,
    shard: bool | None = None,
    compiled: bool | str = False,
    seed: int = 0,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    reduce_transport: Encoding = None,
    **float8: Any,
) -> Llama:
    """Build a candidate's model: converted (except the head), parallel, compiled, initialized.

    Args:
        name: the candidate.
        sizes: the sizes of the model.
        mesh: TP with sequence parallelism over its axis "tp", experts divided over "ep" and "tp",
            FSDP2 over all axes but "tp". None: one process.
        device: the device of the model; on "meta" it is not initialized.
        shard: whether to apply FSDP2, to fp32 parameters that are gathered in float8 or
            `param_dtype`; without it parameters are bf16. None: shard if the axes besides "tp" have
            more than one rank, or if there are experts.
        compiled: whether to torch.compile each block, or the backend to do so with. Of a block with
            experts only the attention, the router and the experts are compiled, one by one.
        seed: the seed of the parameters, equal for all candidates and meshes on a kind of device.
        param_dtype: the dtype that FSDP2 gathers, and in which all but float8 GEMMs compute.
        reduce_dtype: the dtype in which FSDP2 reduces gradients.
        reduce_transport: the encoding of the sums of tensor parallelism's reduce-scatters, for the
            library's recipes.
        float8: fields of the library's config that differ from the recipe's.
    """
    tp = 1 if mesh is None else mesh[TP].size()
    if shard is None:
        shard = mesh is not None and (mesh.size() > tp or sizes.mixture is not None)
    with torch.device("meta"):
        model = Llama(sizes)
    convert(name, model, shard, **float8)
    if mesh is not None and tp > 1:
        apply_tp_plan(model, mesh[TP], tp_plan(name, model, reduce_transport))
    if mesh is not None and sizes.mixture is not None:
        divide_experts(name, model, mesh)
    if compiled:
        compile_blocks(name, model, "inductor" if compiled is True else compiled)
    if shard:
        assert mesh is not None
        # Only the rotary tables are inputs of a block that a cast would round.
        policy = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )
        if sizes.mixture is not None:
            shard_token_wise(model, mesh, policy)
        for module in (*model.layers, model):
            fully_shard(module, mesh=data_parallel_mesh(mesh), mp_policy=policy)
    else:
        model.bfloat16()
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        model.init_weights(seed, device)
    return model


def multiply_in_fp32(model: nn.Module) -> None:
    """Make unconverted layers multiply in fp32 on CPUs without bf16 instructions.

    Operands and results stay in bf16. There a bf16 GEMM takes 10 times as long as one in fp32.
    """
    if has_bf16_instructions():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(_forward_in_fp32, module)


def _forward_in_fp32(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x.float(), self.weight.float()).to(x.dtype)


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes of FSDP2 or HSDP: all but "tp". If "ep" is among them, they are flattened to one."""
    names = [name for name in mesh.mesh_dim_names or () if name != TP]
    return flat(mesh, names) if EP in names else mesh[tuple(names)]


def flat(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """The given axes of a mesh, flattened to one."""
    return mesh[tuple(names)]._flatten() if len(names) > 1 else mesh[names[0]]


def divide_experts(name: str, model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of "ep" and "tp" an equal number of whole experts."""
    axes = [axis for axis in mesh.mesh_dim_names or () if axis in (EP, TP)]
    mesh = flat(mesh, [axis for axis in axes if axis == EP or mesh[axis].size() > 1] or axes)
    if mesh.size() == 1:
        return
    for experts in experts_of(model):
        if name != BF16:
            parallelize_module(experts, mesh, Float8ExpertParallel())
            continue
        for weight, whole in list(experts.named_parameters()):
            part = distribute_tensor(whole.detach(), mesh, [Shard(0)])
            setattr(experts, weight, nn.Parameter(part))


def shard_token_wise(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Apply FSDP2 to token-wise modules: experts, and modules that the TP plan leaves out."""
    names = list(mesh.mesh_dim_names or ())
    sequences = data_parallel_mesh(mesh)
    for module in model.modules():
        parts, over = [], flat(mesh, names)
        if isinstance(module, Router):
            # Each rank adds the balancing loss of its part of a sequence.
            module.balance_weight /= mesh[TP].size()
            parts = [module]
        elif isinstance(module, LatentAttention):
            parts = [module.wq_a, module.wkv_a]
        elif isinstance(module, Experts):
            parts, over = [module], flat(mesh, [name for name in names if name not in (EP, TP)])
        place = partial(without_padding, over.size())
        for part in parts:
            fully_shard(part, mesh=over, mp_policy=policy, shard_placement_fn=place)
            average_gradients_over(part, sequences)  # as the loss


def without_padding(ranks: int, parameter: nn.Parameter) -> Shard:
    """Shard the second dim if only that one divides evenly, else the first."""
    rows, columns = local_tensor(parameter).shape[:2]
    return Shard(1 if rows % ranks and not columns % ranks else 0)


def experts_of(model: nn.Module) -> list[Experts]:
    """The experts of all blocks."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def is_float8(module: nn.Module, fqn: str) -> bool:
    """Whether a linear layer is converted: all are, except the head and routers."""
    return fqn != "output" and not fqn.endswith("router.gate")


def convert(
    name: str,
    model: nn.Module,
    shard: bool = False,
    admits: Callable[[nn.Module, str], bool] = is_float8,
    **changes: Any,
) -> None:
    """Convert experts and linear layers of a model in place, except its head and routers.

    shard: whether FSDP2 will gather the weights, in float8 where the recipe allows it. admits: the
    filter of linear layers. changes: fields of the config that differ from the recipe's.
    """
    if name == BF16:
        return
    call, gather = convert_to_float8_training, "auto" if shard else False
    if is_torchaos(name):
        call = candidates.torchao.convert_to_float8_training
        gather = shard and name == GATHERED_PEER
    config = config_of(name, enable_fsdp_float8_all_gather=gather, **changes)
    if experts_of(model):
        recipe, weight_format = recipe_and_format(name)
        how: Any = {"weight_format": weight_format, "enable_fsdp_float8_all_gather": gather}
        experts = Float8ExpertsConfig(recipe, **how)
        convert_experts_to_float8_training(model, config=experts)
    call(model, module_filter_fn=admits, config=config)


def after_step(name: str, sharded: bool) -> Callable[[nn.Module], None]:
    """The function to call on the model after each optimizer step, on all ranks.

    sharded: whether FSDP2 shards the model.
    """
    if name != BF16 and not is_torchaos(name):
        return update_float8_scales
    if name == GATHERED_PEER and sharded:
        return candidates.torchao.precompute_float8_dynamic_scale_for_fsdp
    return lambda model: None


def compile_blocks(name: str, model: Llama, backend: str) -> None:
    """Compile each block, with a forward that has its own code object for this candidate.

    Otherwise candidates would share one cache of dynamo, which is searched in order, and limited.
    Of blocks with experts, where FSDP2's hooks would break the graph, only parts are compiled.
    """
    parts = [part for block in model.layers for part in parts_to_compile(block)]
    forwards = {kind: own_forward(kind, name) for kind in {type(part) for part in parts}}
    for part in parts:
        part.forward = MethodType(forwards[type(part)], part)
        part.compile(fullgraph=True, dynamic=False, backend=backend)


def parts_to_compile(block: nn.Module) -> list[nn.Module]:
    """The modules that become a graph each: the block, or its attention, router and experts."""
    mixture = block.feed_forward
    if not isinstance(mixture, MixtureOfExperts):
        return [block]
    return [block.attention, *mixture.children()]


def own_forward(kind: type[nn.Module], name: str) -> FunctionType:
    """A copy of a class's forward for one candidate."""
    code = kind.forward.__code__.replace(co_name=f"forward_{name.replace(' ', '_')}")
    return FunctionType(code, kind.forward.__globals__)


def tp_plan(
    name: str, model: nn.Module, reduce_transport: Encoding = None
) -> dict[str, ParallelStyle]:
    """The tensor-parallel plan of a converted model.

    torchao's float8 styles always cast tensorwise, so its other recipes get torch's styles.
    """
    if experts_of(model):
        return mixture_tp_plan(model, reduce_transport)
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


def mixture_tp_plan(
    model: nn.Module, reduce_transport: Encoding = None
) -> dict[str, ParallelStyle]:
    """The plan for a mixture of experts: `llama_tp_plan` without token-wise modules."""
    between, wire = Shard(1), reduce_transport
    local = PrepareModuleInput(
        input_layouts=between, desired_input_layouts=between, use_local_output=True
    )
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": EmbeddingRowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        ),
        "output": colwise_style(
            model.get_submodule("output"), input_layouts=between, output_layouts=Replicate()
        ),
    }
    for path, module in model.named_modules():
        parts = dict(module.named_children())
        if isinstance(module, nn.RMSNorm):
            plan[path] = SequenceParallel()
        elif isinstance(module, MixtureOfExperts):
            plan[path] = local
        elif isinstance(module, LatentAttention):
            plan[path] = local
            for part in ("wq_b", "wkv_b"):
                plan[f"{path}.{part}"] = colwise_style(parts[part], wire, input_layouts=between)
            plan[f"{path}.shared_key"] = GatherSequence()
            plan[f"{path}.wo"] = residual_style(module.wo, wire, output_layouts=between)
        elif isinstance(module, Attention | FeedForward):
            readers, writer = (("w1", "w3"), "w2")
            if isinstance(module, Attention):
                readers, writer = (("wq", "wk", "wv"), "wo")
            layers = {reader: parts[reader] for reader in readers}
            plan[path] = prepare_style(layers, between, wire)
            plan |= {f"{path}.{reader}": colwise_style(layer) for reader, layer in layers.items()}
            plan[f"{path}.{writer}"] = residual_style(parts[writer], wire, output_layouts=between)
    return plan


def _let_gloo_gather() -> None:
    """Make torchao gather float8 as uint8, at the same cost: gloo does not support float8."""
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default

    def as_bytes(data: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return gather(data.view(torch.uint8), *args, **kwargs).view(data.dtype)

    def handler(op: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
        return candidates.torchao_ops.allgather_fp8(as_bytes, args, kwargs)

    candidates.torchao_ops.FLOAT8_OPS_TABLE[gather] = handler
