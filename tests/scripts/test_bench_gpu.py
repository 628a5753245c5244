"""scripts/bench/gpu.py without a GPU: its tables, its page, what it runs; scripts/gpu_day.sh."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from ranks import RankPools

from scripts.bench import gpu
from scripts.bench.gpu import Result, Variant, Work
from scripts.common.blocks import read_block
from scripts.common.llama import MODELS

ROOT = Path(__file__).resolve().parents[2]
EAGER: list[Variant] = [("bf16", False), ("tensorwise", False), ("delayed", False)]


def call(work: Work) -> float:
    """In place of a GPU's events."""
    begin = time.perf_counter()
    work.before()
    work.run()
    return time.perf_counter() - begin


def result(name: str, compiled: bool, seconds: float) -> Result:
    return Result(name, compiled, seconds, 1e12, 8192, 2 * 10**9)


def test_blocks_of_every_candidate() -> None:
    make = partial(gpu.block_work, MODELS["debug"], 32, "cpu")
    eager = gpu.variants([False])
    found = gpu.compare(make, eager, time.monotonic() + 600, 1, call)
    assert [(r.name, r.compiled) for r in found] == eager
    assert {r.tokens for r in found} == {32}
    assert len({r.flops for r in found}) == 1


def test_a_block_computes_gradients_of_new_weights() -> None:
    work = gpu.block_work(MODELS["debug"], 32, "cpu", ("tensorwise", False))
    sizes = MODELS["debug"]
    d, kv, ffn = sizes.dim, sizes.n_kv_heads * sizes.head_dim, sizes.ffn_dim
    assert work.flops == 6 * 32 * (2 * d * d + 2 * d * kv + 3 * d * ffn)
    call(work)
    call(work)


def test_late_candidates_are_left_out() -> None:
    make = partial(gpu.block_work, MODELS["debug"], 32, "cpu")
    found = gpu.compare(make, EAGER, time.monotonic(), 1, call)
    assert [r.name for r in found] == ["bf16"]
    assert gpu.left_out(found).startswith("Left out for lack of time: tensorwise;")
    assert gpu.left_out([result(*variant, 1.0) for variant in gpu.variants()]) == ""


def steps() -> list[Result]:
    make = partial(gpu.step_work, MODELS["debug"], 16, "cpu")
    return gpu.compare(make, EAGER, time.monotonic() + 600, 1, call)


def test_steps_on_ranks(ranks: RankPools) -> None:
    first, second = ranks(2).run(steps)
    assert first == second  # the slowest rank's, on both
    assert [r.name for r in first] == ["bf16", "tensorwise", "delayed"]
    assert all(r.tokens == 32 and r.seconds > 0 for r in first)


def test_layers() -> None:
    shapes = gpu.layer_shapes()
    assert shapes["8b w1, w3"] == (8192, 4096, 14336)
    assert shapes["70b w2"] == (8192, 28672, 8192)
    assert len(shapes) == len(set(shapes.values())) == 8


def test_the_page(documents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine with one GPU writes."""
    measured = [result("bf16", False, 0.02), result("tensorwise", False, 0.025)]
    measured += [result("bf16", True, 0.018), result("tensorwise", True, 0.01)]
    monkeypatch.setattr(
        gpu,
        "variants",
        lambda kinds=(False, True): [(r.name, r.compiled) for r in measured if r.compiled in kinds],
    )
    monkeypatch.setattr(
        gpu, "layer_shapes", lambda: {"8b w2": (64, 32, 16), "8b w1, w3": (64, 16, 32)}
    )

    def compare(
        make: object, candidates: list[Variant], *args: object, **options: object
    ) -> list[Result]:
        return [r for r in measured if (r.name, r.compiled) in candidates]

    monkeypatch.setattr(gpu, "compare", compare)
    monkeypatch.setattr(
        gpu, "run_on_ranks", lambda *args, device: [[gpu.astuple(r) for r in measured[:2]]]
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert gpu.main(["--write", "--device", "cuda"]) == 0
    made, date, *parts = read_block(documents / "gpu.md", "gpu measured").split("\n\n")
    assert made.startswith(
        "`python -m scripts.bench.gpu --write --device cuda` on NVIDIA X, torch "
    )
    assert date == f"Measured on {gpu.datetime.date.today().isoformat()}."
    assert_expected_inline(
        "\n\n".join(parts),
        """\
**Layers.** TFLOP/s of forward and backward, 8b w2: 64 x 32 x 16; 8b w1, w3: 64 x 16 x 32 (rows x in_features x out_features).

| candidate            | 8b w2 | x bf16 | 8b w1, w3 | x bf16 |
| -------------------- | ----: | -----: | --------: | -----: |
| bf16                 |    50 |   1.00 |        50 |   1.00 |
| tensorwise           |    40 |   0.80 |        40 |   0.80 |
| bf16, compiled       |       |        |        56 |   1.11 |
| tensorwise, compiled |       |        |       100 |   2.00 |

**Block.** One block of Llama 8B, forward and backward, 8192 tokens.

| candidate            |    ms | x bf16's speed | x bf16 compiled | tokens/s | TFLOP/s | peak GB |
| -------------------- | ----: | -------------: | --------------: | -------: | ------: | ------: |
| bf16                 | 20.00 |           1.00 |            0.90 |  409,600 |      50 |    2.00 |
| tensorwise           | 25.00 |           0.80 |            0.72 |  327,680 |      40 |    2.00 |
| bf16, compiled       | 18.00 |           1.11 |            1.00 |  455,111 |      56 |    2.00 |
| tensorwise, compiled | 10.00 |           2.00 |            1.80 |  819,200 |     100 |    2.00 |

**Step.** Training step, two blocks with embedding and head, FSDP2 on 1 GPU, where it gathers nothing.

Left out for lack of time: bf16, compiled; tensorwise, compiled.

| candidate  |    ms | x bf16's speed | tokens/s | TFLOP/s | peak GB |
| ---------- | ----: | -------------: | -------: | ------: | ------: |
| bf16       | 20.00 |           1.00 |  409,600 |      50 |    2.00 |
| tensorwise | 25.00 |           0.80 |  327,680 |      40 |    2.00 |""",
    )


def test_there_must_be_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as info:
        gpu.main(["--write"])
    assert info.value.code == 2
    assert "there is no CUDA device" in capsys.readouterr().err


def test_the_command_refuses_without_a_gpu() -> None:
    environment = os.environ | {"PY": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", str(ROOT / "scripts/gpu_day.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "finds no CUDA device: install torch for CUDA" in done.stderr
    assert done.stdout == ""
