"""Decoded entries of a state dict, which write through to the parameter.

Code that loads checkpoints in place writes into the tensors of ``state_dict()``. If the parameter
is stored packed or as exponents, its entry is a copy, and the write must reach the parameter.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import ScriptObject, Tensor
from torch.distributed import Work

from fp8_dist import torch_internals
from fp8_dist.tensor.subclass import TensorSubclass
from fp8_dist.torch_internals import tree_leaves, tree_map_only


class Encoded(NamedTuple):
    """Data, and its decoded copy.

    Attributes:
        data: the encoded tensor.
        copy: its decoded values, a plain tensor.
        decode: converts data to values.
        encode: converts values to data; raises ValueError for values that can't be encoded.
    """

    data: Tensor
    copy: Tensor
    decode: Callable[[Tensor], Tensor]
    encode: Callable[[Tensor], Tensor]

    def read(self) -> None:
        """Decode the data again, into the copy."""
        self.copy.copy_(self.decode(self.data))


class Decoded(TensorSubclass):
    """A decoded copy of data, or a view of such a copy, that is kept in sync with the data.

    It is decoded before each operator that reads it, and encoded after each that writes to it. Its
    clones, deepcopies and pickles are plain tensors. Writes to its memory without an operator, such
    as through a numpy array, are not noticed.

    Attributes:
        plain: a plain tensor on the same memory.
        source: the data and its decoded copy.
    """

    plain: Tensor
    source: Encoded

    @staticmethod
    def of(
        data: Tensor, decode: Callable[[Tensor], Tensor], encode: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the decoded copy of data, a plain tensor if the data is fake.

        The arguments are those of :class:`Encoded`.
        """
        with torch.inference_mode(data.is_inference()), torch.no_grad():
            copy = decode(data)
        if not torch_internals.is_plain(copy):
            return copy
        return Decoded._view(copy, Encoded(data, copy, decode, encode))

    @staticmethod
    def _view(plain: Tensor, source: Encoded) -> "Decoded":
        view = plain.as_subclass(Decoded)
        view.plain, view.source = plain, source
        return view

    @staticmethod
    def copied(tensor: Tensor) -> Tensor:
        """Return a plain copy of a tensor of this type, and any other tensor as it is."""
        return tensor.clone() if isinstance(tensor, Decoded) else tensor

    @classmethod
    @torch.no_grad()
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Under inference_mode, composite operators arrive here without being decomposed.
        if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
            return result
        entries = [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, Decoded)]
        for source in {id(x.source): x.source for x in entries if not func.is_view}.values():
            source.read()
        written = tree_leaves(torch_internals.written_arguments(func, args, kwargs))
        args, kwargs = tree_map_only(Decoded, lambda x: x.plain, (args, kwargs))
        out = func(*args, **kwargs)
        if func.is_view:
            return tree_map_only(Tensor, lambda view: cls._view(view, entries[0].source), out)
        for work in tree_leaves(out) if func.namespace == "c10d" else ():
            if isinstance(work, ScriptObject | Work):
                _wait(work)
        changed = {id(x.source): x.source for x in written if isinstance(x, Decoded)}.values()
        # All are encoded first. If one can't be, the next operators read the copies anew.
        for source, data in [(source, source.encode(source.copy)) for source in changed]:
            source.data.copy_(data)
        by_plain = {id(entry.plain): entry for entry in entries}
        return tree_map_only(Tensor, lambda x: by_plain.get(id(x), x), out)

    def readable(self, reader: str) -> Tensor:
        self.source.read()
        return self.plain

    # Code that reads memory, such as safetensors, asks for its address first.
    def data_ptr(self) -> int:
        return self.readable("data_ptr()").data_ptr()

    def __copy__(self) -> "Decoded":
        return self._view(self.plain, self.source)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self.readable("deepcopy()"), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.readable("pickle").__reduce_ex__(protocol)


def _wait(work: Any) -> None:
    (Work.unbox(work) if isinstance(work, ScriptObject) else work).wait()  # type: ignore[attr-defined]
