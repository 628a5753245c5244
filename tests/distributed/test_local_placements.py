"""Layers of plain local tensors with declared placements, against the parallel styles."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from local_nets import local_net
from nets import Distributed
from rank_tests import on_ranks
from ranks import device_mesh
from reference import raised, same_bits, sqnr
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fp8_dist import (
    Float8Linear,
    Float8LinearConfig,
    Float8LinearRecipeName,
    attach_update,
    convert_to_float8_training,
    float8_layers,
    precompute_float8_dynamic_scale,
)
from fp8_dist.debug import comm_audit
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    apply_tp_plan,
    declare_placements,
    share_input,
)
from fp8_dist.weight.known import KnownWeight

of = Float8LinearConfig.from_recipe_name
RECIPES = [*enumerate(Float8LinearRecipeName)]
Steps = tuple[dict[str, torch.Tensor], list[str]]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return KnownWeight.unwrap(local_tensor(tensor.detach()))


def by_hand(world: Distributed) -> nn.Module:
    """The net of ``world`` with plain local tensors, under FSDP2 if ``world`` is."""
    config = next(iter(float8_layers(world.net).values())).config
    net = local_net(world.mesh["tp"], config, world.sequence_parallel, **world.net_arguments)
    world.fully_shard(net, net.layers)
    return net


def two_steps(world: Distributed, net: nn.Module, update: bool) -> Steps:
    """Results of training steps as local tensors; and the collectives of each phase of the last."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if update:
        attach_update(optimizer, net)
    found: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for step in range(2):
        x = world.mine(torch.randn(4, 8, 64, generator=generator)).requires_grad_()
        audits = [comm_audit(world.mesh) for _ in range(3)]
        with audits[0]:
            output = net(x)
        with audits[1]:
            output.square().mean().backward()
        assert x.grad is not None
        found |= {f"output {step}": output, f"grad_input {step}": x.grad}
        found |= {f"{n}.grad {step}": plain(p.grad) for n, p in net.named_parameters()}
        with audits[2]:
            optimizer.step()
        optimizer.zero_grad()
    tables = [audit.without_modules().table() for audit in audits]
    return found | {n: plain(p) for n, p in net.named_parameters()}, tables


@pytest.mark.parametrize(
    ("dp", "update", "arguments"),
    [
        *((1 + i % 2, True, {"config": of(r), "sequence_parallel": i % 4 < 2}) for i, r in RECIPES),
        (2, True, {"gather": False, "config": of("delayed")}),
        # 45 rows of each part, which FSDP2 shards unevenly.
        (2, False, {"config": of("rowwise_folded"), "net_arguments": {"hidden": 90}}),
    ],
)
@on_ranks(2, "dp", returns=[])
def test_same_bits_and_collectives_as_the_styles(
    dp: int, update: bool, arguments: dict[str, Any]
) -> list[str]:
    """What differs between local tensors and the styles."""
    world = Distributed(dp, 2, **arguments)
    (expected, styles), (found, tables) = (
        two_steps(world, net, update) for net in (world.net, by_hand(world))
    )
    assert expected.keys() == found.keys()
    differ = [name for name in expected if not same_bits(expected[name], found[name])]
    # With the styles, delayed scales have one more history: that of the shared input.
    phases = 2 if world.config == of("delayed") else 3
    return differ + ["collectives"] * (styles[:phases] != tables[:phases])


def one_device(whole: nn.Linear) -> Float8Linear:
    layer = convert_to_float8_training(nn.Sequential(whole))[0]
    assert isinstance(layer, Float8Linear)
    return layer


def part_of(whole: nn.Linear, tp: DeviceMesh, dim: int, **arguments: Any) -> Float8Linear:
    """A converted layer of this rank's part of a weight; attributes keep the global sizes."""
    layer = one_device(nn.Linear(whole.in_features, whole.out_features, bias=False))
    weight = whole.weight.detach().chunk(tp.size(), dim)[tp.get_local_rank()]
    layer.weight = nn.Parameter(weight.clone())
    if arguments:
        declare_placements(layer, tp, weight=Shard(dim), **arguments)
    return layer


@on_ranks(2)
def test_a_partial_output_is_left_to_the_caller() -> None:
    tp, whole = device_mesh(tp=2), nn.Linear(32, 48, bias=False)
    layer, twin = part_of(whole, tp, 1, input=Shard(-1), output=Partial()), one_device(whole)
    x, grad = torch.randn(6, 32), torch.randn(6, 48)
    with comm_audit() as audit:
        output = layer(x.chunk(2, 1)[tp.get_local_rank()])
        output.backward(grad)
    assert {row.op for row in audit.rows} == {"all_reduce"}
    assert all(row.elements == row.count for row in audit.rows)  # amaxes alone
    expected = twin(x)
    expected.backward(grad)
    summed = DTensor.from_local(output.detach(), tp, [Partial()]).full_tensor()
    grad_weight = DTensor.from_local(layer.weight.grad, tp, [Shard(1)]).full_tensor()
    assert sqnr(expected, summed) > 120
    assert sqnr(twin.weight.grad, grad_weight) > 120


@on_ranks(2)
def test_scales_are_those_of_the_global_weight_once_it_is_declared() -> None:
    """Check a weight that is declared whole, then as a shard, and a copy of the layer."""
    tp, whole = device_mesh(tp=2), nn.Linear(32, 48, bias=False)
    with torch.no_grad():
        whole.weight[0, 0] = 5  # on the first rank alone
    layer, twin = part_of(whole, tp, 0), one_device(whole)

    def is_global() -> bool:
        ours, theirs = (m.float8_weight.operands(m.weight, True).output for m in (layer, twin))
        return (
            ours is not None and theirs is not None and same_bits(ours.scales[0], theirs.scales[0])
        )

    layer.out_features, found = len(layer.weight), []
    for weight, output in ((Replicate(), Replicate()), (Shard(0), Shard(-1))):
        declare_placements(layer, tp, weight=weight, input=Replicate(), output=output)
        found.append(is_global())
        precompute_float8_dynamic_scale(layer)
    layer = copy.deepcopy(layer)
    # The first rank has the largest value.
    assert [*found, is_global()] == [tp.get_local_rank() == 0, True, True]


@on_ranks(2, returns=(True, True, "mine"))
def test_what_the_parameter_had_before_its_declaration() -> tuple[bool, bool, str]:
    layer: Any = Float8Linear(32, 16)
    layer.weight.grad, layer.weight.label = torch.ones(16, 32), "mine"
    placed: dict[str, Any] = {"weight": Shard(0), "input": Replicate(), "output": Shard(-1)}
    weight = declare_placements(layer, device_mesh(tp=2), **placed).weight
    same = same_bits(weight.grad, torch.ones(16, 32))
    return isinstance(weight, KnownWeight), same, weight.label


# The error, the call, and a part of its text.
Refused = list[tuple[type[Exception], Callable[[], object], str]]


def wrong_texts(cases: Refused) -> list[str]:
    texts = [(raised(error, call), part) for error, call, part in cases]
    return [f"{part!r} is not in {text!r}" for text, part in texts if part not in text]


@on_ranks(2, returns=[])
def test_declarations_that_do_not_fit() -> list[str]:
    tp, both = device_mesh(tp=2), device_mesh(dp=1, tp=2)
    whole = nn.Linear(32, 48, bias=False)
    layer, flat = part_of(whole, tp, 0), Float8Linear(16, 16)
    styled = convert_to_float8_training(nn.Sequential(nn.Linear(32, 48)))
    apply_tp_plan(styled, tp, {"0": Float8ColwiseParallel()})
    flat.weight = nn.Parameter(flat.weight.detach().flatten())
    column: dict[str, Any] = {"weight": Shard(0), "input": Replicate(), "output": Shard(-1)}

    def declared(layer: Any, mesh: Any = tp, **others: Any) -> Callable[[], object]:
        return partial(declare_placements, layer, mesh, **(column | others))

    cases: Refused = [
        (TypeError, declared(whole), "declare_placements needs a Float8Linear, got a Linear;"),
        (TypeError, declared(layer, tp.get_group()), "needs a DeviceMesh, got a ProcessGroup;"),
        (ValueError, declared(layer, both), "0: declare_placements needs a 1-D mesh, got one"),
        (
            TypeError,
            declared(layer, input="sequence"),
            "input='sequence' is not a placement, such as",
        ),
        (ValueError, declared(layer, weight=Shard(2)), "but it must be Shard(0), Shard(1) or"),
        (
            ValueError,
            declared(layer, weight=Shard(1)),
            "out_features=48 fits neither the weight's local size, 24, nor the global one, 24, of",
        ),
        (ValueError, declared(styled[0]), "so it can't be a local part on"),
        (ValueError, declared(flat), "not [out_features, in_features] (flattened by FSDP1?)"),
    ]
    return wrong_texts(cases)


@on_ranks(2, returns=[])
def test_calls_that_do_not_fit() -> list[str]:
    mesh = device_mesh(dp=1, tp=2)
    tp, other = mesh["tp"], init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    column = nn.Linear(32, 48, bias=False)
    q = part_of(column, tp, 0, input=Shard(1), output=Shard(-1))
    k = part_of(column, tp, 0, input=Shard(0), output=Shard(-1))
    nowhere = part_of(column, tp, 0, input=Shard(1), output=Shard(3))
    q.fqn, k.fqn, nowhere.fqn = "wq", "wk", "nowhere"
    x = torch.randn(2, 4, 32)
    sharded = part_of(column, tp, 0, input=Replicate(), output=Shard(-1))
    elsewhere = part_of(column, tp, 0, input=Replicate(), output=Shard(-1))
    sharded.fqn, elsewhere.fqn = "sharded", "elsewhere"
    fully_shard(sharded, mesh=mesh["dp"])
    fully_shard(elsewhere, mesh=other)
    dtensor = DTensor.from_local(x, tp, [Shard(1)])
    on_both = DTensor.from_local(x, mesh, [Shard(0), Shard(1)])
    undeclared = part_of(column, tp, 0)
    size = "the last dim of the input must be"
    cases: Refused = [
        (ValueError, lambda: q(x[..., :16]), f"wq: {size} 32, for a weight of (24, 32) declared"),
        (ValueError, lambda: sharded.forward(x), "call the module that fully_shard was called on"),
        (
            ValueError,
            lambda: precompute_float8_dynamic_scale(elsewhere),
            "it can't be a local part on",
        ),
        (ValueError, lambda: nowhere(x), "nowhere: the output was declared as Shard(dim=3), but"),
        (TypeError, lambda: share_input(x, q), "list of Float8Linear, got Float8Linear alone"),
        (ValueError, lambda: share_input(x, [q, k]), "['wq', 'wk'] must be column-parallel layers"),
        (TypeError, lambda: share_input(dtensor, [q]), "of ['wq'] is a DTensor; layers"),
        (TypeError, lambda: share_input(x, [undeclared]), "of ['0'] is a Tensor; layers with"),
        (ValueError, lambda: share_input(on_both, [undeclared]), "it must be on a 1-D mesh"),
    ]
    return wrong_texts(cases)
