"""Communication ops of torch: the tensors that they move, and their groups.

Terms: a *collective* is one call of a communication op, point-to-point ops included. Its *buffer*
is the largest tensor that it moves: the output of an all-gather, the input of a reduce-scatter, the
tensor of an all-reduce.

The kind of a collective is derived from the name of its op. Ops in ``IGNORED_OPS`` move no data,
and are not recorded. Other ops in torch's communication namespaces, if their kind is not known, are
recorded under their qualified names. A new op of torch may get a wrong size, but is never missed.

``Collective.sent`` estimates what crosses between nodes. docs/communication.md explains it.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fp8_dist import torch_internals

# An op is of the first of these kinds that its name contains, without underscores.
_KINDS = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "gather"]
_KINDS += ["scatter", "reduce", "send", "recv", "batch_p2p"]
# The namespaces whose ops are named after kinds. Ops of the deprecated c10d_functional decompose
# into ops of _c10d_functional, except in inference mode.
_NAMED = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"}
NAMESPACES = _NAMED | {"c10d_functional", "symm_mem"}
# How often the ring, or chain, of these kinds passes the buffer on.
_RINGS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "broadcast": 1, "reduce": 1}

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


class Collective(NamedTuple):
    """One call of a communication op."""

    op: str  # the kind; the op's qualified name if its kind is not known
    group: dist.ProcessGroup | None  # None if the op has no argument for the group
    tensors: tuple[torch.Tensor, ...]  # the buffer, or one rank's share of it
    factor: int  # the size of the buffer, divided by the size of ``tensors``
    splits: tuple[int, ...] = ()  # parts that an all-to-all sends to each rank; empty: equal ones

    def sent(self, nbytes: int, gpus_per_node: int) -> tuple[int, int]:
        """Return the bytes that this rank sends to ranks of its node, and to ranks of other nodes.

        Args:
            nbytes: the size of the buffer.
            gpus_per_node: global rank r is on node ``r // gpus_per_node``.
        """
        ranks = [] if self.group is None else dist.get_process_group_ranks(self.group)
        nodes = [rank // gpus_per_node for rank in ranks]
        size = len(nodes)
        spanned = len(set(nodes))
        if size == 1 or self.op == "recv":
            return 0, 0
        if self.group is not None and self.op == "all_to_all":
            splits = self.splits or (1,) * size
            own = self.group.rank()
            near = sum(s for s, node in zip(splits, nodes, strict=True) if node == nodes[own])
            whole = max(1, sum(splits))
            within = nbytes * (near - splits[own]) // whole
            between = nbytes * (sum(splits) - near) // whole
            return within, between
        if (turns := _RINGS.get(self.op)) is not None:
            # Each rank has one of the ring's links. Channels rotate those that leave a node.
            between = turns * nbytes * (size - 1) * spanned // size**2 if spanned > 1 else 0
            return turns * nbytes * (size - 1) // size - between, between
        return (nbytes, 0) if spanned == 1 else (0, nbytes)


def read_collective(
    func: torch_internals.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Collective | None:
    """Return the collective that a call of an op issues, or None.

    If the kind of an op is not known, its largest tensor argument is assumed to be the buffer.
    """
    if func.namespace not in NAMESPACES or (name := func.name().partition(".")[0]) in IGNORED_OPS:
        return None
    arguments = torch_internals.named_arguments(func, args, kwargs)
    group = _group(arguments.get("process_group", arguments.get("group_name")))
    letters = name.partition("::")[2].replace("_", "")
    kind = next((kind for kind in _KINDS if kind.replace("_", "") in letters), None)
    if kind is None or func.namespace not in _NAMED:
        by_size = sorted(_tensors(arguments), key=lambda tensor: tensor.nbytes)
        return Collective(name, group, tuple(by_size[-1:]), factor=1)
    assert group is not None, f"{name} was called without a process group"
    # The outputs of allgather_ may differ in size. Only one rank has the inputs of scatter_.
    prefix = "output" if name in ("c10d::allgather_", "c10d::scatter_") else ("input", "tensor")
    buffer = next(argument for name, argument in arguments.items() if name.startswith(prefix))
    has_share = kind in ("all_gather", "gather", "scatter") and name != "c10d::allgather_"
    tensors = _tensors(buffer)
    splits = arguments.get("input_split_sizes") or ()
    if name == "c10d::alltoall_":  # one tensor for each rank
        splits = [tensor.nbytes for tensor in tensors]
    return Collective(
        op=kind,
        group=group,
        tensors=tensors,
        factor=group.size() if has_share else 1,
        splits=tuple(splits),
    )


def _tensors(values: Any) -> tuple[torch.Tensor, ...]:
    leaves = torch_internals.tree_leaves(values)
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _group(group: Any) -> dist.ProcessGroup | None:
    """Return the group of an argument: boxed in c10d ops, a group's name in functional ops."""
    if isinstance(group, torch.ScriptObject):
        return dist.ProcessGroup.unbox(group)
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    return torch_internals.resolve_process_group(group)
