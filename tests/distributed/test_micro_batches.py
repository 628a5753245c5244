"""Weights after training on fixed micro-batches: the same bits on any number of ranks."""

import gc
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from documented import run_shown
from expecttest import assert_expected_inline
from one_sum import (
    Weights,
    backward,
    batches,
    built,
    differing,
    mesh_of,
    nodes_of,
    optimizer_of,
    sums,
    train,
    trained,
)
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, same_bits
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fp8_dist
from fp8_dist import Float8LinearConfig, Float8State, update_float8_scales
from fp8_dist.debug import comm_audit
from fp8_dist.fsdp import clip_grad_norm_, micro_batches, set_gradient_transport
from fp8_dist.fsdp.clip import exact_norm
from scripts.common.llama import MODELS, Llama
from scripts.common.mixture import Mixture
from scripts.common.models import build

PAGE = Path(__file__).parents[2] / "docs" / "fsdp2.md"
TRANSPORTS = ("float8", "bf16", "fp32")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def on_all_ranks(*arguments: Any, **options: Any) -> Weights:
    return trained(mesh_of(dist.get_world_size()), *arguments, **options)


def check(ranks: RankPools, sizes: tuple[int, ...], *given: Any, **options: Any) -> Weights:
    """Train on one rank, and on each of `sizes`; compare weights on the first and the last rank."""
    expected = ranks(1).run(on_all_ranks, *given, **options)[0]
    for size in sizes:
        for found in ranks(size).run(on_all_ranks, *given, **options)[:: size - 1]:
            assert differing(expected, found) == [], size
    return expected


@pytest.mark.parametrize(
    ("transport", "compute"),
    [("float8", "bf16"), ("float8", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")],
)
def test_weights_do_not_depend_on_the_number_of_ranks(
    ranks: RankPools, transport: str, compute: str
) -> None:
    sizes = (2, 3, 4, 8) if (transport, compute) == ("float8", "bf16") else (3,)
    found = check(ranks, sizes, "tensorwise", transport, DTYPES[compute])
    own = ranks(1).run(on_all_ranks, "tensorwise", None, DTYPES[compute])[0]
    assert (differing(found, own) == []) == (transport != "float8")


def differing_between_nodes(steps: int, *arguments: Any, **options: Any) -> list[list[str]]:
    """Weights of 2, 4 nodes of 2 ranks that differ from those of one, and of 2 nodes of 4."""
    found = []
    for per_node in (2, 4):
        runs = []
        for nodes in (1, 2, 4)[: 8 // per_node]:
            how = {"nodes": nodes_of(nodes, per_node)}
            mesh = mesh_of(nodes * per_node)
            runs.append(trained(mesh, *arguments, steps=steps, how=how, **options))
        found += [differing(runs[0], run) for run in runs[1:]]
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_do_not_depend_on_the_number_of_nodes(ranks: RankPools, transport: str) -> None:
    assert ranks(8).run_same(differing_between_nodes, 2, "tensorwise", transport) == [[]] * 3
    if transport != "fp32":  # in which a few bf16 gradients may be summed exactly in any order
        assert ranks(8).run_same(differing_from_one_hop, transport)


def differing_from_one_hop(transport: str) -> list[str]:
    two_hops = trained(mesh_of(4), transport=transport, how={"nodes": nodes_of(2, 2)})
    return differing(two_hops, trained(mesh_of(4), transport=transport))


def test_ranks_that_idle_on_some_nodes(ranks: RankPools) -> None:
    found = ranks(8).run_same(differing_between_nodes, 2, "mxfp8", "float8", count=5)
    assert found == [[]] * 3


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_folded", "mxfp8"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_twenty_steps_on_nodes(ranks: RankPools, recipe: str, transport: str) -> None:
    assert ranks(8).run_same(differing_between_nodes, 20, recipe, transport) == [[]] * 3


def test_numbers_of_micro_batches_and_rounding(ranks: RankPools) -> None:
    for count, sizes in ((9, (3, 4)), (1, (3,))):  # ranks idle
        check(ranks, sizes, None, "float8", count=count, steps=2)
    for reduce in (torch.bfloat16, torch.float16):  # of what arrives; sums are fp32
        check(ranks, (2,), None, "float8", how={"reduce": reduce}, steps=2)


def mixture(recipe: str, size: int) -> nn.Module:
    """A Llama with experts under FSDP2."""
    sizes = replace(MODELS["moe"], dim=64, ffn_dim=96, n_heads=2, n_kv_heads=2, vocab_size=61)
    sizes = replace(sizes, mixture=Mixture(8, 2, 64), n_layers=1)
    model = build(recipe, sizes, device_mesh(dp=size, tp=1), "cpu", shard=True)
    sums(model)
    set_gradient_transport(model, "float8")
    return model


def continued(kind: str, folder: Path, first: int, end: int, save: bool) -> Weights:
    """Steps of a run, which begins with a checkpoint or ends with one."""
    size = dist.get_world_size()
    mesh, (recipe, _, experts) = mesh_of(size), kind.partition(", ")
    model = mixture(recipe, size) if experts else built(mesh, recipe, "float8")
    optimizer = optimizer_of(model)

    def state() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "float8": Float8State(model)}

    if first:
        dcp.load(found := state(), checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )
        update_float8_scales(model)
    weights = train(model, optimizer, mesh, range(first, end))
    if save:
        dcp.save(state(), checkpoint_id=folder)
    return weights


@pytest.mark.parametrize("kind", ["mxfp8", "delayed", "rowwise_folded, experts"])
def test_a_run_continues_on_other_numbers_of_ranks(
    ranks: RankPools, tmp_path: Path, kind: str
) -> None:
    expected = ranks(1).run(continued, kind, tmp_path, 0, 4, False)[0]
    ranks(2).run(continued, kind, tmp_path, 0, 2, True)
    found = ranks(3).run(continued, kind, tmp_path, 2, 4, False)[0]
    assert differing(expected, found) == []


def by_the_page() -> Weights:
    """What docs/fsdp2.md shows, with a small Llama."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    model = Llama(replace(MODELS["debug"], n_layers=2, dim=64, ffn_dim=96, vocab_size=61))
    model.init_weights(0, "cpu")
    scope = {
        "model": model,
        "mesh": mesh_of(dist.get_world_size()),
        "config": Float8LinearConfig(enable_fsdp_float8_all_gather="auto"),
        "steps": [batches(step, 6) for step in range(3)],
    }
    for module in (fp8_dist, fp8_dist.fsdp, torch.distributed.fsdp):
        scope |= {name: getattr(module, name) for name in module.__all__}
    (code,) = (block for block in blocks if "micro_batches" in block)
    run_shown(code, scope | {"torch": torch, "F": F})
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def test_the_page(ranks: RankPools) -> None:
    alone = ranks(1).run(by_the_page)[0]
    assert differing(alone, ranks(3).run(by_the_page)[0]) == []


def gradients(special: bool, transport: str, per_node: int | None = None) -> Weights:
    """Gradients of a step; `special`: one micro-batch has NaN, infinity and -0 in some of them."""
    size = dist.get_world_size()
    nodes = per_node and nodes_of(size // per_node, per_node)
    model = built(mesh_of(size), None, transport, torch.float32, nodes=nodes)

    def order(*arguments: Any) -> Any:
        for index, weight in micro_batches(*arguments):
            model.hook = spoil if index == 4 and special else zero
            yield index, weight

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        grad = zero(grad)
        grad[0, 0, 7], grad[0, 1, 70] = math.nan, math.inf
        return grad

    def zero(grad: torch.Tensor) -> torch.Tensor:
        return grad.index_fill(-1, torch.tensor(9), -0.0)

    backward(model, mesh_of(size), 0, count=5, order=order)
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_special_gradients(ranks: RankPools, transport: str) -> None:
    for special in (False, True):
        alone = ranks(1).run(gradients, special, transport)[0]
        for size in (2, 3):  # the special micro-batch is the last, which idle ranks run too
            found = ranks(size).run(gradients, special, transport)[0]
            assert not differing(
                {n: g.nan_to_num(7) for n, g in alone.items()},
                {n: g.nan_to_num(7) for n, g in found.items()},
            )
        node, nodes = (ranks(size).run(gradients, special, transport, 2)[0] for size in (2, 4))
        assert not differing(
            {n: g.nan_to_num(7) for n, g in node.items()},
            {n: g.nan_to_num(7) for n, g in nodes.items()},
        )
        assert all(torch.equal(g.isfinite(), node[n].isfinite()) for n, g in alone.items())
        up, bias = alone["up.weight"], alone["up.bias"]
        assert not up[9].count_nonzero()
        assert bool(up[7].isnan().all()) == bool(bias[70].isinf()) == special
        assert up[[*range(7), *range(71, 144)]].isfinite().all()
    assert alone["spare.weight"].isfinite().all()


class Scaled(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def zeros(per_node: int | None = None) -> torch.Tensor:
    """A gradient of -0, and the tensor that the first micro-batch left, which FSDP2 adds to."""
    mesh = mesh_of(dist.get_world_size())
    net = fully_shard(Scaled(), mesh=mesh)
    sums(net)
    nodes = per_node and nodes_of(mesh.size() // per_node, per_node)
    set_gradient_transport(net, "fp32", nodes=nodes)
    for _ in range(2):
        for _index, weight in micro_batches(4, mesh):
            # The gradient of a rank that idles is +0 here, before it is left out.
            (net(torch.tensor(0.0)) * (weight - 2 * weight)).backward()
            first = net.weight.grad if net.weight.grad is None else net.weight.grad.to_local()
        assert net.weight.grad.to_local().data_ptr() == first.data_ptr()
    return net.weight.grad.full_tensor()


def test_zeros_keep_their_sign(ranks: RankPools) -> None:
    for size, per_node in ((1, None), (2, None), (3, None), (2, 2), (4, 2)):
        assert ranks(size).run(zeros, per_node)[0].signbit().all()


@on_ranks(2)
def test_collectives() -> None:
    """In each round a message of each of three groups; two for the norm, and one for the scales."""
    mesh = mesh_of(2)
    model = built(mesh, "tensorwise", "float8")
    optimizer = optimizer_of(model)
    train(model, optimizer, mesh, [0])
    with comm_audit(mesh) as audit:
        train(model, optimizer, mesh, [2], count=3)  # two rounds
    assert audit.count("all_to_all") == audit.count("all_to_all", dtype=torch.float8_e4m3fn) == 6
    reductions = {row.dtype: row.count for row in audit.rows if row.op == "all_reduce"}
    assert reductions == {torch.int32: 2, torch.float64: 1}


def refusals() -> dict[str, str]:
    """Of two ranks; each model is dropped when the next one is made."""
    mesh, found = device_mesh(dp=2), dict[str, str]()
    gc.collect()  # models of other tests

    def refused(name: str, error: type[Exception], *arguments: Any) -> None:
        found[name] = raised(error, lambda: [*micro_batches(*arguments)])

    refused("no transport", ValueError, 2, mesh)
    hybrid, one = device_mesh(replicas=2, dp=1), mesh_of(1)
    refused("mesh of two dims", ValueError, 2, hybrid)
    for name, module, how in (
        ("HSDP", nn.Linear, {"mesh": hybrid}),
        ("Shard(1)", nn.Linear, {"shard_placement_fn": lambda p: Shard(1)}),
        ("offload", nn.Linear, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        ("bf16", partial(nn.Linear, dtype=torch.bfloat16), {}),
        ("other ranks", nn.Linear, {"mesh": one}),
        ("means", nn.Linear, {}),
        ("hook", nn.Linear, {}),
    ):
        part = fully_shard(module(8, 8, name != "Shard(1)"), **{"mesh": mesh} | how)
        net = fully_shard(nn.Sequential(part), mesh=mesh)
        set_gradient_transport(net, "float8")
        if name != "means":
            sums(net)
        if name == "hook":
            part.set_all_reduce_hook(print)
        refused(name, ValueError, 2, mesh)
    # Beside another model the one that is trained counts.
    good = built(mesh, None, "float8")
    backward(good, mesh, 0)
    net = fully_shard(nn.Linear(96, 8), mesh=mesh)
    set_gradient_transport(net, "bf16")

    def averaged() -> None:
        for _ in micro_batches(2, mesh):
            net(torch.ones(1, 96)).sum().backward()

    found["trained beside another"] = raised(ValueError, averaged)
    net(torch.ones(1, 96)).sum().backward()  # which goes on outside
    net = good
    refused("count", ValueError, True, mesh)
    refused("mesh", TypeError, 2, "dp")

    def twice() -> None:
        for _ in micro_batches(2, mesh):
            for _ in range(2):
                net(torch.ones(1, 2, dtype=torch.int64)).sum().backward()

    def unreduced(first: Any) -> None:
        net.set_requires_gradient_sync(False)  # type: ignore[operator]
        first()

    found["accumulation"] = raised(ValueError, lambda: unreduced(lambda: backward(net, mesh, 0)))
    # What another model accumulates is its own affair, until it is trained.
    other = built(mesh, None, "float8")
    backward(other, mesh, 0)
    net.set_requires_gradient_sync(True)  # type: ignore[operator]
    found["accumulated before"] = raised(ValueError, lambda: backward(net, mesh, 0))
    net = built(mesh, None, "float8")
    found["twice"] = raised(ValueError, twice)
    clip: Any = clip_grad_norm_
    found["norm"] = raised(ValueError, lambda: clip(net.parameters(), 1.0, 1.0, exact=True))
    double = nn.Parameter(torch.ones(1).double())
    double.grad = torch.ones(1).double()
    found["fp64"] = raised(ValueError, lambda: clip([double], 1.0, exact=True))
    return found


def test_refusals(ranks: RankPools) -> None:
    found = ranks(2).run(refusals)[0]
    assert_expected_inline(
        "\n".join(f"{name}: {text}" for name, text in found.items()),
        """\
no transport: micro_batches: no model has a gradient transport, and torch's sums depend on the number of ranks; call set_gradient_transport(model, "fp32"), or another transport
mesh of two dims: micro_batches: the mesh has 2 dims; pass the 1-D mesh of the data-parallel ranks. Under HSDP the bits of gradients depend on the number of ranks
HSDP: micro_batches: 0 is under HSDP (or has set_all_reduce_hook), which sums the sums of shards over replicas; shard it over one axis of all ranks
Shard(1): micro_batches: 0 has parameters with Shard(1), which divides rows; shard them on dim 0
offload: micro_batches: 0 has CPU offload, which adds gradients on the CPU; leave it out
bf16: micro_batches: 0 trains parameters that are not fp32, in whose dtype sums would be rounded
other ranks: micro_batches: 0 is reduced over ranks [0], not over those of the mesh, [0, 1]
means: micro_batches: 0 averages gradients; call set_gradient_divide_factor(1.0) and set_force_sum_reduction_for_comms(True) of each FSDPModule, and divide the loss by the tokens of the step
hook: micro_batches: 0 is under HSDP (or has set_all_reduce_hook), which sums the sums of shards over replicas; shard it over one axis of all ranks
trained beside another: micro_batches: the root module averages gradients; call set_gradient_divide_factor(1.0) and set_force_sum_reduction_for_comms(True) of each FSDPModule, and divide the loss by the tokens of the step
count: micro_batches: count is True; it must be a positive int
mesh: micro_batches needs a DeviceMesh, got a str
accumulation: micro_batches: a backward has left gradients of up unreduced. They are added to those of another micro-batch before the reduction, in an order that depends on the number of ranks; leave out set_requires_gradient_sync(False)
accumulated before: micro_batches: a backward has left gradients of down unreduced. They are added to those of another micro-batch before the reduction, in an order that depends on the number of ranks; leave out set_requires_gradient_sync(False)
twice: micro_batches: down is reduced twice within a micro-batch, so the order of its sum depends on the number of ranks; call backward once for each micro-batch
norm: clip_grad_norm_: exact=True is for norm_type=2, not 1.0
fp64: clip_grad_norm_: exact=True is for gradients in fp32, bf16 or fp16""",
    )


def finished(loop: Any, run: Callable[[], None]) -> None:
    for _ in loop:
        run()


def by_next(loop: Any, run: Callable[[], None]) -> None:
    next(loop)
    run()


def by_break(loop: Any, run: Callable[[], None]) -> None:
    for _ in loop:
        run()
        break


def by_exception(loop: Any, run: Callable[[], None]) -> None:
    def fail() -> None:
        for _ in loop:
            run()
            raise MemoryError

    raised(MemoryError, fail)


@on_ranks(2)
def test_a_loop_that_is_left_early_changes_nothing_afterwards() -> None:
    """Plain steps on a rank that has run the only micro-batch, and on one that has repeated it."""
    mesh, x, found = mesh_of(2), torch.full((1, 8), 1.0 + dist.get_rank()), []
    for leave in (finished, by_next, by_break, by_exception):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(8, 8), mesh=mesh)
        sums(model)
        set_gradient_transport(model, "float8")
        optimizer = torch.optim.AdamW(model.parameters())

        def run(model: nn.Module = model) -> None:
            model(x).square().sum().backward()

        loop = micro_batches(1, mesh)
        leave(loop, run)
        optimizer.step()
        for _ in range(2):
            run()
            run()  # accumulates
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.full_tensor() for p in model.parameters()])
        del loop  # held until here
    assert all(map(same_bits, found[0] * 3, [p for run in found[1:] for p in run]))


@on_ranks(2)
def test_a_round_that_is_left_before_its_backward() -> None:
    """The rank that would repeat a micro-batch takes part in the next plain step."""
    mesh = mesh_of(2)
    for how in ({}, {"foreach": False}, {"fused": True}):
        model = fully_shard(nn.Linear(8, 2, bias=False), mesh=mesh)
        sums(model)
        set_gradient_transport(model, "fp32")
        optimizer = torch.optim.AdamW(model.parameters(), **how)
        loop = micro_batches(3, mesh)
        for index, _ in loop:
            if index == 2:
                break
            model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        assert model.weight.grad.full_tensor().tolist() == [[2.0] * 8] * 2
        del loop
        # One that is dropped with the micro-batch under way.
        next(micro_batches(1, mesh))
        gc.collect()
        model(torch.ones(1, 8)).sum().backward()
        assert model.weight.grad.full_tensor().tolist() == [[4.0] * 8] * 2


def norms() -> None:
    """Exact norms of gradients that lie in many ways on 6 ranks, beside those of whole ones."""
    grid, line = device_mesh(a=2, b=3), device_mesh(dp=6)
    layouts = [
        (grid, (Shard(0), Shard(1))),
        (grid, (Replicate(), Shard(0))),
        (grid, (Partial(), Shard(0))),
        (line, (Shard(0),)),
        (line, (Replicate(),)),
    ]
    for seed, (spread, special) in enumerate(
        [*[(1, None)] * 5, (30, None), (1e-9, None), (0, None), (1, math.inf), (1, math.nan)]
    ):
        generator = torch.Generator().manual_seed(seed)
        wholes = []
        for i in range(2 * len(layouts)):
            random = torch.randn(90 + i, 11, generator=generator, dtype=torch.float64)
            wholes.append(
                (random * (spread and spread**random))
                .float()
                .to(DTYPES["bf16"] if i == 3 else None)
            )
        if special is not None:
            wholes[4][2, 3] = special
        parameters = []
        for whole, (mesh, placements) in zip(wholes, [*layouts, *layouts], strict=True):
            parts = [Replicate() if p.is_partial() else p for p in placements]
            grad = distribute_tensor(whole, mesh, parts)
            if parts != [*placements]:  # one rank along the axis has the values, the other zeros
                local = grad.to_local() * (mesh.get_coordinate() or [1])[0]
                size, stride = whole.shape, whole.stride()
                grad = DTensor.from_local(local, mesh, placements, shape=size, stride=stride)
            parameters.append(nn.Parameter(torch.zeros_like(distribute_tensor(whole, mesh, parts))))
            parameters[-1].grad = grad
        single = [nn.Parameter(torch.zeros_like(w)) for w in wholes]
        for parameter, whole in zip(single, wholes, strict=True):
            parameter.grad = whole.clone()
        squares = torch.cat([w.double().flatten() for w in wholes]).square().tolist()
        shard_norm, full_norm = (exact_norm([p.grad for p in ps]) for ps in (parameters, single))
        assert same_bits(shard_norm, full_norm)
        expected = torch.tensor(math.sqrt(math.fsum(squares)), dtype=torch.float64)
        torch.testing.assert_close(shard_norm, expected, rtol=2**-50, atol=0, equal_nan=True)
        found = clip_grad_norm_(parameters, 1.0, exact=True)
        assert same_bits(found, clip_grad_norm_(single, 1.0, exact=True))
        for parameter, whole in zip(parameters, single, strict=True):
            grad = parameter.grad.full_tensor()
            torch.testing.assert_close(grad, whole.grad, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(RuntimeError, match="non-finite"):  # the last one has NaN
        clip_grad_norm_(single, 1.0, error_if_nonfinite=True, exact=True)
    assert clip_grad_norm_([], 1.0, exact=True) == 0


def test_exact_norms(ranks: RankPools) -> None:
    ranks(6).run(norms)


def shares(count: int) -> list[tuple[int, float]]:
    mesh = mesh_of(dist.get_world_size())
    _kept = built(mesh, None, "float8")
    return [*micro_batches(count, mesh)]


def test_who_runs_what(ranks: RankPools) -> None:
    last = (3, 1.0), (3, 0.0)
    three_shares = [[(0, 1.0), last[0]], [(1, 1.0), last[1]], [(2, 1.0), last[1]]]
    assert ranks(3).run(shares, 4) == three_shares
    assert ranks(1).run(shares, 2) == [[(0, 1.0), (1, 1.0)]]
