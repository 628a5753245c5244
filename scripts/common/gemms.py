"""Records what the float8 GEMMs of a layer multiply, the library's and torchao's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fp8_dist import function, matmul, tensorwise, wide
from scripts.common import candidates
from scripts.common.candidates import is_torchaos

GEMMS = ("output", "grad_input", "grad_weight")


class Product(NamedTuple):
    """The operands of a GEMM, float8 with dequantization scales: (a * scale_a) @ (b * scale_b)."""

    a: torch.Tensor
    scale_a: torch.Tensor
    b: torch.Tensor
    scale_b: torch.Tensor

    def exact(self) -> torch.Tensor:
        """The product in fp64."""
        return (self.a.double() * self.scale_a) @ (self.b.double() * self.scale_b)

    def same_as(self, other: "Product") -> bool:
        """Whether the bytes and the scales of both operands are equal.

        torchao repeats the one scale of a tensor beside scales of rows.
        """
        return all(
            mine.dtype == theirs.dtype
            and mine.shape == theirs.shape
            and torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
            and torch.equal(scale.expand(mine.shape), their_scale.expand(mine.shape))
            for mine, scale, theirs, their_scale in (
                (self.a, self.scale_a, other.a, other.scale_a),
                (self.b, self.scale_b, other.b, other.scale_b),
            )
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

    def recording(a: Any, b: Any, scale_a: Any, scale_b: Any, *args: Any) -> torch.Tensor:
        record(Product(a.clone(), scale_a.clone(), b.clone(), scale_b.clone()))
        return original(a, b, scale_a, scale_b, *args)

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
        # Its scales are multipliers.
        record(Product(a, scale_a.reciprocal(), b, scale_b.reciprocal()))
        return original(a, scale_a, b, scale_b, *args, **kw)

    ops.addmm_float8_unwrapped = recording
    try:
        yield
    finally:
        ops.addmm_float8_unwrapped = original
