"""The communication ops of torch, read alike: what moves, of which dtype, in which group.

Vocabulary: a *collective* is one call of a communication op; its *buffer* is the largest
tensor it moves (the output of an all-gather, the input of a reduce-scatter, the tensor of an
all-reduce).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Form:
    """How the arguments of one communication op are read.

    op: the name that people know it by, the same for all variants.
    buffer: the argument that holds the buffer.
    times_group_size: that argument holds one rank's share of the buffer.
    """

    op: str
    buffer: str
    times_group_size: bool = False


# By schema name. Left out: barriers and waits, which move no data.
FORMS: Mapping[str, Form] = {
    "c10d::_allgather_base_": Form("all_gather", "input_tensor", True),
    "c10d::allgather_": Form("all_gather", "output_tensors"),
    "c10d::allgather_coalesced_": Form("all_gather", "input_list", True),
    "c10d::allgather_into_tensor_coalesced_": Form("all_gather", "inputs", True),
    "c10d::_reduce_scatter_base_": Form("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_": Form("reduce_scatter", "input_tensors"),
    "c10d::reduce_scatter_tensor_coalesced_": Form("reduce_scatter", "inputs"),
    "c10d::allreduce_": Form("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": Form("all_reduce", "tensors"),
    "c10d::alltoall_": Form("all_to_all", "input_tensors"),
    "c10d::alltoall_base_": Form("all_to_all", "input"),
    "c10d::broadcast_": Form("broadcast", "tensors"),
    "c10d::gather_": Form("gather", "input_tensors", True),
    "c10d::scatter_": Form("scatter", "output_tensors", True),
    "c10d::reduce_": Form("reduce", "tensors"),
    "c10d::send": Form("send", "tensors"),
    "c10d::recv_": Form("recv", "tensors"),
    "c10d::recv_any_source_": Form("recv", "tensors"),
    "_c10d_functional::all_gather_into_tensor": Form("all_gather", "input", True),
    "_c10d_functional::all_gather_into_tensor_out": Form("all_gather", "input", True),
    "_c10d_functional::all_gather_into_tensor_coalesced": Form("all_gather", "inputs", True),
    "_c10d_functional::reduce_scatter_tensor": Form("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": Form("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": Form("reduce_scatter", "inputs"),
    "_c10d_functional::all_reduce": Form("all_reduce", "input"),
    "_c10d_functional::all_reduce_": Form("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": Form("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": Form("all_reduce", "inputs"),
    "_c10d_functional::all_to_all_single": Form("all_to_all", "input"),
    "_c10d_functional::broadcast": Form("broadcast", "input"),
    "_c10d_functional::broadcast_": Form("broadcast", "input"),
    "_c10d_functional::isend": Form("send", "tensor"),
    "_c10d_functional::irecv": Form("recv", "tensor"),
    "_c10d_functional_autograd::all_gather_into_tensor": Form("all_gather", "input", True),
    "_c10d_functional_autograd::reduce_scatter_tensor": Form("reduce_scatter", "input"),
    "_c10d_functional_autograd::all_to_all_single": Form("all_to_all", "input"),
    "_dtensor::shard_dim_alltoall": Form("all_to_all", "input"),
}


@dataclass(frozen=True)
class Collective:
    """One call: `tensors` hold the buffer, or `1 / factor` of it."""

    op: str
    group: dist.ProcessGroup
    tensors: tuple[torch.Tensor, ...]
    factor: int


def read_collective(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Collective | None:
    """The collective that a call of this op makes; None where it makes none."""
    form = FORMS.get(func._schema.name)
    if form is None:
        return None
    names = [argument.name for argument in func._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    group = _group(arguments.get("process_group", arguments.get("group_name")))
    leaves = tree_leaves(arguments[form.buffer])
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return Collective(form.op, group, tensors, group.size() if form.times_group_size else 1)


def _group(group: Any) -> dist.ProcessGroup:
    """From what a c10d op takes (a boxed group) or a functional op (a group or its name)."""
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)
    return group if isinstance(group, dist.ProcessGroup) else _resolve_process_group(group)
