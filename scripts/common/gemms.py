"""Records what the float8 GEMMs of a layer multiply, the library's and torchao's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fp8_dist.linear.recording import record_gemms
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
    if is_torchaos(name):
        return dict(zip(GEMMS, _gemms_of_torchao(step), strict=False))
    with record_gemms() as records:
        step()
    return {
        r.gemm: Product(r.a.qdata, r.a.scale, r.b.qdata, r.b.scale, partial(torch.mm, r.a, r.b))
        for r in records
    }


def _gemms_of_torchao(step: Callable[[], object]) -> list[Product]:
    ops, found = candidates.torchao_ops, []
    original = ops.addmm_float8_unwrapped

    def recording(a: Any, scale_a: Any, b: Any, scale_b: Any, *args: Any, **kwargs: Any) -> Any:
        run = partial(original, a, scale_a, b, scale_b, *args, **kwargs)
        # Its scales are multipliers.
        found.append(Product(a, scale_a.reciprocal(), b, scale_b.reciprocal(), run))
        return run()

    ops.addmm_float8_unwrapped = recording
    try:
        step()
    finally:
        ops.addmm_float8_unwrapped = original
    return found
