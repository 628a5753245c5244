"""scripts/bench_linear.py: what it measures besides time, its tables, its verdict."""

import dataclasses
import json
from pathlib import Path

import bench_layers
import bench_linear
import pytest
import torch
from bench_layers import dispatched_by, layer_of, operators_of
from bench_linear import GEMMS, OVERHEAD, SPEED, Row
from bench_operands import Product, Recorder, products_of_torchao
from bench_peers import BF16, FP32, OURS, TORCHAO
from benchmarks import TOLERANCE_DB
from expecttest import assert_expected_inline

CPU = torch.device("cpu")
with_torchao = pytest.mark.skipif(not TORCHAO, reason="torchao is not installed")


def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page, data = tmp_path / "benchmarks.md", tmp_path / "figures.json"
    monkeypatch.setattr(bench_linear, "PAGE", page)
    options = ["--shapes", "32x48x16", "--repeat", "1", "--json", str(data), "--write"]
    assert bench_linear.main(options) == 0
    rows = [Row(**row) for row in plain_rows(data, dtensors=False)]
    assert [row.name for row in rows] == [FP32, BF16, *OURS, *TORCHAO]
    for row in rows:
        assert row.shape == [32, 48, 16]
        assert row.step > 0
        assert row.dispatched is not None
        assert row.operators is not None
        assert 0 < row.dispatched < row.operators
        assert (row.micro_batch is not None) is (row.name in OURS)
        ours = f"torchao {row.name}" in TORCHAO
        assert row.same_operands is (True if ours else None)
        assert (row.decibels is not None) is (ours or row.name in TORCHAO)
    known = {row.name: row for row in rows}
    for theirs in TORCHAO:
        for gemm, decibels in known[theirs].decibels.items():
            ahead = known[theirs.removeprefix("torchao ")].decibels[gemm] - decibels
            assert ahead >= -TOLERANCE_DB, (theirs, gemm)
    on_dtensors = [row["name"] for row in plain_rows(data, dtensors=True)]
    assert on_dtensors == [BF16, "tensorwise", "rowwise_folded", *TORCHAO[:1]]
    text = page.read_text()
    assert bench_linear.table(rows) in text
    assert "## A linear layer\n" in text


def plain_rows(data: Path, dtensors: bool) -> list[dict[str, object]]:
    rows = json.loads(data.read_text())["rows"]
    return [row for row in rows if row.pop("dtensors") is dtensors]


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
    layer = layer_of(recipe, (16, 16, 16), CPU)
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
    products = products_of_torchao(layer_of("torchao tensorwise", (16, 32, 48), CPU).run)
    assert [(p.a.shape, p.b.shape) for p in products] == [
        ((16, 32), (32, 48)),
        ((16, 48), (48, 32)),
        ((48, 16), (16, 32)),
    ]
    with Recorder() as recorder:
        layer_of("tensorwise", (16, 32, 48), CPU).run()
    assert recorder.saw(products)
    for field, change in (("a", 1), ("b", 1), ("scale_a", 2**-30), ("scale_b", 2**-30)):
        other = products[1]._asdict()
        other[field] = changed(other[field], change)
        assert not recorder.saw([products[0], Product(**other)]), field
    assert not Recorder().saw(products)


def changed(tensor: torch.Tensor, by: float) -> torch.Tensor:
    """A copy whose first element is another."""
    copy = tensor.clone()
    plain = copy.view(torch.uint8) if copy.element_size() == 1 else copy
    plain[(0,) * plain.ndim] += by
    return copy


FAST = {
    (shape, name): Row(
        name, shape, step, None, 35 * step // 2, 50 * step, decibels=dict.fromkeys(GEMMS, 55.0)
    )
    for shape in (SPEED, OVERHEAD)
    for name, step in ((BF16, 1), ("tensorwise", 2), ("torchao tensorwise", 6))
}
FAST[SPEED, "tensorwise"].same_operands = True


def test_a_table() -> None:
    rows = [row for (shape, _), row in FAST.items() if shape == SPEED]
    assert_expected_inline(
        bench_linear.table(rows),
        """\
| layer              | step, ms | x bf16 | faster than torchao | dispatched | operators | output, dB | grad_input, dB | grad_weight, dB | same operands |
| ------------------ | -------- | ------ | ------------------- | ---------- | --------- | ---------- | -------------- | --------------- | ------------- |
| bf16               | 1,000    | 1.00x  | 6.00x               | 17         | 50        | 55.00      | 55.00          | 55.00           |               |
| tensorwise         | 2,000    | 2.00x  | 3.00x               | 35         | 100       | 55.00      | 55.00          | 55.00           | yes           |
| torchao tensorwise | 6,000    | 6.00x  |                     | 105        | 300       | 55.00      | 55.00          | 55.00           |               |""",
    )


def test_verdicts() -> None:
    assert bench_linear.checks([Row(BF16, (32, 32, 32), 1.0)]) == []
    found = bench_linear.checks(list(FAST.values()))
    assert all(check.holds for check in found)
    assert_expected_inline(
        "\n".join(check.sentence for check in found),
        """\
512 x 1024 x 1024: 3.00x faster than torchao, at least 3.0
512 x 1024 x 1024: 2.00x of bf16, at most 2.0
512 x 1024 x 1024: the operands are torchao's, bit for bit
512 x 1024 x 1024: output 55.00 dB from the exact product, torchao's 55.00
512 x 1024 x 1024: grad_input 55.00 dB from the exact product, torchao's 55.00
512 x 1024 x 1024: grad_weight 55.00 dB from the exact product, torchao's 55.00
16 x 16 x 16: 3.00x faster than torchao, at least 3.0
16 x 16 x 16: 35 operators under a dispatch mode (torchao: 105), at most 35
16 x 16 x 16: 100 with nested ones, at most a third of torchao's 300""",
    )


@pytest.mark.parametrize(
    ("shape", "name", "change", "broken"),
    [
        (SPEED, "tensorwise", {"step": 2.01}, 2),
        (SPEED, BF16, {"step": 0.99}, 1),
        (SPEED, "torchao tensorwise", {"step": 5.9}, 1),
        (SPEED, "tensorwise", {"same_operands": False}, 1),
        (SPEED, "tensorwise", {"same_operands": None}, 1),
        (SPEED, "tensorwise", {"decibels": dict.fromkeys(GEMMS, 54.9)}, 3),
        (OVERHEAD, "torchao tensorwise", {"step": 5.9}, 1),
        (OVERHEAD, "tensorwise", {"dispatched": 36}, 1),
        (OVERHEAD, "tensorwise", {"operators": 101}, 1),
    ],
)
def test_a_missed_target(
    shape: tuple[int, int, int], name: str, change: dict[str, object], broken: int
) -> None:
    rows = FAST | {(shape, name): dataclasses.replace(FAST[shape, name], **change)}
    assert sum(not c.holds for c in bench_linear.checks(list(rows.values()))) == broken


def test_nothing_is_promised_without_torchao() -> None:
    rows = [row for (_, name), row in FAST.items() if name in (BF16, "tensorwise")]
    assert [c.holds for c in bench_linear.checks(rows)] == [False, False]


def test_the_targets_have_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        bench_linear.main(["--assert", "--shapes", "16x16x16"])
    assert info.value.code == 2
    assert "--shapes must have both" in capsys.readouterr().err


def test_layers_are_alike() -> None:
    """Whatever the candidate: same input, weight and gradient."""
    for name in (*OURS, *TORCHAO):
        layer, bf16 = layer_of(name, (16, 32, 48), CPU), layer_of(BF16, (16, 32, 48), CPU)
        assert torch.equal(layer.x, bf16.x)
        assert torch.equal(layer.module.weight, bf16.module.weight)
        assert torch.equal(layer.grad, bf16.grad)
    assert bench_layers.layer_of(FP32, (16, 32, 48), CPU).x.dtype is torch.float32
