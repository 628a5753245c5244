"""Sums of tensor parallelism that travel in float8 or bf16 (reduce_transport)."""

import re
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import forward
from expecttest import assert_expected_inline
from gradient_wire import on_the_wire
from local_nets import local_net
from nets import Block, Net, full
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, same_bits, sqnr
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from fp8_dist import Float8LinearConfig, convert_to_float8_training, skip_head
from fp8_dist.debug import CommAudit, comm_audit
from fp8_dist.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    apply_tp_plan,
    declare_placements,
    llama_tp_plan,
    share_input,
)
from fp8_dist.transport import Encoding, reduced_to
from scripts.common.llama import Llama, LlamaConfig

SEQUENCE_SHARD = Shard(1)
SEQUENCE: dict[str, Any] = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
# The lowest SQNR, in dB, of what was reduced once. (The sums of an all-reduce are rounded too.)
LOWEST = {"float8": 28, "bf16": 52}


def mlp_plan(
    transport: Encoding, prepared: bool, local: bool = True, at: Placement = SEQUENCE_SHARD
) -> dict[str, Any]:
    """The plan of an MLP with the placement of its input and output, sharded by sequence."""
    out = {"output_layouts": at, "use_local_output": local}
    plan: dict[str, Any] = {"w2": Float8RowwiseParallel(**out, reduce_transport=transport)}
    if prepared:
        given = SEQUENCE | {"input_layouts": at}
        plan[""] = PrepareFloat8ModuleInput(**given, reduce_transport=transport)
        return plan | {"w1": Float8ColwiseParallel(), "w3": Float8ColwiseParallel()}
    gathers = {"input_layouts": at, "reduce_transport": transport}
    return plan | {name: Float8ColwiseParallel(**gathers) for name in ("w1", "w3")}


def mlp(
    mesh: DeviceMesh,
    transport: Encoding,
    prepared: bool = True,
    *,
    recipe: str = "tensorwise",
    local: bool = False,
    dtype: torch.dtype = torch.float32,
    at: Placement = SEQUENCE_SHARD,
) -> nn.Module:
    net = Net(dim=256, hidden=384, layers=1).to(dtype)
    convert_to_float8_training(net, config=Float8LinearConfig.from_recipe_name(recipe))
    return parallelize_module(net.layers[0], mesh, mlp_plan(transport, prepared, local, at))


def step(
    module: nn.Module,
    mesh: DeviceMesh,
    length: int,
    dtype: torch.dtype = torch.float32,
    at: Placement = SEQUENCE_SHARD,
) -> tuple[torch.Tensor, torch.Tensor, tuple[CommAudit, CommAudit]]:
    """Output and grad_input, whole, and the collectives of the forward and of the backward."""
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, 2, length, 256, generator=generator).to(dtype)
    x.requires_grad_()
    given = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[at])
    audits = comm_audit(mesh), comm_audit(mesh)
    with audits[0]:
        output = module(given if at == SEQUENCE_SHARD else x)
    placed = DTensor.from_local(grad, mesh, [Replicate()]).redistribute(placements=[at])
    with audits[1]:
        output.backward(placed)
    assert x.grad is not None
    return output.full_tensor().detach(), x.grad, audits


def exchanges(dtype: torch.dtype, transport: Encoding) -> tuple[list[str], list[int]]:
    """The sums of forward and backward, and the bytes of all other collectives."""
    mesh = device_mesh(tp=2)
    sums, others = [], []
    for audit in step(mlp(mesh, transport, dtype=dtype), mesh, 8, dtype)[2]:
        mine = [row for row in audit.rows if row.op in ("reduce_scatter", "all_to_all")]
        sums += [f"{r.op} {r.dtype}: {r.count}, {r.elements:,}, {r.bytes:,} B" for r in mine]
        others.append(sum(row.bytes for row in audit.rows if row not in mine))
    return sums, others


def test_bytes(ranks: RankPools) -> None:
    """Of an activation of 2 x 8 x 256, summed once in the forward, once in the backward."""
    lines = []
    for dtype in (torch.bfloat16, torch.float32):
        others = []
        for transport in (None, "bf16", "float8"):
            sums, other = ranks(2).run_same(exchanges, dtype, transport)
            half = len(sums) // 2
            assert sums[:half] == sums[half:]  # the backward's
            lines += [f"{dtype}, {transport}:", *sums[:half]]
            others.append(other)
        assert others[0] == others[1] == others[2]
    assert_expected_inline(
        "\n".join(lines),
        """\
torch.bfloat16, None:
reduce_scatter torch.bfloat16: 1, 4,096, 8,192 B
torch.bfloat16, bf16:
all_to_all torch.bfloat16: 1, 4,096, 8,192 B
torch.bfloat16, float8:
all_to_all torch.float8_e4m3fn: 1, 4,096, 4,096 B
all_to_all torch.uint8: 0, 32, 32 B
torch.float32, None:
reduce_scatter torch.float32: 1, 4,096, 16,384 B
torch.float32, bf16:
all_to_all torch.bfloat16: 1, 4,096, 8,192 B
torch.float32, float8:
all_to_all torch.float8_e4m3fn: 1, 4,096, 4,096 B
all_to_all torch.uint8: 0, 32, 32 B""",
    )


def distances(
    transport: Encoding, length: int, prepared: bool, recipe: str, at: Placement
) -> list[float]:
    """SQNR of output and grad_input against torch's sums; other gradients have the same bits."""
    mesh = device_mesh(tp=dist.get_world_size())
    modules = [mlp(mesh, t, prepared, recipe=recipe, at=at) for t in (None, transport)]
    (output, grad, _), (other, other_grad, _) = (step(m, mesh, length, at=at) for m in modules)
    repeated = step(mlp(mesh, transport, prepared, recipe=recipe, at=at), mesh, length, at=at)
    assert same_bits(other, repeated[0])
    assert same_bits(other_grad, repeated[1])
    for p, q in zip(*(m.parameters() for m in modules), strict=True):
        assert same_bits(full(p.grad), full(q.grad))
    return [sqnr(output, other), sqnr(grad, other_grad)]


# Lengths of a sequence: even shards; uneven ones; on most ranks none.
DISTANCES: list[tuple[int, Encoding, int, bool, str, Placement]] = [
    (2, "float8", 12, False, "tensorwise", SEQUENCE_SHARD),
    (2, "bf16", 5, True, "tensorwise", SEQUENCE_SHARD),
    (3, "float8", 5, True, "tensorwise", SEQUENCE_SHARD),
    (3, "bf16", 1, False, "tensorwise", SEQUENCE_SHARD),
    (2, "float8", 5, True, "tensorwise", Replicate()),
    (3, "float8", 5, False, "rowwise_folded", Replicate()),
    (3, "bf16", 1, True, "tensorwise", Replicate()),
]


def test_distance(ranks: RankPools) -> None:
    for world, transport, *case in DISTANCES:
        found = ranks(world).run(distances, transport, *case)
        assert min(map(min, found)) >= LOWEST[str(transport)], (transport, case)
        assert max(map(max, found)) < 70, (transport, case)  # it was encoded
        if case[-1] == Replicate():  # all ranks have the same bits
            assert all(each == found[0] for each in found), (transport, case)


def reference_sum(summands: list[torch.Tensor], rank: int, transport: str) -> torch.Tensor:
    """The sum on a rank, in fp32 and in the order of ranks, of pieces ``[..., n]``."""
    total = torch.zeros(summands[0].shape)
    for i, piece in enumerate(summands):
        value = piece.float()
        if i != rank and value.numel():
            rows = value.reshape(-1, value.shape[-1])
            value = torch.stack([on_the_wire(row, transport) for row in rows]).view(value.shape)
        total = value if i == 0 else total + value
    return total.to(summands[0].dtype)


SHAPES = [
    ((7, 200), 0),  # a block of 128 and one of 72
    ((3, 8, 128), 0),
    ((2, 6, 40), 1),
    ((2, 5, 256), 1),  # uneven: 2, 2, 1
    ((2, 1, 2, 128), 1),  # one rank has all
    ((2, 4, 300), 2),  # features
    ((2, 0, 64), 1),
]


@on_ranks(3, returns=[])
def test_the_owner_sums_in_the_order_of_ranks() -> list[Any]:
    """Cases in which the shard of a sum has not the bits of the reference."""
    world = dist.get_world_size()
    mesh, rank, wrong = device_mesh(tp=world), dist.get_rank(), []
    for case in product(SHAPES, ("float8", "bf16"), (torch.float32, torch.bfloat16)):
        (shape, at), transport, dtype = case
        generator = torch.Generator().manual_seed(2)
        summands = [torch.randn(shape, generator=generator).to(dtype) for _ in range(world)]
        # A DTensor's shards: chunks of the size of the first one, then what is left, then none.
        chunk = -(-shape[at] // world)
        bounds = min(rank * chunk, shape[at]), min((rank + 1) * chunk, shape[at])
        mine = [x.narrow(at, bounds[0], bounds[1] - bounds[0]) for x in summands]
        partial = DTensor.from_local(summands[rank], mesh, [Partial()])
        found = reduced_to(partial, (Shard(at),), transport)
        assert (found.shape, found.placements) == (torch.Size(shape), (Shard(at),))
        if not same_bits(found.to_local(), reference_sum(mine, rank, transport)):
            wrong.append(case)
    return wrong


@on_ranks(3, returns=[])
def test_whole_sums_are_rounded_once_and_equal_on_ranks() -> list[Any]:
    """Cases in which a sum that all ranks get has not the bits of the reference."""
    world = dist.get_world_size()
    mesh, wrong = device_mesh(tp=world), []
    shapes = [(7, 200), (3, 8, 128), (2, 40), (130,), (2, 0, 64)]
    for case in product(shapes, ("float8", "bf16"), (torch.float32, torch.bfloat16)):
        shape, transport, dtype = case
        generator = torch.Generator().manual_seed(3)
        summands = [torch.randn(shape, generator=generator).to(dtype) for _ in range(world)]
        partial = DTensor.from_local(summands[dist.get_rank()], mesh, [Partial()])
        found = reduced_to(partial, (Replicate(),), transport)
        assert (found.shape, found.placements) == (torch.Size(shape), (Replicate(),))
        rows = [x.float().reshape(-1, shape[-1]) for x in summands]
        chunk = -(-len(rows[0]) // world)
        sums = [
            on_the_wire(row, transport)
            for owner in range(world)
            for row in reference_sum(
                [x[owner * chunk : (owner + 1) * chunk] for x in rows], owner, transport
            )
        ]
        expected = torch.stack(sums).view(shape) if sums else torch.empty(shape)
        if not same_bits(found.to_local(), expected.to(dtype)):
            wrong.append(case)
    return wrong


@on_ranks(2)
def test_compiled_code() -> None:
    """The bits and the exchanges of eager code."""
    torch._dynamo.reset()
    counters.clear()
    mesh = device_mesh(tp=2)
    results: list[dict[str, torch.Tensor]] = []
    exchanges = []
    for compiles in (False, True):
        block = Block(mlp(mesh, "float8", True, local=True))
        if compiles:
            block.compile(backend="aot_eager", fullgraph=True)
        for _ in range(2):
            whole = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(1))
            x = whole.chunk(2, 1)[mesh.get_local_rank()].contiguous().requires_grad_()
            block.zero_grad()
            with comm_audit(mesh) as audit:
                output = block(x)
                output.square().mean().backward()
        assert x.grad is not None
        gradients = {name: full(p.grad) for name, p in block.inner.named_parameters()}
        results.append({"output": output, "grad_input": x.grad} | gradients)
        exchanges.append([line for line in audit.table().splitlines() if "all_to_all" in line])
    assert (sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]) == (0, 1)
    expected, found = results
    assert [name for name in expected if not same_bits(expected[name], found[name])] == []
    eager, in_graphs = [[line.split() for line in each] for each in exchanges]
    assert eager == in_graphs


@on_ranks(2)
def test_activation_checkpointing() -> None:
    """Checkpointing changes no bits, and repeats no exchange."""
    mesh, found = device_mesh(tp=2), []
    for mode in ("none", "full", "selective"):
        net = Net(dim=256, hidden=384)
        convert_to_float8_training(net)
        for layer in net.layers:
            parallelize_module(layer, mesh, mlp_plan("float8", True))
        x = torch.randn(2, 4, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
        with comm_audit(mesh) as audit:
            output = forward(net, x.requires_grad_(), mode)
            output.square().mean().backward()
        assert audit.count("all_to_all") == 4
        found.append([output, x.grad])
    assert all(
        same_bits(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True)
    )


@pytest.mark.parametrize(
    ("transport", "at"), [("float8", Shard(1)), (None, Shard(1)), ("float8", Replicate())]
)
@on_ranks(2, returns=[True] * 3)
def test_layers_of_plain_tensors(transport: Encoding, at: Placement) -> list[bool]:
    """Declared layers of local tensors, and layers that share a DTensor, as under the styles."""
    mesh = device_mesh(tp=2)
    styled = Net(dim=256, hidden=384, layers=1)
    convert_to_float8_training(styled)
    parallelize_module(styled.layers[0], mesh, mlp_plan(transport, True, at=at))
    by_hand = local_net(mesh, Float8LinearConfig(), True, dim=256, hidden=384, layers=1)
    inner: Any = by_hand.layers[0]
    for name in ("w1", "w3"):
        placed = {"weight": Shard(0), "input": at, "output": Shard(-1)}
        declare_placements(inner.get_submodule(name), mesh, **placed, reduce_transport=transport)
    placed = {"weight": Shard(1), "input": Shard(-1), "output": at}
    declare_placements(inner.w2, mesh, **placed, reduce_transport=transport)
    shared = Net(dim=256, hidden=384, layers=1)
    convert_to_float8_training(shared)
    plan = mlp_plan(transport, True, at=at)
    del plan[""]
    parallelize_module(shared.layers[0], mesh, plan)
    layer: Any = shared.layers[0]
    layer.register_forward_pre_hook(
        lambda module, args: share_input(
            DTensor.from_local(args[0], mesh, [at]),
            [layer.w1, layer.w3],
            reduce_transport=transport,
        )
    )
    results = []
    for net in (styled, by_hand, shared):
        x = torch.randn(
            2,
            4,
            256,
            generator=torch.Generator().manual_seed(dist.get_rank() if at == Shard(1) else 0),
        )
        x.requires_grad_()
        with comm_audit(mesh) as audit:
            output = net(x)
            output.square().mean().backward()
        results.append((output, x.grad, audit.count("all_to_all")))
    first, *others = results
    return [
        same_bits(first[0], other[0]) and same_bits(first[1], other[1]) and first[2] == other[2]
        for other in others
    ] + [first[2] == (0 if transport is None else 2)]


TINY = LlamaConfig(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=64, max_seq_len=16
)


def llama_step(
    transport: Encoding, head: bool, kept: str = "", sequence_parallel: bool = True
) -> tuple[float, dict[str, int]]:
    """The loss, and the number of collectives that sum or exchange, by operator."""
    mesh, model = device_mesh(tp=2), Llama(TINY)
    in_head = skip_head(model)
    convert_to_float8_training(
        model, module_filter_fn=lambda m, n: (head or in_head(m, n)) and n != kept
    )
    arguments: Any = {"sequence_parallel": sequence_parallel, "reduce_transport": transport}
    plan = llama_tp_plan(model, **arguments)
    apply_tp_plan(model, mesh, plan)
    tokens = torch.randint(0, 64, (2, 16))
    with comm_audit(mesh) as audit:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
    ops = ("reduce_scatter", "all_to_all")
    counts = {op: audit.count(op) for op in ops}
    if not sequence_parallel:
        amaxes = torch.int32
        counts["all_gather"] = audit.count("all_gather")
        counts["all_reduce"] = audit.count("all_reduce") - audit.count("all_reduce", dtype=amaxes)
    return loss.item(), counts


def test_plan_of_llama(ranks: RankPools) -> None:
    """Two sums of each of the four blocks, and one of a converted head; the rest are torch's."""
    run = ranks(2).run_same
    exact, counts = run(llama_step, None, False)
    assert counts == {"reduce_scatter": 10, "all_to_all": 0}
    losses = [exact]
    # The head is converted or not; a layer in a block isn't, whose neighbours gather as it does.
    for head, kept, sums in ((False, "", 8), (True, "", 9), (False, "layers.0.attention.wk", 8)):
        loss, counts = run(llama_step, "float8", head, kept)
        assert counts == {"reduce_scatter": 10 - sums, "all_to_all": sums}
        losses.append(loss)
    loss, counts = run(llama_step, "float8", True, "", False)  # without sequence parallelism
    assert counts == {"reduce_scatter": 0, "all_to_all": 9, "all_gather": 10, "all_reduce": 1}
    losses.append(loss)
    assert losses == pytest.approx([exact] * 5, rel=0.02)
    assert exact not in losses[1:]


def test_styles_without_a_sum_are_refused() -> None:
    layer = nn.Sequential(nn.Linear(32, 32))
    texts = [
        raised(ValueError, lambda: Float8ColwiseParallel(reduce_transport="fp8")),
        *(
            raised(ValueError, lambda a=a: PrepareFloat8ModuleInput(**a, reduce_transport="bf16"))
            for a in (
                {"input_layouts": Shard(1), "desired_input_layouts": Shard(1)},
                SEQUENCE | {"use_local_output": True},
            )
        ),
        raised(ValueError, lambda: llama_tp_plan(layer, reduce_transport="float8")),
    ]
    assert_expected_inline(
        "\n".join(texts),
        """\
Float8ColwiseParallel: reduce_transport is 'fp8'; it must be one of ('float8', 'bf16', None)
PrepareFloat8ModuleInput: reduce_transport='bf16' applies to the sum of the gradients of an input that the module reads whole: to Replicate(), with use_local_output=False. This style has none: PrepareFloat8ModuleInput(input_layouts=(Shard(dim=1),), desired_input_layouts=(Shard(dim=1),), input_kwarg_layouts={}, desired_input_kwarg_layouts={}, use_local_output=False)
PrepareFloat8ModuleInput: reduce_transport='bf16' applies to the sum of the gradients of an input that the module reads whole: to Replicate(), with use_local_output=False. This style has none: PrepareFloat8ModuleInput(input_layouts=(Shard(dim=1),), desired_input_layouts=(Replicate(),), input_kwarg_layouts={}, desired_input_kwarg_layouts={}, use_local_output=True)
llama_tp_plan: reduce_transport='float8' applies to the sums of converted layers, which this model doesn't have: convert it before""",
    )


def refusals() -> list[str]:
    mesh = device_mesh(tp=2)
    # The layers of a prepared input have no reduction.
    plan: dict[str, Any] = {"": PrepareFloat8ModuleInput(**SEQUENCE)}
    plan |= {name: Float8ColwiseParallel(reduce_transport="bf16") for name in ("w1", "w3")}
    twice = parallelize_module(converted(), mesh, plan)
    whole = parallelize_module(
        converted(), mesh, {"": PrepareFloat8ModuleInput(**SEQUENCE, reduce_transport="bf16")}
    )
    x = torch.randn(2, 4, 32)
    layer: Any = converted().w1
    column = {"weight": Shard(0), "input": Shard(1), "output": Shard(-1)}
    by_hand: Any = converted().w1
    out = Float8RowwiseParallel(output_layouts=Shard(1), reduce_transport="bf16")
    row = parallelize_module(converted().w2, mesh, out)
    declare_placements(by_hand, mesh, **column)
    return [
        raised(ValueError, lambda: twice(x)),
        raised(
            ValueError,
            lambda: declare_placements(
                layer, mesh, **column | {"weight": Replicate()}, reduce_transport="float8"
            ),
        ),
        raised(ValueError, lambda: share_input(x, [by_hand], reduce_transport="float8")),
        raised(ValueError, lambda: whole(x.double())),
        raised(ValueError, lambda: row(x.double())),
    ]


def converted() -> nn.Module:
    net = Net(dim=32, hidden=32, layers=1)
    convert_to_float8_training(net)
    return net.layers[0]


def test_refusals(ranks: RankPools) -> None:
    assert_expected_inline(
        "\n".join(ranks(2).run_same(refusals)),
        """\
layers.0.w1: reduce_transport='bf16' applies to the reduction of grad_input, which is left to what gathered the input. Give it to that (PrepareFloat8ModuleInput, share_input), or pass the input as a plain tensor
layers.0.w1: reduce_transport='float8' applies to the sum of the output of a row-parallel layer (weight=Shard(1)), or of grad_input of a column-parallel one, not to weight=Replicate(), input=Shard(dim=1), output=Shard(dim=-1)
share_input: reduce_transport='float8', but ['layers.0.w1'] declared how their input stands; give it to declare_placements
PrepareFloat8ModuleInput: reduce_transport='bf16' sums in fp32, but the input is in fp64; drop the argument, or cast the model and the input to fp32
layers.0.w2: reduce_transport='bf16' sums in fp32, but the input is in fp64; drop the argument, or cast the model and the input to fp32""",
    )


@on_ranks(2)
def test_ranks_that_disagree() -> None:
    mesh, module = device_mesh(tp=2), converted()
    transport: Encoding = "float8" if dist.get_rank() else "bf16"
    by_hand = local_net(mesh, Float8LinearConfig(), True, dim=32, hidden=32, layers=1)
    at: dict[str, Any] = {"weight": Shard(1), "input": Shard(-1), "output": Shard(1)}
    layer: Any = by_hand.layers[0]
    declare = partial(declare_placements, layer.w2, mesh, **at, reduce_transport=transport)
    plan_error, layers_error = [
        raised(ValueError, lambda: apply_tp_plan(module, mesh, mlp_plan(transport, True))),
        raised(ValueError, declare),
    ]
    assert re.search(r"reduce_transport of the plan's entry '.*': bf16 on rank 0; fl", plan_error)
    assert "reduce_transport='bf16' on rank 0; weight=" in layers_error


@on_ranks(2)
def test_ranks_of_a_mesh_in_another_order() -> None:
    mesh = DeviceMesh("cpu", [1, 0])
    numbers = torch.arange(8.0).view(4, 2) * (1 + dist.get_rank())  # bf16 has them exactly
    summand = DTensor.from_local(numbers, mesh, (Partial(),), run_check=False)
    expected = summand.redistribute(placements=(Shard(0),))
    assert same_bits(reduced_to(summand, (Shard(0),), "bf16").to_local(), expected.to_local())
