"""The benchmarks of a day with a GPU, on a device that computes nothing."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench import gpu, gpu_train
from scripts.bench.gpu_results import Result, read
from scripts.common.candidates import OURS, TORCHAO

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = f"{ROOT}:{ROOT}/tests/support"
LAYER = "2048 x 4096 x 14336"


rehearses = pytest.mark.skipif(
    torch.version.cuda is not None, reason="a build of torch for CUDA looks for its driver"
)


def rehearsed(tmp_path: Path, *programs: str) -> list[Result]:
    """Run lines of Python, in which `words` are the options of a stage; return what it wrote."""
    results = tmp_path / "results.jsonl"
    words = ["--repeat", "2", "--results", str(results), "--begun", str(tmp_path / "begun")]
    code = "\n".join(["from scripts.bench import gpu, gpu_kernels, gpu_probe, gpu_train",
                      f"words = {words!r}", *programs])  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "fake_cuda.rehearsal", "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": IMPORTED},
        capture_output=True,
        text=True,
        check=False,
    )
    found = read(results) if results.exists() else []
    assert done.returncode == 0, done.stderr + done.stdout
    assert [line.name for line in found] == [*dict.fromkeys(line.name for line in found)]
    return found


def names(found: list[Result]) -> list[str]:
    return [line.name for line in found if not line.error]


@rehearses
def test_rates_and_a_trace(tmp_path: Path) -> None:
    trace = f"assert gpu_kernels.main(words + ['--trace', {str(tmp_path / 'traces')!r}]) == 0"
    *found, last = rehearsed(tmp_path, "assert gpu_probe.main(words) == 0", trace)
    assert (last.name, last.recipe) == ("trace", "tensorwise")
    assert (tmp_path / "traces/trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    versions, copy, *others = found
    assert versions.name == "versions"
    assert "fake CUDA device, 132 multiprocessors" in versions.note
    assert (copy.name, copy.bytes, copy.readings) == ("copy", 2**31, (1e-3, 1e-3))
    assert len(found) == 1 + 4 + 3 * 6
    shape = "8192 x 4096 x 14336"
    gemm = next(line for line in others if line.name == f"{shape}, float8 by rows")
    assert (gemm.shape, gemm.flops) == (shape, 2.0 * 8192 * 4096 * 14336)
    assert all(len(line.readings) == 2 for line in others)


FAILS = """
def fails(name, *args, layer_of={module}.layer_of):
    if name == "{recipe}":
        raise ValueError("no such layer")
    return layer_of(name, *args)
{module}.layer_of = fails
"""


@rehearses
def test_rates_of_kernels(tmp_path: Path) -> None:
    """A recipe that fails is a line; what has begun is not done again."""
    chosen = "['--recipes', 'tensorwise', 'rowwise', 'blockwise']"
    first = [
        FAILS.format(module="gpu_kernels", recipe="rowwise"),
        f"assert gpu_kernels.main(words + {chosen}) == 3",
    ]
    found = rehearsed(tmp_path, *first)
    kernels = names(found)
    assert (kernels[0], kernels[-1]) == ("copy, first", "copy, last")
    of_blocks = next(line for line in found if line.name.startswith("blockwise: _reblock"))
    assert of_blocks.bytes > 2**20
    assert re.match(r"BM=\d+ BN=\d+ warps=\d$", of_blocks.note)
    assert len(of_blocks.readings) == 2
    assert [line.name for line in found if line.error] == ["rowwise: launches"]

    # In another process the launches of a recipe are found again, if that went well.
    of = "tensorwise: "
    lines = [line.line() for line in found if line.name in (f"{of}launches", "rowwise: launches")]
    (tmp_path / "results.jsonl").write_text("".join(f"{line}\n" for line in lines))
    begun = [f"{of}launches", "rowwise: launches", "blockwise: launches", "copy, first"]
    begun.append(next(name for name in kernels if name.startswith(f"{of}_")))
    (tmp_path / "begun").write_text("".join(f"{name}\n" for name in begun))
    found = rehearsed(tmp_path, f"assert gpu_kernels.main(words + {chosen}) == 0")
    expected = [name for name in kernels if name.startswith(f"{of}_")][1:]
    assert names(found)[1:] == [*expected, "copy, last"]


@rehearses
def test_candidates_for_a_layer_take_turns(tmp_path: Path) -> None:
    """What failed is not tried again, in another process neither."""
    only = "['--rows', '2048', '--only', ', bf16', ', tensorwise', ', rowwise_folded,', '--turns']"
    first, second = (f"gpu.main(['layers', *words, *{only}, '{turns}'])" for turns in (1, 2))
    fails = FAILS.format(module="gpu", recipe="rowwise_folded")
    found = rehearsed(tmp_path, fails, f"assert {first} == 3")
    candidates = ["bf16", "bf16 compiled", "tensorwise", "tensorwise compiled"]
    again = "bf16, again"
    turn = [f"{LAYER}, {name}, turn 1" for name in [*candidates, again]]
    wall = [f"{LAYER}, {name}, wall" for name in candidates]
    assert names(found) == [*turn, *wall]
    (failed,) = (line for line in found if line.error)
    assert failed.name == f"{LAYER}, rowwise_folded, turn 1"
    assert (failed.recipe, failed.shape) == ("rowwise_folded", LAYER)
    assert "no such layer" in failed.error
    compiled = next(line for line in found if line.name == turn[3])
    assert (compiled.recipe, compiled.compiled, compiled.shape) == ("tensorwise", True, LAYER)
    assert (compiled.flops, len(compiled.readings)) == (6.0 * 2048 * 4096 * 14336, 2)

    later = rehearsed(tmp_path, f"assert {second} == 0")[len(found) :]
    assert names(later) == [name.replace("turn 1", "turn 2") for name in turn]


@rehearses
def test_blocks_and_experts(tmp_path: Path) -> None:
    small = "['--blocks', '1', '--tokens', '64', '--only', 'bf16,', 'tensorwise compiled']"
    found = rehearsed(
        tmp_path,
        "gpu.BLOCKS = (('bf16', False), ('tensorwise', True), ('no such', False))",
        f"assert gpu.main(['blocks', *words, *{small}]) == 0",
        "assert gpu.main(['experts', *words, '--only', '26 x']) == 0",
        "assert gpu.main(['nccl', *words]) == 3",
    )
    expected = [f"{name}, {part}" for name in ("bf16", "tensorwise compiled", "bf16, again")
                for part in ("step", "optimizer")]  # fmt: skip
    assert names(found)[: len(expected)] == expected
    step, optimizer = found[2:4]
    assert (step.tokens, step.compiled, step.shape) == (64, True, "1 blocks x 64 tokens")
    assert step.flops > 6.0 * 64 * 200e6
    assert step.note == "loss 1.0000 after 5 steps"
    assert optimizer.readings == step.readings == (1e-3, 1e-3)
    experts = [line for line in found if line.stage == "experts"]
    assert [line.recipe for line in experts[::5]] == ["bf16", "bf16"]
    assert all(len(line.readings) == 2 and line.tokens == 26 * 545 for line in experts)
    assert found[-1].name == "nccl, one rank"
    assert "NCCL" in found[-1].error  # which a build for CPUs has not


def test_a_group_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(*parts: Any) -> list[float]:
        begin = time.perf_counter()
        for part in parts:
            part()
        return [time.perf_counter() - begin]

    monkeypatch.setattr(gpu, "event_seconds", seconds)
    found = gpu.measured_alone(torch.device("cpu"), 2)
    assert len(found["readings"]) == 2
    assert found["note"].startswith("the mean of a sum of ones is 1, loss 5.")
    assert not torch.distributed.is_initialized()


def test_the_most_wanted_come_first() -> None:
    variants = gpu.layer_variants(gpu.ROWS)
    first = [(name, kind) for name in ("bf16", "tensorwise", "rowwise") for kind in (False, True)]
    assert variants[:6] == first
    assert variants[6:8] == [(name, True) for name in TORCHAO[:2]] or len(TORCHAO) < 2
    assert {name for name, _ in variants} == {"bf16", *OURS, *TORCHAO[:2]}
    assert len(set(variants)) == len(variants)
    assert {name for name, _ in gpu.layer_variants(2048)} < {name for name, _ in variants}
    assert gpu.BLOCKS[0] == gpu_train.RUNS[0] == ("bf16", False)


@rehearses
def test_trainings(tmp_path: Path) -> None:
    small = "['--model', 'debug', '--steps', '7', '--batch-size', '2', '--seq-len', '32']"
    found = rehearsed(
        tmp_path,
        "gpu_train.RUNS = (('bf16', False), ('no such', False))",
        f"assert gpu_train.main(words + {small}) == 3",
    )
    bf16, failed = found
    assert (bf16.name, bf16.tokens, len(bf16.readings)) == ("bf16", 64, 2)
    assert bf16.peak > 0
    assert " after 7 steps" in bf16.note
    assert failed.error.startswith("RuntimeError: exit status 2: 0 steps")


def test_a_training_that_was_stopped() -> None:
    rows = [{"loss": 1 / n, "tokens_per_second": 10.0 * n, "memory_bytes": n} for n in range(1, 10)]
    found = gpu_train.summary(rows, "stopped after 40 s: ", 360)
    assert found["note"].endswith("0.2500 after 4, 0.1667 after 6, 0.1111 after 9 steps")
    assert found["note"].startswith("stopped after 40 s: loss 0.5000 after 2")
    assert found["readings"] == (6.0, 360 / 70, 4.5, 4.0)
    assert found["peak"] == 9
