"""Tied parameters under a tensor-parallel plan: they stay tied, or the plan is refused."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from nets import full
from ranks import RankPools, device_mesh
from reference import raised, same_bits, sqnr
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8_dist import Float8LinearConfig, convert_to_float8_training
from fp8_dist.tensor_parallel import Float8ColwiseParallel, apply_tp_plan, llama_tp_plan
from scripts.common.llama import Llama, LlamaConfig

TINY = LlamaConfig(
    dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=64, max_seq_len=16
)


@pytest.fixture
def fake_tp() -> Iterator[DeviceMesh]:
    """A mesh of 2 ranks in one process; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def tied_llama() -> Llama:
    """As transformers ties embeddings; the head stays in high precision."""
    model = Llama(TINY)
    model.output.weight = model.tok_embeddings.weight
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name != "output")
    return model


def trained(model: Llama) -> dict[str, torch.Tensor]:
    """The whole state after a step."""
    tokens = torch.arange(2 * 17).view(2, 17) % TINY.vocab_size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    return {name: full(tensor) for name, tensor in model.state_dict().items()}


def parallel(dp: int) -> tuple[bool, int, dict[str, torch.Tensor]]:
    model = tied_llama()
    mesh = device_mesh(dp=dp, tp=2)
    apply_tp_plan(model, mesh["tp"], llama_tp_plan(model))
    if dp > 1:
        fully_shard(model, mesh=mesh["dp"])
    state = trained(model)
    tied = model.output.weight is model.tok_embeddings.weight
    return tied, len(list(model.parameters())), state


@pytest.mark.parametrize("dp", [1, 2])
def test_tied_embeddings_stay_tied(ranks: RankPools, dp: int) -> None:
    model = tied_llama()
    expected = trained(model)
    for tied, count, state in ranks(2 * dp).run(parallel, dp):
        assert tied
        assert count == len(list(model.parameters()))
        assert same_bits(state["output.weight"], state["tok_embeddings.weight"])
        assert min(sqnr(expected[name], state[name]) for name in expected) > 40


def test_float8_layers_stay_tied(fake_tp: DeviceMesh) -> None:
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    net[1].weight, net[1].bias = net[0].weight, net[0].bias
    convert_to_float8_training(net, config=config)
    apply_tp_plan(net, fake_tp, {"*": Float8ColwiseParallel()})
    assert net[0].weight is net[1].weight
    assert net[0].bias is net[1].bias
    assert isinstance(net[0].weight, DTensor)
    assert net[1].float8_weight.parameter() is net[0].weight


class Unknown(ParallelStyle):
    """A style of the user's own, which replicates parameters."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return SequenceParallel()._apply(module, device_mesh)


def tied() -> nn.ModuleDict:
    embedding, head = nn.Embedding(16, 16), nn.Linear(16, 16)
    head.weight = embedding.weight
    return nn.ModuleDict({"embedding": embedding, "norm": nn.LayerNorm(16), "head": head})


def refused(plan: dict[str, ParallelStyle], mesh: DeviceMesh) -> str:
    model = tied()
    text = raised(ValueError, lambda: apply_tp_plan(model, mesh, plan))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return text


def test_plans_that_would_untie_are_refused_by_name(fake_tp: DeviceMesh) -> None:
    row, column = RowwiseParallel(), ColwiseParallel()
    texts = {
        "embedding.weight whole, head.weight S(0).": {"head": column, "norm": SequenceParallel()},
        "embedding.weight S(0), head.weight S(1).": {"head": row, "embedding": row},
        "embedding.weight R, head.weight S(0).": {"head": column, "embedding": SequenceParallel()},
    }
    for placed, plan in texts.items():
        text = refused(plan, fake_tp)
        assert "'embedding.weight' and 'head.weight' are one parameter (tied), which the" in text
        assert f"would untie: {placed} Give its modules entries that divide it alike" in text


def test_plans_that_leave_or_divide_ties_alike_are_applied(fake_tp: DeviceMesh) -> None:
    placed = {
        "whole": {"norm": SequenceParallel()},
        str(Shard(0)): {"embedding": RowwiseParallel(), "head": ColwiseParallel()},
        str(Shard(1)): {"embedding": ColwiseParallel(), "head": RowwiseParallel()},
        str(Replicate()): {"embedding": SequenceParallel(), "head": Unknown()},
    }
    for place, plan in placed.items():
        model = tied()
        apply_tp_plan(model, fake_tp, copy.copy(plan))
        weight = model["head"].weight
        assert weight is model["embedding"].weight
        assert place == (str(weight.placements[0]) if isinstance(weight, DTensor) else "whole")


def test_a_style_that_is_not_known_is_refused_afterwards(fake_tp: DeviceMesh) -> None:
    plan = {"embedding": RowwiseParallel(), "head": Unknown()}
    text = raised(ValueError, lambda: apply_tp_plan(tied(), fake_tp, plan))
    assert "embedding.weight S(0), head.weight R" in text
