"""The base class of the library's tensor subclasses."""

from typing import Any, Self

import torch

from fp8_dist import torch_internals


class TensorSubclass(torch.Tensor):
    """Base class of the library's tensor subclasses, which run operators on inner tensors.

    Some methods of ``torch.Tensor`` read memory without calling an operator, and reject subclasses
    or crash. They are overridden to read the result of :meth:`readable`.
    """

    _stable_hash_for_caching = torch_internals.stable_hash
    __torch_function__ = torch_internals.disabled_torch_function

    def readable(self, reader: str) -> torch.Tensor:
        """Return a plain tensor with the values, on the same memory.

        Raises:
            NotImplementedError: there is none. The message names the ``reader``.
        """
        raise NotImplementedError

    def numpy(self, *, force: bool = False) -> Any:
        return self.readable("numpy()").numpy(force=force)

    def tolist(self) -> Any:
        return self.readable("tolist()").tolist()

    def share_memory_(self) -> Self:
        self.readable("share_memory_()").share_memory_()
        return self
