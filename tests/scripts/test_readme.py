"""The README's examples run as they stand, under torchrun; public names are what they claim to be."""

import inspect
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from ranks import RankPool
from torch.distributed.tensor import parallel

import fp8_dist
from fp8_dist import tensor_parallel
from scripts.common.candidates import TORCHAO
from scripts.plan.__main__ import parse_args
from scripts.plan.run import plans_of
from scripts.plan.step import PEER, Plan, make_mesh, run_step
from scripts.plan.world import fake_world

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FSDP2, TENSOR_PARALLEL = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHARDING = "for block in model.layers:\n    fully_shard(block)\nfully_shard(model)\n"

# What the README calls the reader's.
YOURS = """
import os
import torch.nn.functional as F
from scripts.common.llama import Llama, LlamaConfig

torch.manual_seed(0)
model = Llama(LlamaConfig(64, 2, 4, 2, 96, vocab_size=64, max_seq_len=32))
tokens = torch.randint(0, 64, (4, 33))
batches = [(tokens[:, :-1], tokens[:, 1:])] * 20
losses = []
device, ranks = "cpu", int(os.environ["WORLD_SIZE"])

def loss_of(logits, targets):
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    losses.append(loss.item())
    return loss
"""
# A step more, counted by what the README says about counting.
COUNTED = """
import fp8_dist
with fp8_dist.debug.comm_audit() as audit:
    loss_of(model(inputs), targets).backward()
    optimizer.step()
dtypes = (torch.float8_e4m3fn, torch.float8_e5m2)
gathers = [audit.count("all_gather", dtype=dtype) for dtype in dtypes]
scales = audit.count("all_reduce", dtype=torch.int32)
if torch.distributed.get_rank() == 0:
    print("RESULT", losses[0] > losses[-1] + 0.5, gathers, scales)
torch.distributed.destroy_process_group()
"""


def result(code: str, ranks: int, folder: Path) -> str:
    """What rank 0 prints about a program, which torchrun runs."""
    program = folder / "program.py"
    program.write_text(f"import torch\n{YOURS}\n{code}\n{COUNTED}")
    run = f"-m forking_torchrun --nproc-per-node {ranks}"
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests/support")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *run.split(), str(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = re.findall("^RESULT (.*)$", done.stdout, re.MULTILINE)
    return line


def test_the_example_begins_the_page_and_trains(tmp_path: Path) -> None:
    assert README.index(FSDP2) < README.index("## ")
    # Two blocks are gathered for the forward and again for the backward; one update of all scales.
    assert result(FSDP2, 2, tmp_path) == "True [4, 0] 1"


def test_with_tensor_parallelism(tmp_path: Path) -> None:
    assert SHARDING in FSDP2
    code = FSDP2.replace(SHARDING, TENSOR_PARALLEL)
    # Per block: the weights twice and two inputs (e4m3), two output gradients (e5m2).
    assert result(code, 4, tmp_path).startswith("True [8, 4] ")


def planned(commands: list[str]) -> list[list[tuple[str, ...]]]:
    """By command and plan: GB exchanged, and of memory. It takes the default group's place."""
    dist.destroy_process_group()
    with fake_world(8):
        return [
            [gigabytes(plan) for plan in plans_of(parse_args(command.split()))]
            for command in commands
        ]


def gigabytes(plan: Plan) -> tuple[str, ...]:
    """Of all blocks, by those of one and of two: each block adds the same."""
    sizes = []
    for blocks in (1, 2):
        part = replace(plan, model=replace(plan.model, n_layers=blocks))
        step = run_step(part, make_mesh(part), fake_tensors=True)
        exchanged = sum(row.bytes for row in step.collectives)
        sizes.append((exchanged, sum(step.memory.values())))
    totals = [
        one + (plan.model.n_layers - 1) * (two - one) for one, two in zip(*sizes, strict=True)
    ]
    return tuple(f"{total / 1e9:.1f}" for total in totals)


def test_the_table_has_the_figures_of_its_commands() -> None:
    commands = re.findall(r"^    python -m scripts\.plan (.*)$", README, re.MULTILINE)
    pool = RankPool(1)  # a process used for nothing else
    try:
        dp, dp_tp = pool.run(planned, commands, timeout=300)[0]
    finally:
        pool.close()
    table = re.findall(r"^\|[^|]+\| \d.*$", README, re.MULTILINE)
    bf16, torchao, ours, encoded = ([n.strip() for n in row.split("|")[2:6]] for row in table)
    peers = [torchao] if PEER in TORCHAO else []  # an extra, without which there is no such plan
    found = [[a, b, c, d] for (a, c), (b, d) in zip(dp, dp_tp, strict=True)]
    assert found == [ours, bf16, *peers, encoded]


def test_the_example_is_short() -> None:
    for example in (FSDP2, TENSOR_PARALLEL):
        lines = [line for line in example.splitlines() if line and "import" not in line]
        assert len(lines) <= 12


def test_the_readme_is_a_page() -> None:
    assert len(README.splitlines()) <= 100


def test_the_alias_of_torchao() -> None:
    ours = fp8_dist.precompute_float8_dynamic_scale
    assert fp8_dist.precompute_float8_dynamic_scale_for_fsdp is ours
    for name in fp8_dist.__all__:
        assert hasattr(fp8_dist, name)


def test_constructor_arguments_of_torch_are_taken() -> None:
    for ours, theirs in (
        (tensor_parallel.Float8ColwiseParallel, parallel.ColwiseParallel),
        (tensor_parallel.Float8RowwiseParallel, parallel.RowwiseParallel),
        (tensor_parallel.PrepareFloat8ModuleInput, parallel.PrepareModuleInput),
    ):
        known = inspect.signature(ours).parameters
        for name, parameter in inspect.signature(theirs).parameters.items():
            assert known[name].default == parameter.default
