"""Communication ops of torch: the tensors that they move, and their groups.

Terms: a *collective* is one call of a communication op, which may also be a point-to-point op. Its
*buffer* is the largest tensor that it moves: the output of an all-gather, the input of a
reduce-scatter, the tensor of an all-reduce.

The arguments of the ops in ``SCHEMAS`` are known. The ops in ``IGNORED_OPS`` move no data. Any
other op in torch's communication namespaces is recorded under its qualified name. So a new op of
torch may be recorded with a wrong size, but it is never missed.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fp8_dist.torch_internals import (
    OpOverload,
    op_arguments,
    op_name,
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
    """Return the collective that a call of an op issues, or None.

    The buffer of an op that is not in ``SCHEMAS`` is assumed to be its largest tensor argument.
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
    """Return the group of an argument, which is boxed in c10d ops, and a name in functional ops."""
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    return resolve_process_group(group)
