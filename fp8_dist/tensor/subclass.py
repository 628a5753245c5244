"""The base class of the library's tensor subclasses."""

from collections.abc import Callable
from typing import Any, Self

import torch

from fp8_dist import torch_internals


class TensorSubclass(torch.Tensor):
    """Base class of the library's tensor subclasses, which run operators on inner tensors.

    Some methods of ``torch.Tensor`` read memory without calling an operator, and reject subclasses
    or crash. They are overridden to read the result of :meth:`readable`. Others write to memory
    without calling an operator. They are overridden to write to a copy, and to call ``copy_``.
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

    def apply_(self, callable: Callable[..., Any]) -> Self:
        return self._overwrite("apply_", callable)

    def map_(self, tensor: torch.Tensor, callable: Callable[..., Any]) -> Self:
        return self._overwrite("map_", tensor, callable)

    def map2_(self, x: torch.Tensor, y: torch.Tensor, callable: Callable[..., Any]) -> Self:
        return self._overwrite("map2_", x, y, callable)

    def _overwrite(self, method: str, *args: Any) -> Self:
        """Run an in-place method of ``torch.Tensor`` on a copy, and copy the result back."""
        reader = f"{method}()"
        plain = [x.readable(reader) if isinstance(x, TensorSubclass) else x for x in args]
        values = self.readable(reader).clone()
        getattr(values, method)(*plain)
        self.copy_(values)
        return self
