"""Experts of a user's class that are stored in float8, on one device and on meshes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from frozen_experts import STORED, Experts, Transposed, batch, gradients, made, run
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, reloaded, same_bits
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import dequantized, unfreeze_from_float8
from fp8_dist.debug import comm_audit, float8_stats
from fp8_dist.fsdp import average_gradients_over
from fp8_dist.moe import Float8ExpertsConfig, grouped_linear
from fp8_dist.tensor_parallel import Float8ExpertParallel

SOME = ["rowwise_folded", "mxfp4", "1 x 32 of tensorwise"]
by_storage = pytest.mark.parametrize("name", STORED)


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, each in expected.items() if not same_bits(found[name], each)]


@by_storage
def test_bits_of_the_values_that_are_stored(name: str) -> None:
    """As those of experts that cast the same values, and of copies; adapters are trained."""
    net, twin = made(STORED[name]), made(STORED[name], store=False)
    expected = run(twin)
    for each in (net, copy.deepcopy(net), reloaded(net, weights_only=False)):
        assert differing(run(each), expected) == []
        assert gradients(each).keys() == {"0.a", "0.b"}
        assert differing(gradients(each), gradients(twin)) == []
    values = {weight: dequantized(net[0], weight) for weight in Experts.float8_weight_names}
    unfreeze_from_float8(net)
    assert differing({n: net[0].get_parameter(n).detach() for n in values}, values) == []


@by_storage
def test_weights_that_are_passed_transposed(name: str) -> None:
    storage = STORED[name]
    net = made(storage, kind=Transposed)
    if storage.has_square_blocks:
        assert differing(run(net), run(made(storage, store=False, kind=Transposed))) == []
    else:
        text = raised(ValueError, lambda: run(net))
        assert "0: gate has one scale per" in text
        assert "make it a parameter [E, N, K], or use a recipe with square blocks" in text


def test_what_is_refused() -> None:
    net, x, offs = made(STORED["mxfp8"]), batch(0), torch.arange(1, 7)
    experts: Any = net[0]
    config = experts.float8_experts_config
    calls: list[Callable[[], Any]] = [
        lambda: grouped_linear(x, experts.up, offs),
        lambda: grouped_linear(x, experts.up[:, :32], offs, config),
        lambda: grouped_linear(x, experts.up, offs, Float8ExpertsConfig("blockwise")),
        lambda: grouped_linear(x, experts.up.requires_grad_(), offs, config),
    ]
    texts = [raised(ValueError, call) for call in calls]
    alone = copy.deepcopy(experts).up
    texts.append(raised(ValueError, lambda: grouped_linear(x, alone, offs, config)))
    assert_expected_inline(
        "\n".join(texts),
        """\
0: up is stored as torch.float8_e4m3fn with one scale per block of 32 x 32 (MX), Blocks(dtype=torch.float8_e4m3fn, rows=32, columns=32, source='master', rule='ceil'), and the config has torch.float8_e4m3fn with one scale per row, Dense(dtype=torch.float8_e4m3fn, per='row', power_of_2=True, dims=()); pass the module's float8_experts_config
0: up is stored in float8 as a whole, [6, 96, 64], and the forward passes [6, 32, 64]; pass the parameter itself, and divide the outputs
0: up is stored as torch.float8_e4m3fn with one scale per block of 32 x 32 (MX), Blocks(dtype=torch.float8_e4m3fn, rows=32, columns=32, source='master', rule='ceil'), and the config has torch.float8_e4m3fn with one scale per block of 128 x 128, Blocks(dtype=torch.float8_e4m3fn, rows=128, columns=128, source='master', rule=None); pass the module's float8_experts_config
0: up requires gradients, but is stored in float8, where no optimizer can update it; call unfreeze_from_float8 to train it, or requires_grad_(False)
experts: a weight is stored in float8, and the module with its scales is not known; pass the parameter of the module that freeze_to_float8 was called on""",
    )


def test_statistics_show_what_is_cast() -> None:
    with float8_stats(net := made(STORED["mxfp4"])) as stats:
        run(net)
    weights = [f"0.{name}" for name in Experts.float8_weight_names]
    operands = {(row.fqn, row.operand) for row in stats.rows}
    assert operands == {(fqn, each) for fqn in weights for each in ("input", "grad_output")}


def sharded(net: Any, mesh: DeviceMesh) -> None:
    fully_shard(net[0], mesh=mesh, reshard_after_forward=True)


def by_ep(net: Any, dp: int) -> None:
    mesh = device_mesh(dp=dp, ep=2)
    parallelize_module(net[0], mesh["ep"], Float8ExpertParallel())
    sharded(net, mesh["dp"])
    average_gradients_over(net[0], mesh)


WAYS: dict[int, dict[str, Callable[[Any], Any]]] = {
    2: {
        "FSDP2": lambda net: sharded(net, device_mesh(dp=2)),
        "EP": lambda net: by_ep(net, 1),
    },
    4: {
        "EP x FSDP2": lambda net: by_ep(net, 2),
        "FSDP2, uneven": lambda net: sharded(net, device_mesh(dp=4)),
        "HSDP": lambda net: sharded(net, device_mesh(replicate=2, shard=2)),
    },
}


@pytest.mark.parametrize(
    ("size", "name"), [*((2, name) for name in STORED), *((4, name) for name in SOME)]
)
@on_ranks("size", returns=[])
def test_bits_on_meshes(size: int, name: str) -> list[str]:
    """Those of one device; adapters have the gradients beside weights that are cast."""
    wrong, rank = [], dist.get_rank()
    alone = run(made(STORED[name]), rank)
    for way, distribute in WAYS[size].items():
        nets = [made(STORED[name], store) for store in (True, False)]
        found = []
        for net in nets:
            distribute(net)
            found.append(run(net, rank))
        differ = differing(found[0], alone) + differing(*map(gradients, nets))
        wrong += [f"{way}: {each}" for each in differ]
    return wrong


def gathers(name: str) -> str:
    """The messages of a step, in which experts are gathered again for the backward."""
    sharded(net := made(STORED[name]), device_mesh(dp=2))
    with comm_audit() as audit:
        net(batch(0).requires_grad_()).sum().backward()
    return audit.without_modules().table()


def test_messages_of_a_step(ranks: RankPools) -> None:
    """FSDP2 gathers what is stored; nothing is reduced for weights."""
    names = "mxfp4", "1 x 32 of tensorwise"
    assert_expected_inline(
        "\n".join(ranks(2).run_same(gathers, name) for name in names),
        """\
op              axis   dtype             count  elements    bytes
all_gather      world  float4_e2m1fn_x2      2   221,184  110,592
all_gather      world  bfloat16              +    30,720   61,440
all_gather      world  uint8                 +       216      216
reduce_scatter  world  bfloat16              1    15,360   30,720
total                                        3            202,968
  float8                                                  110,592
  other                                                    92,376
op              axis   dtype             count  elements    bytes
all_gather      world  float4_e2m1fn_x2      2   221,184  110,592
all_gather      world  bfloat16              +    30,720   61,440
all_gather      world  uint8                 +     6,912    6,912
reduce_scatter  world  bfloat16              1    15,360   30,720
total                                        3            209,664
  float8                                                  110,592
  other                                                    99,072""",
    )
