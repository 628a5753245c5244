"""scripts/bench_step.py: its table, its page and its verdict, on steps that are too small to time."""

import json
from pathlib import Path

import bench_models
import bench_step
import pytest
import torch
from bench_peers import BF16, OURS, TORCHAO
from bench_step import Run
from expecttest import assert_expected_inline
from llama import Block, LlamaConfig
from ranks import RankPools, device_mesh

from fp8_dist.debug import comm_audit

SMALL = ["--batch-size", "2", "--seq-len", "16", "--repeat", "1"]
TINY = LlamaConfig(64, 2, 4, 4, 128, vocab_size=256, max_seq_len=16)


def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page, data = tmp_path / "benchmarks.md", tmp_path / "figures.json"
    page.write_text("# Benchmarks\n\n## Another\n\nstays\n")
    monkeypatch.setattr(bench_step, "PAGE", page)
    options = [*SMALL, "--json", str(data), "--write", "--assert", "1000000"]
    assert bench_step.main(options) == 1
    result = json.loads(data.read_text())
    ((row,), (check,)) = result["rows"], result["checks"]
    assert list(row["seconds"]) == [BF16, *OURS, *TORCHAO]
    assert all(median > 0 for median in row["seconds"].values())
    assert not check["holds"]
    assert "at least 1e+06" in check["sentence"]
    text = page.read_text()
    assert "## Another\n\nstays" in text
    assert text.count("## A training step, debug model, one process") == 1
    assert bench_step.table(row["seconds"]) in text


def test_fewer_recipes_have_fewer_peers(tmp_path: Path) -> None:
    data = tmp_path / "figures.json"
    options = [*SMALL, "--json", str(data), "--recipes", "delayed", "rowwise_folded"]
    assert bench_step.main(options) == 0
    (row,) = json.loads(data.read_text())["rows"]
    peers = [name for name in TORCHAO if not name.endswith("gw_hp")]
    assert list(row["seconds"]) == [BF16, "delayed", "rowwise_folded", *peers]


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)])
def test_on_a_mesh(ranks: RankPools, mesh: tuple[int, int]) -> None:
    names = [BF16, "tensorwise", "delayed", *TORCHAO[:2]]
    first, second = ranks(2).run(
        bench_step.measure, mesh, ["debug"], names, bench_step.parse(SMALL)
    )
    assert first == second  # the slowest rank's, on both
    assert list(first["debug"]) == names
    assert all(median > 0 for median in first["debug"].values())


def gathered(name: str, dp: int, tp: int) -> dict[str, int]:
    """Bytes of the all-gathers of a candidate's forward, by dtype."""
    mesh = device_mesh(dp=dp, tp=tp)
    model, after = bench_models.build(name, TINY, mesh, torch.device("cpu"))
    with comm_audit(mesh) as audit:
        after(model)
        loss = model(torch.randint(256, (2, 16))).square().mean()
    loss.backward()
    found: dict[str, int] = {}
    for row in audit.rows:
        if row.op == "all_gather":
            dtype = "float8" if "float8" in str(row.dtype) else str(row.dtype).rpartition(".")[2]
            found[dtype] = found.get(dtype, 0) + row.bytes
    return found


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["tensorwise", *TORCHAO[:1]])
def test_candidates_gather_float8(ranks: RankPools, name: str, dp: int, tp: int) -> None:
    """torchao's too: by its own styles and hooks, over gloo."""
    bf16, found = (ranks(2).run(gathered, each, dp, tp)[0] for each in (BF16, name))
    assert set(bf16) == {"bfloat16"}
    assert found["float8"] > 0
    assert found["bfloat16"] == bf16["bfloat16"] - 2 * found["float8"]


@pytest.mark.parametrize("name", [BF16, "tensorwise", *TORCHAO[:1]])
def test_attention_of_every_candidate_is_fp32_on_cpus(name: str) -> None:
    built = bench_models.build(name, TINY, None, torch.device("cpu"))
    assert all(block.attention.dtype is None for block in built[0].layers)
    trained = bench_step.Trained(*built)
    assert all(block.attention.dtype is torch.float32 for block in trained.model.layers)


def test_compiled_candidates_have_graphs_of_their_own() -> None:
    codes = [Block.forward.__code__]
    for name in (BF16, "tensorwise", "rowwise"):
        model, _ = bench_models.build(name, TINY, None, torch.device("cpu"), compiled=True)
        first, *others = (block.forward.__func__.__code__ for block in model.layers)
        assert all(code is first for code in others)
        assert all(first is not code for code in codes)
        assert all(block._compiled_call_impl is not None for block in model.layers)
        codes.append(first)


def test_the_table() -> None:
    seconds = {BF16: 0.01, "tensorwise": 0.02, "rowwise_folded": 0.03}
    assert "torchao" not in bench_step.table(seconds)  # it is not installed
    seconds |= {"torchao tensorwise": 0.05, "torchao rowwise": 0.015}
    assert_expected_inline(
        bench_step.table(seconds),
        """\
| candidate          | ms   | x bf16 | faster than torchao |
| ------------------ | ---- | ------ | ------------------- |
| bf16               | 10.0 | 1.00x  | 5.00x               |
| tensorwise         | 20.0 | 2.00x  | 2.50x               |
| rowwise_folded     | 30.0 | 3.00x  | 0.50x               |
| torchao tensorwise | 50.0 | 5.00x  |                     |
| torchao rowwise    | 15.0 | 1.50x  |                     |""",
    )


def test_verdicts() -> None:
    seconds = {BF16: 0.01, "tensorwise": 0.02, "torchao tensorwise": 0.05}
    run = Run("small", (2, 1), False, seconds)
    assert bench_step.checks([run], None) == []
    alone = Run("debug", (1, 1), True, {BF16: 0.01, "tensorwise": 0.02})
    asked = [(run, 2.5), (run, 2.6), (alone, 1.0)]
    found = [bench_step.checks([each], least)[0] for each, least in asked]
    assert_expected_inline(
        "\n".join(f"{check.holds}: {check.sentence}" for check in found),
        """\
True: A training step, small model, FSDP2 x2: tensorwise 2.50x faster than torchao, at least 2.5
False: A training step, small model, FSDP2 x2: tensorwise 2.50x faster than torchao, at least 2.6
False: A training step, debug model, one process, compiled: torchao is installed""",
    )


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    args = bench_step.parse(["--mesh", "none", "dp=2", "tp=2", "dp=2,tp=4"])
    assert args.mesh == [(1, 1), (2, 1), (1, 2), (2, 4)]
    wrong = {
        "expected none, dp=N": ["--mesh", "pp=2"],
        "--compile is for --mesh none": ["--mesh", "tp=2", "--compile"],
        "--recipes must have it": ["--recipes", "rowwise", "--assert", "1"],
    }
    for message, options in wrong.items():
        with pytest.raises(SystemExit) as info:
            bench_step.main(options)
        assert info.value.code == 2
        assert message in capsys.readouterr().err
