"""What one rank's memory holds in a training step, measured on the tensors of the step itself.

Works on fake tensors, which have sizes and storages but no data, as on real ones. Sizes are bytes
of storages, each counted once, however many tensors view it.

A storage *comes of weights* if only parameters went into it: a gathered parameter, its float8 copy,
a transposed one.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from scripts.common.saved_bytes import plain_tensors, rewrites_ops

FSDP_COPY_IN = "fsdp::all_gather_copy_in"
FSDP_COPY_OUT = "fsdp::split_with_sizes_copy"
IN_BLOCKS, OTHER, WEIGHTS = "activations in blocks", "other activations", "weights"


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of what tensors hold on this rank, padding left out."""
    plain = [p for tensor in tensors for p in plain_tensors(tensor)]
    return sum(p.numel() * p.dtype.itemsize for p in plain)


class MemoryMeter(TorchDispatchMode):
    """Watches a forward (`with meter, meter.saving():`) and a backward (`with meter:`).

    Attributes:
        gathered: the most bytes of gathered parameters at one time: FSDP2's communication buffers
            and the parameters that it copies out of them.
        saved: bytes that autograd keeps at the end of forward: `IN_BLOCKS`, `OTHER`, and `WEIGHTS`
            (gathered parameters that FSDP2 has not freed, and copies of weights).
    """

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.gathered = 0
        self.saved = dict.fromkeys((IN_BLOCKS, OTHER, WEIGHTS), 0)
        self._blocks = list(blocks)
        self._persistent = WeakIdKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            for plain in plain_tensors(tensor):
                self._persistent[plain.untyped_storage()] = True
        self._of_weights = WeakIdKeyDictionary()
        self._gathered = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if rewrites_ops(types):
            return NotImplemented
        result = func(*args, **kwargs)
        name = func._schema.name
        if name == FSDP_COPY_IN:
            self._note_gathered(result)
        elif name == FSDP_COPY_OUT:
            self._note_gathered(kwargs["out"])
        elif self._are_of_weights(_tensors((args[1:2] if name == "aten::copy_" else args, kwargs))):
            for output in _tensors(result):
                self._of_weights[output.untyped_storage()] = True
            if name == "aten::copy_":  # FSDP2 gathers by a copy where a group has one rank
                self._note_gathered(_tensors(result))
        return result

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The context of the forward; `saved` is known after it."""
        in_block = False
        storages = WeakIdKeyDictionary()  # storage -> saved in a block

        def note(tensor: torch.Tensor) -> torch.Tensor:
            for plain in plain_tensors(tensor):
                storages.setdefault(plain.untyped_storage(), in_block)
            return tensor

        def enter(*_: Any) -> None:
            nonlocal in_block
            in_block = True

        def leave(*_: Any) -> None:
            nonlocal in_block
            in_block = False

        with ExitStack() as around:
            hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved)
            around.enter_context(hooks)
            for block in self._blocks:
                around.callback(block.register_forward_pre_hook(enter).remove)
                around.callback(block.register_forward_hook(leave).remove)
            yield
        for storage, of_block in storages.items():
            if storage not in self._persistent:
                kind = IN_BLOCKS if of_block else OTHER
                kind = WEIGHTS if storage in self._of_weights else kind
                self.saved[kind] += storage.nbytes()

    def _note_gathered(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._of_weights[storage] = True
            if storage not in self._persistent:
                self._gathered[storage] = True
        self.gathered = max(self.gathered, sum(s.nbytes() for s in self._gathered))

    def _are_of_weights(self, tensors: list[torch.Tensor]) -> bool:
        """Whether only parameters, and scalars, go into an op."""
        found = False
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage in self._of_weights or storage in self._persistent:
                found = True
            elif tensor.numel() > 1:
                return False
        return found


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
