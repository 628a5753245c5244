"""Count the bytes that a forward saves for its backward."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

OTHER = "other"


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors inside a wrapper subclass, or the tensor itself."""
    if (inner := getattr(tensor, "_tensor", getattr(tensor, "plain", None))) is not None:
        # The plain tensor of a weight, without cached statistics. (torchao's __tensor_flatten__
        # reads the value of its scale, which fake tensors lack.)
        return plain_tensors(inner)
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.detach()]
    names, _ = tensor.__tensor_flatten__()
    held = [getattr(tensor, name) for name in names]  # a DTensor's mesh is among them
    return [
        plain for part in held if isinstance(part, torch.Tensor) for plain in plain_tensors(part)
    ]


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the local tensors of this rank, without padding."""
    plain = [p for tensor in tensors for p in plain_tensors(tensor)]
    return sum(p.numel() * p.dtype.itemsize for p in plain)


def saved_bytes(
    forward: Callable[[], torch.Tensor],
    kinds: Mapping[int, str],
    known: Iterable[torch.Tensor] = (),
    caches: Callable[[], Iterable[torch.Tensor]] = tuple,
) -> Counter[str]:
    """Bytes of the storages that a forward saves for its backward, by kind, each counted once.

    Storages that were freed in place, such as FSDP2's unsharded parameters, count 0 bytes. Wrapper
    subclasses count as the plain tensors inside them.

    Args:
        forward: returns an output, which keeps the graph alive during the count.
        kinds: the kinds of storages, by their number of elements; all others are `OTHER`.
        known: tensors to leave out because they exist anyway, such as parameters.
        caches: returns tensors to count that are held outside of autograd.
    """
    tensors: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tensors.extend(plain_tensors(tensor))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        graph = forward().grad_fn
    tensors += [plain for tensor in caches() for plain in plain_tensors(tensor)]
    # Storages are identified by `_cdata`, because fake tensors have no data pointer.
    there = {plain.untyped_storage()._cdata for t in known for plain in plain_tensors(t)}
    storages = {
        storage._cdata: (storage.nbytes(), kinds.get(storage.nbytes() // t.itemsize, OTHER))
        for t in tensors
        for storage in [t.untyped_storage()]
        if storage.nbytes() and storage._cdata not in there
    }
    assert graph is not None
    bytes_of: Counter[str] = Counter()
    for size, kind in storages.values():
        bytes_of[kind] += size
    return bytes_of
