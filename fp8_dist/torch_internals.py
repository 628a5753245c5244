"""Every private name of torch that the library uses, under a public name.

A release of torch may rename them. A missing name raises ImportError when the library is imported,
instead of AttributeError in the middle of a step.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import lru_cache, wraps
from hashlib import blake2b
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn as nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.utils.checkpoint import create_selective_checkpoint_contexts

try:
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed._functional_collectives import (
        AsyncCollectiveTensor as AsyncCollectiveTensor,
    )
    from torch.distributed.distributed_c10d import _resolve_process_group
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState as FsdpState
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._python_dispatch import (
        _disable_current_modes,
        _get_current_dispatch_mode_stack,
    )
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map_only as tree_map_only

    FsdpReduceScatter = ReduceScatter
    StridedShard = _StridedShard
    resolve_process_group: Any = _resolve_process_group
    root_mesh: Callable[[DeviceMesh], DeviceMesh] = DeviceMesh._get_root_mesh
    concatenated_mesh: Callable[[list[DeviceMesh]], DeviceMesh] = DeviceMesh._concatenate
    has_functorch_transforms = torch._C._are_functorch_transforms_active
    without_dispatch_modes = _disable_current_modes
    _current_graph_task_id = torch._C._current_graph_task_id
    _len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
    profiler_is_active: Callable[[], bool] = torch.autograd._profiler_enabled
    disabled_torch_function: Any = torch._C._disabled_torch_function_impl
    native_scaled_mm = torch._scaled_mm
    foreach_zero_ = torch._foreach_zero_
    tensor_data: Any = torch._C.TensorBase.data  # the descriptor behind tensor.data
    tensor_version: Any = torch._C.TensorBase._version  # the descriptor behind tensor._version
    make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
    funcol = torch.ops._c10d_functional
    shard_dim_alltoall = torch.ops._dtensor.shard_dim_alltoall.default
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"fp8_dist needs torch >= 2.11, and does not know torch {torch.__version__}: {error}. "
        "Install another release of torch"
    ) from error

# Types that stand for tensors while a graph is traced.
STAND_INS = (FakeTensor, FunctionalTensor)

_PLAIN = (torch.Tensor, nn.Parameter)

# An operator of torch > 2.11 that wraps a collective's result as an AsyncCollectiveTensor.
wrapped_in_flight = getattr(getattr(funcol, "_wrap_tensor_autograd", None), "default", None)


# torch's GEMM with block scales, and the enums of its options: (function, scalings, swizzles).
_functional: Any = nn.functional
block_gemm_of_torch: tuple[Any, Any, Any] | None = None
if hasattr(_functional, "scaled_mm"):
    block_gemm_of_torch = (
        _functional.scaled_mm,
        _functional.ScalingType,
        _functional.SwizzleType,
    )

P = ParamSpec("P")
R = TypeVar("R")


def cached_but_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a function's results, except while dynamo traces it: dynamo warns about lru_cache."""
    cached: Callable[..., R] = lru_cache(maxsize=4096)(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return cached(*args, **kwargs)

    return call


def stable_hash(tensor: torch.Tensor) -> str:
    """Key of a tensor subclass in torch's cache of compiled graphs.

    torch adds nothing to it, so it contains everything that a graph may depend on, including the
    shapes and dtypes of inner tensors. A subclass uses this function as its method
    ``_stable_hash_for_caching``.
    """
    key: list[Any] = [type(tensor).__qualname__, tensor.device, tensor.dtype, tensor.requires_grad]
    key += [tensor.shape, tensor.stride(), tensor.storage_offset()]
    if hasattr(tensor, "__tensor_flatten__"):
        names, static = tensor.__tensor_flatten__()
        key += [static, [(name, stable_hash(getattr(tensor, name))) for name in names]]
    return blake2b(repr(key).encode(), digest_size=16).hexdigest()


def _tell_local_tensors_apart() -> None:
    """Add the local tensor of a DTensor to its key in torch's cache of compiled graphs.

    The key of torch 2.13 has only the placements and the shape of a DTensor. A compiled optimizer
    that was traced with plain shards would therefore also run on shards of another class, which
    have no address for it to read. A graph of e4m3 data would run on e5m2 data.
    """
    of_dtensor = getattr(DTensor, "_stable_hash_for_caching", None)

    def with_local(self: DTensor) -> str:
        local = self._local_tensor
        is_plain = type(local) in (torch.Tensor, *STAND_INS)
        return of_dtensor(self) + ("" if is_plain else stable_hash(local))  # type: ignore[misc]

    if of_dtensor is not None:
        DTensor._stable_hash_for_caching = with_local  # type: ignore[method-assign]


_tell_local_tensors_apart()


def dtensor_local(tensor: DTensor) -> torch.Tensor:
    """The local tensor, which may be in flight. (``to_local()`` waits, and is differentiable.)"""
    return tensor._local_tensor


def set_dtensor_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace the local tensor with another of the same shape and dtype, as FSDP2 does."""
    tensor._local_tensor = local


def when_backward_ends(call: Callable[[], None]) -> None:
    """Run ``call`` when the current backward pass has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def in_backward() -> bool:
    """Whether this thread runs code of a backward pass."""
    return backward_id() != -1


def backward_id() -> int:
    """The number of the backward pass that this thread runs, or -1."""
    return int(_current_graph_task_id())


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> DTensor:
    """``DTensor.from_local`` for a contiguous global tensor, faster and without a gradient.

    In a graph, with a gradient, or on a rank outside the mesh it calls ``from_local``.
    """
    if torch.compiler.is_compiling() or local.requires_grad or mesh.get_coordinate() is None:
        stride = contiguous_stride(shape)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )
    spec = _spec(mesh, placements, shape, local.dtype)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg,arg-type]


@lru_cache(maxsize=4096)
def _spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    meta = TensorMeta(shape, contiguous_stride(shape), dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor."""
    sizes = [max(n, 1) for n in shape[:0:-1]]
    return tuple(accumulate(sizes, mul, initial=1))[::-1] if shape else ()


def storage_address(tensor: torch.Tensor) -> int:
    """The address of the storage object, the same for all views."""
    return tensor.untyped_storage()._cdata


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside wrappers such as DTensor, or ``tensor`` itself if it is plain."""
    while not is_plain(tensor) and hasattr(tensor, "__tensor_flatten__"):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a torch.Tensor or an nn.Parameter, and not of another subclass."""
    return type(tensor) in _PLAIN


def runs_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()`` runs hooks. A subclass that skips ``__init__`` does not."""
    hooked = getattr(type(optimizer).step, "hooked", False)
    return hooked and "_optimizer_step_post_hooks" in vars(optimizer)


def has_hooks_after_accumulation(parameter: torch.Tensor) -> bool:
    """Whether a parameter has post-accumulate-grad hooks, which may update it in the backward."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def op_name(op: OpOverload) -> str:
    """The qualified name of an operator, without its overload: ``aten::mm``."""
    return op._schema.name


def op_arguments(op: OpOverload) -> list[str]:
    """The names of an operator's arguments."""
    return [argument.name for argument in op._schema.arguments]


def is_mutable(op: OpOverload) -> bool:
    """Whether an operator writes to an argument."""
    return op._schema.is_mutable


def written_arguments(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Any]:
    """The arguments that an operator writes to.

    For a collective these are all arguments, because c10d schemas do not mark mutated ones.
    """
    if op.namespace == "c10d":
        return args
    schema = op._schema
    if not is_mutable(op):
        return ()
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    return [given[name] for name in written if name in given]


def is_selectively_checkpointed() -> bool:
    """Whether code runs in selective activation checkpointing, including its recomputation."""
    return _len_torch_dispatch_stack() > 0 and any(
        type(mode).__module__ == create_selective_checkpoint_contexts.__module__
        for mode in _get_current_dispatch_mode_stack()
    )


def can_skip_dispatch(tensor: torch.Tensor) -> bool:
    """Whether an operator's implementation may be called directly, which is faster.

    This is the case for a real tensor that is not of a subclass, without dispatch modes, while
    dynamo is not tracing.
    """
    return (
        not torch.compiler.is_dynamo_compiling()
        and type(tensor) in _PLAIN
        and not _len_torch_dispatch_stack()
        and not tensor.is_meta
    )


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether the current computation on a tensor is captured in a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def fsdp_groups_of_module(module: FSDPModule) -> list[Any]:
    """The parameter groups of a module that ``fully_shard`` was called on."""
    return _groups_of_state(module._get_fsdp_state())


def fsdp_groups() -> list[Any]:
    """The parameter groups of all modules that ``fully_shard`` was called on."""
    states = [reference() for reference in list(_module_state_mapping.values())]
    return [group for state in states for group in _groups_of_state(state)]


def fsdp_init_shards(module: FSDPModule) -> None:
    """Let FSDP2 replace the local tensors of a module's parameters, which it may pad or pin.

    Otherwise FSDP2 does so before the first gather.
    """
    for group in fsdp_groups_of_module(module):
        is_done = group._reset_sharded_params
        if not (is_done or any(p.sharded_param.is_meta for p in group.fsdp_params)):
            group.lazy_init()


def before_fsdp_gathers(call: Callable[[Any], None]) -> None:
    """Let FSDP2 call ``call(group)`` for each parameter group before the group's first gather.

    The call follows FSDP2's lazy initialization of the group: when the root module first runs, and
    each time that a module is unsharded by hand.
    """
    lazy_init = FSDPParamGroup.lazy_init

    @wraps(lazy_init)
    def with_call(self: Any) -> None:
        lazy_init(self)
        call(self)

    FSDPParamGroup.lazy_init = with_call  # type: ignore[method-assign]


def fsdp_roots_of(group: Any) -> list[nn.Module]:
    """The root modules under which FSDP2 runs a parameter group, and the group's own modules.

    The result includes roots that share streams with the group's root.
    """
    states: list[Any] = [reference() for reference in list(_module_state_mapping.values())]
    roots = [state for state in states if getattr(state, "_is_root", False)]
    of_roots = [m for root in roots if root._comm_ctx is group.comm_ctx for m in root._modules]
    return list(dict.fromkeys([*of_roots, *group.modules]))


def _groups_of_state(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None) or [
        getattr(state, "_fsdp_param_group", None)
    ]
    return [group for group in groups if group is not None]


def fsdp_groups_of_same_root(group: Any) -> list[Any]:
    """The groups under the same root as ``group``; only ``group`` before FSDP2 first runs it."""
    return [other for other in fsdp_groups() if other.comm_ctx is group.comm_ctx]


def fsdp_modules_asked(group: Any) -> list[nn.Module]:
    """The modules that FSDP2 passes to the all-gather hooks of a group's parameters.

    It passes one module for each parameter with hooks, and not others that share the parameter.
    """
    return [p._module_info.module for p in group.fsdp_params if hasattr(p, "_extensions_data")]


def fsdp_modules_with_extensions(group: Any) -> list[nn.Module]:
    """All modules that hold a parameter of the group with hooks for FSDP2's all-gather."""
    infos = [p._module_info for p in group.fsdp_params if hasattr(p, "_extensions_data")]
    return [module for info in infos for module in (info.module, *info.shared_modules)]


def fsdp_modules_sharing(group: Any, module: nn.Module) -> list[nn.Module]:
    """The other modules that share a parameter for which FSDP2 passes ``module`` to the hooks."""
    infos = [p._module_info for p in group.fsdp_params if hasattr(p, "_extensions_data")]
    return [user for info in infos if info.module is module for user in info.shared_modules]


def fsdp_parameter_users(module: FSDPModule) -> Iterator[tuple[nn.Module, str]]:
    """Yield (module, parameter name) for each user of a parameter that an FSDP module shards."""
    for group in fsdp_groups_of_module(module):
        for parameter in group.fsdp_params:
            info = parameter._module_info
            yield info.module, info.param_name
            yield from zip(info.shared_modules, info.shared_param_names, strict=True)


class FsdpParameterUse(NamedTuple):
    """A parameter of a module that FSDP2 shards."""

    module: nn.Module
    name: str
    has_extensions: bool  # fully_shard found all-gather hooks on the tensor
    has_gathered: bool  # it was gathered at least once
    param_dtype: torch.dtype | None  # dtype of a gather without hooks; None: the parameter's


def fsdp_parameter_uses() -> Iterator[FsdpParameterUse]:
    """Yield every use of every parameter that FSDP2 shards, in all models."""
    for group in fsdp_groups():
        for parameter in group.fsdp_params:
            state = (
                hasattr(parameter, "_extensions_data"),
                hasattr(parameter, "_unsharded_param"),
                group.mp_policy.param_dtype,
            )
            info = parameter._module_info
            yield FsdpParameterUse(info.module, info.param_name, *state)
            for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                yield FsdpParameterUse(module, name, *state)


def fsdp_parameters_of_group(group: Any) -> list[nn.Parameter]:
    """The sharded parameters of a group in the group's order, as their modules hold them."""
    infos = [parameter._module_info for parameter in group.fsdp_params]
    return [getattr(info.module, info.param_name) for info in infos]


def fsdp_padded_sizes(group: Any) -> list[int]:
    """Number of elements of each parameter that a rank has in the group's reduce-scatter."""
    return [parameter.padded_sharded_param_size.numel() for parameter in group.fsdp_params]


def fsdp_reduce_scatter_group(group: Any) -> Any:
    """The process group of a parameter group's reduce-scatter; None if nothing is sharded."""
    if not isinstance(group.mesh_info, FSDPMeshInfo):
        return None
    return group._reduce_scatter_process_group


def fsdp_replicas(group: Any) -> Any:
    """The process group over which HSDP all-reduces a group's shards; None without HSDP."""
    if not isinstance(group.mesh_info, DDPMeshInfo):
        return None
    return group.mesh_info.replicate_process_group


def set_fsdp_replicas(group: Any, replicas: Any) -> None:
    """Replace the process group over which HSDP all-reduces a parameter group's shards."""
    # A copy, because other parameter groups share the object.
    before = group.mesh_info
    group.mesh_info = copy(before)
    group.mesh_info.replicate_process_group = replicas
    if group.post_forward_mesh_info is before:
        group.post_forward_mesh_info = group.mesh_info


def fsdp_reduction(group: Any) -> Any:
    """The custom reduce-scatter of a parameter group; None if it is FSDP2's own."""
    found = group._reduce_scatter_comm
    return None if type(found) is DefaultReduceScatter else found


def set_fsdp_reduction(
    group: Any, comm: FsdpReduceScatter | None, call: Callable[[list[int]], None] | None
) -> None:
    """Replace the reduce-scatter of a parameter group; None restores FSDP2's own.

    Args:
        call: runs before the reduce-scatter, with the indices of the parameters whose gradients it
            reduces. FSDP2 does not pass these to a custom reduce-scatter.
    """
    found = vars(group).get("post_backward")
    if hasattr(found, "in_place_of"):  # with_call below, which no other code has replaced since
        group.post_backward = found.in_place_of
    group._reduce_scatter_comm = DefaultReduceScatter() if comm is None else comm
    if call is None:
        return
    post_backward, note = group.post_backward, call

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def with_call(*unused: Any) -> None:
        if group.reduce_grads:
            note([i for i, p in enumerate(group.fsdp_params) if _is_reduced(p, group)])
        post_backward(*unused)

    with_call.in_place_of = post_backward
    group.post_backward = with_call


def _is_reduced(parameter: Any, group: Any) -> bool:
    if not hasattr(parameter, "_unsharded_param"):
        return False
    unsharded = parameter.unsharded_param
    if parameter.unsharded_accumulated_grad is not None or unsharded.grad is not None:
        return True
    return getattr(group, "reduce_scatter_unused_params", False) and unsharded.requires_grad


def fsdp_divisor(group: Any, op: Any, reduced_over: Any) -> float:
    """Divisor of the sum in the reduction of a parameter group over a process group."""
    if op == ReduceOp.AVG:
        return float(reduced_over.size())
    # A ReduceOp of PREMUL_SUM does not expose its factor.
    return 1.0 if op == ReduceOp.SUM else float(group.gradient_divide_factor)


def fsdp_is_running(group: Any) -> bool:
    """Whether FSDP2 runs the forward or the backward of a parameter group."""
    return group._training_state is not FsdpState.IDLE


def fsdp_reshards_to_smaller_mesh(group: Any) -> bool:
    """Whether a parameter group has ``reshard_after_forward=<int>``."""
    return group.post_forward_mesh_info not in (None, group.mesh_info)
