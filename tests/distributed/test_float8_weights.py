"""Float8 parameters by name: experts' weights [E, N, K], which FSDP2 gathers in float8."""

import copy

import pytest
import torch
from experts import Experts, experts_config
from nets import full
from rank_tests import on_ranks
from ranks import device_mesh
from reference import reloaded, same_bits, sqnr
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from fp8_dist import attach_update, precompute_float8_dynamic_scale
from fp8_dist.debug import comm_audit
from fp8_dist.linear.weights import float8_weights


# Experts that ranks have unequal numbers of (a fourth rank has none), and parts of each expert.
@pytest.mark.parametrize(
    ("dp", "experts", "dim", "reductions"),
    [(2, 6, 0, 0), (3, 6, 0, 0), (4, 6, 0, 1), (2, 5, 0, 1), (2, 4, 1, 1)],
)
@on_ranks("dp")
def test_experts(dp: int, experts: int, dim: int, reductions: int) -> None:
    """Differences from one device in two steps, precompute's collectives, and dtypes of gathers.

    The second step follows an update by the optimizer's hook.
    """
    mesh = device_mesh(dp=dp)
    config = experts_config(enable_fsdp_float8_all_gather=True)
    model = nn.Sequential(Experts(experts, 24, 36, config))
    twin = nn.Sequential(Experts(experts, 24, 36, experts_config()))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
    attached = torch.optim.SGD(model.parameters(), lr=0.1)
    attach_update(attached, model)
    alone = torch.optim.SGD(twin.parameters(), lr=0.1)
    x, wrong = torch.randn(5, 24, generator=torch.Generator().manual_seed(1)), []
    with comm_audit(mesh) as update:
        precompute_float8_dynamic_scale(model)
    gathered: set[torch.dtype] = set()
    for step in range(2):
        with comm_audit(mesh) as audit:
            model(x).square().sum().backward()
        twin(x).square().sum().backward()
        gathered |= {row.dtype for row in audit.rows if row.op == "all_gather"}
        if audit.count("all_reduce"):
            wrong.append(f"step {step}: {audit.table()}")
        pairs = zip(model[0].used, twin[0].used, strict=True)
        if not all(same_bits(a, b) for a, b in pairs):
            wrong.append(f"step {step}: casts")
        for optimizer in (attached, alone):
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in twin.named_parameters():
            mine = full(model.get_parameter(name).detach())
            if sqnr(parameter.detach(), mine) < 100:
                wrong.append(f"step {step}: {name}")
            parameter.data.copy_(mine)  # the mean over ranks rounds
    assert wrong == []
    assert update.count() == reductions
    # Where all ranks have as many experts, FSDP2's gather carries their scales.
    assert gathered == {torch.float8_e4m3fn} | (set() if reductions else {torch.float32})


def test_they_are_saved_plain_and_copied() -> None:
    model = nn.Sequential(Experts(2, 24, 36, experts_config(enable_fsdp_float8_all_gather=True)))
    saved = reloaded(model.state_dict())
    assert [type(tensor) for tensor in saved.values()] == [torch.Tensor] * 2
    assert model.state_dict(keep_vars=True)["0.up"] is model[0].up
    for copied in (copy.deepcopy(model), reloaded(model, weights_only=False)):
        assert [w.module for w in float8_weights(copied).values()] == [copied[0]] * 2


@on_ranks(2, returns=True)
def test_they_are_assigned_after_a_step() -> bool:
    config = experts_config(enable_fsdp_float8_all_gather=True)
    model = fully_shard(nn.Sequential(Experts(4, 24, 36, config)), mesh=device_mesh(dp=2))
    model(torch.randn(5, 24)).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with comm_audit() as audit:
        model(torch.randn(5, 24))
    return torch.float8_e4m3fn in {row.dtype for row in audit.rows if row.op == "all_gather"}
