"""Stages that check facts, bits and bytes on all ranks."""

import hashlib
import shutil
import socket
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.collect_env import get_pretty_env_info

from fp8_dist.debug import record
from fp8_dist.debug.replay.findings import Replay
from fp8_dist.debug.replay.printing import line_of
from fp8_dist.recipe_names import ExpertsRecipe
from scripts.bench.step_run import parts_of_step
from scripts.common.candidates import gathers_float8
from scripts.common.models import build, device_mesh, multiply_in_fp32
from scripts.common.options import mesh_text
from scripts.common.recipes import BF16, OURS, PACKED
from scripts.common.report import machine
from scripts.common.sizes import LlamaConfig, Mixture
from scripts.plan.run import run_all
from scripts.plan.step import Collectives, Plan, Step, make_mesh, run_step
from scripts.prove.results import Case, Worker
from scripts.prove.runner import Place
from scripts.train.options import make_parser, parse_options
from scripts.train.train_run import Trainer

# Eight ranks can share any dim, and cut the blocks of all recipes.
SIZES = LlamaConfig(256, 1, 8, 8, 512, vocab_size=256, max_seq_len=64)
EXPERTS = replace(SIZES, mixture=Mixture(8, 2, 256))
BLOCKS, STEPS = {"cuda": 2, "cpu": 1}, {"cuda": 5, "cpu": 3}  # of models that check operands
SUMS = {"tensorwise": "float8", "rowwise_folded": "bf16", BF16: "fp32"}  # transports by recipe
# Seconds of a case of each kind, at most; tests/support/rehearse_proof.py compares them.
SECONDS = {"sum": 20.0, "compiled": 30.0, "eager": 10.0}
OPTIONS = "--seq-len 32 --steps 2 --lr 1e-2 --warmup 0"
Axes = dict[str, int]


def facts(worker: Worker, place: Place) -> None:
    """Note each rank's host and device, and rank 0's software and topology."""

    def measure() -> dict[str, Any]:
        values = {"host": socket.gethostname(), "ranks": place.ranks, "per node": place.per_node}
        if worker.rank == 0:
            tool = shutil.which("nvidia-smi")
            topology = subprocess.getoutput(f"{tool} topo -m") if tool else ""
            values |= {"environment": get_pretty_env_info(), "topology": topology}
        return {"values": values, "note": machine(place.device.type, torch.get_num_threads())}

    worker.run([Case("facts", measure)])


# Bits


def meshes(ranks: int) -> dict[str, Axes]:
    """The meshes of a number of ranks, by name: sizes of their axes."""
    found = {f"FSDP2 {ranks}": {"dp": ranks, "tp": 1}}
    if ranks in (2, 4, 8):
        found[f"TP {ranks}"] = {"dp": 1, "tp": ranks}
    if ranks % 2 == 0:
        half = ranks // 2
        found[f"FSDP2 {half} x EP 2"] = {"dp": half, "ep": 2, "tp": 1}
        if half > 1:
            found[f"HSDP 2 x {half}"] = {"replicate": 2, "shard": half, "tp": 1}
            found[f"FSDP2 {half} x TP 2"] = {"dp": half, "tp": 2}
    return found


def bits(worker: Worker, place: Place) -> None:
    """Check one sum on any number of ranks, and operands on each mesh, compiled and eager."""
    worker.run(case for cases in cases_of_bits(place).values() for case in cases)


def cases_of_bits(place: Place) -> dict[str, list[Case]]:
    """The cases by kind. The kinds with the fewest cases come first, in case the time is short."""
    eager, compiled = operand_cases(place)
    return {"sum": [*sum_cases(place)], "compiled": compiled, "eager": eager}


def seconds_of_bits(place: Place) -> float:
    """The time for the cases, from the time of one of each kind."""
    return sum(SECONDS[kind] * len(cases) for kind, cases in cases_of_bits(place).items())


def operand_cases(place: Place) -> tuple[list[Case], list[Case]]:
    """Eager cases for each mesh and recipe, and compiled ones on the last mesh without experts.

    On CPUs, where they would take minutes, one recipe is compiled, and one mesh gathers four bits.
    """
    recipes = [name for name in (*OURS, *PACKED) if gathers_float8(name.partition("+")[0])]
    eager, compiled = [], []
    for name, axes in meshes(place.ranks).items():
        known = get_args(ExpertsRecipe) if "ep" in axes else OURS
        chosen = [recipe for recipe in recipes if recipe.partition("+")[0] in known]
        if eager and place.device.type == "cpu":
            chosen = [recipe for recipe in chosen if recipe not in PACKED]
        for recipe in chosen:
            eager.append(Case(f"{name}, {recipe}", partial(operands, recipe, axes, False, place)))
        if "ep" not in axes:
            few = chosen if place.device.type == "cuda" else chosen[:1]
            of = [(f"{name}, {r}, compiled", partial(operands, r, axes, True, place)) for r in few]
            compiled = [Case(*each) for each in of]
    return eager, compiled


def operands(recipe: str, axes: Axes, compiled: bool, place: Place) -> dict[str, Any]:
    """Train for some steps; compare operands with one device's casts, and weights between ranks.

    Recorded steps, the first and the last one (on CPUs only that), run in eager mode. Compiled code
    must give the weights of eager code.
    """
    if compiled:
        digests, _, wrong = trained(recipe, axes, "aot_eager", place, set())
        expected, *_ = trained(recipe, axes, False, place, set())
        if not wrong and digests != expected:
            wrong = f"compiled steps end with weights {digests}, eager ones with {expected}"
        return {"wrong": wrong}
    last = STEPS[place.device.type] - 1
    recorded = {last} if place.device.type == "cpu" else {0, last}
    _, casts, wrong = trained(recipe, axes, False, place, recorded)
    values: dict[str, float] = {"casts": casts}
    if place.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        values["GB besides torch's"] = (total - free - torch.cuda.memory_reserved()) / 1e9
    return {"wrong": wrong, "values": values}


def trained(
    recipe: str, axes: Axes, backend: str | bool, place: Place, recorded: set[int]
) -> tuple[list[str], int, str]:
    """Train; return the ranks' digests, the number of recorded casts, and what is wrong."""
    device = place.device
    mesh = device_mesh(device.type, (*axes.values(),), mesh_dim_names=(*axes,))
    sizes = replace(EXPERTS if "ep" in axes else SIZES, n_layers=BLOCKS[device.type])
    model = build(recipe, sizes, mesh, device, shard=True, compiled=backend)
    if device.type == "cpu":
        multiply_in_fp32(model)
    batch = torch.Generator().manual_seed(dist.get_rank() // axes["tp"])
    tokens = torch.randint(sizes.vocab_size, (2, 1, sizes.max_seq_len), generator=batch)
    first, second = tokens.to(device)
    step, update = parts_of_step(recipe, model, (first, second), sharded=True)
    wrong, compared = "", 0
    for number in range(STEPS[device.type]):
        if number in recorded:
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # which say where the recording is
                with record(model, folder, layers="*") as recorder:
                    step()
                casts, found = replayed(recorder.write())
            wrong, compared = wrong or found, compared + casts
        else:
            step()
        update()
    digests = everyone(digest(model))
    if len({*digests}) > 1:
        wrong = wrong or f"after {number + 1} steps weights differ between ranks: {digests}"
    return digests, compared, wrong


def replayed(folder: Path) -> tuple[int, str]:
    """Replay some of the layers; return the number of all ranks' casts, and what is wrong."""
    (mine,) = folder.parent.glob(f"{folder.name}*/rank*.pt")  # others write elsewhere
    files = everyone((mine.name, mine.read_bytes()))
    with tempfile.TemporaryDirectory() as whole:
        for name, content in files:
            Path(whole, name).write_bytes(content)
        replay = Replay(Path(whole), (dist.get_rank(), dist.get_world_size()))
    wrong = [line_of(finding).strip() for finding in replay.findings if finding.is_wrong]
    found = everyone((replay.checked, wrong))
    checked = sum((counts for counts, _ in found), Counter[str]())
    right = sum(n for text, n in checked.items() if text.startswith("casts equal"))
    unlike = {text: n for text, n in checked.items() if " equal" not in text}
    if first := next((text for _, texts in found for text in texts), ""):
        return right, first
    return right, "" if right and not unlike else f"{right} casts were compared, {unlike}"


def everyone(value: Any) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def digest(model: nn.Module) -> str:
    """The beginning of a SHA-256 of all weights."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        weight = parameter.detach()
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        hashed.update(whole.cpu().contiguous().view(torch.uint8).numpy())
    return hashed.hexdigest()[:16]


def sum_cases(place: Place) -> Iterator[Case]:
    """Cases for sums that have the same bits on all ranks of a node as on some of them."""
    sizes = [n for n in range(1, place.per_node + 1) if place.per_node % n == 0]
    for recipe, transport in SUMS.items() if len(sizes) > 1 else ():
        name = f"one sum on {', '.join(map(str, sizes))} ranks, {recipe}, {transport}"
        yield Case(name, partial(one_sum, recipe, transport, sizes, place))


def one_sum(recipe: str, transport: str, sizes: list[int], place: Place) -> dict[str, Any]:
    """Train on the same micro-batches with different numbers of ranks; compare the weights."""
    found, count = {}, str(place.per_node)
    for size in sizes:
        words = ["--recipe", recipe, "--gradient-transport", transport, *OPTIONS.split()]
        words += ["--micro-batches", count, "--batch-size", count]
        args = parse_options(make_parser("scripts.prove", None), words, size)
        shape = (place.ranks // size, size, 1)
        mesh = device_mesh(place.device.type, shape, mesh_dim_names=("others", "dp", "tp"))
        trainer = Trainer(args, mesh["dp", "tp"], place.device)
        for step in range(1, args.steps + 1):
            trainer.step(step)
        found[size] = sorted({*everyone(digest(trainer.model))})
    wrong = "" if len({*map(tuple, found.values())}) == 1 else f"digests by ranks: {found}"
    return {"wrong": wrong, "values": {"digest": found[sizes[0]][0]}}


# Bytes


def plans(ranks: int, per_node: int) -> list[Plan]:
    """Steps whose bytes are counted. A single node is counted as two, if its ranks are even."""
    nodes = per_node if per_node < ranks else max(per_node // 2, 1)
    meshes = [{"dp": ranks, "tp": 1}]
    if ranks % 2 == 0:
        meshes.append({"dp": ranks // 2, "tp": 2})
    found = []
    for axes in meshes:
        for recipe in (BF16, "tensorwise", "rowwise_folded"):
            plan = Plan(SIZES, axes, 1, SIZES.max_seq_len, recipe, gpus_per_node=nodes)
            found.append(plan)
        wire = "float8" if axes["dp"] > 1 else None
        found.append(replace(found[-2], gradient_transport=wire, reduce_transport="float8"))
    return found


def bytes_of_steps(worker: Worker, place: Place) -> None:
    """Compare the collectives of steps with the plan's prediction, exactly."""
    steps = plans(place.ranks, place.per_node)
    predicted = run_all(steps) if worker.rank == 0 else [None] * len(steps)
    worker.run(
        Case(f"{plan.name}, {mesh_text(plan.axes)}", partial(counted, plan, step, place))
        for plan, step in zip(steps, predicted, strict=True)
    )


def counted(plan: Plan, predicted: Any, place: Place) -> dict[str, Any]:
    """Run a step, and compare the collectives of each rank with the predicted ones on rank 0."""
    mesh = make_mesh(plan, place.device.type)
    found = everyone(run_step(plan, mesh, fake_tensors=False).collectives)
    if dist.get_rank():
        return {}
    expected = predicted.collectives if isinstance(predicted, Step) else []
    differ = [
        f"rank {rank}: {described(a)} instead of {described(b)}"
        for rank, mine in enumerate(found)
        for a, b in zip_longest(mine, expected)
        if a != b
    ]
    sent = {n: sum(getattr(r, n) for r in found[0]) for n in ("within", "between", "count")}
    return {"wrong": "; ".join(differ[:1]), "values": sent}


def described(of: Collectives | None) -> str:
    """Collectives in words."""
    if of is None:
        return "nothing"
    sent = f"{of.bytes} bytes ({of.within} within nodes, {of.between} between them)"
    return f"{of.count} {of.op} over {of.axis} of {of.dtype}, {sent}, in {of.phase}"
