"""Records what the float8 GEMMs of a layer multiply, the library's and torchao's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fp8_dist import Float8Tensor, function, matmul, tensorwise, wide
from scripts.common import candidates
from scripts.common.candidates import is_torchaos

GEMMS = ("output", "grad_input", "grad_weight")


@dataclass
class Product:
    """The operands of a GEMM, float8 with dequantization scales: (a * scale_a) @ (b * scale_b).

    `run` multiplies them again as their library does.
    """

    a: torch.Tensor
    scale_a: torch.Tensor
    b: torch.Tensor
    scale_b: torch.Tensor
    run: Callable[[], torch.Tensor]

    def exact(self) -> torch.Tensor:
        """The product in fp64."""
        return (self.a.double() * self.scale_a) @ (self.b.double() * self.scale_b)

    def same_as(self, other: "Product") -> bool:
        """Whether bytes and scales are equal; torchao repeats the one scale of a tensor."""
        return _same(self.a, self.scale_a, other.a, other.scale_a) and _same(
            self.b, self.scale_b, other.b, other.scale_b
        )


def _same(a: torch.Tensor, scale_a: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor) -> bool:
    return (
        (a.dtype, a.shape) == (b.dtype, b.shape)
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        and torch.equal(scale_a.expand(a.shape), scale_b.expand(a.shape))
    )


def float8_gemms(name: str, step: Callable[[], object]) -> dict[str, Product]:
    """The float8 GEMMs of one step of a candidate's layer, by the name of their result."""
    found: list[Product] = []
    with (_recorded_torchao if is_torchaos(name) else _recorded)(found.append):
        step()
    return dict(zip(GEMMS, found, strict=False))


@contextmanager
def _recorded(record: Callable[[Product], object]) -> Iterator[None]:
    original, shared = matmul.scaled_mm_of_data, (wide.shared_by_gemms, wide.shared_by_layers)

    def recording(a: Any, b: Any, scale_a: Any, scale_b: Any, dtype: Any, *args: Any) -> Any:
        left, right = (
            Float8Tensor(data.clone(), scale.clone(), dtype)
            for data, scale in ((a, scale_a), (b, scale_b))
        )
        run = partial(torch.mm, left, right)
        record(Product(left.qdata, left.scale, right.qdata, right.scale, run))
        return original(a, b, scale_a, scale_b, dtype, *args)

    for module in (function, tensorwise):
        module.scaled_mm_of_data = recording
        # GEMMs get the float8 bytes, and not an upcast copy that several of them share.
        module.shared_by_gemms = module.shared_by_layers = lambda data, owner=None: data
    try:
        yield
    finally:
        for module in (function, tensorwise):
            module.scaled_mm_of_data = original
            module.shared_by_gemms, module.shared_by_layers = shared


@contextmanager
def _recorded_torchao(record: Callable[[Product], object]) -> Iterator[None]:
    ops = candidates.torchao_ops
    original = ops.addmm_float8_unwrapped

    def recording(a: Any, scale_a: Any, b: Any, scale_b: Any, *args: Any, **kw: Any) -> Any:
        run = partial(original, a, scale_a, b, scale_b, *args, **kw)
        # Its scales are multipliers.
        record(Product(a, scale_a.reciprocal(), b, scale_b.reciprocal(), run))
        return run()

    ops.addmm_float8_unwrapped = recording
    try:
        yield
    finally:
        ops.addmm_float8_unwrapped = original
