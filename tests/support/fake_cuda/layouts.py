"""The requirements of cuBLASLt and CUTLASS for the operands of float8 GEMMs."""

from collections.abc import Mapping
from typing import Any

import torch

ALIGNMENT = 16  # in bytes, which equal elements of float8 data


def scaled_mm_problems(given: Mapping[str, Any]) -> list[str]:
    """List violated requirements for the arguments of ``aten::_scaled_mm``.

    Data: ``a`` must be row-major and ``b`` column-major; dims, leading dims and addresses must be
    multiples of 16 bytes. Scales: fp32 and contiguous, one per tensor, or one per row of ``a`` and
    per column of ``b``. The latter need a bf16 output, and stride 1 along the last dim (in some
    releases of torch even if that dim has one element).
    """
    a, b = given["self"], given["mat2"]
    problems = _matrix_problems("a", a) + _matrix_problems("b", b.t())
    scales = (given["scale_a"], given["scale_b"])
    if any(scale.dtype is not torch.float32 or not scale.is_contiguous() for scale in scales):
        problems.append("scales are not contiguous fp32")
    shapes = tuple(tuple(scale.shape) for scale in scales)
    if all(scale.numel() == 1 for scale in scales):
        return problems
    if shapes != ((a.shape[0], 1), (1, b.shape[1])):
        problems.append(f"scales of shapes {shapes}")
    if any(scale.stride(-1) != 1 for scale in scales):
        problems.append(f"scales with strides {[scale.stride() for scale in scales]}")
    if given["out_dtype"] is not torch.bfloat16:
        problems.append(f"rowwise scales with an output in {given['out_dtype']}")
    if b.dtype is not torch.float8_e4m3fn:
        problems.append(f"rowwise scales with b in {b.dtype}")
    return problems


def block_mm_problems(given: Mapping[str, Any]) -> list[str]:
    """List violated requirements for the data of ``aten::_scaled_mm_v2``. (torch checks scales.)"""
    return _matrix_problems("a", given["self"]) + _matrix_problems("b", given["mat2"].t())


def _matrix_problems(name: str, matrix: torch.Tensor) -> list[str]:
    rows, columns = matrix.shape
    problems = []
    if matrix.stride(1) != 1 or matrix.stride(0) < columns:
        problems.append(f"{name} has strides {matrix.stride()}, transposed if it is b")
    if columns % ALIGNMENT or matrix.stride(0) % ALIGNMENT:
        problems.append(f"{name} has rows of {columns} bytes, {matrix.stride(0)} apart")
    if matrix.storage_offset() % ALIGNMENT:
        problems.append(f"{name} begins {matrix.storage_offset()} bytes into its memory")
    if name == "b" and rows % ALIGNMENT:
        problems.append(f"b has {rows} columns")
    return problems
