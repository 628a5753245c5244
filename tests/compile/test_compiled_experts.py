"""Experts in one graph have the bits of eager code, on one device and on several ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from graphs import Compilations
from hf_experts import IDS, Mixture, different, made, step
from moe_layers import Layer, results
from nets import full
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, same_bits
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist.debug import comm_audit
from fp8_dist.moe import (
    Float8ExpertsConfig,
    convert_experts_to_float8_training,
    float8_experts,
    grouped_linear,
    route,
)
from fp8_dist.tensor_parallel import Float8ExpertParallel
from scripts.common.mixture import Experts
from scripts.common.sizes import Mixture as Sizes

full_tier = pytest.mark.full
BF16 = torch.bfloat16


def trained(
    output: Callable[..., torch.Tensor],
    layer: Layer,
    group: dist.ProcessGroup | None,
    frozen: Sequence[str],
) -> dict[str, torch.Tensor]:
    tensors = {n: t.clone().requires_grad_(n not in frozen) for n, t in layer.tensors.items()}
    return results(output(tensors, group), tensors, layer.grad)


def wrong_in_graphs(
    layer: Layer, backend: str, group: dist.ProcessGroup | None = None
) -> tuple[set[str], int]:
    """The differences from eager code in steps with changing routes, and the number of graphs."""
    compilations, wrong = Compilations(), set()
    # Inductor uses another order in the sum for the gradient of the routing weights.
    frozen = ("probs",) if backend == "inductor" else ()
    layer.ids = layer.ids.clone(memory_format=torch.contiguous_format)  # strides as of later ids
    compiled = torch.compile(layer.output, backend=backend, fullgraph=True)
    for _ in range(3):
        found, expected = (trained(run, layer, group, frozen) for run in (compiled, layer.output))
        wrong |= {name for name in expected if not same_bits(expected[name], found[name])}
        layer.ids = (layer.ids - 1).clamp(min=0)
    assert compilations.breaks == 0
    return wrong, compilations.graphs


@pytest.mark.parametrize(
    ("backend", "recipe", "dtype"),
    [
        ("aot_eager", "blockwise", BF16),
        pytest.param("inductor", "rowwise_folded", torch.float32, marks=full_tier),
    ],
)
def test_layer(backend: str, recipe: Any, dtype: torch.dtype) -> None:
    layer = Layer.of(Float8ExpertsConfig(recipe), 1, "foreign ids", dtype)
    assert wrong_in_graphs(layer, backend) == (set(), 1)


@on_ranks(2, returns=(set(), 1), timeout=240)
def test_layer_on_ranks() -> tuple[set[str], int]:
    layer = Layer.of(Float8ExpertsConfig("mxfp8", "float8"), 2, "no tokens on rank 0")
    return wrong_in_graphs(layer.part(dist.get_rank()), "aot_eager", dist.group.WORLD)


def test_grouped_linear() -> None:
    torch._dynamo.reset()
    x, w, bias = (torch.randn(s, requires_grad=True) for s in ((40, 64), (4, 32, 64), (4, 32)))
    offs = torch.tensor([3, 3, 20, 31], dtype=torch.int32)  # later rows belong to no expert
    compiled, every = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True), []
    for run in (grouped_linear, compiled):
        one, several = run(x, w, offs, None, bias), run(x, [w, w * 2], offs)
        loss = one.square().sum() + sum(each.square().sum() for each in several)
        every.append([one, *several, *torch.autograd.grad(loss, (x, w, bias))])
    assert all(same_bits(a, b) for a, b in zip(*every, strict=True))
    assert not every[1][0][31:].any()
    text = raised(ValueError, lambda: compiled(x, w, offs.flip(0), None, bias))
    assert_expected_inline(
        text,
        """grouped_linear: offs must grow from 0 to at most 40, the number of rows; got groups of [31, -11, -17, 0] rows""",
    )


@pytest.mark.parametrize("recipe", ["rowwise_folded", None])
def test_your_own_experts_without_biases(recipe: Any) -> None:
    """One graph, even if only the routing says that rows sent and received are equal in number."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    experts = Experts(160, Sizes(experts=8, top_k=2, ffn_dim=96))
    for weight in experts.parameters():
        nn.init.normal_(weight)
    experts.to(BF16)
    if recipe is not None:
        convert_experts_to_float8_training(experts, config=Float8ExpertsConfig(recipe))
    x = torch.randn(24, 160, dtype=BF16, requires_grad=True)
    ids, shares = torch.rand(24, 8).argsort(1)[:, :2].contiguous(), torch.rand(24, 2, dtype=BF16)
    every = []
    for run in (experts, torch.compile(experts, backend="aot_eager", fullgraph=True)):
        output = run(x, ids, shares)
        every.append([output, *torch.autograd.grad(output.sum(), (x, *experts.parameters()))])
    assert all(same_bits(a, b) for a, b in zip(*every, strict=True))


class Grouped(nn.Module):
    """Experts that take rows sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32, 160))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return grouped_linear(x, self.weight, offs)


def test_export() -> None:
    """An exported program accepts other numbers of tokens, and other routes."""

    def routed(tokens: int) -> tuple[torch.Tensor, ...]:
        ids = torch.rand(tokens, 8).argsort(1)[:, :2]
        return torch.randn(tokens, 160), ids, torch.rand(tokens, 2)

    def sorted_rows(rows: int) -> tuple[torch.Tensor, ...]:
        offs = torch.randint(rows + 1, (8,), dtype=torch.int32)
        return torch.randn(rows, 160), offs.sort().values

    any_number = {0: torch.export.Dim("tokens", min=2, max=64)}
    for module, arguments, sizes in (
        (Mixture(Float8ExpertsConfig()), routed, (any_number,) * 3),
        (Grouped(), sorted_rows, (any_number, None)),
    ):
        program = torch.export.export(module, arguments(24), dynamic_shapes=sizes).module()
        for tokens in (24, 37):
            given = arguments(tokens)
            assert same_bits(program(*given).detach(), module(*given).detach())


def refused() -> str:
    torch._dynamo.reset()
    group, ids = dist.group.WORLD, torch.tensor([[0, 3], [1, 2]])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def slots(ids: torch.Tensor) -> torch.Tensor:
        return route(ids, 4, group).slots * 2

    assert len(slots(ids)) == 4
    return raised(ValueError, lambda: slots(ids + 2 * dist.get_rank()))


def test_all_ranks_refuse_ids_in_graphs(ranks: RankPools) -> None:
    assert_expected_inline(
        "\n".join(ranks(2).run(refused, timeout=120)),
        """\
route: expert ids must be from 0 to 4; rank 1 of 2 has others
route: expert ids must be from 0 to 4; rank 1 of 2 has others, such as [5]""",
    )


@pytest.mark.parametrize("captured", [True, False])
def test_scalars_that_graphs_do_not_capture(captured: bool) -> None:
    layer, compilations = Layer.of(Float8ExpertsConfig(), 1), Compilations()
    with torch._dynamo.config.patch(capture_scalar_outputs=captured):
        found = trained(torch.compile(layer.output, backend="aot_eager"), layer, None, ())
    expected = layer.trained()
    assert all(same_bits(expected[name], found[name]) for name in expected)
    assert (compilations.breaks == 0) is captured  # the reasons of breaks say how to avoid them
    assert all("capture_scalar_outputs = True" in reason for reason in counters["graph_break"])


def test_blocks_of_transformers() -> None:
    """GPT-OSS stores experts as [E, K, N], with biases."""
    compilations = Compilations()
    model, eager = (made("gpt_oss", "rowwise_folded") for _ in range(2))
    for block in model.model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert different(step(model), step(eager)) == []
    assert compilations.breaks == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "fields", "dp"),
    [
        ("qwen3_moe", {"recipe": "rowwise_folded"}, 1),
        pytest.param("mixtral", {"recipe": "blockwise"}, 2, marks=full_tier),
    ],
)
@on_ranks(2, "dp", returns=([], True, 1), timeout=240)
def test_expert_parallel_blocks(
    kind: str, fields: dict[str, Any], dp: int
) -> tuple[list[str], bool, int]:
    """Differences from eager code, whether collectives are equal, and the number of graphs."""
    compilations, mesh = Compilations(), device_mesh(dp=dp, ep=2)
    every: list[tuple[nn.Module, Any]] = []
    for compiled in (True, False):
        model = made(kind, **fields)
        for experts in float8_experts(model).values():
            parallelize_module(experts, mesh["ep"], Float8ExpertParallel())
            if dp > 1:
                fully_shard(experts, mesh=mesh["dp"])
        for block in model.model.layers if compiled else ():
            # Compile only the experts with FSDP2, whose hooks in a block would break its graph.
            part = block.mlp.experts if dp > 1 else block.mlp
            part.compile(backend="aot_eager", fullgraph=True)
        every.append((model, comm_audit(mesh)))
    wrong: list[str] = []
    for i in range(2):
        found = []
        for model, audit in every:
            with audit:
                logits, grads = step(model, IDS[dist.get_rank() % 4 :: 4] + i)
            found.append((logits, {n: None if g is None else full(g) for n, g in grads.items()}))
        wrong += different(*found)
    assert compilations.breaks == 0
    tables = [audit.without_modules().table() for _, audit in every]
    return wrong, tables[0] == tables[1], compilations.graphs
