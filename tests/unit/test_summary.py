"""conversion_summary: what is in float8, what is not and why, and which share that is."""

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn.utils import parametrizations

from fp8_dist import (
    auto_filter,
    conversion_summary,
    convert_to_float8_training,
    skip_head,
)


class Experts(nn.Module):
    """Experts like transformers 5's MixtralExperts: all their weights in 3-D parameters."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, 2 * hidden, dim))
        self.down_proj = nn.Parameter(torch.zeros(experts, dim, hidden))


class Router(nn.Module):
    """A router like transformers 5's MixtralTopKRouter."""

    def __init__(self, experts: int, dim: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.zeros(experts, dim))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.gate = Router(4, 32, top_k=2)
        self.experts = Experts(4, 32, 64)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.positions = nn.Parameter(torch.zeros(1, 16, 32))
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(32, 64, bias=False)


def test_the_table() -> None:
    model = Model()
    convert_to_float8_training(model, module_filter_fn=skip_head(model))
    assert_expected_inline(
        str(conversion_summary(model)),
        """\
conversion_summary: 2 of 9 weights in float8, 3.6% of 56,256 parameters
  weight                             shape                 parameters  reason
  layers.*.q_proj (2)                32 x 32       float8        3.6%
  layers.*.gate.weight (2)           4 x 32        skip          0.5%  no nn.Linear, but a parameter of Router
  layers.*.experts.gate_up_proj (2)  4 x 128 x 32  skip         58.2%  no nn.Linear, but a 3-D parameter of 4 experts
  layers.*.experts.down_proj (2)     4 x 32 x 64   skip         29.1%  no nn.Linear, but a 3-D parameter of 4 experts
  lm_head                            64 x 32       skip          3.6%  skip_head: it is the model's head, by its name
  (embeddings, norms, biases, ...)                               4.9%""",
    )


def test_layers_that_are_not_alike_have_lines_of_their_own() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    convert_to_float8_training(model, module_filter_fn=lambda layer, fqn: fqn != "1")
    lines = str(conversion_summary(model)).splitlines()
    assert [line.split()[:5] for line in lines[2:4]] == [
        ["*", "(2)", "32", "x", "32"],
        ["1", "32", "x", "32", "skip"],
    ]


class OwnForward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


@pytest.mark.filterwarnings("ignore:convert_to_float8_training", "ignore:Lazy modules")
def test_reasons() -> None:
    model = nn.ModuleDict(
        {
            "converted": nn.Linear(2048, 8192),
            "own": OwnForward(16, 16),
            "computed": parametrizations.weight_norm(nn.Linear(16, 16)),
            "lazy": nn.LazyLinear(16),
            "filtered": nn.Linear(32, 16),
            "attention": nn.MultiheadAttention(16, 2),
            "conv": nn.Conv2d(3, 16, 4),
            "bilinear": nn.Bilinear(4, 4, 2),
        }
    )
    convert_to_float8_training(model, module_filter_fn=lambda m, fqn: fqn != "filtered")
    model["late"] = nn.Linear(16, 16)
    summary = conversion_summary(model)
    assert_expected_inline(
        "\n".join(
            f"{row.name}: {row.parameters}, {row.reason or 'float8'}" for row in summary.rows
        ),
        """\
converted: 16777216, float8
own: 256, its class OwnForward has a forward of its own
computed: 272, its weight is computed from other parameters (a parametrization, weight_norm)
lazy: 0, it is lazy: run it once, so that it knows its sizes
filtered: 512, module_filter_fn returned False
attention.in_proj_weight: 768, no nn.Linear, but a parameter of MultiheadAttention
attention.out_proj: 256, its class NonDynamicallyQuantizableLinear is read by nn.MultiheadAttention, never called
bilinear.weight: 32, no nn.Linear, but a parameter of Bilinear
late: 256, convert_to_float8_training has not seen it""",
    )
    assert summary.parameters == sum(
        p.numel() for m in model.values() if m is not model["lazy"] for p in m.parameters()
    )


def test_the_reasons_of_auto_filter() -> None:
    model = nn.Sequential(nn.Linear(4096, 8192, device="meta"), nn.Linear(64, 24, device="meta"))
    convert_to_float8_training(model, module_filter_fn=auto_filter("tensorwise"))
    (row,) = conversion_summary(model).skipped
    assert row.reason == "auto_filter: out = 24 is not a multiple of 16"
    (row,) = conversion_summary(copy.deepcopy(model)).skipped
    assert row.reason == "convert_to_float8_training has not seen it"


def test_shared_weights_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[1].weight = model[0].weight
    convert_to_float8_training(model)
    summary = conversion_summary(model)
    assert [row.parameters for row in summary.rows] == [256, 0]
    assert summary.parameters == 256
    assert summary.parameter_share == 1
