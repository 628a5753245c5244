"""Records of the operands of layers' float8 GEMMs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fp8_dist import Float8Tensor
from fp8_dist.kernels.gemm import GemmOptions
from fp8_dist.operand.observers import Observer, Owner, Product, observed_by
from fp8_dist.recipe import Gemm
from fp8_dist.scaling import operators


class GemmRecord(NamedTuple):
    """One float8 GEMM of a layer: ``a @ b``, with local copies of the operands."""

    fqn: str
    gemm: Gemm
    a: Float8Tensor  # [M, K]
    b: Float8Tensor  # [K, N]
    options: GemmOptions


def scaled_mm(
    a: Float8Tensor,
    b: Float8Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
    pad_inner_dim: bool = False,
    emulate: bool = False,
) -> torch.Tensor:
    """Multiply two float8 matrices with the options of a layer's GEMMs."""
    options = use_fast_accum, pad_inner_dim, emulate, False
    return a.scheme.multiply(a.quantized, b.quantized, out_dtype, options)


class _Recorder(Observer):
    def __init__(self) -> None:
        self.records: list[GemmRecord] = []

    def on_multiply(self, owner: Owner, product: Product) -> None:
        if product.groups is not None:
            return
        gemm, left, right, result, *_ = product
        operands = operators.matrices(left, right, (gemm == "grad_weight", gemm == "output"))
        copies: list[Any] = [Float8Tensor.of(each, result.dtype).clone() for each in operands]
        # Copy scales too: copies share 0-dim scales, and FSDP2 frees those of stored weights.
        a, b = (each.rewrap(scale=tuple([s.clone() for s in each.scales])) for each in copies)
        self.records.append(GemmRecord(owner.fqn, gemm, a, b, owner.config.gemm_options(gemm)))


@contextmanager
def record_gemms() -> Iterator[list[GemmRecord]]:
    """Record the operands of every float8 GEMM of linear layers, in order, in an eager block."""
    recorder = _Recorder()
    with observed_by(recorder):
        yield recorder.records
