"""Every example runs under torchrun as its docstring says, and learns."""

import argparse
import inspect
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from forking_torchrun import launch_in
from processes import ending_all, run
from transformers import LlamaForCausalLM

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
# What is gathered in float8 in a step: messages and bytes, by axis and dtype.
GATHERED = {
    "ddp": {},
    "fsdp2": {("dp", "float8_e4m3fn"): (4, 786_432)},
    "experts": {
        ("dp", "float8_e4m3fn"): (4, 786_432),
        ("world", "float8_e4m3fn"): (4, 196_608),
    },
    "transformers_fsdp2": {("dp", "float8_e4m3fn"): (4, 655_360)},
    "accelerate_fsdp2": {("world", "float8_e4m3fn"): (4, 655_360)},
    "lightning_fabric": {("data_parallel", "float8_e4m3fn"): (4, 786_432)},
    "lightning_trainer": {("data_parallel", "float8_e4m3fn"): (4, 786_432)},
    # Per block and axis: the input of attention and of the feed-forward, two output gradients.
    "tensor_parallel": {
        ("tp", "float8_e4m3fn"): (4, 262_144),
        ("tp", "float8_e5m2"): (4, 262_144),
    },
    "fsdp2_tensor_parallel": {
        ("dp", "float8_e4m3fn"): (4, 393_216),
        ("tp", "float8_e4m3fn"): (4, 262_144),
        ("tp", "float8_e5m2"): (4, 262_144),
    },
}

PAGES = {
    "ddp": "fsdp2",
    "fsdp2_tensor_parallel": "tensor_parallel",
    "transformers_fsdp2": "transformers",
    "accelerate_fsdp2": "transformers",
    "lightning_fabric": "lightning",
    "lightning_trainer": "lightning",
}
SAVED = {"transformers_fsdp2": "transformers_fsdp2", "accelerate_fsdp2": "accelerate"}
# Their pages show the table of the last step.
SHOWN = ("fsdp2", "tensor_parallel")


class Launcher:
    """A process that has imported what the examples need, and forks their ranks."""

    def __init__(self, pool: ProcessPoolExecutor, environment: dict[str, str]) -> None:
        with patch.dict(os.environ, environment, OMP_NUM_THREADS="1"):
            pool.submit(import_libraries).result(timeout=120)  # starts the process
        self.pool = pool

    def __call__(self, folder: Path, *words: str, **variables: str) -> tuple[bool, str, str]:
        done = self.pool.submit(launch_in, folder, variables, *words)
        return done.result(timeout=300)


def import_libraries() -> None:
    torch.set_num_threads(1)
    llama = "transformers.models.llama.modeling_llama"
    for name in ("accelerate", "lightning.pytorch.strategies", llama):
        import_module(name)


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool, ending_all() as environment:
        yield Launcher(pool, environment)


def output_of(launcher: Launcher, name: str, folder: Path) -> str:
    """What the command in an example's docstring prints, run in a folder."""
    text = (EXAMPLES / f"{name}.py").read_text().replace("\\\n", "")
    pattern = r"^(torchrun|accelerate launch) (--\S+) (\S+) +(scripts/examples/\w+\.py)$"
    found = re.search(pattern, text, re.M)
    assert found, "the docstring names no command"
    option, value, program = found[2], found[3], str(ROOT / found[4])
    if found[1] == "torchrun":
        good, out, err = launcher(folder, option, value, program)
        assert good, err
        return out
    on_gpus = str(ROOT / "tests/support/run_as_on_gpus.py")
    launch = ["-m", "accelerate.commands.launch", option, str(ROOT / value)]
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests/support")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, *launch, on_gpus, program]
    done = run(command, cwd=folder, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="takes GPUs, of which there may be too few")
@pytest.mark.parametrize("name", GATHERED)
def test_it_learns(launcher: Launcher, name: str, tmp_path: Path) -> None:
    printed = output_of(launcher, name, tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 20
    assert losses[0] > 5.4  # ln 256 = 5.5
    assert sum(losses[-5:]) / 5 < 2.8
    rows = re.findall(r"^all_gather +(\w+) +(float8\w+) +(\d+) +\S+ +(\S+)$", printed, re.M)
    gathered = {(axis, dtype): (int(n), int(b.replace(",", ""))) for axis, dtype, n, b in rows}
    assert gathered == GATHERED[name]
    table = printed.partition("Communication of the last step:\n")[2]
    page = (ROOT / "docs" / f"{PAGES.get(name, name)}.md").read_text()
    assert f"scripts/examples/{name}.py" in page
    if name in SHOWN:
        assert table
        assert table in page
    if name in SAVED:
        check_saved(tmp_path / "runs" / SAVED[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="takes GPUs, of which there may be too few")
def test_the_engine_has_the_logits_of_the_trainer(launcher: Launcher, tmp_path: Path) -> None:
    printed = output_of(launcher, "weight_sync", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 20
    assert losses[0] > 5.4
    assert sum(losses[-5:]) / 5 < 2.8
    synced = re.findall("^.* bytes sent; .*$", printed, re.M)
    # 393,216 weights, 96 bytes of scales, and fp32 embedding, head, norms and biases.
    assert synced == ["663,136 bytes sent; 65,536 logits equal: True"] * 2
    page = (ROOT / "docs/serving.md").read_text()
    assert synced[0] in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about CPUs")
@pytest.mark.parametrize("cpu", ["true", "false"])
def test_accelerate_on_cpus(launcher: Launcher, cpu: str, tmp_path: Path) -> None:
    """The second command in the docstring; without its variable each rank would train alone."""
    text = (EXAMPLES / "accelerate_fsdp2.py").read_text()
    found = re.search(r"^ACCELERATE_USE_CPU=true torchrun (.*) (scripts/\S+)$", text, re.MULTILINE)
    assert found
    *options, program = *found[1].split(), str(ROOT / found[2])
    good, out, err = launcher(tmp_path, *options, program, ACCELERATE_USE_CPU=cpu)
    if cpu == "true":
        assert good, err
        assert len(re.findall("loss", out)) == 20
        check_saved(tmp_path / "runs/accelerate")
    else:
        assert not good
        assert "2 processes were started, but accelerate uses 1: each would train a" in err


def check_saved(folder: Path) -> None:
    """Plain transformers loads a checkpoint, whose model has learnt."""
    model = LlamaForCausalLM.from_pretrained(folder)
    text = inspect.getsource(argparse).encode()[40_000:40_512]
    ids = torch.tensor(list(text)).view(8, 64)
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss < 3


def test_examples_are_short_and_all_are_tested() -> None:
    stand_ins = ("__init__", "own_engine", "own_model")
    paths = [path for path in EXAMPLES.glob("*.py") if path.stem not in stand_ins]
    others = {"transformers_trainer", "weight_sync"}
    assert {path.stem for path in paths} - others == set(GATHERED)
    assert all(len(path.read_text().splitlines()) <= 80 for path in paths)
