"""FLOP formulas of the operators that contain GEMMs, for torch's ``FlopCounterMode``.

A GEMM is counted once, as the operator that a dispatch mode sees. It counts as for nn.Linear: 2
FLOPs per multiplication. Rows that pad the groups of experts on a GPU count, too.
"""

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from fp8_dist.imports import AfterImport
from fp8_dist.kernels.gemm import block_scaled_mm, scaled_mm
from fp8_dist.moe.operators import grouped_gradients_operator, grouped_mm_operator
from fp8_dist.scaling.operators import multiply_operator

_Shape = Sequence[int]


def _matmul_flops(a: _Shape, b: _Shape, *_: Any, **__: Any) -> int:
    # Without the zeros that pad the contracted dim of one operand.
    return 2 * a[0] * min(a[1], b[0]) * b[1]


def _multiply_flops(*arguments: Any, **_: Any) -> int:
    (*rows, depth), (*others, columns), transposed = arguments[0], arguments[4], arguments[8]
    left, right = (prod(rows), depth), (prod(others), columns)
    return _matmul_flops(left[:: -1 if transposed[0] else 1], right[:: -1 if transposed[1] else 1])


def _grouped_mm_flops(rows: _Shape, *arguments: Any, **_: Any) -> int:
    return 2 * rows[0] * prod(arguments[3][1:])


def _grouped_gradients_flops(rows: _Shape, *arguments: Any, **_: Any) -> int:
    weights, dtypes = arguments[7], arguments[15:17]
    return sum(dtype is not None for dtype in dtypes) * 2 * rows[0] * prod(weights[1:])


def _aten_grouped_mm_flops(a: _Shape, b: _Shape, *_: Any, **__: Any) -> int:
    # Each row, or column of the left operand, is multiplied by the matrix of its group.
    return 2 * prod(a[-len(b) :]) * b[-1]


aten = torch.ops.aten
_FORMULAS: dict[Any, Any] = {
    scaled_mm.packet: _matmul_flops,
    block_scaled_mm.packet: _matmul_flops,
    multiply_operator.packet: _multiply_flops,
    grouped_mm_operator.packet: _grouped_mm_flops,
    grouped_gradients_operator.packet: _grouped_gradients_flops,
    # Called by eager code for experts on a GPU. A release of torch may have these formulas.
    aten._grouped_mm: _aten_grouped_mm_flops,
    aten._scaled_grouped_mm: _aten_grouped_mm_flops,
}


_COUNTER = "torch.utils.flop_counter"


def _add_formulas() -> bool:
    """Let torch count these operators, if its counter is imported."""
    counter: Any = sys.modules.get(_COUNTER)
    for operator, formula in _FORMULAS.items() if counter else ():
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator)(formula)
    return counter is not None


AfterImport(_COUNTER.__eq__, _add_formulas)  # not imported here, because it imports Triton
