"""scripts/bench/linear.py: what it measures besides time, its tables, its verdict."""

import dataclasses
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from ranks import RankPools

from scripts.bench import linear
from scripts.bench.layers import dispatched_by, layer_of, operators_of
from scripts.bench.linear import OVERHEAD, SPEED, Row
from scripts.bench.timing import TOLERANCE_DB, shape_text
from scripts.common.blocks import read_block
from scripts.common.candidates import BF16, FP32, OURS, TORCHAO
from scripts.common.gemms import GEMMS, float8_gemms

SHAPE = (16, 32, 48)
with_torchao = pytest.mark.skipif(not TORCHAO, reason="torchao is not installed")


@pytest.fixture(autouse=True)
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets of CPUs without AMX, on all CPUs."""
    monkeypatch.setattr(linear, "MOST_OF_BF16", 2.0)
    monkeypatch.setattr(linear, "LEAST_OF_TORCHAO", {SPEED: 3.0, OVERHEAD: 2.0})


def test_a_run(ranks: RankPools) -> None:
    args = Namespace(device="cpu", repeat=1, clock="wall")
    (on_dtensors,) = ranks(1).run(linear.measure_dtensors, SHAPE, args)
    names = [BF16, "tensorwise", "rowwise_folded", *TORCHAO[:1]]
    assert [row.name for row in on_dtensors] == names
    known = {row.name: row for row in linear.measure(SHAPE, args)}
    assert list(known) == [FP32, BF16, *OURS, *TORCHAO]
    for name, row in known.items():
        assert row.shape == SHAPE
        assert row.step > 0
        assert 0 < row.dispatched < row.operators
        assert (row.micro_batch is not None) is (name in OURS)
        ours = f"torchao {name}" in TORCHAO
        assert row.same_operands is (True if ours else None)
        assert bool(row.decibels) is (ours or name in TORCHAO)
    for theirs in TORCHAO:
        for gemm, decibels in known[theirs].decibels.items():
            ahead = known[theirs.removeprefix("torchao ")].decibels[gemm] - decibels
            assert ahead >= -TOLERANCE_DB, (theirs, gemm)


def test_operators_are_counted_with_and_without_nested_ones() -> None:
    x = torch.randn(4, 4)
    assert operators_of(lambda: torch.add(x, x)) == 1
    # to, _to_copy, empty_strided, copy_
    assert operators_of(lambda: x.to(torch.float64)) == 4
    assert dispatched_by(lambda: x.to(torch.float64)) == 1
    leaf = x.clone().requires_grad_()
    forward = operators_of(lambda: (x * 2).sum())
    assert operators_of(lambda: (leaf * 2).sum().backward()) > forward > 2


@pytest.mark.parametrize("recipe", OURS)
def test_a_changed_weight_is_cast_again(recipe: str) -> None:
    layer = layer_of(recipe, (16, 16, 16), "cpu")
    first = layer.run()
    assert layer.module.weight.grad is not None
    layer.clear()
    assert layer.module.weight.grad is layer.x.grad is None
    micro_batch = operators_of(layer.run)
    layer.change_weight()
    assert operators_of(layer.run) > micro_batch
    if recipe != "delayed":
        layer.change_weight()
        assert torch.equal(layer.run(), first)


@with_torchao
def test_other_operands_are_noticed() -> None:
    theirs = float8_gemms("torchao tensorwise", layer_of("torchao tensorwise", SHAPE, "cpu").run)
    shapes = [(tuple(p.a.shape), tuple(p.b.shape)) for p in theirs.values()]
    assert shapes == [((16, 32), (32, 48)), ((16, 48), (48, 32)), ((48, 16), (16, 32))]
    ours = float8_gemms("tensorwise", layer_of("tensorwise", SHAPE, "cpu").run)
    for gemm in GEMMS:
        assert ours[gemm].same_as(theirs[gemm])
        for field, change in (("a", 1), ("b", 1), ("scale_a", 2**-30), ("scale_b", 2**-30)):
            copy = getattr(theirs[gemm], field).clone()
            plain = copy.view(torch.uint8) if copy.element_size() == 1 else copy
            plain[(0,) * plain.ndim] += change
            other = dataclasses.replace(theirs[gemm], **{field: copy})
            assert not ours[gemm].same_as(other), (gemm, field)


FAST = {
    (shape, name): Row(
        name, shape, step, None, 35 * step // 2, 50 * step, dict.fromkeys(GEMMS, 55.0)
    )
    for shape in (SPEED, OVERHEAD)
    for name, step in ((BF16, 1), ("tensorwise", 2), ("torchao tensorwise", 6))
}
FAST[SPEED, "tensorwise"].same_operands = True


def test_the_blocks_of_the_document(documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(shape: tuple[int, int, int], args: object) -> list[Row]:
        return [row for (at, _), row in FAST.items() if at == shape]

    monkeypatch.setattr(linear, "measure", measure)
    on_dtensors = [Row(BF16, OVERHEAD, 1.5, operators=77)]
    monkeypatch.setattr(linear, "run_on_ranks", lambda *args, **options: [on_dtensors])
    assert linear.main(["--write", "--assert"]) == 0
    page = documents / "benchmarks.md"
    for shape in (SPEED, OVERHEAD):
        block = read_block(page, f"linear {shape_text(shape)}")
        assert linear.layer_table(measure(shape, None)) in block
    assert linear.layer_table(on_dtensors) in read_block(page, "linear on DTensors 16 x 16 x 16")
    assert_expected_inline(
        linear.layer_table(measure(SPEED, None)),
        """\
| layer              | step, ms | x bf16 | faster than torchao | dispatched | operators | output, dB | grad_input, dB | grad_weight, dB | same operands |
| ------------------ | -------: | -----: | ------------------: | ---------: | --------: | ---------: | -------------: | --------------: | ------------: |
| bf16               |    1,000 |  1.00x |               6.00x |         17 |        50 |      55.00 |          55.00 |           55.00 |               |
| tensorwise         |    2,000 |  2.00x |               3.00x |         35 |       100 |      55.00 |          55.00 |           55.00 |           yes |
| torchao tensorwise |    6,000 |  6.00x |                     |        105 |       300 |      55.00 |          55.00 |           55.00 |               |""",
    )


def test_verdicts() -> None:
    assert linear.checks([Row(BF16, (32, 32, 32), 1.0)]) == []
    found = linear.checks(list(FAST.values()))
    assert all(check.holds for check in found)
    assert_expected_inline(
        "\n".join(check.sentence for check in found),
        """\
512 x 1024 x 1024: 3.00x faster than torchao, at least 3
512 x 1024 x 1024: 2.00x of bf16, at most 2.0
512 x 1024 x 1024: the operands are torchao's, bit for bit
512 x 1024 x 1024: output 55.00 dB from the exact product, torchao's 55.00
512 x 1024 x 1024: grad_input 55.00 dB from the exact product, torchao's 55.00
512 x 1024 x 1024: grad_weight 55.00 dB from the exact product, torchao's 55.00
16 x 16 x 16: 3.00x faster than torchao, at least 2
16 x 16 x 16: 35 operators under a dispatch mode (torchao: 105), at most 35
16 x 16 x 16: 100 with nested ones, at most half of torchao's 300""",
    )
    rows = [row for (_, name), row in FAST.items() if name in (BF16, "tensorwise")]
    assert [c.holds for c in linear.checks(rows)] == [False, False]  # torchao is not installed


@pytest.mark.parametrize(
    ("shape", "name", "change", "broken"),
    [
        (SPEED, "tensorwise", {"step": 2.01}, 2),
        (SPEED, BF16, {"step": 0.99}, 1),
        (SPEED, "torchao tensorwise", {"step": 5.9}, 1),
        (SPEED, "tensorwise", {"same_operands": False}, 1),
        (SPEED, "tensorwise", {"same_operands": None}, 1),
        (SPEED, "tensorwise", {"decibels": dict.fromkeys(GEMMS, 54.9)}, 3),
        (OVERHEAD, "torchao tensorwise", {"step": 4.0}, 0),
        (OVERHEAD, "torchao tensorwise", {"step": 3.9}, 1),
        (OVERHEAD, "tensorwise", {"dispatched": 36}, 1),
        (OVERHEAD, "tensorwise", {"operators": 151}, 1),
    ],
)
def test_a_missed_target(
    shape: tuple[int, int, int], name: str, change: dict[str, object], broken: int
) -> None:
    rows = FAST | {(shape, name): dataclasses.replace(FAST[shape, name], **change)}
    assert sum(not c.holds for c in linear.checks(list(rows.values()))) == broken


def test_the_targets_have_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        linear.main(["--assert", "--shapes", "16x16x16"])
    assert info.value.code == 2
    assert "--shapes must have both" in capsys.readouterr().err


def test_layers_are_alike() -> None:
    """Whatever the candidate: same input, weight and gradient."""
    bf16 = layer_of(BF16, SHAPE, "cpu")
    for name in (*OURS, *TORCHAO):
        layer = layer_of(name, SHAPE, "cpu")
        assert torch.equal(layer.x, bf16.x)
        assert torch.equal(layer.module.weight, bf16.module.weight)
        assert torch.equal(layer.grad, bf16.grad)
    assert layer_of(FP32, SHAPE, "cpu").x.dtype is torch.float32
