"""Find hazards of CUDA streams: data races, and memory that is reused too early.

Kernels on one stream run in order. Kernels on two streams are ordered only if one stream waits for
an event of the other. The caching allocator hands a freed block at once to the next allocation on
the stream that it was allocated on. So that stream must have waited for other streams that used the
block, or ``record_stream`` must have been called. :class:`Hazards` checks both rules for all fake
CUDA storages, on the simulated streams of ``tests/support/fake_cuda/streams.py``.
"""

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from fake_cuda.counter import ALLOCATIONS, rewrites_ops, traffic
from fake_cuda.streams import Clock, Stream, current_stream
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = f"{Path(__file__).resolve().parents[2]}/"
LIBRARY = tuple(ROOT + folder for folder in ("fp8_dist/", "fsdp/", "tensor_parallel/"))
_COLLECTIVES = ("c10d", "_c10d_functional")
_SMALL = 2**20  # bytes; larger blocks have pools of their own


@dataclass
class Access:
    """An access to a block by an operator on a stream."""

    stream: Stream
    number: int
    name: str
    clock: Clock | None = None  # the stream's clock, for collectives alone

    def known_to(self, stream: Stream) -> bool:
        """Whether a stream is ordered after this access."""
        return stream is self.stream or stream.knows(self.stream.stream_id, self.number)


@dataclass
class Memory:
    """The memory of one storage."""

    reference: StorageWeakRef
    size: int
    pool: Stream  # the stream that it was allocated on
    made: str  # the functions of the library that allocated it
    written: Access | None = None
    uses: dict[int, Access] = field(default_factory=dict)  # the last access by stream id
    recorded: set[int] = field(default_factory=set)  # the streams in calls of record_stream

    def is_freed(self) -> bool:
        """Whether Python has freed the storage, or FSDP2 has resized it."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        return storage is None or storage.nbytes() != self.size


class Hazards(TorchDispatchMode):
    """A mode that follows operators and streams; ``found`` counts each hazard."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        # Bytes of blocks, by the functions that made them, that the allocator does not hand out
        # again at once, because of record_stream.
        self.held: Counter[str] = Counter()
        self._compute = current_stream()
        self._nccl = Stream(name="NCCL")
        self._memories: dict[int, Memory] = {}
        # Memories used on a stream other than their pool's. Only these can be reused too early.
        self._shared: dict[int, Memory] = {}
        self._freed: defaultdict[int, list[Memory]] = defaultdict(list)  # by stream id of the pool

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if rewrites_ops(types):
            return NotImplemented
        space, _, name = func._schema.name.partition("::")
        stream = current_stream()
        if name == "record_stream":
            self._memory_of(args[0], self._compute).recorded.add(args[1].stream_id)
            return None
        result = func(*args, **kwargs)
        if name == "wait_tensor":
            written = self._memory_of(args[0], self._compute).written
            if written is not None and written.clock is not None:
                stream.merge(written.clock)
            return args[0]  # because for fake tensors the result is a new tensor
        if name == "triton_kernel":
            # Memory that was never written is assumed to be for results.
            written = [t for t in args[1] if self._memory_of(t, self._compute).written is None]
            self._run(space, args[0], args[1], written)
        elif space != "prim":
            reads, writes, updates = traffic(func, args, kwargs, result)
            new = [t for t in writes if id(t) not in map(id, tree_leaves((args, kwargs)))]
            for tensor in filter(_is_cuda, new):
                self._memory_of(tensor, stream)
            if writes and name not in ALLOCATIONS:
                self._run(space, name, [*reads, *updates], writes)
        return result

    def _run(
        self, space: str, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]
    ) -> None:
        """Follow an operator that reads and writes tensors."""
        stream, clock = current_stream(), None
        runs_on = self._nccl if space in _COLLECTIVES else stream
        if runs_on is self._nccl:
            runs_on.wait_stream(stream)
        number = runs_on.tick()
        if runs_on is self._nccl:
            clock = dict(runs_on.clock)
        access = Access(runs_on, number, name, clock)
        for tensors, is_written in ((reads, False), (writes, True)):
            for tensor in filter(_is_cuda, tensors):
                self._use(self._memory_of(tensor, self._compute), access, writes=is_written)
        if space == "c10d":
            # FSDP2 waits at once, or, for asynchronous unshards, later on the same stream.
            stream.wait_stream(self._nccl)

    def _use(self, memory: Memory, access: Access, writes: bool) -> None:
        before = list(memory.uses.values()) if writes else [memory.written]
        for other in before:
            if other is not None and not other.known_to(access.stream):
                self.found[
                    f"{access.name} on {access.stream.name} {'writes' if writes else 'reads'} what "
                    f"{other.name} on {other.stream.name} may still be at; made at {memory.made}"
                ] += 1
        memory.uses[access.stream.stream_id] = access
        if writes:
            memory.written = access
        if access.stream is not memory.pool:
            self._shared[id(memory)] = memory
        if access.stream is self._nccl:
            memory.recorded.add(self._nccl.stream_id)  # torch keeps it until the wait

    def _memory_of(self, tensor: torch.Tensor, pool: Stream) -> Memory:
        """The memory of a tensor. New memory counts as allocated on the given stream."""
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None or memory.is_freed():
            memory = Memory(StorageWeakRef(storage), storage.nbytes(), pool, _where())
            self._memories[storage._cdata] = memory
            self._reuse(memory)
        return memory

    def _reuse(self, new: Memory) -> None:
        """Let a new allocation reuse all freed blocks of its pool that are large enough."""
        for key, memory in list(self._shared.items()):
            if memory.is_freed():
                if memory.recorded - {memory.pool.stream_id}:
                    self.held[memory.made] += memory.size
                self._freed[memory.pool.stream_id].append(self._shared.pop(key))
        kept = []
        for old in self._freed[new.pool.stream_id]:
            unknown = [
                use
                for stream_id, use in old.uses.items()
                if stream_id not in old.recorded and not use.known_to(new.pool)
            ]
            fits = new.size <= max(old.size, 512) and (new.size <= _SMALL) == (old.size <= _SMALL)
            if unknown and fits:
                self.found[
                    f"memory of {old.pool.name} is allocated again before {unknown[0].name} on "
                    f"{unknown[0].stream.name} is known to be done; made at {old.made}"
                ] += 1
            elif unknown:
                kept.append(old)
        self._freed[new.pool.stream_id] = kept


def _is_cuda(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _where() -> str:
    """The innermost functions of the library on the current stack."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(names) < 3:
        path = frame.f_code.co_filename
        if path.startswith(LIBRARY):
            names.append(f"{path.removeprefix(ROOT)}:{frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(names) or "torch"
