"""The operands of `scripts.measure.sqnr`, their products, and its tables and checks."""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path
from tqdm import tqdm

from fp8_dist import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingGranularity,
    dequantized,
    freeze_to_float8,
)
from fp8_dist.operand.cast import cast_to_float8
from scripts.common.candidates import config_of
from scripts.common.corpus import load_corpus
from scripts.common.llama import MODELS, Llama
from scripts.common.markdown import table
from scripts.common.metrics import sqnr
from scripts.common.recipes import OURS, PACKED
from scripts.common.report import Check, finish
from scripts.measure.sqnr import TOLERANCE
from scripts.train.train_run import MAX_GRAD_NORM, learning_rate_factor

GEMMS = ("output", "grad_input", "grad_weight")
MODEL, BATCH_SIZE, SEQ_LEN, LR, WARMUP = "debug", 8, 64, 1e-3, 40
WEIGHTS = torch.float32, torch.bfloat16, torch.float16  # dtypes of weights, not of codes
STEPS = [5, 300]  # the recorded steps; the last one ends the training
# A delayed scale comes from earlier steps, which a single record doesn't have.
RECIPES = [name for name in OURS if name != "delayed"]
# rowwise casts an operand twice, once per GEMM. ONE_COPY: recipes with one float8 copy for both.
TWO_CASTS, ONE_COPY = "rowwise", ("rowwise_folded", "blockwise", "mxfp8")
# The parts (rows or columns) of results whose worst 1 % counts: GEMM, and dim of the norm.
PARTS = {
    "tokens of output": ("output", 1),
    "columns of output": ("output", 0),
    "columns of grad_input": ("grad_input", 0),
    "rows of grad_weight": ("grad_weight", 1),
    "columns of grad_weight": ("grad_weight", 0),
}


class Operands(NamedTuple):
    """Operands of the three GEMMs of a linear layer, fp32: [M, K], [N, K] and [M, N]."""

    input: Tensor
    weight: Tensor
    grad_output: Tensor


class Place(NamedTuple):
    """The origin of recorded operands: the name of the linear layer, and the step, from 1."""

    linear: str
    step: int


Figures = dict[str, dict[str, float]]  # dB by config, and by GEMM or part


def configs() -> dict[str, Float8LinearConfig]:
    """The recipes, and variants of them, by name."""
    known = {name: config_of(name) for name in (*RECIPES, *PACKED)}
    rowwise, tensorwise, mxfp8 = known["rowwise"], known["tensorwise"], known["mxfp8"]
    e5m2_rows = CastConfig(
        scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e5m2
    )
    e4m3 = CastConfig(target_dtype=torch.float8_e4m3fn)
    one_scale = dataclasses.replace(tensorwise, cast_config_grad_output=e4m3)
    floor = {
        field: dataclasses.replace(getattr(mxfp8, field), scale_rule="floor")
        for field in ("cast_config_input", "cast_config_weight", "cast_config_grad_output")
    }
    return known | {
        "rowwise, exact scales": dataclasses.replace(rowwise, round_scales_to_power_of_2=False),
        "rowwise, e5m2 gradients": dataclasses.replace(rowwise, cast_config_grad_output=e5m2_rows),
        "tensorwise, e4m3 gradients": one_scale,
        "mxfp8, floor": dataclasses.replace(mxfp8, **floor),
        "mxfp8, weights in mxfp4 of 1 x 32": Float8LinearConfig.from_recipe_name(
            "mxfp8", weight_format="mxfp4", weight_block_size=(1, 32)
        ),
    }


def products(operands: Operands, config: Float8LinearConfig) -> dict[str, Tensor]:
    """The output and the gradients of a Float8Linear, in fp32, by GEMM."""
    n, k = operands.weight.shape
    linear = nn.Linear(k, n, bias=False)
    linear.weight = nn.Parameter(operands.weight)
    layer = Float8Linear.from_float(linear, config)
    x = operands.input.clone().requires_grad_()
    output = layer(x)
    output.backward(operands.grad_output)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return dict(zip(GEMMS, (output.detach(), x.grad, layer.weight.grad), strict=True))


def measure(operands: Operands) -> Figures:
    """The SQNR of the three GEMMs and of their `PARTS`, by config."""
    x, w, g = (tensor.double() for tensor in operands)
    exact = dict(zip(GEMMS, (x @ w.t(), g @ w, g.t() @ x), strict=True))
    figures = {}
    for name, config in configs().items():
        results = products(operands, config)
        figures[name] = {gemm: sqnr(exact[gemm], results[gemm]) for gemm in GEMMS}
        for part, (gemm, dim) in PARTS.items():
            figures[name][part] = sqnr_of_worst(exact[gemm], results[gemm], dim)
    return figures


def sqnr_of_worst(expected: Tensor, actual: Tensor, dim: int) -> float:
    """The mean SQNR of the worst 1 % (at least one) of rows (dim 1) or columns (dim 0).

    All-zero rows or columns have no SQNR, and are left out.
    """
    signal, noise = expected.norm(dim=dim), (expected - actual).norm(dim=dim)
    signal, noise = signal[signal > 0], noise[signal > 0]
    values = 20 * torch.log10(signal / noise.clamp(min=1e-300))
    return values.sort().values[: max(1, len(values) // 100)].mean().item()


def recorded_linears() -> list[str]:
    """The names of all linear layers in the first, the middle and the last block of the model."""
    layers = MODELS[MODEL].n_layers
    kinds = [f"attention.{name}" for name in ("wq", "wk", "wv", "wo")]
    kinds += [f"feed_forward.{name}" for name in ("w1", "w2", "w3")]
    return [f"layers.{i}.{kind}" for i in (0, layers // 2, layers - 1) for kind in kinds]


def record(steps: list[int], seed: int) -> dict[Place, Operands]:
    """Train the reference model, and record the operands of its linear layers at some steps.

    As in ``scripts.train.train``, parameters and AdamW are fp32, compute is bf16 (by autocast), and
    gradients are clipped. Recorded are the bf16 values of inputs and output gradients, and the fp32
    parameters, which a float8 layer would cast.

    Args:
        steps: the recorded steps, counted from 1; the last one ends the training and its schedule.
        seed: the seed of the weights and the data.
    """
    corpus = load_corpus(None, seq_len=SEQ_LEN)
    model = Llama(MODELS[MODEL], seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    last = max(steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, partial(learning_rate_factor, warmup=WARMUP, steps=last)
    )
    recorded: dict[Place, Operands] = {}
    for step in tqdm(range(1, last + 1), desc="training", unit="step"):
        tokens, targets = corpus.batch(seed=seed, step=step, batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
        hooks = _listen(model, step, recorded) if step in steps else []
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        for hook in hooks:
            hook.remove()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    # (The backward recorded them in reverse order.)
    places = (Place(name, step) for step in sorted(steps) for name in recorded_linears())
    return {place: recorded[place] for place in places}


def _listen(
    model: Llama, step: int, recorded: dict[Place, Operands]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Register hooks that fill ``recorded`` during the next forward and backward."""

    def matrix(tensor: Tensor) -> Tensor:
        return tensor.detach().to(torch.bfloat16).flatten(0, -2).float()

    def forward_hook(name: str, linear: nn.Linear, args: tuple[Tensor], output: Tensor) -> None:
        x, w = matrix(args[0]), linear.weight.detach().clone()

        def backward_hook(grad: Tensor) -> None:
            recorded[Place(name, step)] = Operands(x, w, matrix(grad))

        output.register_hook(backward_hook)

    return [
        model.get_submodule(name).register_forward_hook(partial(forward_hook, name))
        for name in recorded_linears()
    ]


def stress_cases(seed: int) -> dict[str, Operands]:
    """Normal operands, and operands with outliers or zeros as training may produce, by name."""
    m, k, n = 1024, 512, 768
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator)

    def lognormal(*size: int) -> Tensor:
        return torch.exp(2.5 * normal(*size))

    def operands(
        x: Tensor | float = 1.0, w: Tensor | float = 1.0, g: Tensor | float = 1.0
    ) -> Operands:
        return Operands(x * normal(m, k), 0.02 * w * normal(n, k), 1e-3 * g * normal(m, n))

    channels, rows, tokens = torch.ones(k), torch.ones(n, 1), lognormal(m, 1)
    channels[::37] = 30_000
    rows[::10] = 0
    return {
        "normal": operands(),
        "10 % of weight rows zero": operands(w=rows),
        "weight rows of lognormal(2.5) size": operands(w=lognormal(n, 1)),
        "3 % of input channels x 30,000": operands(x=channels),
        "output channels of lognormal(2.5) size": operands(g=lognormal(n)),
        "tokens of lognormal(2.5) size": operands(x=tokens, g=tokens),
    }


def matrices(path: Path) -> list[Tensor]:
    """The weights of a checkpoint file, in fp32, cropped to multiples of 128."""
    if path.suffix == ".safetensors":
        content = import_module("safetensors.torch").load_file(path)
    else:
        content = torch.load(path, map_location="cpu", weights_only=True)
    weights = []
    for key, leaf in tree_leaves_with_path(content):
        wanted = isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.dtype in WEIGHTS
        if wanted and not any(word in keystr(key).lower() for word in ("embed", "optim")):
            matrix = leaf.detach().flatten(1).float()
            rows, columns = (size - size % 128 for size in matrix.shape)
            weights.append(matrix[:rows, :columns].contiguous())
    if not (weights := [matrix for matrix in weights if matrix.any()]):
        raise SystemExit(f"{path} has no matrix of 128 x 128 or more")
    return weights


def weights_table(weights: Sequence[Tensor]) -> str:
    """The SQNR of casts of weights: a table with a line per format and rule, a column per size."""
    casts = {"e4m3": [config_of(recipe).cast_config_weight for recipe in ("mxfp8", "blockwise")]}
    for rule in ("ceil", "even", "floor"):
        change = partial(dataclasses.replace, format="mxfp4", scale_rule=rule)
        casts[f"mxfp4, {rule}"] = [*map(change, casts["e4m3"])]
    lines = []
    for name, pair in casts.items():
        values = ([sqnr(w, cast_to_float8(w, c).dequantize()) for w in weights] for c in pair)
        lines.append([name, *(f"{fmean(row):.2f} ({min(row):.2f})" for row in values)])
    return table(["weights in", "32 x 32 (mxfp8)", "128 x 128 (blockwise)"], lines)


def stored_table(recorded: Iterable[Operands]) -> str:
    """The SQNR of GEMMs of frozen weights in MXFP4 blocks of 1 x 32, against the stored values."""
    names = "mxfp8", "blockwise", "tensorwise", "bf16"
    ways = {name: Float8LinearConfig.from_recipe_name(name) for name in names}
    found: dict[str, list[list[float]]] = {name: [[], []] for name in ways}
    for (x, w, g), (name, config) in itertools.product(recorded, ways.items()):
        linear = nn.Linear(*w.shape[::-1], bias=False)
        linear.weight = nn.Parameter(w, requires_grad=False)
        layer = Float8Linear.from_float(linear, config)
        freeze_to_float8(layer, format="mxfp4", block_size=(1, 32))
        stored, x = dequantized(layer).double(), x.clone().requires_grad_()
        output = layer(x)
        output.backward(g)
        assert x.grad is not None
        pairs = (x.detach().double() @ stored.t(), output.detach()), (g.double() @ stored, x.grad)
        for figures, pair in zip(found[name], pairs, strict=True):
            figures.append(sqnr(*pair))
    cell = lambda row: f"{decibels(fmean(row))} ({decibels(min(row))})"  # noqa: E731
    return table(["GEMMs in", *GEMMS[:2]], [[n, *map(cell, rows)] for n, rows in found.items()])


def checks(by_place: Mapping[Place, Figures]) -> list[Check]:
    """The conditions of `--assert`, for the worst recorded layer and GEMM. A NaN fails them."""
    conditions = []
    for recipe in ONE_COPY:
        behind = [
            row[TWO_CASTS][gemm] - row[recipe][gemm] for row in by_place.values() for gemm in GEMMS
        ]
        worst = max(behind, key=lambda difference: (math.isnan(difference), difference))
        sentence = f"{recipe} behind {TWO_CASTS}: {worst:.4f} dB, at most {TOLERANCE:g}"
        conditions.append(Check(sentence, worst <= TOLERANCE))
    return conditions


def decibels(value: float) -> str:
    """A cell with one decimal. Above 100 dB, the format of the result limits the SQNR."""
    return f"{round(value, 1) + 0.0:.1f}" if value < 100 else "> 100"  # never -0.0


def recorded_table(by_place: Mapping[Place, Figures]) -> str:
    """A table of the mean and worst SQNR of each config and GEMM, over layers and steps."""
    lines = []
    for config in configs():
        values = ([row[config][gemm] for row in by_place.values()] for gemm in GEMMS)
        cells = (f"{decibels(fmean(row))} ({decibels(min(row))})" for row in values)
        lines.append([f"`{config}`", *cells])
    return table(["config", *GEMMS], lines)


def stress_table(by_case: Mapping[str, Figures]) -> str:
    """A table with a line per case and recipe."""
    columns = (*GEMMS, *PARTS)
    lines = [
        [case, f"`{recipe}`", *(decibels(row[recipe][column]) for column in columns)]
        for case, row in by_case.items()
        for recipe in (TWO_CASTS, *ONE_COPY)
    ]
    head = [*GEMMS, *(f"worst {part}" for part in PARTS)]
    return table(["operands", "recipe", *head], lines)


def run(args: argparse.Namespace) -> int:
    if args.weights:
        return finish(args, {str(path): weights_table(matrices(path)) for path in args.weights})
    recorded = record(STEPS, seed=0)
    progress = tqdm(recorded.items(), desc="multiplying", unit="layer")
    by_place = {place: measure(operands) for place, operands in progress}
    by_case = {case: measure(operands) for case, operands in stress_cases(seed=0).items()}
    tables = {"recorded": recorded_table(by_place), "made up": stress_table(by_case)}
    trained = [operands.weight for place, operands in recorded.items() if place.step == STEPS[-1]]
    tables["weights of the last step"] = weights_table(trained)
    tables["frozen weights in mxfp4 of 1 x 32"] = stored_table(recorded.values())
    return finish(args, tables, checks(by_place))
