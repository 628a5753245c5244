"""scripts/bench/matmul.py: its products, its table, its verdict."""

from argparse import Namespace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from torch_releases import rows_in_torchs_gemm

from scripts.bench import matmul
from scripts.bench.timing import TOLERANCE_DB
from scripts.common.blocks import read_block
from scripts.common.candidates import TORCHAO


@pytest.mark.parametrize("recipe", matmul.RECIPES)
def test_a_run(recipe: str, monkeypatch: pytest.MonkeyPatch, documents: Path) -> None:
    args = Namespace(device="cpu", repeat=1, clock="wall")
    with rows_in_torchs_gemm(recipe):
        rows = matmul.measure((32, 48, 16), recipe, args)
        assert [(row.recipe, row.gemm) for row in rows] == [(recipe, gemm) for gemm in matmul.GEMMS]
        for row in rows:
            assert len(row.seconds) == (4 if f"torchao {recipe}" in TORCHAO else 3)
            for name in (matmul.NATIVE, *([matmul.PEER] if TORCHAO else [])):
                ahead = row.decibels[matmul.OURS] - row.decibels[name]
                assert ahead >= -TOLERANCE_DB, (row.label, name)
            assert row.decibels[matmul.OURS] > 45, row.label
    monkeypatch.setattr(matmul, "measure", lambda *_: rows)
    assert matmul.main(["--shapes", "32x48x16", "--write"]) == 0
    assert matmul.matmul_table(2 * rows) in read_block(documents / "benchmarks.md", "matmul")


def product_row(gemm: str, ours: float, native: float, decibels: float) -> matmul.Row:
    seconds = {"fp8_dist": ours, "torch._scaled_mm": native, "bf16": 0.5, "torchao": 3.0}
    both = {"fp8_dist": decibels, "torch._scaled_mm": 55.0, "torchao": 54.0}
    return matmul.Row((16, 32, 64), "rowwise", gemm, seconds, both)


def test_verdicts() -> None:
    good, slow = product_row("output", 1.0, 2.0, 55.0), product_row("grad_input", 2.0, 1.9, 54.99)
    assert all(check.holds for check in matmul.checks([good]))
    found = matmul.checks([good, slow])
    assert [check.holds for check in found] == [False, True, True]
    assert_expected_inline(
        "\n".join(check.sentence for check in found),
        """\
at least as fast as torch._scaled_mm; least ahead, 0.95x, at 16 x 32 x 64 rowwise g @ w
at least as fast as torchao; least ahead, 1.50x, at 16 x 32 x 64 rowwise g @ w
as close to the exact product as torch._scaled_mm; furthest, -0.01 dB, at 16 x 32 x 64 rowwise g @ w""",
    )
    far = product_row("grad_weight", 1.0, 2.0, 54.9)
    assert [check.holds for check in matmul.checks([good, far])] == [True, True, False]
    del far.seconds["torchao"]
    assert [check.holds for check in matmul.checks([good, far])] == [True, False, False]
    assert_expected_inline(
        matmul.matmul_table([good, slow]),
        """\
| M x K x N    | scales  | GEMM      |    ms | bf16, ms | x bf16 | faster than torch._scaled_mm | faster than torchao |    dB | torch._scaled_mm, dB | torchao, dB |
| ------------ | ------- | --------- | ----: | -------: | -----: | ---------------------------: | ------------------: | ----: | -------------------: | ----------: |
| 16 x 32 x 64 | rowwise | x @ w.t() | 1,000 |      500 |  2.00x |                        2.00x |               3.00x | 55.00 |                55.00 |       54.00 |
| 16 x 32 x 64 | rowwise | g @ w     | 2,000 |      500 |  4.00x |                        0.95x |               1.50x | 54.99 |                55.00 |       54.00 |""",
    )
