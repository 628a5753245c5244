"""Every private name of torch that the library uses, under a public name, but those of FSDP2.

A release of torch may rename any of them. Importing the library then raises an ImportError that
names it and the release.
"""

import gc
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from hashlib import blake2b
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn as nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import PrepareModuleInput, RowwiseParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import create_selective_checkpoint_contexts


def require(owner: Any, names: str) -> None:
    """Raise AttributeError if an object or a class of torch neither has nor declares a name."""
    cls = owner if isinstance(owner, type) else type(owner)
    declared = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", ())}
    declared |= {*dir(cls), *getattr(owner, "__dict__", ())}
    if missing := [f"{cls.__name__}.{name}" for name in names.split() if name not in declared]:
        raise AttributeError(f"it has no {', '.join(missing)}")


@contextmanager
def names_of_torch() -> Iterator[None]:
    """Raise an ImportError that names torch's release if a private name is missing."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"fp8_dist needs torch >= 2.11, and does not know torch {torch.__version__}: {error}. "
            "Install another release of torch"
        ) from error


with names_of_torch():
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.distributed import _functional_collectives
    from torch.distributed.distributed_c10d import _resolve_process_group, _world
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.fx.experimental.symbolic_shapes import statically_known_true as statically_known_true
    from torch.utils import _python_dispatch, _pytree

    AsyncCollectiveTensor = _functional_collectives.AsyncCollectiveTensor
    TorchDispatchMode = _python_dispatch.TorchDispatchMode
    tree_leaves, tree_map = _pytree.tree_leaves, _pytree.tree_map
    tree_map_only = _pytree.tree_map_only
    StridedShard = _StridedShard
    resolve_process_group: Any = _resolve_process_group
    without_dispatch_modes = _python_dispatch._disable_current_modes
    _dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack
    _is_in_dispatch_mode = _python_dispatch.is_in_torch_dispatch_mode
    has_functorch_transforms = torch._C._are_functorch_transforms_active
    unnoticed_writes = torch.autograd._unsafe_preserve_version_counter
    _len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
    disabled_torch_function: Any = torch._C._disabled_torch_function_impl
    native_scaled_mm = torch._scaled_mm
    native_scaled_grouped_mm: Any = torch._scaled_grouped_mm
    foreach_zero_ = torch._foreach_zero_
    _disable_dynamo: Any = torch._disable_dynamo
    _has_avx512 = torch.cpu._is_avx512_supported
    _has_avx512_bf16 = torch.cpu._is_avx512_bf16_supported
    root_mesh: Callable[[DeviceMesh], DeviceMesh] = DeviceMesh._get_root_mesh
    concatenated_mesh: Callable[[list[DeviceMesh]], DeviceMesh] = DeviceMesh._concatenate
    _ = forward_ad._current_level  # in_forward_ad reads it
    tensor_data: Any = torch.Tensor.data  # the descriptor behind tensor.data
    funcol = torch.ops._c10d_functional
    shard_dim_alltoall = torch.ops._dtensor.shard_dim_alltoall.default
    # Attributes and methods that the library reads, calls, or overrides in subclasses.
    require(torch._C, "_current_graph_task_id _will_engine_execute_node")
    require(torch._C, "_set_throw_on_mutable_data_ptr")
    require(torch.Tensor, "_backward_hooks _post_accumulate_grad_hooks")
    require(torch.Tensor, "_make_subclass _make_wrapper_subclass")
    require(torch.UntypedStorage, "_cdata")
    require(torch.ops.aten.mm.default, "_schema")
    require(torch.autograd.Variable._execution_engine, "queue_callback")
    require(_world, "pg_names")
    require(DTensor, "_local_tensor")
    require(nn.Module, "_parameters _buffers _modules")
    require(nn.Module, "_apply _save_to_state_dict _load_from_state_dict")
    require(nn.Module, "_state_dict_hooks _load_state_dict_pre_hooks")
    require(torch.optim.Optimizer, "_optimizer_step_post_hooks")
    require(RowwiseParallel, "_apply _partition_linear_fn _prepare_output_fn")
    require(PrepareModuleInput, "_apply _prepare_input_arg")

# Types of the tensors that torch passes while it traces a graph.
STAND_INS = (FakeTensor, FunctionalTensor)

_PLAIN = (torch.Tensor, nn.Parameter)

# An operator of torch > 2.11 that wraps a collective's result as an AsyncCollectiveTensor.
wrapped_in_flight = getattr(getattr(funcol, "_wrap_tensor_autograd", None), "default", None)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def cached_but_in_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Cache a function's results, except while dynamo traces it: dynamo warns about lru_cache."""
    cached: Callable[..., _R] = lru_cache(maxsize=4096)(function)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return cached(*args, **kwargs)

    return call


def constant_in_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``torch.compiler.assume_constant_result`` without its import of dynamo.

    Dynamo calls the function while it traces, and treats the result as a constant.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def disabled_in_graphs(reason: str | None = None) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """``torch.compiler.disable`` that imports dynamo when the function is called.

    ``reason``: why a graph that must not break can't call the function, as a clause.
    """
    message = reason and f"{reason}; call it outside of code that is compiled with fullgraph=True"

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        disabled: Callable[_P, _R] = _disable_dynamo(function)
        # Dynamo reads these where a graph would call the function.
        vars(disabled).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=message)
        return disabled

    return decorate


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Make normal tensors, which autograd can save, in any mode; a context or a decorator.

    Note [What outlives a call]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A tensor that is made under ``torch.inference_mode`` is an inference tensor for all its life.
    Autograd can't save it, and code outside of the mode can't write to it. An evaluation may run
    between any two steps of a training. So whatever outlives a call is made within this context:
    scales and statistics of weights, casts that are kept, amax histories, handles, parameters and
    their wrappers. What a forward makes for itself needs no context: it is gone before the next.

    A view of a normal tensor is normal in any mode, but ``x.view(dtype)`` is not.
    """
    # (inference_mode(False) enables gradients.)
    with torch.inference_mode(False), torch.no_grad():
        yield


def recorded_as_operators_are(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that applies autograd functions, for gradients within inference mode.

    ``torch.enable_grad`` has no effect on torch's operators under ``torch.inference_mode``, but an
    autograd function would save inference tensors, and raise.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # (Dynamo can't trace the question, and saves nothing itself.)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.no_grad():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def allowed_in_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``torch.compiler.allow_in_graph`` without its import of dynamo.

    AOTAutograd traces the function, and dynamo does not.
    """

    @constant_in_graphs
    def allow() -> bool:
        return bool(torch.compiler.allow_in_graph(function))

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling():
            allow()  # before dynamo looks at the function
        return function(*args, **kwargs)

    return call


def is_exporting() -> bool:
    """``torch.compiler.is_exporting()``, which in torch 2.11 is True in every graph of dynamo."""
    return torch.compiler.is_exporting() and getattr(torch.compiler, "_is_exporting_flag", True)


@constant_in_graphs
def graphs_fuse_collectives() -> bool:
    """Whether graphs fuse collectives with GEMMs: async tensor parallelism of torch.compile."""
    return _is_set_in_inductor("_micro_pipeline_tp")


def graphs_choose_gemms() -> bool:
    """Whether Inductor may choose the kernel of a GEMM by autotuning."""
    return _is_set_in_inductor("max_autotune") or _is_set_in_inductor("max_autotune_gemm")


def _is_set_in_inductor(option: str) -> bool:
    return bool(getattr(sys.modules.get("torch._inductor.config"), option, False))


def has_bf16_instructions() -> bool:
    """Whether torch multiplies bf16 matrices by instructions of this CPU.

    oneDNN decides, and respects ``ONEDNN_MAX_CPU_ISA``. It also supports bf16 on AVX-512 without
    such instructions, where bf16 is slower than fp32.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported and (_has_avx512_bf16() or not _has_avx512())


def make_wrapper(
    cls: Any,
    inner: torch.Tensor,
    dtype: torch.dtype,
    pin_memory: bool = False,
    shape: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Any:
    """Make a tensor of the subclass ``cls`` with the layout of ``inner``.

    It shares the storage of a plain ``inner`` of the same dtype and shape, so its address is that
    of the values. Otherwise it has no storage.

    ``shape``: the size and strides, if they differ from those of ``inner``.
    """
    if type(inner) in (torch.Tensor, nn.Parameter) and shape is None and dtype is inner.dtype:
        return torch.Tensor._make_subclass(cls, inner)
    size, strides = shape or (inner.size(), inner.stride())
    tensor = torch.Tensor._make_wrapper_subclass(
        cls,
        size,
        strides=strides,
        storage_offset=inner.storage_offset(),
        dtype=dtype,
        layout=inner.layout,
        device=inner.device,
        pin_memory=pin_memory,
    )
    torch._C._set_throw_on_mutable_data_ptr(tensor)  # code that reads it would crash
    return tensor


def stable_hash(tensor: torch.Tensor) -> str:
    """Key of a tensor subclass in torch's cache of compiled graphs.

    torch adds nothing to the key, so it contains everything that a graph may depend on, including
    shapes and dtypes of inner tensors. A subclass uses this function as its method
    ``_stable_hash_for_caching``.
    """
    key: list[Any] = [type(tensor).__qualname__, tensor.device, tensor.dtype, tensor.requires_grad]
    key += [tensor.shape, tensor.stride(), tensor.storage_offset()]
    if hasattr(tensor, "__tensor_flatten__"):
        names, static = tensor.__tensor_flatten__()
        key += [static, [(name, stable_hash(getattr(tensor, name))) for name in names]]
    return blake2b(repr(key).encode(), digest_size=16).hexdigest()


# Whether torch's cache of compiled graphs has a key for each tensor subclass.
CACHE_TELLS_SUBCLASSES = torch.__version__ >= "2.13"

if CACHE_TELLS_SUBCLASSES:
    _hash_of_dtensor = DTensor._stable_hash_for_caching

    def _hash_with_local(self: DTensor) -> str:
        """The key of a DTensor in torch's cache of compiled graphs, with what torch leaves out.

        The key of torch 2.13 has only the mesh's ranks, the placements and the global shape. A
        compiled optimizer that was traced with plain shards would also run on shards of a subclass,
        which have no address to read. A graph of e4m3 data would run on e5m2 data. And equal meshes
        have groups of their own, whose names are constants of a graph.
        """
        local = self._local_tensor
        is_plain = type(local) in (torch.Tensor, *STAND_INS)
        of_local = tuple(local.shape) if is_plain else stable_hash(local)
        return f"{_hash_of_dtensor(self)} {group_names(self.device_mesh)} {of_local}"

    DTensor._stable_hash_for_caching = _hash_with_local  # type: ignore[method-assign]


def module_being_traced() -> str | None:
    """The name of the module that calls an operator while dynamo adds the operator to a graph.

    It is for messages: dynamo has one graph for modules with different names.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    current_node = getattr(utils, "get_current_node", lambda: None)  # private
    node = current_node()
    if node is None or not (stack := node.meta.get("nn_module_stack")):
        return None
    path, _ = [*stack.values()][-1]
    return re.sub(r"^L\['\w+'\]\.?|_modules\['(\w+)'\]", r"\1", str(path))


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Make ``isinstance(tensor, nn.Parameter)`` true of what AOTAutograd passes for one."""
    tensor._is_param = True  # type: ignore[attr-defined]


def process_groups() -> dict[str, list[int]]:
    """The names of the process groups of this rank, and their ranks."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return {}
    ranks_of = torch.distributed.get_process_group_ranks
    return {name: ranks_of(group) for group, name in _world.pg_names.items()}


def group_names(mesh: DeviceMesh) -> list[str]:
    """The name of the process group of each axis; none on a rank outside the mesh."""
    return [*getattr(mesh, "_dim_group_names", ())]


def dtensor_local(tensor: DTensor) -> torch.Tensor:
    """The local tensor, possibly in flight. (``to_local()`` waits, and is differentiable.)"""
    return tensor._local_tensor


def dtensor_spec(tensor: DTensor) -> object:
    """The DTensorSpec, which is replaced when mesh, placements or shape change."""
    return tensor._spec


def set_dtensor_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Replace the local tensor with another of the same shape and dtype, as FSDP2 does."""
    tensor._local_tensor = local


def may_be_transformed() -> bool:
    """Whether forward-mode differentiation, a transform of torch.func, or jit.trace is active."""
    in_forward_ad = forward_ad._current_level >= 0
    return in_forward_ad or has_functorch_transforms() or torch.jit.is_tracing()


def when_backward_ends(call: Callable[[], None]) -> None:
    """Run ``call`` when the current backward pass has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def in_backward() -> bool:
    """Whether this thread runs code of a backward pass."""
    return backward_id() != -1


def backward_id() -> int:
    """The number of the backward pass that this thread runs, or -1."""
    return int(torch._C._current_graph_task_id())


def backward_runs(node: Any) -> bool | None:
    """Whether the current backward runs a node; None for a leaf of ``torch.autograd.grad``.

    For a leaf (AccumulateGrad): whether its gradient is accumulated. ``torch.autograd.grad``
    returns the gradients of the given leaves instead.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # "A leaf node was passed ... we are currently running autograd.grad()"
        return None


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> DTensor:
    """``DTensor.from_local`` for a contiguous global tensor, faster and without a gradient.

    In a graph, with a gradient, or on a rank outside the mesh it calls ``from_local``.
    """
    if torch.compiler.is_compiling() or local.requires_grad or mesh.get_coordinate() is None:
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=contiguous_stride(shape)
        )
    spec = _spec(mesh, placements, shape, local.dtype)
    if spec.mesh is not mesh:
        # Equal meshes have groups of their own. Ranks may guess different uneven shapes, so one
        # rank could find the mesh of an earlier spec, and wait for the others in its group.
        spec = DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]


@lru_cache(maxsize=4096)
def _spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> Any:
    meta = TensorMeta(shape, contiguous_stride(shape), dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor."""
    return tuple([math.prod([max(n, 1) for n in shape[dim + 1 :]]) for dim in range(len(shape))])


def storage_address(tensor: torch.Tensor) -> int:
    """The address of the storage object, the same for all views.

    It may be that of a later storage, unless a StorageWeakRef exists.
    """
    return tensor.untyped_storage()._cdata


def version_of(tensor: torch.Tensor) -> int | None:
    """The number of writes that autograd has counted; None for an inference tensor."""
    return None if tensor.is_inference() else tensor._version


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


def carry_attributes(old: torch.Tensor, new: torch.Tensor) -> None:
    """Copy the attributes of a parameter to another one, which shares its hooks.

    The handle of a hook removes it from both.
    """
    vars(new).update({name: value for name, value in vars(old).items() if name != "_is_param"})
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(new, name, getattr(old, name))


def own_load_hooks(module: nn.Module) -> None:
    """Rebind load_state_dict pre-hooks that were copied from another module to this one."""
    hooks: Any = module._load_state_dict_pre_hooks
    for number, hook in hooks.items():
        if hook.with_module:
            hooks[number] = type(hook)(hook.hook, module)


def remove_state_hooks(module: nn.Module, hooks: set[Any]) -> None:
    """Remove hooks of ``state_dict`` and ``load_state_dict`` from a module."""
    for registered in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for number, hook in list(registered.items()):
            if getattr(hook, "hook", hook) in hooks:  # torch wraps some
                del registered[number]


def parameters_of_ddp() -> set[int]:
    """The ids of the parameters of all modules that DistributedDataParallel wraps."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return set()
    classes = (DistributedDataParallel, *DistributedDataParallel.__subclasses__())
    # An object refers to its class. Asking all objects for their classes takes four times as long.
    wrappers = [ddp for ddp in gc.get_referrers(*classes) if type(ddp) in classes]
    return {id(p) for ddp in wrappers if hasattr(ddp, "module") for p in ddp.module.parameters()}


_IGNORED = "_ddp_params_and_buffers_to_ignore"


class _LeftOutOfDDP:
    """FQNs of the parameters that DDP ignores, computed when it is constructed."""

    def __init__(self, module: nn.Module, find: Callable[[nn.Module], list[str]]) -> None:
        self.module, self.find = module, find
        self.others = vars(module).get(_IGNORED)  # FQNs that other code has set

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*(self.others or ()), *self.find(self.module)]))


def leave_out_of_ddp(module: nn.Module, find: Callable[[nn.Module], list[str]]) -> None:
    """Exclude parameters of a module from DistributedDataParallel(module).

    ``find`` returns their FQNs in a module. It is called when a DDP is constructed.
    """
    if not isinstance(vars(module).get(_IGNORED), _LeftOutOfDDP):
        setattr(module, _IGNORED, _LeftOutOfDDP(module, find))


def give_back_to_ddp(module: nn.Module) -> None:
    """Undo :func:`leave_out_of_ddp` in modules where ``find`` returns nothing any more."""
    for part in module.modules():
        ignored = vars(part).get(_IGNORED)
        if isinstance(ignored, _LeftOutOfDDP) and not ignored.find(part):
            delattr(part, _IGNORED)
            if ignored.others is not None:
                setattr(part, _IGNORED, ignored.others)


def named_arguments(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of an operator's call by name, in the order of its schema."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return {name: given[name] for name in names if name in given}


def is_mutable(op: OpOverload) -> bool:
    """Whether an operator writes to an argument."""
    return op._schema.is_mutable


def written_arguments(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Any]:
    """The arguments that an operator writes to.

    For a collective, these are all arguments: c10d schemas do not mark mutated ones.
    """
    if op.namespace == "c10d":
        return args
    if not is_mutable(op):
        return ()
    written = {a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write}
    return [arg for name, arg in named_arguments(op, args, kwargs).items() if name in written]


def is_selectively_checkpointed() -> bool:
    """Whether selective activation checkpointing is active, including its recomputation."""
    return bool(_len_torch_dispatch_stack()) and any(
        type(mode).__module__ == create_selective_checkpoint_contexts.__module__
        for mode in _dispatch_modes()
    )


def outside_of_modes() -> AbstractContextManager[Any]:
    """Disable dispatch modes, such as FakeTensorMode, for operators on the host."""
    return without_dispatch_modes() if _is_in_dispatch_mode() else nullcontext()


def has_dispatch_modes() -> bool:
    """Whether there are active dispatch modes, such as that of ``comm_audit``."""
    return bool(_len_torch_dispatch_stack())


def can_skip_dispatch(tensor: torch.Tensor) -> bool:
    """Whether an operator's implementation may be called directly, which is faster.

    The values of a tensor with the negative bit (``z.conj().imag``) are not those of its storage.
    The dispatcher resolves the bit before it calls an implementation.
    """
    return (
        not torch.compiler.is_dynamo_compiling()
        and type(tensor) in _PLAIN
        and not _len_torch_dispatch_stack()
        and not tensor.is_meta
        and not tensor.is_neg()
    )
