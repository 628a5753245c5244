"""Operands of linear layers to multiply: of a training run, and made to be hard to cast.

And how close products of casts of them are to the exact ones.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from scripts.common.corpus import load_corpus
from scripts.common.gemms import GEMMS
from scripts.common.llama import MODELS, Llama
from scripts.common.metrics import sqnr
from scripts.train.train import MAX_GRAD_NORM, learning_rate_factor

MODEL, BATCH_SIZE, SEQ_LEN, LR, WARMUP = "debug", 8, 64, 1e-3, 40
LINEARS = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
LINEARS += ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
ZERO_ROWS = "10 % of weight rows zero"
WEIGHT_ROWS = "weight rows of lognormal(2.5) size"
INPUT_CHANNELS = "3 % of input channels x 30,000"
OUTPUT_CHANNELS = "output channels of lognormal(2.5) size"
TOKENS = "tokens of lognormal(2.5) size"


class Operands(NamedTuple):
    """What the three GEMMs of a linear layer multiply, fp32.

    Attributes:
        input: x, ``[M, K]``, a row for each token.
        weight: w, ``[N, K]``.
        grad_output: g, ``[M, N]``.
    """

    input: Tensor
    weight: Tensor
    grad_output: Tensor


Products = Mapping[str, Tensor]  # results of GEMMs, by name
ByWay = dict[str, dict[str, float]]  # figures in dB, of each way to cast
WORST = {
    "worst tokens of output": ("output", 1),
    "worst columns of output": ("output", 0),
    "worst columns of grad_input": ("grad_input", 0),
    "worst rows of grad_weight": ("grad_weight", 1),
    "worst columns of grad_weight": ("grad_weight", 0),
}


def exact(operands: Operands) -> dict[str, Tensor]:
    """The output and the two gradients, fp64."""
    x, w, g = (tensor.double() for tensor in operands)
    return dict(zip(GEMMS, (x @ w.t(), g @ w, g.t() @ x), strict=True))


def figures(operands: Operands, by_way: Mapping[str, Products]) -> ByWay:
    """The SQNR of each GEMM, and of its `WORST` parts."""
    expected = exact(operands)
    return {
        way: {gemm: sqnr(expected[gemm], result) for gemm, result in results.items()}
        | {
            figure: sqnr_of_worst(expected[gemm], results[gemm], dim)
            for figure, (gemm, dim) in WORST.items()
            if gemm in results
        }
        for way, results in by_way.items()
    }


def sqnr_of_worst(expected: Tensor, actual: Tensor, dim: int) -> float:
    """The mean SQNR of the worst 1 % (one at least) of rows (dim 1) or columns (dim 0).

    Those of zeros have no SQNR, and are left out.
    """
    signal, noise = expected.norm(dim=dim), (expected - actual).norm(dim=dim)
    signal, noise = signal[signal > 0], noise[signal > 0]
    values = 20 * torch.log10(signal / noise.clamp(min=1e-300))
    return values.sort().values[: max(1, len(values) // 100)].mean().item()


class Place(NamedTuple):
    """Where operands were recorded: the linear layer's name, and the step, counted from 1."""

    linear: str
    step: int


def recorded_linears() -> list[str]:
    """The names of all linear layers in the first, the middle and the last block of the model."""
    layers = MODELS[MODEL].n_layers
    return [f"layers.{i}.{kind}" for i in (0, layers // 2, layers - 1) for kind in LINEARS]


def record(steps: list[int], seed: int) -> dict[Place, Operands]:
    """Trains the reference model, and keeps what its linear layers multiply at some steps.

    As in ``scripts.train.train``, parameters and AdamW are fp32, compute is bf16 (by autocast), and
    gradients are clipped. Inputs and output gradients are the bf16 values, weights the fp32
    parameters, which a float8 layer casts.

    Args:
        steps: which ones, counted from 1; the last one ends the training and its schedule.
        seed: of the weights and the data.
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
    # (The backward met them in the reverse order.)
    places = (Place(name, step) for step in sorted(steps) for name in recorded_linears())
    return {place: recorded[place] for place in places}


def _listen(
    model: Llama, step: int, recorded: dict[Place, Operands]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that fill ``recorded`` during the next forward and backward."""

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


def stress_cases(seed: int, m: int = 1024, k: int = 512, n: int = 768) -> dict[str, Operands]:
    """Normal operands, and what training may do to them, by name."""
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator)
    cases = {
        case: Operands(normal(m, k), 0.02 * normal(n, k), 1e-3 * normal(m, n))
        for case in ("normal", ZERO_ROWS, WEIGHT_ROWS, INPUT_CHANNELS, OUTPUT_CHANNELS)
    }
    cases[ZERO_ROWS].weight[::10] = 0
    cases[WEIGHT_ROWS].weight.mul_(torch.exp(2.5 * normal(n, 1)))
    cases[INPUT_CHANNELS].input[:, ::37].mul_(30_000)
    cases[OUTPUT_CHANNELS].grad_output.mul_(torch.exp(2.5 * normal(n)))
    cases[TOKENS] = Operands(normal(m, k), 0.02 * normal(n, k), 1e-3 * normal(m, n))
    sizes = torch.exp(2.5 * normal(m, 1))
    cases[TOKENS].input.mul_(sizes)
    cases[TOKENS].grad_output.mul_(sizes)
    return cases
