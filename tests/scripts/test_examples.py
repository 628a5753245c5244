"""All examples run with the command in their docstring, and learn; so do those in README.md."""

import argparse
import inspect
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from forking_torchrun import accelerate_launch, launch, launch_in
from processes import ending_all
from transformers import LlamaForCausalLM

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
# The float8 gathers of a step, (messages, bytes) by axis and dtype.
GATHERED = {
    "fsdp2": {("dp", "float8_e4m3fn"): (4, 786_432)},
    "experts": {
        ("dp", "float8_e4m3fn"): (4, 786_432),
        ("world", "float8_e4m3fn"): (4, 196_608),
    },
    "accelerate_fsdp2": {("world", "float8_e4m3fn"): (4, 655_360)},
    # Over tp, per block: the inputs of attention and feed-forward, and two output gradients.
    "fsdp2_tensor_parallel": {
        ("dp", "float8_e4m3fn"): (4, 393_216),
        ("tp", "float8_e4m3fn"): (4, 262_144),
        ("tp", "float8_e5m2"): (4, 262_144),
    },
}

PAGES = {
    "fsdp2_tensor_parallel": "tensor_parallel",
    "accelerate_fsdp2": "transformers",
}
# Examples whose pages show the table of the last step.
SHOWN = ("fsdp2", "fsdp2_tensor_parallel")
README = (ROOT / "README.md").read_text()
FSDP2, TENSOR_PARALLEL = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
MESH, SMALLER = 'init_device_mesh("cuda", (4, 2)', 'init_device_mesh("cpu", (2, 2)'

# The code that the README leaves to the reader.
YOURS = """
import torch
import torch.nn.functional as F
from scripts.common.llama import Llama, LlamaConfig

torch.manual_seed(0)
model = Llama(LlamaConfig(64, 2, 4, 2, 96, vocab_size=64, max_seq_len=32))
tokens = torch.randint(0, 64, (4, 33))
batches = [(tokens[:, :-1], tokens[:, 1:])] * 20
losses = []

def loss_of(logits, targets):
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    losses.append(loss.item())
    return loss
"""
# Another step, with collectives counted as in the README.
COUNTED = """
import fp8_dist
with fp8_dist.debug.comm_audit() as audit:
    loss_of(model(inputs), targets).backward()
    optimizer.step()
dtypes = (torch.float8_e4m3fn, torch.float8_e5m2)
gathers = [audit.count("all_gather", dtype=dtype) for dtype in dtypes]
sums = {axis: audit.count("all_to_all", axis, dtypes[0]) for axis in ("world", "dp", "tp")}
sums = {axis: count for axis, count in sums.items() if count}
scales = audit.count("all_reduce", dtype=torch.int32)
if torch.distributed.get_rank() == 0:
    print("RESULT", losses[0] > losses[-1] + 0.5, gathers, scales, sums)
torch.distributed.destroy_process_group()
"""


class Launcher:
    """A process that has imported the libraries of the examples, and forks their ranks."""

    def __init__(self, pool: ProcessPoolExecutor, environment: dict[str, str]) -> None:
        with patch.dict(os.environ, environment, OMP_NUM_THREADS="1"):
            pool.submit(import_libraries).result(timeout=120)  # starts the process
        self.pool = pool

    def __call__(
        self, folder: Path, *words: str, run: Callable[..., None] = launch, **variables: str
    ) -> tuple[bool, str, str]:
        done = self.pool.submit(launch_in, folder, variables, run, *words)
        return done.result(timeout=300)


def import_libraries() -> None:
    torch.set_num_threads(1)
    models = (f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "qwen3_moe"))
    for name in ("accelerate", "trainer_runs", *models):
        import_module(name)


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool, ending_all() as environment:
        yield Launcher(pool, environment)


def output_of(launcher: Launcher, name: str, folder: Path) -> str:
    """Run the command in an example's docstring in a folder, and return its output."""
    text = (EXAMPLES / f"{name}.py").read_text().replace("\\\n", "")
    pattern = r"^(torchrun|accelerate launch) (--\S+) (\S+) +(scripts/examples/\w+\.py)$"
    found = re.search(pattern, text, re.M)
    assert found, "the docstring names no command"
    option, value, program = found[2], found[3], str(ROOT / found[4])
    run = launch if found[1] == "torchrun" else accelerate_launch
    value = value if found[1] == "torchrun" else str(ROOT / value)
    good, out, err = launcher(folder, option, value, program, run=run)
    assert good, err
    return out


def check_learns(printed: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 10
    assert losses[0] > 5.4  # ln 256 = 5.5
    assert sum(losses[-3:]) / 3 < 3.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="takes GPUs, of which there may be too few")
@pytest.mark.parametrize("name", GATHERED)
def test_it_learns(launcher: Launcher, name: str, tmp_path: Path) -> None:
    printed = output_of(launcher, name, tmp_path)
    check_learns(printed)
    rows = re.findall(r"^all_gather +(\w+) +(float8\w+) +(\d+) +\S+ +(\S+)$", printed, re.M)
    gathered = {(axis, dtype): (int(n), int(b.replace(",", ""))) for axis, dtype, n, b in rows}
    assert gathered == GATHERED[name]
    table = printed.partition("Communication of the last step:\n")[2]
    page = (ROOT / "docs" / f"{PAGES.get(name, name)}.md").read_text()
    assert f"scripts/examples/{name}.py" in page
    if name in SHOWN:
        assert table
        assert table in page
    if name == "accelerate_fsdp2":
        check_saved(tmp_path / "runs/accelerate")


@pytest.mark.skipif(torch.cuda.is_available(), reason="takes GPUs, of which there may be too few")
def test_the_engine_has_the_logits_of_the_trainer(launcher: Launcher, tmp_path: Path) -> None:
    printed = output_of(launcher, "weight_sync", tmp_path)
    check_learns(printed)
    synced = re.findall("^.* bytes sent; .*$", printed, re.M)
    # 393,216 weights, 96 bytes of scales, and fp32 embedding, head, norms and biases.
    assert synced == ["663,136 bytes sent; 65,536 logits equal: True"] * 2
    page = (ROOT / "docs/serving.md").read_text()
    assert synced[0] in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about CPUs")
@pytest.mark.parametrize("cpu", ["true", "false"])
def test_accelerate_on_cpus(launcher: Launcher, cpu: str, tmp_path: Path) -> None:
    """Run the second command in the docstring. (Without its variable ranks would train alone.)"""
    text = (EXAMPLES / "accelerate_fsdp2.py").read_text()
    found = re.search(r"^ACCELERATE_USE_CPU=true torchrun (.*) (scripts/\S+)$", text, re.MULTILINE)
    assert found
    *options, program = *found[1].split(), str(ROOT / found[2])
    good, out, err = launcher(tmp_path, *options, program, ACCELERATE_USE_CPU=cpu)
    if cpu == "true":
        assert good, err
        assert len(re.findall("loss", out)) == 10
        check_saved(tmp_path / "runs/accelerate")
    else:
        assert not good
        assert "2 processes were started, but accelerate uses 1: each would train a" in err


def test_the_readme(launcher: Launcher, tmp_path: Path) -> None:
    def result(code: str, ranks: int) -> str:
        """The output of rank 0 for a program."""
        program = tmp_path / f"on_{ranks}.py"
        program.write_text(f"{YOURS}\n{code}\n{COUNTED}")
        good, out, err = launcher(tmp_path, "--nproc-per-node", str(ranks), str(program))
        assert good, err
        (line,) = re.findall("^RESULT (.*)$", out, re.MULTILINE)
        return line

    assert README.index(FSDP2) < README.index("## ")
    # Two blocks are gathered in forward and in backward. One all-reduce updates all scales. The
    # gradients of the blocks and of the rest are summed.
    assert result(FSDP2, 2) == "True [4, 0] 1 {'world': 3}"
    assert MESH in TENSOR_PARALLEL
    loop = FSDP2[FSDP2.index("for inputs, ") :]
    # Per block: weights twice and two inputs in e4m3, two output gradients in e5m2.
    found = result(TENSOR_PARALLEL.replace(MESH, SMALLER) + loop, 4)
    assert re.sub(r"\] \d+ ", "] ", found) == "True [8, 4] {'dp': 3, 'tp': 8}"


def check_saved(folder: Path) -> None:
    """Check that plain transformers loads a checkpoint, and that its model has learnt."""
    model = LlamaForCausalLM.from_pretrained(folder)
    text = inspect.getsource(argparse).encode()[40_000:40_512]
    ids = torch.tensor(list(text)).view(8, 64)
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss < 3.5


def test_examples_are_short_and_all_are_tested() -> None:
    stand_ins = ("__init__", "own_engine", "own_model")
    paths = [path for path in EXAMPLES.glob("*.py") if path.stem not in stand_ins]
    others = {"transformers_trainer", "weight_sync"}
    assert {path.stem for path in paths} - others == set(GATHERED)
    assert all(len(path.read_text().splitlines()) <= 80 for path in paths)
