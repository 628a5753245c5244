"""Measures how close gradients that travel in fewer bytes stay to FSDP2's reduction in fp32.

    python -m scripts.measure.gradient_sqnr --assert

Starts 2, 3 and 4 ranks on this machine (gloo, CPU), each with its own batch. The gradients are
those of the debug Llama at its first step, with fp32 compute unless a row says bf16. (With error
feedback those of a second one, on the same weights and data: the first has no errors to add.) A
figure is the SQNR in dB of a parameter's whole gradient against FSDP2's own reduction: of the worst
parameter with 2 dims or more, and the median of these. `--assert` fails where the worst is below 55
dB with bf16, or below 30 dB with float8 that is rounded to nearest.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8_dist.fsdp import set_gradient_transport
from scripts.common.corpus import VOCAB_SIZE, load_corpus
from scripts.common.llama import MODELS, Llama
from scripts.common.markdown import table
from scripts.common.metrics import sqnr
from scripts.common.ranks import run_on_ranks
from scripts.common.report import Check, finish, make_parser, start

RANKS = (2, 3, 4)
ROWS, SEQUENCE = 2, 64  # of each rank's batch
MIXED = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
)


class Way(NamedTuple):
    """How gradients travel in a row."""

    arguments: dict[str, Any]  # of set_gradient_transport
    bf16: bool = False  # compute
    least: float = 0.0  # SQNR in dB, by `--assert`
    replicas: bool = False  # HSDP on 2 x 2 ranks
    nodes: bool = False  # a hierarchy of 2 x 2 ranks


WAYS = {
    "bf16": Way({"transport": "bf16"}, least=55.0),
    "bf16, HSDP": Way({"transport": "bf16"}, least=55.0, replicas=True),
    "bf16, 2 nodes": Way({"transport": "bf16"}, least=55.0, nodes=True),
    "float8": Way({"transport": "float8"}, least=30.0),
    "float8, bf16 compute": Way({"transport": "float8"}, bf16=True, least=30.0),
    "float8, HSDP": Way({"transport": "float8"}, least=30.0, replicas=True),
    "float8, 2 nodes": Way({"transport": "float8"}, least=30.0, nodes=True),
    "float8, error feedback": Way({"transport": "float8", "error_feedback": True}),
    "float8, stochastic rounding": Way({"transport": "float8", "stochastic_rounding": True}),
}
# The lowest and the median SQNR in dB by row; a dict for each number of ranks.
Found = dict[str, tuple[float, float]]


def gradients_of(mesh: DeviceMesh, way: Way) -> dict[str, torch.Tensor]:
    """The whole gradients of one step; called on every rank."""
    config = MODELS["debug"]
    assert config.vocab_size == VOCAB_SIZE
    model = Llama(config)
    policy = MIXED if way.bf16 else MixedPrecisionPolicy(cast_forward_inputs=False)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    set_gradient_transport(model, **way.arguments)
    corpus = load_corpus(None, seq_len=SEQUENCE)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = {"batch_size": ROWS * ranks, "seq_len": SEQUENCE, "rank": rank, "ranks": ranks}
    inputs, targets = corpus.batch(seed=0, step=1, **sizes)
    for _ in range(2 if "error_feedback" in way.arguments else 1):
        model.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
    return {
        name: parameter.grad.full_tensor()  # type: ignore[union-attr]
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
    }


def on_ranks() -> Found:
    """The SQNR of all `WAYS` that this number of ranks has; called on every rank."""
    ranks = dist.get_world_size()
    flat = init_device_mesh("cpu", (ranks,))
    square = None
    if ranks == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    exact = {bf16: gradients_of(flat, Way({"transport": None}, bf16)) for bf16 in (False, True)}
    found = {}
    for name, way in WAYS.items():
        mesh = square if way.replicas else flat
        if way.nodes:
            way = way._replace(arguments=way.arguments | {"hierarchy": square})
        if mesh is None or (way.nodes and square is None):
            continue
        gradients = gradients_of(mesh, way)
        figures = [sqnr(exact[way.bf16][key], gradient) for key, gradient in gradients.items()]
        found[name] = min(figures), statistics.median(figures)
    return found


def sqnr_table(by_ranks: Mapping[int, Found]) -> str:
    """A line per way, columns per number of ranks."""
    heads = [f"{ranks} ranks: {what}" for ranks in by_ranks for what in ("worst", "median")]
    lines = []
    for name in WAYS:
        cells = [each for found in by_ranks.values() for each in found.get(name, (None, None))]
        lines.append([name, *("" if dB is None else f"{dB:.1f}" for dB in cells)])
    return table(["gradients on the wire", *heads], lines, "lr")


def checks(by_ranks: Mapping[int, Found]) -> list[Check]:
    """The conditions of `--assert`. (Written so that a NaN breaks them.)"""
    found = []
    for ranks, figures in by_ranks.items():
        for name, (worst, _) in figures.items():
            if least := WAYS[name].least:
                sentence = f"{name} on {ranks} ranks: {worst:.1f} dB, at least {least:.0f}"
                found.append(Check(sentence, worst >= least))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    asserts = "the SQNR of a parameter's gradient is too low"
    parser = make_parser("scripts.measure.gradient_sqnr", __doc__, asserts=asserts)
    args = start(parser, argv)
    by_ranks = {ranks: run_on_ranks(ranks, on_ranks)[0] for ranks in RANKS}
    return finish(args, {"sqnr by transport": sqnr_table(by_ranks)}, checks(by_ranks))


if __name__ == "__main__":
    sys.exit(main())
