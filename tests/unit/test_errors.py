"""Every error has a test; those that no other test provokes are here."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from granularities import ROW_QUADS, RowQuads
from torch import nn
from torch.distributed.tensor import Partial, Replicate

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8Tensor,
    ScalingGranularity,
    ScalingType,
    cast_to_float8,
    rewrap_float8_weights,
    update_float8_scales,
)
from fp8_dist.kernels.gemm import _native
from fp8_dist.kernels.transposing import transposed_copy
from fp8_dist.mesh.rules import linear_layouts
from scripts.measure.errors import ROOT, Error, errors, expected_by, grams, pieces

AXISWISE = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
BYTES = torch.zeros(2, 4, dtype=torch.float8_e4m3fn)
E5M2 = torch.zeros(16, 16, dtype=torch.float8_e5m2)
ONE = torch.ones(())


def of_rows() -> Float8Tensor:
    x = cast_to_float8(torch.ones(4, 8), AXISWISE, dim=-1)
    assert isinstance(x, Float8Tensor)
    return x


def of_columns() -> Float8Tensor:
    x = cast_to_float8(torch.ones(4, 8), AXISWISE, dim=0)
    assert isinstance(x, Float8Tensor)
    return x


def gathered(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.all_gather_into_tensor(x, 1, "no group")


def of_middle_dim() -> Float8Tensor:
    y = cast_to_float8(torch.ones(2, 4, 8), AXISWISE, dim=1)
    assert isinstance(y, Float8Tensor)
    return y


REFUSED: dict[str, Callable[[], object]] = {
    "no tensor": lambda: cast_to_float8([1.0], CastConfig()),  # type: ignore[arg-type]
    "no cast config": lambda: cast_to_float8(ONE, "e4m3"),  # type: ignore[arg-type]
    "delayed": lambda: cast_to_float8(ONE, CastConfig(ScalingType.DELAYED)),
    "for layers": lambda: cast_to_float8(ONE, CastConfig(scaling_granularity=ROW_QUADS)),
    "second granularity": RowQuads,
    "e5m2 twice": lambda: _native(E5M2, E5M2, ONE, ONE, torch.float32, False, transposed_copy),
    "no linear": lambda: Float8Linear.from_float(nn.ReLU()),  # type: ignore[arg-type]
    "no config": lambda: Float8Linear(16, 16, config="tensorwise"),  # type: ignore[arg-type]
    "partial weight": lambda: linear_layouts([Replicate()], [Partial()], 2, "layer"),
    "fp16 scale": lambda: Float8Tensor(BYTES, ONE.half(), torch.float32),
    "scale of another shape": lambda: Float8Tensor(BYTES, torch.ones(3, 1), torch.float32),
    "view": lambda: of_rows().view(8, 4),
    "view of other dims": lambda: of_middle_dim().view(8, 8),
    "as_strided": lambda: of_rows().as_strided((8, 4), (4, 1)),
    "cat of two kinds": lambda: torch.cat([of_rows(), of_columns()]),
    "gather of columns": lambda: gathered(of_columns()),
    "nothing to rewrap": lambda: rewrap_float8_weights(nn.ReLU()),
    "nothing to update": lambda: update_float8_scales(nn.ReLU()),
}


def test_what_is_refused() -> None:
    lines = []
    for name, call in REFUSED.items():
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as info:
            call()
        lines.append(f"{name}: {info.type.__name__}: {info.value}")
    assert_expected_inline(
        "\n".join(lines),
        """\
no tensor: TypeError: cast_to_float8: expected a tensor, got a list
no cast config: TypeError: cast_to_float8: cast_config must be a CastConfig, got 'e4m3'
delayed: ValueError: cast_to_float8: a DELAYED scale comes from the history that a Float8Linear keeps; use ScalingType.DYNAMIC
for layers: ValueError: cast_to_float8: <one scale per 4 values of a row> is for layers; use ScalingGranularity.TENSORWISE or AXISWISE
second granularity: ValueError: there is a granularity called '4 values of a row' already; use that one
e5m2 twice: ValueError: float8 GEMM of (16, 16) by (16, 16), both torch.float8_e5m2: this device multiplies none but torch.float8_e4m3fn by any; set another target_dtype, or emulate=True
no linear: TypeError: Float8Linear.from_float: expected an nn.Linear, got <class 'torch.nn.modules.activation.ReLU'>
no config: TypeError: Float8Linear: config must be a Float8LinearConfig, got 'tensorwise'
partial weight: ValueError: layer: a weight placed as P(sum) can't be multiplied; distribute it as Replicate(), Shard(0) (column-parallel) or Shard(1) (row-parallel)
fp16 scale: TypeError: Float8Tensor: scale must be fp32 and orig_dtype floating point, got torch.float16 and torch.float32
scale of another shape: ValueError: Float8Tensor: a scale of shape (3, 1) does not cover qdata of shape (2, 4); it must be 0-dim, or of size 1 along what it covers
view: NotImplementedError: aten.view.default of a Float8Tensor of shape (4, 8) with a scale of shape (4, 1) to (8, 4): its rows would be others; if one row was sharded, redistribute the high-precision tensor and cast it then, else call .dequantize() first
view of other dims: NotImplementedError: aten.view.default of a Float8Tensor of shape (2, 4, 8) with a scale of shape (2, 1, 8) (<one scale per slice of dims 1>): its result has no such scales; call .dequantize() first
as_strided: NotImplementedError: aten.as_strided.default of a Float8Tensor of shape (4, 8) with a scale of shape (4, 1) (<one scale per row>): its result has no such scales; call .dequantize() first
cat of two kinds: ValueError: torch.cat of float8 tensors with one scale per row and per column; .dequantize() them
gather of columns: NotImplementedError: _c10d_functional.all_gather_into_tensor.default of a Float8Tensor of shape (4, 8) with <one scale per column>: only whole rows travel, each with its scale; redistribute the high-precision tensor and cast it then
nothing to rewrap: ValueError: rewrap_float8_weights: the module has no Float8Linear; call convert_to_float8_training first
nothing to update: ValueError: update_float8_scales: the module has no Float8Linear; call convert_to_float8_training first""",
    )


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("fsdp", "this package is fp8_dist.fsdp, not another: import fp8_dist.fsdp (from"),
        ("tensor_parallel", "this package is fp8_dist.tensor_parallel, not another: import"),
    ],
)
def test_packages_under_another_name(folder: str, message: str) -> None:
    spec = importlib.util.spec_from_file_location("another", ROOT / folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError) as info:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert str(info.value).startswith(message)


def test_a_torch_that_is_not_known() -> None:
    code = "import torch; del torch._scaled_mm; import fp8_dist"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: fp8_dist needs torch >= 2.11, and does not know torch" in done.stderr


def test_every_error_has_a_test() -> None:
    found = errors()
    tests = expected_by(found)
    without = [f"{error.file}:{error.line}" for error in found if error not in tests]
    assert without == []


def test_the_tests_that_are_found_exist() -> None:
    for test in expected_by(errors()).values():
        file, _, name = test.partition("::")
        functions = ast.walk(ast.parse((ROOT / file).read_text()))
        assert name in {node.name for node in functions if isinstance(node, ast.FunctionDef)}


def test_how_texts_are_compared() -> None:
    scope = ast.parse("f'{name}: the scale of {what!r} is stale; ' 'call precompute'")
    node = scope.body[0]
    assert isinstance(node, ast.Expr)
    error = Error("file.py", 1, "ValueError", "".join(pieces(node.value, {}, scope)))
    assert error.shown == "…: the scale of … is stale; call precompute"
    assert {" is stale;", ": the scal"} <= grams(error.text)
    assert not any("\0" in gram for gram in grams(error.text))
