"""Tensor-parallel ranks with different inputs or replicated parameters are told once."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from nets import Net, net_plan
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import all_warnings
from test_agreement import comparisons_counted
from torch import nn
from torch._dynamo import config as dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fp8_dist import convert_to_float8_training, skip_head
from fp8_dist.debug import comm_audit
from fp8_dist.tensor_parallel import apply_tp_plan, llama_tp_plan
from scripts.common.llama import Llama, LlamaConfig

SIZES = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128}
WORDS = 64


def llama(float8: bool = True) -> Llama:
    model = Llama(LlamaConfig(**SIZES, vocab_size=WORDS, max_seq_len=16))
    if float8:
        convert_to_float8_training(model, module_filter_fn=skip_head(model))
    return model


def divided(mesh: DeviceMesh, model: Llama, sequence_parallel: bool = True) -> Llama:
    apply_tp_plan(model, mesh["tp"], llama_tp_plan(model, sequence_parallel=sequence_parallel))
    data = tuple(axis for axis in mesh.mesh_dim_names or () if axis != "tp")
    for module in (*model.layers, model) if data else ():
        fully_shard(module, mesh=mesh[data])
    return model


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, batch: torch.Tensor, steps: int = 1) -> None:
    for _ in range(steps):
        model(batch).square().mean().backward()


def told(run: Callable[..., object], *arguments: object) -> list[str]:
    with all_warnings() as texts:
        run(*arguments)
    return [text for text in texts if "of a tensor-parallel group" in text]


def change(parameter: torch.Tensor, by: float) -> None:
    """Change this rank's copy of a parameter."""
    with torch.no_grad():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local[-1] += by


def texts_of_differences() -> list[str]:
    mesh, rank = device_mesh(tp=2), dist.get_rank()
    found = told(train, divided(mesh, llama()), tokens(rank), 3)
    model = divided(mesh, llama(), sequence_parallel=False)
    for parameter in (model.norm.weight, *(layer.ffn_norm.weight for layer in model.layers)):
        change(parameter, rank)
    return found + told(train, model, tokens(), 3)


def test_ranks_that_differ_are_told_once(ranks: RankPools) -> None:
    assert_expected_inline(
        "\n".join(ranks(2).run_same(texts_of_differences)),
        """\
apply_tp_plan: input 0 of 'tok_embeddings', which the plan takes to be the same on every rank of a tensor-parallel group, differs between rank 0 and rank 1. Read the same batch on these ranks (give a sampler the data-parallel rank and size), and seed dropout alike
apply_tp_plan: layers.*.ffn_norm.weight (2), norm.weight: parameters that every rank of a tensor-parallel group has whole differ between rank 0 and rank 1, so these ranks train different models. Seed them alike before the model is made, load the same weights, or broadcast these parameters""",
    )


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}, {"replicas": 2, "dp": 1, "tp": 2}])
@on_ranks("axes")
def test_on_meshes(axes: dict[str, int]) -> None:
    """Each group is compared by itself, while data-parallel ranks have batches of their own."""
    mesh = device_mesh(**axes)
    group, place = divmod(dist.get_rank(), 2)
    last = math.prod(axes.values()) // 2 - 1
    for float8 in (True, False):
        assert told(train, divided(mesh, llama(float8)), tokens(group), 2) == []
        other = place if group == last else 0
        found = told(train, divided(mesh, llama(float8)), tokens(other))
        assert len(found) == (group == last)
        assert all("input 0 of 'tok_embeddings'" in text for text in found)
        model = divided(mesh, llama(float8))
        change(model.layers[1].attention_norm.weight, other)
        found = told(train, model, tokens(group))
        assert len(found) == (group == last)
        assert all("layers.1.attention_norm.weight: parameters that every" in x for x in found)


@on_ranks(2)
def test_weights_may_become_alike_after_the_plan() -> None:
    mesh, rank = device_mesh(tp=2), dist.get_rank()
    for seed in (0, rank):
        with torch.device("meta"):
            model = llama()
        divided(mesh, model)
        model.to_empty(device="cpu")
        model.init_weights(seed, "cpu")
        found = told(train, model, tokens())
        assert found == []  # norms are ones, and the others are divided
    torch.manual_seed(rank)
    model = llama()
    state = {name: torch.ones_like(x) for name, x in model.state_dict().items()}
    change(model.norm.weight, rank)
    divided(mesh, model, sequence_parallel=False)
    model.load_state_dict({name: x for name, x in state.items() if "norm" in name}, strict=False)
    assert told(train, model, tokens()) == []


@on_ranks(2)
def test_bits_and_their_order_are_compared() -> None:
    mesh, rank, found = device_mesh(tp=2)["tp"], dist.get_rank(), []
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0], x[1, 0, 0] = math.nan, -0.0
    permuted, signed, bf16 = x.clone(), x.clone(), x.bfloat16()
    permuted[0, [1, 2]] = permuted[0, [2, 1]]
    signed[1, 0, 0] = 0.0
    for other in (x.clone(), permuted, signed, bf16.float(), x[:, :, :].flip(0)):
        net = convert_to_float8_training(Net())
        apply_tp_plan(net, mesh, net_plan(net, False))  # type: ignore[arg-type]
        found.append(len(told(net, other if rank else x)))
    assert found == [0, 1, 1, 1, 1]
    # Parts of a sequence differ, of course.
    net = convert_to_float8_training(Net())
    apply_tp_plan(net, mesh, net_plan(net, True))  # type: ignore[arg-type]
    assert told(net, x.chunk(2, 1)[rank]) == []


@on_ranks(2)
def test_evaluations_before_the_first_step() -> None:
    mesh, rank = device_mesh(tp=2), dist.get_rank()
    for mode in (torch.no_grad, torch.inference_mode):
        model = divided(mesh, llama())
        with mode():
            assert told(model, tokens()) == []
        assert len(told(train, model, tokens(rank))) == 1
        model = divided(mesh, llama())
        with mode():
            assert len(told(model, tokens(rank))) == 1
        assert told(train, model, tokens(rank)) == []


@on_ranks(2)
def test_compiled_code_is_not_changed() -> None:
    """Compiled before and after the first forward in eager mode: one graph, never again."""
    mesh, x = device_mesh(tp=2)["tp"], torch.ones(2, 8, 64)
    net = convert_to_float8_training(Net(layers=1))
    apply_tp_plan(net, mesh, net_plan(net, False))  # type: ignore[arg-type]
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    train(compiled, x)  # type: ignore[arg-type]
    with dynamo.patch(error_on_recompile=True):
        assert len(told(train, net, x + dist.get_rank())) == 1
        train(compiled, x)  # type: ignore[arg-type]


@on_ranks(2)
def test_one_comparison_in_the_first_forward() -> None:
    mesh = device_mesh(tp=2)
    model = divided(mesh, llama())
    counts = []
    with comm_audit(mesh) as audit, comparisons_counted() as count:
        for _ in range(2):
            with torch.no_grad():
                model(tokens())
            counts.append(count[0])
        for _ in range(2):
            train(model, tokens())
            counts.append(count[0])
    assert counts == [1, 1, 2, 2]
    assert all(row.dtype is not torch.int64 for row in audit.rows)


@on_ranks(2, returns=[])
def test_what_has_no_bits_is_left_out() -> list[str]:
    """Parameters without a size yet, and sparse ones."""

    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.late = Net(layers=1), nn.LazyLinear(16, bias=False)
            self.table = nn.Parameter(torch.eye(4).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.late(self.net(x))

    mesh, model = device_mesh(tp=2), Extra()
    convert_to_float8_training(model, module_filter_fn=lambda _, fqn: fqn.startswith("net"))
    plan = {f"net.{name}": style for name, style in net_plan(model.net, False).items()}
    apply_tp_plan(model, mesh["tp"], plan)
    return told(model, torch.ones(2, 8, 64))
