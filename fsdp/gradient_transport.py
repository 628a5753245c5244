"""Reductions of FSDP2's gradients: sent in float8, bf16 or fp32, and summed in a fixed order.

Note [One sum on any number of ranks]. The owner of a shard starts from the gradient that it has
accumulated, and adds the pieces of ranks 0, 1, ..., W - 1 in fp32. If rank r runs micro-batches r,
r + W, r + 2W, ... (:func:`micro_batches`), that is the sum ((g0 + g1) + g2) + ... of micro-batches,
whatever W is. A piece on the wire depends on its micro-batch's gradient alone: each rank's own
piece is encoded too, also on a single rank, and no block spans two rows of dim 0. Missing summands
are -0, the neutral element: on a single rank FSDP2 assigns the first gradient of a step, so that a
gradient of -0 stays -0.

Note [Two hops]. Of E gradients with b bytes each, NCCL's ring sends E b / g bytes per GPU from node
to node, if each node has g of the N ranks. An exchange between all ranks sends E b (N - g) / N,
several times as many. So a group that spans nodes with g > 1 exchanges pieces within each node
first: the rank at place p of a node gets, from each rank of the node, the pieces for the ranks at
place p of all nodes. It sums them in fp32, encodes the sums, and exchanges them with the ranks at
its place: E b (N - g) / (N g). The owner of a shard then adds the sums of nodes, in the order of
nodes. With :func:`micro_batches` these are sums of g consecutive micro-batches on any number of
nodes. Each hop is an all-to-all of the whole group in which other ranks get 0 bytes, so that no
groups are made for it.

Note [Ranks that use different parameters]. FSDP2 reduces the gradients that a rank has, but another
rank may have gradients of another head, adapter or expert. A message of these alone would be added
to a message of other parameters. So each message of a group has all its trained parameters, with -0
for those that the rank's micro-batch did not use, and a number for each: 1 if it was used, 0 if
not. If the numbers of a parameter add up to 0, its gradient stays None, as on a single rank. The
last number is the module's, to detect ranks that reduce the gradients of different modules.
"""

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from math import nan
from typing import Any, ClassVar, Literal, NamedTuple, get_args
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8_dist import fsdp_internals as internals
from fp8_dist import transport as wire
from fp8_dist.device import current_capture
from fp8_dist.mesh import local_tensor
from fp8_dist.text import warn_once, without_wrappers
from fp8_dist.torch_internals import STAND_INS
from fp8_dist.weight import agreement, weights

Transport = Literal["float8", "bf16", "fp32"]
Hook = Callable[[torch.Tensor], None]
Filter = Callable[[str, nn.Parameter], bool]

_CALLER = "set_gradient_transport"
_ENCODED = ("float8", "bf16")

# Models that have a transport, and the parameter groups for which this was decided.
_models: "WeakSet[nn.Module]" = WeakSet()
_decided: "WeakSet[Any]" = WeakSet()


class Hops(NamedTuple):
    """How a message travels between the ranks of a group; see Note [Two hops].

    Attributes:
        per_node: the number of ranks on each node; 1 if there is one hop.
        within: the encoding of the hop within nodes; None for that of the transport.
        last: the encoding of the other hop, or of the only one.
    """

    per_node: int = 1
    within: wire.Encoding = None
    last: wire.Encoding = None


class EncodedReduction:
    """Reduce-scatter of a parameter group with encoded gradients.

    FSDP2 calls it on a stream of its own.
    """

    # A check by the running loop of micro_batches, which returns whether this rank's gradients are
    # part of the sum.
    check: ClassVar[Callable[["EncodedReduction"], bool] | None] = None

    def __init__(
        self, module: str, number: int, group: Any, encodings: dict[str, wire.Encoding]
    ) -> None:
        shapes = internals.fsdp_padded_shapes(group).items()
        self.parts_of = {
            parameter: wire.Part(shape.numel(), encoding, shape[1:].numel())
            for (parameter, shape), encoding in zip(shapes, encodings.values(), strict=True)
        }
        self.module = module
        self.encodings = encodings  # by the names of parameters
        self.number = number
        self.group = group
        self.hops = Hops()
        # State of the current reduction.
        self.used: set[Any] = set()  # the parameters for which this rank has gradients
        self.parameters: list[Any] = []  # the parameters of the message
        self.is_final = False  # no other reduction follows: sums start from accumulated gradients
        self.has_gradients = False  # FSDP2 has allocated the buffer for gradients

    @property
    def parts(self) -> list[wire.Part]:
        """The parts of the current reduction's message."""
        parts = [self.parts_of[parameter] for parameter in self.parameters]
        if internals.fsdp_ranks(self.group) > 1:
            parts.append(wire.Part(len(parts) + 1, None))
        return parts

    def _runs(self, how: wire.Encoding) -> tuple[wire.Part, ...]:
        """The runs of a message in another encoding; None for that of the transport."""
        return wire.runs_of(
            p._replace(encoding=how) if how and p.encoding else p for p in self.parts
        )

    def complete(self, runs: bool) -> None:
        """Add gradients of -0, see Note [Ranks that use different parameters]."""
        parameters = list(internals.fsdp_parameters([self.group]))
        self.used = {p.own for p in parameters if p.has_gradient()}
        keeps_unused = internals.fsdp_reduces_unused(self.group)
        is_filled = keeps_unused or internals.fsdp_ranks(self.group) > 1
        if not self.used and not (is_filled and (runs or keeps_unused)):
            return  # FSDP2 reduces nothing
        if EncodedReduction.check is not None and not EncodedReduction.check(self):
            self.used.clear()
        if is_filled:
            trained = [p for p in parameters if p.is_trained or p.has_gradient()]
            internals.fill_fsdp_gradients([p for p in trained if p.own not in self.used], -0.0)

    @staticmethod
    def check_default(group: Any) -> None:
        """Raise if a group reduces by default because its model was given a transport too early.

        Raises:
            ValueError: ``fully_shard`` made the group after ``set_gradient_transport``.
        """
        parameters = list(internals.fsdp_parameters([group]))
        is_trained = any(parameter.is_trained for parameter in parameters)
        if not is_trained or group in _decided:
            return
        for model in _models:
            names = {module: name for name, module in model.named_modules()}
            users = [user for parameter in parameters for user in parameter.users]
            found = [f"{names[module]}.{name}" for module, name in users if module in names]
            if found and internals.fsdp_reduce_scatter_group(group) is not None:
                shown = without_wrappers(names.get(group.modules[0], "")) or "the root module"
                raise ValueError(
                    f"{_CALLER}: fully_shard was called on {shown} after it, so the gradient of "
                    f"{without_wrappers(found[0]).lstrip('.')} (one of {len(found)}) would have no "
                    f"transport. Call {_CALLER} after the last fully_shard"
                )
        _decided.add(group)

    def prepare(
        self,
        parameters: list[Any],
        gradients: list[torch.Tensor],
        replicas: dist.ProcessGroup | None,
        hook: Hook | None,
    ) -> tuple[Any, Hook | None]:
        """Record what FSDP2 is about to reduce, and return the replicas' group and the hook.

        ``replicas`` all-reduces the sums, and ``hook`` runs afterwards.
        """
        self.parameters, self.has_gradients = parameters, False
        self.is_final = replicas is None and hook is None
        if internals.fsdp_ranks(self.group) == 1:
            return replicas, partial(self._round_then, hook)  # FSDP2 calls no reduce-scatter
        unused = [i for i, parameter in enumerate(parameters) if parameter not in self.used]
        shards = internals.fsdp_reduce_scatter_group(self.group).size()
        flags = gradients[0].new_ones(shards, len(parameters) + 1)
        flags[:, -1] = self.number % max(1, 256 // self.hops.per_node)  # bf16 can hold their sum
        for i in unused:
            flags[:, i] = 0
        gradients.append(flags)
        encoded = EncodedReplicas(replicas, self) if replicas and replicas.size() > 1 else replicas
        new = [i for i in unused if internals.FsdpParameter(parameters[i]).sharded.grad is None]
        if not new or internals.fsdp_reduces_unused(self.group):
            return encoded, hook
        return encoded, partial(self._drop_unused, new, hook)

    def _drop_unused(self, unused: Sequence[int], hook: Hook | None, output: torch.Tensor) -> None:
        """Run a hook, and let FSDP2 drop the gradients of parameters that no rank has used.

        Raises:
            ValueError: a CUDA graph is being captured, in which the host can't read the counts.
        """
        if current_capture():
            name_of = dict(zip(self.parts_of, self.encodings, strict=True))
            names = [name_of[self.parameters[i]] for i in unused]
            raise ValueError(
                f"{_CALLER}: {self.module}: this rank has no gradient of {', '.join(names)}, and a "
                "CUDA graph can't ask the other ranks for theirs while it is captured; use every "
                "parameter in the step, or capture it without a transport (None)"
            )
        if hook is not None:
            hook(output)
        counts = output[-len(self.parameters) - 1 :].tolist()
        for i in unused:
            if counts[i] == 0:
                self.parameters[i] = internals.without_fsdp_gradient(self.parameters[i])

    def _round_then(self, hook: Hook | None, output: torch.Tensor) -> None:
        """Round the gradients of a single rank as they are rounded on the wire, and run a hook."""
        runs = self._runs(self.hops.last)
        output.copy_(wire.decode(wire.encode(output, runs, output.dtype), runs, output.dtype))
        if hook is not None:
            hook(output)

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate a buffer for gradients, then one for their sums.

        Raises:
            NotImplementedError: sums of such gradients would lose precision in fp32.
        """
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotImplementedError(
                f"set_gradient_transport: {self.module} has gradients of {dtype}; sums are taken "
                "in fp32. Set reduce_dtype, or give this module transport=None"
            )
        is_sum, self.has_gradients = self.has_gradients, True
        dtype = torch.float32 if is_sum and self.is_final else dtype
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        ranks, rank, (per_node, within, last) = group.size(), group.rank(), self.hops
        rows, dtype, peers = input_tensor.view(ranks, -1), input_tensor.dtype, range(ranks)
        assert rows.shape[1] == sum(part.size for part in self.parts), (rows.shape, self.parts)
        others: list[int] = []
        if per_node > 1:
            first, runs = rank - rank % per_node, self._runs(within)
            peers = range(first, first + per_node)
            received = wire.exchanged(wire.encode(rows, runs, dtype, per_node), group, peers)
            others = self._others(received, dtype, group, peers)
            rows = wire.sum_decoded(received, runs, dtype)
            if others:
                rows[:, -1] = nan  # the ranks of other nodes raise an error, too
            peers = range(rank % per_node, ranks, per_node)
        runs = self._runs(last)
        received = wire.exchanged(wire.encode(rows, runs, dtype), group, peers)
        if others := others or self._others(received, dtype, group, peers):
            raise ValueError(
                f"{_CALLER}: rank {dist.get_rank()} reduces the gradients of {self.module} while "
                f"ranks {others} reduce those of other modules. All ranks must run FSDP modules in "
                "one order; shard what only some of them run (heads, experts) as one module"
            )
        # A mean is divided before the accumulated gradient is added, so it can't start from that.
        adds = self.is_final and internals.fsdp_sums(self.group)
        start = self._accumulated(rows) if adds else None
        total = wire.sum_decoded(received, runs, dtype, start)
        output_tensor.copy_(total.div_(internals.fsdp_divisor(self.group, op, group)))

    def _others(
        self, received: torch.Tensor, dtype: torch.dtype, group: dist.ProcessGroup, peers: range
    ) -> list[int]:
        """The ranks that have sent pieces of other modules (or nodes in which some have)."""
        # On other devices this check would make the host wait.
        if not received.is_cpu or isinstance(received, STAND_INS):
            return []
        last = received.flatten(1)[:, -dtype.itemsize :]
        numbers = last.clone(memory_format=torch.contiguous_format).view(dtype).flatten()
        differ = numbers != numbers[peers.index(group.rank())]
        return [dist.get_global_rank(group, peers[i]) for i in differ.nonzero()]

    def _accumulated(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Move this rank's accumulated gradients to an fp32 tensor ``[S]``; None if there are none.

        They become -0, and FSDP2 adds the sum to that.
        """
        total, begin = None, 0
        for parameter in self.parameters:
            grad = internals.FsdpParameter(parameter).sharded.grad
            if grad is not None and grad.device == rows.device:
                shard = local_tensor(grad)
                if total is None:
                    total = rows.new_full(rows.shape[1:], -0.0, dtype=torch.float32)
                total.narrow(0, begin, shard.numel()).copy_(shard.flatten())
                shard.fill_(-0.0)
            begin += self.parts_of[parameter].size
        return total


class EncodedReplicas(NamedTuple):
    """Stand-in for the process group of a parameter group's replicas."""

    replicas: dist.ProcessGroup
    shards: EncodedReduction

    def size(self) -> int:
        """Return the number of replicas."""
        return self.replicas.size()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        """All-reduce the only tensor of a list in place; ``dist.all_reduce`` calls this."""
        (x,) = tensors
        divisor = internals.fsdp_divisor(self.shards.group, options.reduceOp, self.replicas)
        x.copy_(wire.all_reduce(x, self.shards.parts, self.replicas, divisor=divisor))


def set_gradient_transport(
    model: nn.Module,
    transport: Transport | None,
    *,
    high_precision: Filter | None = None,
    nodes: DeviceMesh | None = None,
    within_nodes: Literal["float8", "bf16"] | None = None,
) -> None:
    """Encode the gradients of FSDP2's parameters for their reduction, and sum them in order.

    FSDP2's reduce-scatter becomes an all-to-all of encoded pieces. The rank that owns a shard
    decodes the pieces, including its own, and sums them in fp32, in the order of ranks. Where
    gradients are sums (``set_gradient_divide_factor(1.0)``), it starts from the gradient that it
    has accumulated. **With** :func:`micro_batches`, **the sum is then the same, bit for bit, on any
    number of ranks of one node.** Without it the bits depend on the number of ranks. Repeated runs
    on one mesh have the same bits either way.

    If the ranks are on several nodes, with the same number g > 1 of them on each, pieces travel in
    two hops: an all-to-all within each node, whose sums are encoded, and one between the ranks at
    the same place in their nodes. This sends 1 / g of the bytes between nodes. With
    :func:`micro_batches` the sum is then the same on any number of nodes of g ranks (on one node if
    ``nodes`` names it), but not that of one hop.

    With HSDP, the all-reduce over replicas becomes the same exchange, of parts of the shard, except
    that a rank's own part is not encoded. An all-gather of the sums follows, in bf16 with
    ``"float8"`` and in ``reduce_dtype`` otherwise.

    Args:
        model: a module that ``fully_shard`` was called on, or that contains such modules. The
            function may be called again between two steps, with other arguments. Call it after the
            last ``fully_shard``.
        transport: ``"fp32"``, for gradients as they are (in ``reduce_dtype``); ``"bf16"``;
            ``"float8"`` (e4m3 in blocks of up to 128 numbers of a row of dim 0, with power-of-two
            scales: 1 byte per element and 1 per block); or None for FSDP2's own reduce-scatter.
        high_precision: a function ``f(name, parameter)`` that returns true for parameters whose
            gradients are not encoded. These travel in the same message. Gradients of parameters
            with fewer than 2 dims are never encoded. Names are those of ``named_parameters()``,
            without the segments that wrappers add (``_orig_mod``).
        nodes: a 2-D mesh with the ranks of each node in a row. By default, rank r is on node
            ``r // LOCAL_WORLD_SIZE``, as torchrun numbers ranks, and there is one hop on one node.
            A row for each rank also gives one hop, on any number of nodes.
        within_nodes: the transport of the hop within nodes, ``"float8"`` or ``"bf16"``; by default
            ``transport``. It is also that of the only hop on one node.

    Ranks may use different parameters of a module, such as heads, adapters or experts of a
    ModuleList. A rank sends zeros for those that it did not use. A parameter that no rank used has
    no gradient. To find this out, the host waits for the message, if its rank did not use a
    parameter and has not accumulated a gradient of it.

    A gradient that is NaN or infinite stays so, and does not change other gradients. Zeros stay
    zeros. FSDP2's settings (``reduce_dtype``, ``set_gradient_divide_factor``, ...) apply as before:
    the numbers that FSDP2 would reduce are encoded.

    Collectives: in a step, only those above. In this call, a comparison of the arguments between
    the ranks of each mesh, as in ``apply_tp_plan``, and of LOCAL_WORLD_SIZE and host names.

    Raises:
        TypeError, ValueError: for invalid arguments, a model without FSDP2, modules with several
            parameter groups or with another custom reduce-scatter, a transport that would encode no
            gradient, nodes with different numbers of the ranks, or arguments that differ between
            ranks. (A launch of different numbers of ranks per node leads to a warning and one hop.)
            In a backward: ``fully_shard`` was called after this function on a module whose
            parameters are those of ``model``.
        NotImplementedError: in a backward, for gradients of dtypes other than fp32, bf16 and fp16.
    """
    weights.checked_module(model)
    known = (*get_args(Transport), None)
    if transport not in known:
        raise ValueError(f"{_CALLER}: transport is {transport!r}; it must be one of {known}")
    if high_precision is not None and not callable(high_precision):
        raise TypeError(
            f"{_CALLER}: high_precision is {high_precision!r}; it must be a function of a "
            "parameter's name and the parameter, such as lambda name, p: 'embed' in name"
        )
    if not (nodes is None or (isinstance(nodes, DeviceMesh) and nodes.ndim == 2)):
        raise TypeError(
            f"{_CALLER}: nodes is {nodes!r}; it must be a 2-D DeviceMesh, with a row for each node"
        )
    if within_nodes not in (*_ENCODED, None):
        raise ValueError(
            f"{_CALLER}: within_nodes is {within_nodes!r}; it must be one of {(*_ENCODED, None)}"
        )
    if transport not in _ENCODED and (high_precision, within_nodes) != (None, None):
        raise ValueError(
            f"{_CALLER}: high_precision and within_nodes are about how gradients are encoded, and "
            f"transport={transport!r} encodes none; drop them"
        )
    if transport is None and nodes is not None:
        raise ValueError(f"{_CALLER}: nodes is for a transport, and transport is None; drop it")
    reductions = _reductions(model, transport, high_precision)
    if not (is_fake := agreement.has_stand_ins(model.parameters())):
        _check_agreement(reductions, nodes, within_nodes)
    internals.announce_fsdp_reductions(EncodedReduction)
    _decided.update(reduction.group for reduction in reductions)
    if transport is None:
        _models.discard(model)
    else:
        _models.add(model)
    launched: dict[DeviceMesh, int | None] = {}
    for reduction in reductions:
        if transport is not None:
            mesh = reduction.group.mesh_info.mesh
            if mesh not in launched:
                launched[mesh] = _ranks_per_node(mesh, is_fake)
            ranks = internals.fsdp_reduce_scatter_group(reduction.group)
            reduction.hops = _hops(ranks, launched[mesh], nodes, within_nodes)
            internals.set_fsdp_reduction(reduction.group, reduction)
        # Leave the reduction of other code.
        elif isinstance(internals.fsdp_reduction(reduction.group), EncodedReduction):
            internals.set_fsdp_reduction(reduction.group, None)


def _reductions(
    model: nn.Module, transport: Transport | None, high_precision: Filter | None
) -> list[EncodedReduction]:
    """Return a reduction for each parameter group of a model."""
    # The keys of model.state_dict().
    names = {id(p): without_wrappers(name) for name, p in model.named_parameters()}
    reductions = []
    for number, (group, module) in enumerate(_groups_of(model, transport).items()):
        encodings: dict[str, wire.Encoding] = {}
        for p in _parameters(group):
            if (name := names.get(id(p))) is None:
                raise ValueError(
                    f"{_CALLER}: a parameter group of FSDP2 (fully_shard of a list) has parameters "
                    "outside of the module that was passed; pass one that holds all of them"
                )
            is_kept = p.ndim < 2 or (high_precision is not None and high_precision(name, p))
            encodings[name] = None if is_kept or transport == "fp32" else transport
        reductions.append(EncodedReduction(module, number, group, encodings))
    if transport in _ENCODED and not any(any(r.encodings.values()) for r in reductions):
        raise ValueError(
            f"{_CALLER}: transport={transport!r} would encode no gradient: all parameters have "
            "fewer than 2 dims, or high_precision is true for them"
        )
    return reductions


def _ranks_per_node(mesh: DeviceMesh, is_fake: bool) -> int | None:
    """The number of consecutive ranks that the launcher has started on each node.

    Args:
        mesh: a mesh of this rank.
        is_fake: whether there are no other ranks to compare it with.

    Returns:
        None if it is not known, or if the launcher has not placed ranks one after the other.

    Collectives: those of :func:`agreement.first_difference` over the mesh, twice.

    Raises:
        ValueError: LOCAL_WORLD_SIZE is no number of ranks. All ranks of the mesh raise it.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE")
    groups = [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1 and not is_fake]
    facts = {"LOCAL_WORLD_SIZE": str(local)}
    if agreement.first_difference(facts, groups, mesh.device_type) is not None:
        return None
    if local is not None and not (local.isdecimal() and int(local)):
        raise ValueError(f"{_CALLER}: LOCAL_WORLD_SIZE={local!r} is no number of ranks; unset it")
    per_node = int(local or dist.get_world_size())
    # Some launchers number ranks in turns over the nodes.
    told = agreement.gathered_if_different({"host": platform.node()}, groups, mesh.device_type)
    hosts: dict[int, set[str]] = {}
    for rank, fact in (told or {}).items():
        hosts.setdefault(rank // per_node, set()).add(fact["host"])
    return per_node if all(len(names) == 1 for names in hosts.values()) else None


def _hops(
    group: dist.ProcessGroup,
    launched: int | None,
    nodes: DeviceMesh | None,
    within: wire.Encoding,
) -> Hops:
    """Return how messages travel in a group, the same on all of its ranks.

    Args:
        launched: the number of ranks on each node, if it is known.
        nodes, within: arguments of :func:`set_gradient_transport`.
    """
    ranks, node_of = dist.get_process_group_ranks(group), dict[int, int]()
    if nodes is not None:
        node_of = {rank: i for i, row in enumerate(nodes.mesh.tolist()) for rank in row}
    elif launched is not None:
        node_of = {rank: rank // launched for rank in ranks}
    places = [node_of.get(rank, -1) for rank in ranks]
    count = len({*places})
    per_node = len(ranks) // count
    is_even = [len([*run]) for _, run in groupby(places)] == [per_node] * count
    if -1 not in places and is_even:
        if per_node > 1 and (count > 1 or nodes is not None):
            return Hops(per_node, within)
        return Hops(last=within if count == 1 else None)
    if nodes is not None:
        raise ValueError(
            f"{_CALLER}: each row of nodes must have the same number of the ranks that share "
            f"gradients, one after the other ({len(ranks)} from rank {ranks[0]} on)"
        )
    warn_once(
        "uneven nodes",
        f"{_CALLER}: the {len(ranks)} ranks that share gradients are not divided evenly over the "
        "nodes, one after the other, or LOCAL_WORLD_SIZE is not set. So gradients travel in one "
        "hop, with several times as many bytes between nodes. Launch the same number of ranks on "
        "each node (torchrun), or pass nodes",
    )
    return Hops()


def _parameters(group: Any) -> list[nn.Parameter]:
    """The parameters of a parameter group, in its order, as their modules have them."""
    return [getattr(*parameter.users[0]) for parameter in internals.fsdp_parameters([group])]


def _check_agreement(
    reductions: Iterable[EncodedReduction], nodes: DeviceMesh | None, within: wire.Encoding
) -> None:
    """Raise if arguments differ between ranks that share a parameter (tensor-parallel ones too)."""
    others = {"nodes": str(nodes and nodes.mesh.tolist()), "within_nodes": str(within)}
    facts = agreement.Facts()
    for reduction in reductions:
        # Under tensor parallelism, the mesh of a parameter also has the tensor-parallel axis.
        meshes = (p.device_mesh for p in _parameters(reduction.group) if isinstance(p, DTensor))
        for mesh in {reduction.group.mesh_info.mesh, *meshes}:
            for name, encoding in reduction.encodings.items():
                facts.of(mesh)[f"the transport of the gradient of {name}"] = str(encoding)
            facts.of(mesh).update(others)
    facts.check(_CALLER, fix="Give it the same arguments on all ranks")


def _groups_of(model: nn.Module, transport: Transport | None) -> dict[Any, str]:
    """Return the model's parameter groups that reduce gradients, with the name of a module."""
    groups: dict[Any, str] = {}
    for fqn, module in model.named_modules():
        name, module_groups = fqn or "the root module", internals.fsdp_groups_of_module(module)
        if transport is not None:
            _check_takes_transport(module_groups, name)
        for group in module_groups:
            if internals.fsdp_reduce_scatter_group(group) is not None:
                groups.setdefault(group, name)  # several modules may share it
    if not groups:
        raise ValueError(
            f"{_CALLER}: the {type(model).__name__} has no module that fully_shard was called on; "
            "call it after fully_shard"
        )
    return groups


def _check_takes_transport(groups: Sequence[Any], module: str) -> None:
    """Raise ValueError if the reduce-scatter of a module's parameter groups can't be replaced."""
    if len(groups) > 1:
        raise ValueError(
            f"{_CALLER}: {module} has {len(groups)} parameter groups (a shard_placement_fn that "
            "gives parameters meshes of their own); torch takes no custom reduce-scatter for such "
            "a module. Shard its parts apart, with one mesh each"
        )
    for group in groups:
        if internals.fsdp_reduce_scatter_group(group) is None:
            raise ValueError(
                f"{_CALLER}: {module} is replicated (replicate, not fully_shard): its gradients "
                "are all-reduced, and there is no reduce-scatter"
            )
        reduction = internals.fsdp_reduction(group)
        if not isinstance(reduction, EncodedReduction | None):
            raise ValueError(
                f"{_CALLER}: {module} has a reduce-scatter of its own "
                f"({type(reduction).__name__}, of set_custom_reduce_scatter or of memory from the "
                "process group), which would be replaced"
            )
