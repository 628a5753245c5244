"""``comm_audit``: what plain torch communicates, and how float8 shows."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # Registers ops; torch 2.11 imports it late.
from expecttest import assert_expected_inline
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fp8_dist import CastConfig, Float8LinearConfig, cast_to_float8, convert_to_float8_training
from fp8_dist.debug import comm_audit
from fp8_dist.debug.collectives import IGNORED_OPS, NAMESPACES, read_collective
from fp8_dist.tensor import Float8Tensor
from fp8_dist.tensor_parallel import apply_tp_plan, llama_tp_plan
from scripts.common.llama import Llama, LlamaConfig

funcol = torch.ops._c10d_functional

SIZES = LlamaConfig(
    dim=64, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=128, vocab_size=256, max_seq_len=32
)


def placeholder(argument: torch.Argument) -> Any:
    """A value for an op's argument, as far as the audit reads it."""
    if argument.name == "process_group":
        return dist.group.WORLD.boxed()
    if argument.name == "group_name":
        return dist.group.WORLD.group_name
    values = {"Tensor": torch.ones(4), "List[Tensor]": [torch.ones(4)]}
    values["List[List[Tensor]]"] = [values["List[Tensor]"]]
    return values.get(str(argument.type))


@on_ranks(2)
def test_every_registered_op_is_read_ignored_or_counted_by_name() -> None:
    # How a call of each op of the communication namespaces is recorded; "" where it is not.
    recorded: dict[str, str] = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, op = name.split("::")
        if namespace in NAMESPACES:
            packet, _, overload = op.partition(".")
            func = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
            call = read_collective(func, tuple(map(placeholder, func._schema.arguments)), {})
            assert call is None or call.tensors, name
            recorded[func._schema.name] = "" if call is None else call.op
    by_name = {name for name, op in recorded.items() if op == name}
    assert {name for name, op in recorded.items() if not op} == IGNORED_OPS & recorded.keys()
    # A new op of another namespace needs a kind, or an entry in IGNORED_OPS.
    assert {name.split("::")[0] for name in by_name} == {"symm_mem", "c10d_functional"}


@on_ranks(2)
def test_a_repr_is_one_line_and_communicates_nothing() -> None:
    mesh = device_mesh(dp=2)
    model = nn.Sequential(nn.Linear(4, 2))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    fully_shard(model, mesh=mesh)
    x = cast_to_float8(DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]), CastConfig())
    gathered = x.redistribute(mesh, [Replicate()], async_op=True)
    assert isinstance(gathered._local_tensor, AsyncCollectiveTensor)  # still on its way
    model.unshard()
    model.reshard()
    audit = comm_audit(mesh)
    with audit:
        shown = [repr(x), repr(gathered), repr(model[0].weight)]
    model.unshard()
    with audit:
        shown.append(repr(model[0].weight))
    assert audit.rows == []
    cast, whole, sharded, unsharded = shown
    text = "Float8Tensor(shape=(2, 4), qdata=e4m3fn, scale=0.00223214, orig_dtype=float32"
    assert text in cast
    assert text.replace("(2, 4)", "(4, 4)") in whole
    assert "Float8AllGatherWeight" in sharded
    assert unsharded.startswith("Float8Tensor(shape=(2, 4), qdata=e4m3fn, scale=")
    assert not any("\n" in line for line in (cast, whole, unsharded))


@on_ranks(2, returns=["world", "a", "group NAME", "dp+tp"])
def test_axes_have_the_names_of_their_mesh_or_group() -> list[str]:
    mesh = device_mesh(a=2)
    unnamed, named = dist.new_group([0, 1]), dist.new_group([0, 1], group_desc="mesh_dp+tp")
    names = []
    for given, group in ((None, None), (mesh, None), (None, unnamed), (None, named)):
        with comm_audit(given) as audit:
            dist.all_reduce(torch.ones(1), group=group)
        names.append(audit.rows[0].axis.replace(unnamed.group_name, "NAME"))
    return names


def step_of_fsdp_and_tp() -> tuple[str, str]:
    model, mesh = Llama(SIZES).bfloat16(), device_mesh(dp=2, tp=2)
    apply_tp_plan(model, mesh["tp"], llama_tp_plan(model))  # torch's styles
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=True)
    tokens = torch.randint(SIZES.vocab_size, (2, SIZES.max_seq_len))
    # Without a mesh argument: groups of a mesh of several axes carry the names of the axes.
    with comm_audit() as audit:
        model(tokens).float().square().mean().backward()
    head, *rows = audit.table(by_module=True).splitlines()
    first = [row for row in rows if " layers.0" in row and " tp " in row]
    return repr(audit), "\n".join([head, *first])


def test_a_step_of_fsdp_and_tp(ranks: RankPools) -> None:
    text, first_layer = ranks(4).run_same(step_of_fsdp_and_tp)
    assert text == "CommAudit(61 collectives, 922,112 bytes)"
    # The last line has the gradients of both norms.
    assert_expected_inline(
        first_layer,
        """\
op              axis  dtype     count  elements    bytes  module
all_gather      tp    bfloat16      1     4,096    8,192  layers.0.attention
reduce_scatter  tp    bfloat16      1     4,096    8,192  layers.0.attention.wo
all_gather      tp    bfloat16      1     4,096    8,192  layers.0.feed_forward
reduce_scatter  tp    bfloat16      1     4,096    8,192  layers.0.feed_forward.w2
all_gather      tp    bfloat16      1     4,096    8,192  layers.0.feed_forward.w2
reduce_scatter  tp    bfloat16      1     4,096    8,192  layers.0.feed_forward
all_gather      tp    bfloat16      1     4,096    8,192  layers.0.attention.wo
reduce_scatter  tp    bfloat16      1     4,096    8,192  layers.0.attention
all_reduce      tp    bfloat16      2       128      256  layers.0""",
    )


def step_of_fsdp_on_two_nodes() -> list[str]:
    model, mesh = Llama(SIZES).bfloat16(), device_mesh(dp=4)
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    tokens = torch.randint(SIZES.vocab_size, (2, SIZES.max_seq_len))
    with comm_audit(mesh, gpus_per_node=2) as audit:
        model(tokens).float().square().mean().backward()
    lines = audit.table(by_module=True).splitlines()
    return [line.rstrip() for line in lines if " layers.0" in line or not line.startswith("a")]


def test_a_step_of_fsdp_on_two_nodes(ranks: RankPools) -> None:
    # A GPU sends 3 / 4 of each buffer, and half of it leaves the node.
    assert_expected_inline(
        "\n".join(ranks(4).run_same(step_of_fsdp_on_two_nodes)),
        """\
op              axis  dtype          count  elements      bytes  within nodes  between nodes  module
all_reduce      dp    int32              7         7         28            21             21  layers.0
all_gather      dp    float8_e4m3fn      1    40,960     40,960        15,360         15,360  layers.0
all_gather      dp    bfloat16           +       128        256            96             96  layers.0
reduce_scatter  dp    float32            1    41,088    164,352        61,632         61,632  layers.3
reduce_scatter  dp    float32            1    41,088    164,352        61,632         61,632  layers.2
reduce_scatter  dp    float32            1    41,088    164,352        61,632         61,632  layers.1
reduce_scatter  dp    float32            1    41,088    164,352        61,632         61,632  layers.0
reduce_scatter  dp    float32            1    32,832    131,328        49,248         49,248
total                                   43            1,167,860       437,991        437,991
  float8                                                344,064       129,024        129,024
  other                                                 823,796       308,967        308,967""",
    )


def sent_by_parts() -> tuple[int, int]:
    """What a rank sends when each rank r of four sends r + d + 1 numbers to rank d."""
    rank, x = dist.get_rank(), torch.ones(4 * dist.get_rank() + 10)
    send = [rank + other + 1 for other in range(4)]
    with comm_audit(gpus_per_node=2) as audit:
        dist.all_to_all_single(torch.empty_like(x), x, send, send)
    (row,) = audit.rows
    return row.bytes_within, row.bytes_between


def test_each_rank_counts_what_it_sends(ranks: RankPools) -> None:
    # Rank 0 sends 2 numbers to rank 1, and 3 + 4 to the other node.
    assert ranks(4).run(sent_by_parts) == [(8, 28), (8, 36), (24, 28), (24, 36)]


def every_kind() -> str:
    rank, group = dist.get_rank(), dist.group.WORLD
    qdata = torch.ones(4, 8).to(torch.float8_e5m2)
    x = Float8Tensor(qdata, torch.ones(()), torch.bfloat16)
    with comm_audit() as audit:
        funcol.wait_tensor(funcol.all_gather_into_tensor(x, 2, group.group_name))
        funcol.wait_tensor(
            funcol.all_gather_into_tensor(qdata.view(torch.uint8), 2, group.group_name)
        )
        funcol.wait_tensor(
            funcol.all_gather_into_tensor(
                torch.ones(3, dtype=torch.uint8), 2, group_name=group.group_name
            )
        )
        amax = torch.ones(1).view(torch.int32)
        funcol.wait_tensor(funcol.all_reduce(amax, "max", group.group_name))
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3))
        dist.all_to_all_single(torch.empty(2), torch.ones(2))
        dist.broadcast(torch.ones(5), 0)
        dist.reduce(torch.ones(5), 0)
        dist.scatter(torch.empty(2), [torch.ones(2), torch.ones(2)] if rank == 0 else None)
        dist.gather(torch.ones(2), [torch.empty(2), torch.empty(2)] if rank == 0 else None)
        sending = dist.isend(torch.ones(4), 1 - rank)
        dist.recv(torch.empty(4), 1 - rank)
        sending.wait()
        dist.barrier()
        rows = Float8Tensor(qdata, torch.ones(4, 1), torch.bfloat16)  # with a scale each
        funcol.wait_tensor(funcol.all_gather_into_tensor(rows, 2, group.group_name))
    return audit.table(baseline=True)


def test_every_kind_of_collective(ranks: RankPools) -> None:
    found = ranks(2).run_same(every_kind)
    assert_expected_inline(
        found,
        """\
op          axis   dtype        count  elements  bytes  in bf16
all_gather  world  float8_e5m2      3       192    192      384
all_gather  world  uint8            1         6      6        6
all_reduce  world  int32            2         2      8        0
all_gather  world  float32          1         6     24       24
all_to_all  world  float32          1         2      8        8
broadcast   world  float32          1         5     20       20
reduce      world  float32          1         5     20       20
scatter     world  float32          1         4     16       16
gather      world  float32          1         4     16       16
send        world  float32          1         4     16       16
recv        world  float32          1         4     16       16
all_gather  world  float32          +         8     32       32
total                              14              374      558
  float8                                           192      384
  other                                            182      174""",
    )


@on_ranks(2)
def test_what_was_recorded_survives_an_error_and_audits_nest() -> None:
    outer, inner = comm_audit(), comm_audit()

    def interrupted() -> None:
        with outer:
            dist.all_reduce(torch.ones(1))
            with inner:
                dist.all_reduce(torch.ones(2))
                with pytest.raises(RuntimeError, match="this comm_audit is already recording"):
                    outer.__enter__()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    dist.all_reduce(torch.ones(1))
    assert repr(outer) == "CommAudit(2 collectives, 12 bytes)"
    with outer:
        dist.all_reduce(torch.ones(1))
    assert repr(inner) == "CommAudit(1 collectives, 8 bytes)"
    assert repr(outer) == "CommAudit(3 collectives, 16 bytes)"
