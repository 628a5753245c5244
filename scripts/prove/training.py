"""Stages that train the reference Llama on text: do losses in float8 differ from those in bf16?"""

import hashlib
from functools import partial
from statistics import fmean
from time import monotonic
from typing import Any

import torch

from scripts.common.corpus import Corpus, load_packages
from scripts.common.models import device_mesh
from scripts.common.recipes import BF16
from scripts.prove.checks import everyone
from scripts.prove.results import Case, Result, Worker, read
from scripts.prove.runner import Place
from scripts.train.options import make_parser, parse_options
from scripts.train.train_run import Trainer

# Options by type of device; of stages, also the rows of a batch (at least one per rank).
SIZES = {"cuda": "--model 124m --lr 6e-4", "cpu": "--model debug --lr 1e-2 --seq-len 64"}
LOSS = {"cuda": (64, "--seq-len 512 --steps 100 --warmup 10 --compile")}
LOSS["cpu"] = 8, "--steps 8 --warmup 2"
CURVE = {"cuda": (32, "--seq-len 1024 --warmup 200 --compile"), "cpu": (4, "--warmup 5")}
RUNS = {BF16: "", f"{BF16}, seed 1": "--seed 1", "tensorwise": "", "rowwise_folded": ""}
RUNS["tensorwise, float8 gradients"] = "--gradient-transport float8"
BOTH = BF16, "tensorwise"  # recipes of the curve
MOST_TEXT = {"cuda": 10**8, "cpu": 2**15}  # bytes, which are tokens
POINTS, CALIBRATED = 100, 10  # of a curve, about; steps, after as many that warm up


def trainer(recipe: str, words: str, of: dict[str, tuple[int, str]], place: Place) -> Trainer:
    """A training in the group of all ranks, under FSDP2."""
    (rows, options), device = of[place.device.type], place.device
    rows = place.ranks * max(1, rows // place.ranks)
    words = f"--recipe {recipe} --batch-size {rows} {SIZES[device.type]} {options} {words}"
    parser = make_parser("scripts.train.train", None)
    args = parse_options(parser, [*words.split(), "--out", "runs/prove/none"], place.ranks)
    mesh = device_mesh(device.type, (place.ranks, 1), mesh_dim_names=("dp", "tp"))
    return Trainer(args, mesh, device)


def trained(run: Trainer, steps: range) -> tuple[float, float]:
    """Train some steps; return their mean loss on all ranks, and the seconds of a step."""
    begin = monotonic()
    mean = run.whole_loss(torch.stack([run.step(step)[0] for step in steps]).mean(0))
    return mean, (monotonic() - begin) / len(steps)


def found(worker: Worker, run: Trainer, loss: float, **values: Any) -> dict[str, Any]:
    """Fields of a result: a loss, and its difference to bf16's in this stage, relative to that."""
    args, values = run.args, {"loss": loss} | values
    for known in (r for r in read(worker.results) if (r.stage, r.name) == (worker.stage, BF16)):
        if known.values and known.values.get("points") == values.get("points"):
            values["difference"] = loss / known.values["loss"] - 1
    rows = f"{args.batch_size} x {args.seq_len:,} tokens"
    return {"shape": f"{args.model}, {args.steps:,} steps of {rows}", "values": values}


def loss(worker: Worker, place: Place) -> None:
    """Compare the last losses of short runs. Another seed of bf16 shows their scatter."""
    worker.run(
        Case(
            name,
            partial(last_loss, worker, name.partition(",")[0], words, place),
            Result(recipe=name.removesuffix(", seed 1")),
        )
        for name, words in RUNS.items()
    )


def last_loss(worker: Worker, recipe: str, words: str, place: Place) -> dict[str, Any]:
    """Train; return the mean loss of the last tenth of the steps."""
    run = trainer(recipe, words, LOSS, place)
    last = 1 + run.args.steps * 9 // 10
    trained(run, range(1, last))
    return found(worker, run, trained(run, range(last, run.args.steps + 1))[0])


def curve(worker: Worker, place: Place) -> None:
    """Train longer, in bf16 and in float8 on the same tokens, and keep both curves of losses."""
    end, corpus = monotonic() + 0.9 * place.seconds, load_packages(MOST_TEXT[place.device.type])
    digest = hashlib.sha256(corpus.text).hexdigest()[:16]
    note = f"{len(corpus.text):,} bytes of {corpus.source}, SHA-256 {digest}"
    measures = {recipe: partial(losses, worker, recipe, corpus, place, end) for recipe in BOTH}
    worker.run(Case(r, measure, Result(recipe=r, note=note)) for r, measure in measures.items())


def losses(worker: Worker, recipe: str, corpus: Corpus, place: Place, end: float) -> dict[str, Any]:
    """Train as many steps as both recipes have time for, but not more than the corpus has text."""

    def start(recipe: str, steps: int) -> Trainer:
        run = trainer(recipe, f"--steps {steps}", CURVE, place)
        run.args.corpus = corpus
        return run

    known = [r.values["steps"] for r in read(worker.results) if r.stage == "curve" and r.values]
    if not min(everyone(known)):
        begin, seconds = monotonic(), 0.0
        for each in BOTH:
            run = start(each, 2 * CALIBRATED)
            trained(run, range(1, CALIBRATED + 1))
            seconds += max(everyone(trained(run, range(CALIBRATED + 1, 2 * CALIBRATED + 1))[1]))
        in_text = len(corpus.text) // (run.args.batch_size * run.args.seq_len)
        left = end - monotonic() - (monotonic() - begin)  # both must start and compile again
        known = [min(in_text, int(min(everyone(left)) / seconds))]
    every = max(1, known[0] // POINTS)
    run = start(recipe, steps := max(1, known[0] // every) * every)
    points, stop = [], end + 0.07 * place.seconds
    for first in range(1, steps + 1, every):
        if min(everyone(stop - monotonic())) > 0:
            points.append(trained(run, range(first, first + every)))
    means, readings = zip(*points, strict=True)
    values = {"steps": steps, "every": every, "points": len(points), "losses": means}
    tokens = run.args.batch_size * run.args.seq_len // place.ranks
    about = {"readings": readings, "tokens": tokens}
    return found(worker, run, fmean(means[-max(1, len(means) // 10) :]), **values) | about
