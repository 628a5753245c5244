"""Communication ops of torch: the tensors that they move, their groups, and their durations.

Terms: a *collective* is one call of a communication op, which may also be a point-to-point op. Its
*buffer* is the largest tensor that it moves: the output of an all-gather, the input of a
reduce-scatter, the tensor of an all-reduce.

The arguments of the ops in ``SCHEMAS`` are known. The ops in ``IGNORED_OPS`` move no data. Any
other op in torch's communication namespaces is recorded under its qualified name. So a new op of
torch may be recorded with a wrong size, but it is never missed.
"""

import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from fp8_dist.torch_internals import (
    OpOverload,
    op_arguments,
    op_name,
    profiler_is_active,
    resolve_process_group,
    tree_leaves,
)


class CollectiveSchema(NamedTuple):
    """The meaning of the arguments of one communication op."""

    op: str  # the name of the collective, the same for all variants of the op
    buffer: str  # the name of the argument that holds the buffer
    times_group_size: bool  # whether that argument holds only one rank's share of the buffer


# A line has the qualified name of an op, and the fields of its CollectiveSchema.
_TABLE = """
c10d::_allgather_base_                                  all_gather      input_tensor    share
c10d::allgather_                                        all_gather      output_tensors
c10d::allgather_coalesced_                              all_gather      input_list      share
c10d::allgather_into_tensor_coalesced_                  all_gather      inputs          share
c10d::_reduce_scatter_base_                             reduce_scatter  input_tensor
c10d::reduce_scatter_                                   reduce_scatter  input_tensors
c10d::reduce_scatter_tensor_coalesced_                  reduce_scatter  inputs
c10d::allreduce_                                        all_reduce      tensors
c10d::allreduce_coalesced_                              all_reduce      tensors
c10d::alltoall_                                         all_to_all      input_tensors
c10d::alltoall_base_                                    all_to_all      input
c10d::broadcast_                                        broadcast       tensors
c10d::gather_                                           gather          input_tensors   share
c10d::gather_into_tensor_                               gather          input_tensor    share
c10d::scatter_                                          scatter         output_tensors  share
c10d::reduce_                                           reduce          tensors
c10d::send                                              send            tensors
c10d::recv_                                             recv            tensors
c10d::recv_any_source_                                  recv            tensors
_c10d_functional::all_gather_into_tensor                all_gather      input           share
_c10d_functional::all_gather_into_tensor_out            all_gather      input           share
_c10d_functional::all_gather_into_tensor_coalesced      all_gather      inputs          share
_c10d_functional::reduce_scatter_tensor                 reduce_scatter  input
_c10d_functional::reduce_scatter_tensor_out             reduce_scatter  input
_c10d_functional::reduce_scatter_tensor_coalesced       reduce_scatter  inputs
_c10d_functional::all_reduce                            all_reduce      input
_c10d_functional::all_reduce_                           all_reduce      input
_c10d_functional::all_reduce_coalesced                  all_reduce      inputs
_c10d_functional::all_reduce_coalesced_                 all_reduce      inputs
_c10d_functional::all_to_all_single                     all_to_all      input
_c10d_functional::broadcast                             broadcast       input
_c10d_functional::broadcast_                            broadcast       input
_c10d_functional::isend                                 send            tensor
_c10d_functional::irecv                                 recv            tensor
_c10d_functional::batch_p2p_ops                         batch_p2p       tensors
_c10d_functional_autograd::all_gather_into_tensor       all_gather      input           share
_c10d_functional_autograd::reduce_scatter_tensor        reduce_scatter  input
_c10d_functional_autograd::all_to_all_single            all_to_all      input
_dtensor::shard_dim_alltoall                            all_to_all      input
"""
SCHEMAS = {
    name: CollectiveSchema(op, buffer, bool(share))
    for name, op, buffer, *share in map(str.split, _TABLE.strip().splitlines())
}

# Ops of these namespaces that move no data between ranks: barriers, waits and signals, work on a
# rank's own tensors, and the lookup and setup of groups and of symmetric memory.
_IGNORED = """
c10d::barrier  c10d::monitored_barrier_  c10d_functional::wait_tensor
_c10d_functional::wait_tensor  _c10d_functional::wait_tensors
symm_mem::_barrier  symm_mem::memset32_  symm_mem::nccl_wait_for_signal
symm_mem::nccl_wait_signal  symm_mem::nvshmem_wait_for_signal  symm_mem::stream_write_value32_
c10d::check_for_nan  _c10d_functional::_wrap_tensor_autograd  symm_mem::_async_input_mm
_dtensor::mesh_get_process_group  symm_mem::_rendezvous  symm_mem::get_remote_tensors
"""
IGNORED_OPS = set(_IGNORED.split())

# The namespaces of torch's communication ops. The ops of c10d_functional, which is deprecated,
# decompose into those of _c10d_functional, except in inference mode.
NAMESPACES = {name.partition("::")[0] for name in (*SCHEMAS, *IGNORED_OPS)}


class Collective(NamedTuple):
    """One call of a communication op."""

    op: str  # the name in its schema; the op's qualified name if it is not in SCHEMAS
    group: dist.ProcessGroup | None  # None if the op has no argument for the group
    tensors: tuple[torch.Tensor, ...]  # the buffer, or one rank's share of it
    factor: int  # the size of the buffer, in sizes of ``tensors``


def read_collective(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Collective | None:
    """Return the collective that a call of an op makes; None if it makes none.

    For an op that is not in ``SCHEMAS``, the buffer is assumed to be its largest tensor argument.
    """
    if func.namespace not in NAMESPACES or (name := op_name(func)) in IGNORED_OPS:
        return None
    arguments = dict(zip(op_arguments(func), args, strict=False)) | kwargs
    group = _group(arguments.get("process_group", arguments.get("group_name")))
    schema = SCHEMAS.get(name)
    if schema is None:
        by_size = sorted(_tensors(arguments), key=lambda tensor: tensor.nbytes)
        return Collective(name, group, tuple(by_size[-1:]), factor=1)
    assert group is not None, f"{name} was called without a process group"
    factor = group.size() if schema.times_group_size else 1
    return Collective(schema.op, group, _tensors(arguments[schema.buffer]), factor)


def _tensors(values: Any) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _group(group: Any) -> dist.ProcessGroup | None:
    """Return the group of an argument: boxed in a c10d op, or its name in a functional op."""
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    return resolve_process_group(group)


# In the trace, the range around each call has this name and the position of the call.
_MARK = "comm_audit: collective "
# The name of a collective on a thread of its backend, such as "gloo:all_reduce".
_BACKEND_EVENT = re.compile(r"\w+:(\w+)")
_GRACE_S = 0.01
# gloo may run a reduce-scatter as an all-reduce of the whole buffer; each rank keeps its share.
_RUNS_AS = {"reduce_scatter": {"reduce_scatter", "all_reduce"}}


class _Call(NamedTuple):
    """The properties of a collective that are known when it is issued."""

    op: str
    on_cpu: bool
    shapes: set[tuple[int, ...]]
    times: list[float | None]  # gets the duration


class CollectiveTimer:
    """A context manager that profiles a block to find the durations of its collectives."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, record_shapes=True)

    def __enter__(self) -> Self:
        if profiler_is_active():
            raise RuntimeError(
                "comm_audit(timings=True) uses torch.profiler, which is already active, and there "
                "can be only one: audit a block outside of it, or leave timings out"
            )
        self._profiler.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if any(call.on_cpu for call in self._calls):
            # gloo ends an event shortly after it wakes the threads that wait for the collective.
            time.sleep(_GRACE_S)
        with record_function(f"{_MARK}end"):
            pass
        self._profiler.stop()
        events = sorted(self._profiler.events() or [], key=lambda event: event.time_range.start)
        # The timeline of a GPU has ranges with the same names.
        on_host = (event for event in events if event.device_type == DeviceType.CPU)
        marks = {event.name: event for event in on_host if event.name.startswith(_MARK)}
        # For a collective that is still running, the profiler reports an end after all marks.
        end = max((mark.time_range.end for mark in marks.values()), default=0)
        of_backends = [event for event in events if event.is_async]
        for i, call in enumerate(self._calls):
            seconds, mark = None, marks.get(f"{_MARK}{i}")
            if mark is not None and not call.on_cpu:
                seconds = _seconds_of_kernels(mark)
            elif mark is not None and (event := _backend_event(call, mark, of_backends)):
                of_backends.remove(event)
                if event.time_range.end <= end:
                    seconds = event.time_range.elapsed_us() / 1e6
            call.times.append(seconds)

    def around(
        self, collective: Collective, times: list[float | None]
    ) -> AbstractContextManager[Any]:
        """Return a context manager for the call that issues a collective.

        When the block ends, its duration is added to ``times``; None if it is not known.
        """
        tensors = collective.tensors
        shapes = {tuple(tensor.shape) for tensor in tensors}
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        self._calls.append(_Call(collective.op, on_cpu, shapes, times))
        return record_function(f"{_MARK}{len(self._calls) - 1}")


def _inside(event: FunctionEvent) -> Iterator[FunctionEvent]:
    for child in event.cpu_children:
        yield child
        yield from _inside(child)


def _seconds_of_kernels(mark: FunctionEvent) -> float | None:
    """Return the total time of the NCCL kernels that a call launched; None if there are none."""
    kernels = [kernel for event in (mark, *_inside(mark)) for kernel in event.kernels]
    # "nccl:all_reduce" is a range around kernels, not a kernel.
    own = [k for k in kernels if k.name.startswith("nccl") and not k.name.startswith("nccl:")]
    return sum(kernel.duration for kernel in own) / 1e6 if own else None


def _backend_event(
    call: _Call, mark: FunctionEvent, events: list[FunctionEvent]
) -> FunctionEvent | None:
    """Return the first event of a collective on a backend's thread that a call may have caused."""
    # The backend may send a packed copy of the tensors, of another shape.
    sent = {shape for event in _inside(mark) for shape in _shapes(event)} - {()}
    for event in events:
        name = _BACKEND_EVENT.fullmatch(event.name)
        if (
            name is not None
            and name[1] in _RUNS_AS.get(call.op, {call.op})
            and _shapes(event) & (call.shapes | sent)
            and mark.time_range.start <= event.time_range.start
        ):
            return event
    return None


def _shapes(event: FunctionEvent) -> set[tuple[int, ...]]:
    """Return the shapes of an operator's arguments; () also stands for lists and other objects."""
    shapes: Any = event.input_shapes or []
    return {tuple(s) if all(isinstance(n, int) for n in s) else () for s in shapes}
