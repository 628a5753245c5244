"""Every private name of FSDP2 that the library uses, under a public name.

If a release of torch has renamed a name that is read here at import, importing the library raises
an ImportError, as in ``torch_internals``. Reading an attribute of FSDP2's objects that is missing
raises an AttributeError.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import cache, cached_property, wraps
from typing import Any

import torch
import torch.nn as nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8_dist import torch_internals as internals

with internals.names_of_torch():
    from torch.distributed._composable_state import _module_state_mapping as _modules_with_state
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

    _all_gather_inputs = FSDPParam.all_gather_inputs.fget  # type: ignore[attr-defined]
    _init_extensions = FSDPParam._init_extensions
    _reset_sharded_param = FSDPParam.reset_sharded_param
    _unshard = _fsdp_param_group.FSDPParamGroup.unshard
    _foreach_reduce = _fsdp_param_group.foreach_reduce
    _post_backward = _fsdp_param_group.FSDPParamGroup.post_backward
    _reduction = inspect.signature(_foreach_reduce)
    _announced = ["fsdp_params", "unsharded_grads", "reduce_scatter_comm", "all_reduce_group"]
    _announced += ["all_reduce_hook", "reduce_scatter_stream", "reduce_dtype"]
    _divided = ["unsharded_grads", "reduce_scatter_group", "reduce_dtype", "gradient_divide_factor"]
    internals.require(FSDPModule, "_get_fsdp_state")
    internals.require(FSDPParam, "_extensions_data _sharded_param_data _unsharded_param")
    internals.require(FSDPParam, "_sharded_local_tensor")
    internals.require(FSDPParam, "_unsharded_inner_tensors _orig_size")
    _read = [*_announced, *_divided]
    if _renamed := [name for name in _read if name not in _reduction.parameters]:
        raise AttributeError(f"foreach_reduce has no parameters {', '.join(_renamed)}")


def fsdp_groups_of_module(module: nn.Module | FSDPModule) -> list[Any]:
    """The parameter groups of a module; none unless ``fully_shard`` was called on it."""
    state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = getattr(state, "_fsdp_param_group", None)  # torch 2.11 has one at most
    return [] if group is None else [group]


def fsdp_groups() -> list[Any]:
    """The parameter groups of all modules that ``fully_shard`` was called on."""
    groups = [group for module in _fsdp_modules() for group in fsdp_groups_of_module(module)]
    return list(dict.fromkeys(groups))


def _fsdp_modules() -> list[FSDPModule]:
    return [module for module in list(_modules_with_state) if isinstance(module, FSDPModule)]


def fsdp_roots_of(group: Any) -> list[nn.Module]:
    """The root modules under which FSDP2 runs a parameter group, and the group's own modules.

    Roots that share streams with the group's root are included.
    """
    states: dict[Any, Any] = {module: module._get_fsdp_state() for module in _fsdp_modules()}
    roots = [m for m, s in states.items() if s._is_root and s._comm_ctx is group.comm_ctx]
    return list(dict.fromkeys([*roots, *group.modules]))


def when_fsdp_shards(call: Callable[["FsdpParameter"], None]) -> None:
    """Call a function with each parameter that ``fully_shard`` shards.

    It runs before FSDP2 looks for all-gather hooks of the local tensor: when the parameter is
    sharded, and before the first gather, because a loader may have replaced the parameter.
    """

    @wraps(_init_extensions)
    def with_call(self: Any) -> None:
        group = next((group for group in fsdp_groups() if self in group.fsdp_params), None)
        parameter = FsdpParameter(self, group)
        call(parameter)
        _init_extensions(self)
        parameter.note_local()

    FSDPParam._init_extensions = with_call  # type: ignore[method-assign]


def when_fsdp_resets(call: Callable[["FsdpParameter"], None]) -> None:
    """Call a function with each parameter whose local tensor FSDP2 has looked up again.

    FSDP2 does so after ``load_state_dict`` and ``nn.Module._apply`` of an FSDP module, which may
    have replaced the local tensor, also by a plain one.
    """

    @wraps(_reset_sharded_param)
    def with_call(self: Any) -> None:
        _reset_sharded_param(self)
        parameter = FsdpParameter(self)
        call(parameter)
        parameter.note_local()

    FSDPParam.reset_sharded_param = with_call  # type: ignore[method-assign]


def before_fsdp_gathers_others(call: Callable[["FsdpParameter"], None]) -> None:
    """Call a function with each parameter whose old local tensor FSDP2 is about to gather.

    Other code has replaced the local tensor, and FSDP2 has not looked it up again. Only parameters
    whose old local tensor is a wrapper are considered.
    """

    @internals.disabled_in_graphs()
    @wraps(_unshard)
    def with_call(self: Any, *args: Any, **kwargs: Any) -> None:
        for fsdp_param in () if self.is_unsharded else self.fsdp_params:
            is_wrapper = hasattr(fsdp_param._sharded_param_data, "plain")
            if is_wrapper and fsdp_param._sharded_local_tensor is not fsdp_param._noted_local:
                parameter = FsdpParameter(fsdp_param, self)
                if not parameter.holds_local:
                    call(parameter)
        _unshard(self, *args, **kwargs)

    _fsdp_param_group.FSDPParamGroup.unshard = with_call  # type: ignore[method-assign]


def hand_over_to_fsdp_gathers(wrapper: type[Any]) -> None:
    """Let FSDP2 take the inputs of a gather from a method of a local tensor, where it returns any.

    FSDP2 inspects the signature of its hook in each gather, which takes longer than the method.

    ``wrapper``: the type of these local tensors. The method ``kept_inputs(parameter, module)`` gets
    the sharded parameter, and the module that the hook ``fsdp_pre_all_gather`` would get. It
    returns what the hook returns; or ``None``, and FSDP2 asks the hook.
    """

    @wraps(_all_gather_inputs)
    def all_gather_inputs(self: Any) -> list[torch.Tensor]:
        local, handed_over = self._sharded_local_tensor, None
        is_sharded = self.sharded_state is ShardedState.SHARDED
        if is_sharded and isinstance(local, wrapper) and not self.offload_to_cpu:
            handed_over = local.kept_inputs(self.sharded_param, self._module_info.module)
        if handed_over is None:
            return _all_gather_inputs(self)
        inputs, metadata = handed_over
        self._extensions_data.all_gather_metadata = metadata
        self._extensions_data.all_gather_input_sizes = [*map(torch.Tensor.size, inputs)]
        return [*map(torch.Tensor.ravel, inputs)]

    FSDPParam.all_gather_inputs = property(all_gather_inputs)  # type: ignore[assignment]


def fsdp_init_shards(modules: Iterable[nn.Module]) -> None:
    """Make FSDP2 replace the shards of modules (padded, pinned) now, not at its first gather."""
    for module in modules:
        for group in fsdp_groups_of_module(module):
            is_done = group._reset_sharded_params
            if not (is_done or any(p.sharded_param.is_meta for p in group.fsdp_params)):
                group.lazy_init()


class FsdpParameter:
    """A parameter that FSDP2 shards.

    Attributes:
        own: FSDP2's object.
        group: the parameter group; None while ``fully_shard`` makes it.
    """

    def __init__(self, fsdp_param: Any, group: Any = None) -> None:
        self.own, self.group = fsdp_param, group

    @property
    def users(self) -> list[tuple[nn.Module, str]]:
        """The modules that share the parameter, each with its name there; hooks get the first."""
        info = self.own._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        return [(info.module, info.param_name), *shared]

    @property
    def module(self) -> nn.Module:
        """The first of these modules."""
        return self.own._module_info.module

    @property
    def sharded(self) -> DTensor:
        """The sharded parameter."""
        return self.own.sharded_param

    @property
    def unsharded(self) -> torch.Tensor | None:
        """The unsharded parameter; None before the first gather."""
        return getattr(self.own, "_unsharded_param", None)

    @property
    def size(self) -> torch.Size:
        """The size of what is gathered."""
        return self.own._orig_size

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh over which it is sharded, or replicated."""
        return self.own.shard_mesh_from_root

    @property
    def gathered_as(self) -> torch.dtype | None:
        """The dtype of the gather; None if it is the parameter's own, or hooks choose it."""
        return None if hasattr(self.own, "_extensions_data") else self.own.mp_policy.param_dtype

    def note_local(self) -> None:
        """Remember the local tensor, which other code may replace."""
        self.own._noted_local = self.own._sharded_local_tensor

    @property
    def holds_local(self) -> bool:
        """Whether FSDP2 gathers a local tensor that is not the noted one.

        It does so if the local tensor is a wrapper and has got other ``data``.
        """
        tensors = self.own._sharded_param_data, self.own._sharded_local_tensor
        held, current = [getattr(tensor, "plain", tensor) for tensor in tensors]
        return internals.storage_address(held) == internals.storage_address(current)

    def replace_local(self, local: Any) -> None:
        """Replace the local tensor by a wrapper of it."""
        internals.set_dtensor_local(self.sharded, local)
        # FSDP2 (2.13) compares the address of this padded tensor with that of the local one, unless
        # it is of a type of its own.
        data = self.own._sharded_param_data
        self.own._sharded_param_data = local.like(getattr(data, "plain", data))

    def forget_hooks(self) -> None:
        """Make FSDP2 gather the parameter as a plain one, after its local tensor was unwrapped."""
        _reset_sharded_param(self.own)
        # Remove the state of earlier gathers.
        for name in ("_extensions_data", "_unsharded_param"):
            self.own.__dict__.pop(name, None)
        self.own.all_gather_outputs, self.own._unsharded_inner_tensors = [], []

    @property
    def is_trained(self) -> bool:
        """Whether a backward computes its gradient."""
        return (self.sharded if self.unsharded is None else self.unsharded).requires_grad

    def has_gradient(self) -> bool:
        """Whether FSDP2 holds an unsharded gradient of the parameter."""
        accumulated = getattr(self.own, "unsharded_accumulated_grad", None)  # torch < 2.15
        return accumulated is not None or getattr(self.unsharded, "grad", None) is not None

    def has_unreduced(self) -> bool:
        """Whether FSDP2 holds a gradient that is not fully reduced yet."""
        partial_output = getattr(self.group, "_partial_reduce_output", None)
        return partial_output is not None or self.has_gradient()


def fsdp_parameters(groups: Iterable[Any]) -> Iterator[FsdpParameter]:
    """The parameters of FSDP2's parameter groups, in their order."""
    return (FsdpParameter(param, group) for group in groups for param in group.fsdp_params)


def fill_fsdp_gradients(parameters: Iterable[FsdpParameter], value: float) -> None:
    """Fill the gradients of unsharded parameters with one value; they share memory."""
    numbers: torch.Tensor | None = None
    unsharded = [param.unsharded for param in parameters if param.unsharded is not None]
    for parameter in sorted(unsharded, key=lambda param: -param.numel()):
        local = internals.dtensor_local(parameter) if isinstance(parameter, DTensor) else parameter
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        if numbers is None or numbers.dtype != dtype or len(numbers) < local.numel():
            numbers = torch.full((local.numel(),), value, dtype=dtype, device=local.device)
        gradient = numbers[: local.numel()].view(local.shape)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            gradient = internals.make_dtensor(gradient, mesh, placements, parameter.shape)
        parameter.grad = gradient


class _Untouched:
    """Stand-in, in FSDP2, for a sharded parameter whose gradient is dropped."""

    grad: torch.Tensor | None = None
    _post_accumulate_grad_hooks = None

    def __init__(self, sharded: DTensor) -> None:
        self.sharded = sharded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sharded, name)


def without_fsdp_gradient(parameter: Any) -> Any:
    """A stand-in for FSDP2's object of a parameter that drops its gradient."""
    stand_in = copy(parameter)
    stand_in.sharded_param = _Untouched(parameter.sharded_param)
    return stand_in


def have_gradients(leaves: Iterable[Any], parameters: Iterable[FsdpParameter]) -> bool:
    """Whether any leaf of autograd's graph may have a gradient, perhaps held by FSDP or a hook.

    A hook may accumulate gradients elsewhere, for instance in fp32, or update the leaf.

    ``parameters``: those of FSDP2 that may be among the leaves.
    """
    in_fsdp = {
        id(param.unsharded): param.sharded.grad is not None or param.has_unreduced()
        for param in parameters
    }
    for leaf in leaves:
        if leaf.grad is not None or leaf._post_accumulate_grad_hooks or in_fsdp.get(id(leaf)):
            return True
        if vars(leaf).get("_saved_grad_shard") is not None:  # of FSDP1
            return True
    return False


def fsdp_is_running(group: Any) -> bool:
    """Whether FSDP2 runs the forward or the backward of a parameter group."""
    return group._training_state.name != "IDLE"


def fsdp_reshards_to_smaller_mesh(group: Any) -> bool:
    """Whether a parameter group has ``reshard_after_forward=<int>``."""
    return group.post_forward_mesh_info not in (None, group.mesh_info)


def fsdp_padded_shapes(group: Any) -> dict[Any, torch.Size]:
    """Padded shapes of the shards in a group's reduce-scatter, by FSDP2's parameter objects."""
    return {param: param.padded_sharded_param_size for param in group.fsdp_params}


def fsdp_reduce_scatter_group(group: Any) -> Any:
    """The process group of a parameter group's reduce-scatter; None if nothing is sharded."""
    if group.mesh_info.shard_mesh_dim is None:
        return None
    return group._reduce_scatter_process_group


def fsdp_reduction(group: Any) -> Any:
    """The custom reduce-scatter of a parameter group; None if it is FSDP2's own."""
    comm = group._reduce_scatter_comm
    return None if type(comm) is DefaultReduceScatter else comm


def set_fsdp_reduction(group: Any, comm: Any) -> None:
    """Replace the reduce-scatter of a parameter group; None restores FSDP2's own."""
    group.modules[0].set_custom_reduce_scatter(DefaultReduceScatter() if comm is None else comm)


def divide_fsdp_gradients_once() -> None:
    """Make FSDP2 divide gradients once where it shards over a single rank.

    Without a reduce-scatter, FSDP2 divides by ``set_gradient_divide_factor`` as it copies the
    gradients. torch 2.13 divides by it again afterwards, if it was to reduce by SUM: with
    ``set_force_sum_reduction_for_comms``, or in dtypes other than fp32 and bf16. Gradients that
    are divided before, and a factor of 1, are right whether it does or not.
    """

    @internals.disabled_in_graphs()
    @wraps(_foreach_reduce)
    def reduce_divided(*args: Any, **kwargs: Any) -> Any:
        bound = _reduction.bind(*args, **kwargs)
        grads, shards, dtype, factor = (bound.arguments[name] for name in _divided)
        is_sharded = shards is not None and shards.size() > 1
        if factor not in (None, 1) and not is_sharded:
            for i, grad in enumerate(grads):  # one by one, so that the old ones are freed
                grads[i] = grad.to(dtype or grad.dtype) / factor
            bound.arguments["gradient_divide_factor"] = 1.0
        return _foreach_reduce(*bound.args, **bound.kwargs)

    _fsdp_param_group.foreach_reduce = reduce_divided


@cache
def announce_fsdp_reductions(comm_class: type) -> None:
    """Make FSDP2 announce each reduction to custom reduce-scatters of a class.

    FSDP2 tells a custom reduce-scatter neither which parameters have gradients in its buffer nor
    what follows, and does not call it for a single rank. With this patch it calls two methods:

    ``complete(runs)``, before it looks for gradients. The method may add some. ``runs``: whether
    the backward of the group's modules runs, alike on all ranks. For a group that runs with
    FSDP2's own reduce-scatter, it calls the static method ``check_default(group)`` instead.

    ``prepare(parameters, gradients, replicas, hook)``, before the reduction; returns new
    ``replicas`` and ``hook``. ``parameters`` are keys of :func:`fsdp_padded_shapes`, in the order
    of the buffer; the method may replace them by :func:`without_fsdp_gradient`. ``gradients`` has
    the same length; tensors that are appended to it stay in the reduced buffer. ``replicas`` is
    the process group of HSDP's all-reduce, ``hook`` a function of the reduced buffer; either may
    be None. A new hook runs on the stream of the last reduction.
    """
    reduce = _fsdp_param_group.foreach_reduce

    @internals.disabled_in_graphs()
    @wraps(_post_backward)
    def completed(self: Any, *unused: Any) -> Any:
        runs = self._training_state.name in ("FORWARD", "PRE_BACKWARD")
        if isinstance(self._reduce_scatter_comm, comm_class) and self.reduce_grads:
            self._reduce_scatter_comm.complete(runs)  # type: ignore[attr-defined]
        elif runs and self.reduce_grads and fsdp_reduction(self) is None:
            comm_class.check_default(self)  # type: ignore[attr-defined]
        return _post_backward(self, *unused)

    @internals.disabled_in_graphs()
    @wraps(_foreach_reduce)
    def announced(*args: Any, **kwargs: Any) -> Any:
        bound = _reduction.bind(*args, **kwargs)
        parameters, grads, comm, replicas, hook, stream, dtype = (
            bound.arguments[name] for name in _announced
        )
        if isinstance(comm, comm_class):
            if dtype is not None and len({grad.dtype for grad in grads}) > 1:
                # FSDP2 converts the gradients that it accumulates, and raises for mixed dtypes.
                grads[:] = [grad.to(dtype) for grad in grads]
            group, new_hook = comm.prepare(parameters, grads, replicas, hook)  # type: ignore[attr-defined]
            bound.arguments |= {"all_reduce_group": group, "all_reduce_hook": new_hook}
            if replicas is None and hook is None and new_hook is not None:
                # FSDP2 frees the buffer, allocated on this stream, without waiting for others.
                bound.arguments["all_reduce_stream"] = stream
        return reduce(*bound.args, **bound.kwargs)

    _fsdp_param_group.FSDPParamGroup.post_backward = completed  # type: ignore[method-assign]
    _fsdp_param_group.foreach_reduce = announced


def fsdp_has_second_reduction(group: Any) -> bool:
    """Whether a second reduction follows: HSDP's, or that of ``set_all_reduce_hook``."""
    return group.mesh_info.replicate_mesh_dim is not None or group._all_reduce_hook is not None


def fsdp_reduces_unused(group: Any) -> bool:
    """Whether parameters that no rank has used get gradients of 0."""
    return getattr(group, "reduce_scatter_unused_params", False)  # torch > 2.12


def fsdp_ranks(group: Any) -> int:
    """Number of ranks over which gradients of a parameter group are reduced, replicas included."""
    return int(group.mesh_info.mesh.size())


def fsdp_sums(group: Any) -> bool:
    """Whether gradients of a parameter group are sums over ranks, not means."""
    return (group.gradient_divide_factor or fsdp_ranks(group)) == 1


def fsdp_divisor(group: Any, op: Any, reduced_over: Any) -> float:
    """Divisor of the sum in the reduction of a parameter group over a process group."""
    if op == ReduceOp.AVG:
        return float(reduced_over.size())
    # A ReduceOp of PREMUL_SUM does not expose its factor.
    return 1.0 if op == ReduceOp.SUM else float(group.gradient_divide_factor)
