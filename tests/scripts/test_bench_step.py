"""scripts/bench/step.py: its blocks and its verdict, on steps that are too small to time."""

from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from ranks import RankPools

from scripts.bench import step
from scripts.common import models
from scripts.common.blocks import read_block
from scripts.common.candidates import BF16, OURS, TORCHAO
from scripts.common.llama import Llama

SMALL = ["--batch-size", "2", "--seq-len", "16", "--repeat", "1"]


def test_a_run(documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Llama] = []
    found: list[dict[str, dict[str, float]]] = []
    measure = step.measure

    def build(*args: object, **options: object) -> Llama:
        built.append(models.build(*args, **options))
        return built[-1]

    def measured(*args: object) -> dict[str, dict[str, float]]:
        found.append(measure(*args))
        return found[-1]

    monkeypatch.setattr(step, "build", build)
    monkeypatch.setattr(step, "measure", measured)
    assert step.main([*SMALL, "--write", "--assert", "1000000"]) == 1
    ((_, seconds),) = found[0].items()
    assert list(seconds) == [BF16, *OURS, *TORCHAO]
    assert all(median > 0 for median in seconds.values())
    block = read_block(documents / "benchmarks.md", "step debug none")
    assert step.step_table(seconds) in block
    assert len(built) == len(seconds)
    for model in built:
        assert all(block.attention.dtype is torch.float32 for block in model.layers)


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}])
def test_on_a_mesh(ranks: RankPools, mesh: step.Mesh) -> None:
    names = [BF16, "delayed", *TORCHAO[:1]]
    first, second = ranks(2).run(step.measure, mesh, names, step.parse(SMALL))
    assert first == second  # the slowest rank's, on both
    assert list(first["debug"]) == names
    assert all(median > 0 for median in first["debug"].values())


def test_steps_train() -> None:
    """The next step begins with what follows this one, and uses its weights."""
    args = step.parse(SMALL)
    batch = torch.randint(256, (2, 2, 16))
    model = models.build("tensorwise", step.MODELS["debug"])
    with pytest.MonkeyPatch.context() as patch:
        calls: list[torch.nn.Module] = []
        patch.setattr(step, "build", lambda *args, **options: model)
        patch.setattr(step, "after_step", lambda name, sharded: calls.append)
        run = step.step_of("tensorwise", step.MODELS["debug"], None, args, tuple(batch))
    weight = model.layers[0].attention.wq.weight
    before = weight.detach().clone()
    for count in (1, 2):
        run()
        assert calls == [model] * count
        assert weight.grad is None
    assert not torch.equal(weight, before)


def test_the_blocks_of_the_document(documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two commands that the module's docstring names."""
    seconds = dict.fromkeys((BF16, *OURS, *TORCHAO), 0.01) | {"torchao tensorwise": 0.02}

    def measured(*args: object, **options: object) -> dict[str, dict[str, float]]:
        return {"debug": seconds, "small": seconds}

    monkeypatch.setattr(step, "measure", measured)
    monkeypatch.setattr(step, "run_on_ranks", lambda ranks, task, **options: [task()])
    meshes = ["dp=2", "tp=2", "dp=2,tp=2"]
    options = ["--mesh", *meshes, "--model", "debug", "small", "--write", "--assert"]
    assert step.main([*options, "2"]) == 0
    assert step.main([*options, "2.1"]) == 1
    assert step.main(["--compile", "--write"]) == 0
    names = [f"step {model} {mesh}" for model in ("debug", "small") for mesh in meshes]
    for name in [*names, "step debug none compiled"]:
        block = read_block(documents / "benchmarks.md", name)
        assert step.step_table(seconds) in block, name


def test_the_table() -> None:
    seconds = {BF16: 0.01, "tensorwise": 0.02, "rowwise_folded": 0.03}
    assert "torchao" not in step.step_table(seconds)  # it is not installed
    seconds |= {"torchao tensorwise": 0.05, "torchao rowwise": 0.015}
    assert_expected_inline(
        step.step_table(seconds),
        """\
| candidate          |   ms | x bf16 | faster than torchao |
| ------------------ | ---: | -----: | ------------------: |
| bf16               | 10.0 |  1.00x |               5.00x |
| tensorwise         | 20.0 |  2.00x |               2.50x |
| rowwise_folded     | 30.0 |  3.00x |               0.50x |
| torchao tensorwise | 50.0 |  5.00x |                     |
| torchao rowwise    | 15.0 |  1.50x |                     |""",
    )


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["none", "dp=2", "tp=2", "dp=2,tp=4"]
    args = step.parse(["--mesh", *words])
    assert [(*mesh.values(),) for mesh in args.mesh] == [(1, 1), (2, 1), (1, 2), (2, 4)]
    assert list(map(step.mesh_text, args.mesh)) == words
    wrong = {
        "'pp=2' is not dp=SIZE or tp=SIZE": ["--mesh", "pp=2"],
        "--compile is for --mesh none": ["--mesh", "tp=2", "--compile"],
    }
    for message, options in wrong.items():
        with pytest.raises(SystemExit) as info:
            step.main(options)
        assert info.value.code == 2
        assert message in capsys.readouterr().err
