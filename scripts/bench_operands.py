"""What a layer multiplies: torchao's operands of a step, and whether another step had them too."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import bench_peers
import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Product(NamedTuple):
    """The operands of a scaled GEMM, float8 with dequantization scales: (a * sa) @ (b * sb)."""

    a: torch.Tensor
    scale_a: torch.Tensor
    b: torch.Tensor
    scale_b: torch.Tensor

    def exact(self) -> torch.Tensor:
        """The product in fp64."""
        return (self.a.double() * self.scale_a) @ (self.b.double() * self.scale_b)


def products_of_torchao(step: Callable[[], object]) -> list[Product]:
    """The float8 GEMMs of a step of torchao's, in their order."""
    found: list[Product] = []
    ops = bench_peers.float8_ops
    multiply = ops.addmm_float8_unwrapped

    def recording(a: Any, scale_a: Any, b: Any, scale_b: Any, *args: Any, **kwargs: Any) -> Any:
        # Its scales are multipliers.
        found.append(Product(a, scale_a.reciprocal(), b, scale_b.reciprocal()))
        return multiply(a, scale_a, b, scale_b, *args, **kwargs)

    ops.addmm_float8_unwrapped = recording
    try:
        step()
    finally:
        ops.addmm_float8_unwrapped = multiply
    return found


class Recorder(TorchDispatchMode):
    """Keeps what operators take and return."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        self._tensors += [
            inner for t in leaves if isinstance(t, torch.Tensor) for inner in plain_tensors(t)
        ]
        return result

    def saw(self, products: Iterable[Product]) -> bool:
        """Whether every operand and every scale of some GEMMs was there, bit for bit."""
        return all(
            self._saw(p.a) and self._saw(p.b) and self._saw_scale(p.scale_a, p.scale_b)
            for p in products
        )

    def _saw_scale(self, *scales: torch.Tensor) -> bool:
        # Beside rows torchao repeats the one scale of a tensor, as its kernel wants it.
        return all(
            self._saw(scale) or (scale.unique().numel() == 1 and self._saw(scale.flatten()[0]))
            for scale in scales
        )

    def _saw(self, tensor: torch.Tensor) -> bool:
        return any(
            same_bits(tensor, each) or (each.ndim == 2 and same_bits(tensor, each.t()))
            for each in self._tensors
        )


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with storages of their own that a wrapper subclass holds; or the tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.detach()]
    names, _ = tensor.__tensor_flatten__()
    held = [getattr(tensor, name) for name in names]  # a DTensor's mesh is among them
    return [
        plain for each in held if isinstance(each, torch.Tensor) for plain in plain_tensors(each)
    ]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes in the same shape, dims of size 1 aside."""
    a, b = a.squeeze(), b.squeeze()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)
