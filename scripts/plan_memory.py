"""What one rank's memory holds in a training step, measured on the tensors of the step itself.

Works on fake tensors, which have sizes and storages but no data, as on real ones. All sizes are
bytes of storages, each counted once, however many tensors view it.

Vocabulary: a storage *comes of weights* if nothing but parameters went into it: a gathered
parameter, its float8 copy, a transposed one. What backward *saved* is what autograd keeps from
forward.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from fp8_dist.linear import float8_layers
from fp8_dist.mesh import local_tensor

FSDP_COPY_IN = "fsdp::all_gather_copy_in"
FSDP_COPY_OUT = "fsdp::split_with_sizes_copy"


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a DTensor or another wrapper is made of."""
    if isinstance(tensor, DTensor):
        return plain_tensors(local_tensor(tensor))
    if hasattr(tensor, "_tensor"):
        # A weight that FSDP2 gathers in float8, of either library. (To be flattened, torchao's
        # reads the value of its scale, which fake tensors lack.)
        return plain_tensors(tensor._tensor)
    if is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, FakeTensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [plain for name in names for plain in plain_tensors(getattr(tensor, name))]
    return [tensor]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of what tensors hold on this rank, padding left out; None entries are not allowed."""
    plain = [p for tensor in tensors for p in plain_tensors(tensor)]
    return sum(p.numel() * p.dtype.itemsize for p in plain)


def kept_float8_shards(model: nn.Module) -> int:
    """Bytes of the float8 copies of weights that layers of this library keep beside them."""
    casts = [layer.float8_weight.cache.float8 or () for layer in float8_layers(model).values()]
    return bytes_of([tensor for kept in casts for cast in kept for tensor in cast])


class MemoryMeter(TorchDispatchMode):
    """Watches a forward and backward: `with meter:`, and `with meter.saving():` in forward.

    Attributes:
        gathered: the most bytes of gathered parameters at one time: FSDP2's communication buffers
            and the parameters that it copies out of them.
        saved: after forward, bytes that backward saved: "activations in blocks", "other
            activations", "weights" (gathered parameters that FSDP2 has not freed, and copies).
    """

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.gathered = 0
        self.saved: dict[str, int] = {}
        self._blocks = list(blocks)
        self._in_block = False
        self._persistent = WeakIdKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            for plain in plain_tensors(tensor):
                self._persistent[plain.untyped_storage()] = True
        self._of_weights = WeakIdKeyDictionary()
        self._gathered = WeakIdKeyDictionary()
        self._saved = WeakIdKeyDictionary()  # storage -> saved in a block

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(_rewrites_ops(kind) for kind in types):
            return NotImplemented
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def saving(self) -> "_Saving":
        """The context of the forward; `saved` is known after it."""
        return _Saving(self)

    def note_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """autograd saves a tensor."""
        for plain in plain_tensors(tensor):
            self._saved.setdefault(plain.untyped_storage(), self._in_block)
        return tensor

    def end_of_forward(self) -> None:
        """Add up what is saved and was not freed."""
        self.saved = dict.fromkeys(("activations in blocks", "other activations", "weights"), 0)
        for storage, in_block in self._saved.items():
            if storage in self._persistent:
                continue
            kind = "activations in blocks" if in_block else "other activations"
            if storage in self._of_weights:
                kind = "weights"
            self.saved[kind] += storage.nbytes()

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._schema.name
        if name == FSDP_COPY_IN:
            self._note_gathered(result)
        elif name == FSDP_COPY_OUT:
            self._note_gathered(kwargs["out"])
        elif self._are_of_weights(_tensors((args[1:2] if name == "aten::copy_" else args, kwargs))):
            outputs = _tensors(result)
            for output in outputs:
                self._of_weights[output.untyped_storage()] = True
            if name == "aten::copy_":  # FSDP2 gathers by a copy where a group has one rank
                self._note_gathered(outputs)

    def _note_gathered(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._of_weights[storage] = True
            if storage not in self._persistent:
                self._gathered[storage] = True
        self.gathered = max(self.gathered, sum(s.nbytes() for s in self._gathered))

    def _are_of_weights(self, tensors: list[torch.Tensor]) -> bool:
        """Whether nothing but parameters, and scalars, goes into an op."""
        found = False
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage in self._of_weights or storage in self._persistent:
                found = True
            elif tensor.numel() > 1:
                return False
        return found

    def enter_block(self, *_: Any) -> None:
        """A block's forward begins."""
        self._in_block = True

    def leave_block(self, *_: Any) -> None:
        """A block's forward ends."""
        self._in_block = False


class _Saving:
    """See `MemoryMeter.saving`."""

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._around = ExitStack()

    def __enter__(self) -> Self:
        meter, around = self._meter, self._around
        around.enter_context(
            torch.autograd.graph.saved_tensors_hooks(meter.note_saved, lambda saved: saved)
        )
        for block in meter._blocks:
            around.callback(block.register_forward_pre_hook(meter.enter_block).remove)
            around.callback(block.register_forward_hook(meter.leave_block).remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._around.close()
        self._meter.end_of_forward()


def _rewrites_ops(kind: type) -> bool:
    """Whether a tensor type makes other ops of one, which the mode sees then."""
    own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return own and not issubclass(kind, FakeTensor)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
