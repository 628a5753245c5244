"""Weights that are stored in float8, on meshes: bits, bytes, collectives and checkpoints."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from expecttest import assert_expected_inline
from nets import full
from rank_tests import on_ranks
from ranks import RankPools, device_mesh
from reference import raised, reloaded, same_bits
from safetensors.torch import save_file
from stored_weights import CONFIGS, RELEASED, converted, freeze, frozen, run, same
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fp8_dist import (
    convert_to_float8_training,
    dequantized,
    float8_state_dict,
    freeze_to_float8,
    load_float8_checkpoint,
    precompute_float8_dynamic_scale,
    unfreeze_from_float8,
    update_float8_scales,
)
from fp8_dist.debug import comm_audit, float8_stats
from fp8_dist.mesh import local_tensor
from fp8_dist.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, apply_tp_plan
from fp8_dist.weight.stored import Stored

# Whole blocks; and for some meshes blocks that ranks cut, and ranks without rows.
WHOLE, CUT, EMPTY = (512, 384, 256), (128, 200, 72), (96, 3, 40)
CUT_ROWS = (128, 160, 72)  # for blocks of 1 x 32, which divide all columns


def layers(name: str, sizes: tuple[int, ...], store: bool, way: str) -> nn.Sequential:
    """Frozen weights, and biases to train."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    if way != "mixed":
        net.bfloat16()
    gathers: Any = False if store else "auto"
    config = replace((CONFIGS | RELEASED)[name], enable_fsdp_float8_all_gather=gathers)
    convert_to_float8_training(net, config=config)
    for layer in net:
        layer.weight.requires_grad_(False)
    if is_released := name.startswith("1 x 32"):
        freeze_to_float8(net, format="mxfp4", block_size=(1, 32))
    if store and not is_released:
        freeze(net)
    elif is_released and not store:
        unfreeze_from_float8(net)
    return net


def shard(net: nn.Module, mesh: DeviceMesh, **arguments: Any) -> nn.Module:
    for module in (*net.children(), net):
        fully_shard(module, mesh=mesh, **arguments)
    return net


def parallelize(net: nn.Module, mesh: DeviceMesh, sequence: bool = False) -> nn.Module:
    layout: Any = Shard(0) if sequence else Replicate()
    first, *_, last = (name for name, _ in net.named_children())
    plan = {
        first: Float8ColwiseParallel(input_layouts=layout),
        last: Float8RowwiseParallel(output_layouts=layout),
    }
    apply_tp_plan(net, mesh, plan)
    return net


def replicated(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, process_group=device_mesh(dp=2).get_group())


def both(net: nn.Module, **arguments: Any) -> nn.Module:
    mesh = device_mesh(dp=2, tp=2)
    return shard(parallelize(net, mesh["tp"], **arguments), mesh["dp"])


def by_columns(parameter: nn.Parameter) -> Shard:
    """Shard by columns, or by rows if columns are too few. (FSDP2 asks for scales, too.)"""
    return Shard(1 if parameter.ndim == 2 and parameter.shape[1] > 16 else 0)


def offloaded(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return shard(net, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
Distribute = Callable[[nn.Module], nn.Module]
WAYS: dict[int, dict[str, Distribute]] = {
    2: {
        "FSDP2": lambda net: shard(net, device_mesh(dp=2)),
        "mixed": lambda net: shard(net, device_mesh(dp=2), mp_policy=BF16),
        "offload": lambda net: offloaded(net, device_mesh(dp=2)),
        "dim 1": lambda net: shard(net, device_mesh(dp=2), shard_placement_fn=by_columns),
        "TP": lambda net: parallelize(net, device_mesh(tp=2)["tp"]),
        "TP + SP": lambda net: parallelize(net, device_mesh(tp=2)["tp"], sequence=True),
        "DDP": replicated,
    },
    3: {"FSDP2": lambda net: shard(net, device_mesh(dp=3))},
    4: {
        "FSDP2": lambda net: shard(net, device_mesh(dp=4)),
        "HSDP": lambda net: shard(net, device_mesh(replicate=2, shard=2)),
        "TP x FSDP2": both,
        "TP + SP x FSDP2": partial(both, sequence=True),
    },
}


def losses(net: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    """Losses and gradients of steps in which the biases are trained."""
    biases = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(biases, lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inner = net.module if isinstance(net, DistributedDataParallel) else net
    features, found = inner[0].in_features, []  # type: ignore[index]
    for _ in range(steps):
        x = torch.randn(16, features, generator=generator).bfloat16().requires_grad_()
        loss = net(x).float().square().mean()
        loss.backward()
        assert x.grad is not None
        found += [loss.detach(), x.grad, *(local_tensor(p.grad) for p in biases)]
        optimizer.step()
        optimizer.zero_grad()
    return found


def stored_bytes(net: nn.Module) -> int:
    """Bytes of the data and scales of stored weights on this rank, with their padding."""
    local = [local_tensor(p) for p in net.parameters()]
    return sum(p.plain.untyped_storage().nbytes() for p in local if isinstance(p, Stored))


def compared(size: int, name: str) -> dict[str, float]:
    """Bytes per weight over all ranks, by mesh. Results must have the twin's bits."""
    found = {}
    for way, distribute in WAYS[size].items():
        uneven = {"FSDP2": (CUT, EMPTY), "offload": (EMPTY,), "TP": (CUT,), "TP x FSDP2": (CUT,)}
        for sizes in (WHOLE, *uneven.get(way, ())):
            if "mxfp4" in name and sizes == EMPTY:  # an odd number of columns
                continue
            sizes = CUT_ROWS if name.startswith("1 x 32") and sizes != WHOLE else sizes
            nets = [distribute(layers(name, sizes, store, way)) for store in (False, True)]
            expected, bits = map(losses, nets)
            assert all(map(same_bits, expected, bits)), (name, way, sizes)
            total = torch.tensor(stored_bytes(nets[1]))
            dist.all_reduce(total)
            if sizes == WHOLE:
                found[way] = total.item() / sum(a * b for a, b in itertools.pairwise(sizes))
    return found


RECIPES_AND_SIZES = [(2, "tensorwise"), (2, "mxfp4"), (3, "blockwise"), (3, "mxfp4")]
RECIPES_AND_SIZES += [(4, "rowwise_folded"), (4, "mxfp4 of blockwise")]
RECIPES_AND_SIZES += [(2, "1 x 32 of mxfp8"), (3, "1 x 32 in bf16"), (4, "1 x 32 of tensorwise")]
RECIPES_AND_SIZES += [(2, "1 x 32 in bf16"), (4, "1 x 32 of rowwise")]


@pytest.mark.parametrize(("size", "name"), RECIPES_AND_SIZES)
@on_ranks("size")
def test_bits_and_bytes_on_meshes(size: int, name: str) -> None:
    """Losses and gradients are those of the twin that casts its weights, on the same mesh."""
    for way, per_weight in compared(size, name).items():
        copies = {"DDP": 2, "HSDP": 2}.get(way, 1)
        exponents = copies / 32 if "1 x" in name else 0
        # One scale per row of 512 and 384 values; of uneven shards FSDP2 pads some.
        more = 0.012 if name == "rowwise_folded" or size == 3 else 0.002
        if ("mxfp4" in name or "1 x" in name) and way != "dim 1":  # which can't be gathered packed
            copies *= 2 / 3 if size == 3 else 1 / 2  # of 384 and 256 rows
        copies += exponents
        assert copies <= per_weight <= copies * (1 + more), way


# Collectives


def audited(name: str, tp: bool) -> str:
    """The collectives of a step, after precompute and update."""
    mesh = device_mesh(dp=2, tp=2) if tp else device_mesh(dp=2)
    net = (both if tp else WAYS[2]["FSDP2"])(layers(name, WHOLE, True, "FSDP2"))
    with float8_stats(net) as stats:
        losses(net, 1)
    with comm_audit(mesh) as audit:
        precompute_float8_dynamic_scale(net)
        update_float8_scales(net)
        losses(net, 1)
    assert {row.operand for row in stats.rows} == {"input", "grad_output"}
    return audit.without_modules().table()


def test_collectives_of_fsdp2(ranks: RankPools) -> None:
    """Half a byte per weight; scales ride along, and nothing is reduced for weights."""
    assert_expected_inline(
        ranks(2).run_same(audited, "mxfp4", False),
        """\
op              axis  dtype             count  elements    bytes
all_gather      dp    float4_e2m1fn_x2      4   589,824  294,912
all_gather      dp    bfloat16              +     1,280    2,560
all_gather      dp    uint8                 +       576      576
reduce_scatter  dp    bfloat16              2       640    1,280
total                                       6            299,328
  float8                                                 294,912
  other                                                    4,416""",
    )


def test_collectives_of_fsdp2_and_tensor_parallelism(ranks: RankPools) -> None:
    assert_expected_inline(
        ranks(4).run_same(audited, "tensorwise", True),
        """\
op              axis  dtype          count  elements    bytes
all_gather      dp    float8_e4m3fn      4   294,912  294,912
all_gather      dp    bfloat16           +       896    1,792
all_gather      dp    float32            +         8       32
all_reduce      tp    int32              2         2        8
all_reduce      tp    bfloat16           2    12,288   24,576
reduce_scatter  dp    bfloat16           2       448      896
total                                   10            322,216
  float8                                              294,912
  other                                                27,304""",
    )


@on_ranks(2)
def test_precompute_with_some_stored_weights() -> None:
    nets = []
    for store in (False, True):
        net = layers("tensorwise", WHOLE, False, "FSDP2")
        if store:
            freeze_to_float8(net, module_filter_fn=lambda _, fqn: fqn == "0")
        nets.append(shard(net, device_mesh(dp=2)))
    found = []
    for net in nets:
        update_float8_scales(net)
        with comm_audit() as audit:
            precompute_float8_dynamic_scale(net)
        found.append([(row.op, row.elements) for row in audit.rows])
        found.append(losses(net, 2))
    assert found[0] == [("all_reduce", 2)]
    assert found[2] == [("all_reduce", 1)]
    assert all(map(same_bits, found[1], found[3]))


@pytest.mark.parametrize("sizes", [WHOLE, CUT_ROWS], ids=str)
def test_released_files(ranks: RankPools, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Each rank reads its part; saved again, the bytes are those of the files."""
    net = layers("1 x 32 of mxfp8", sizes, True, "FSDP2")
    files = float8_state_dict(net, format="mxfp4")
    assert files["0.weight_blocks"].shape == (sizes[1], sizes[0] // 32, 16)
    save_file(files, tmp_path / "model.safetensors")
    values = {fqn: dequantized(layer) for fqn, layer in net.named_children()}
    for saved, read in ranks(4).run(loaded_from_files, str(tmp_path), sizes):
        assert all(same_bits(saved[key], tensor) for key, tensor in files.items())
        assert all(same_bits(read[fqn], tensor) for fqn, tensor in values.items())


def loaded_from_files(folder: str, sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """The export of stored weights, and the values of others, both loaded on the mesh."""
    nets = [erased(both(layers("1 x 32 of mxfp8", sizes, s, "FSDP2"))) for s in (True, False)]
    for net in nets:
        assert load_float8_checkpoint(net, folder) == ([], [])
    saved = float8_state_dict(nets[0], full_state_dict=True, format="mxfp4")
    return saved, {fqn: full(layer.weight.detach()) for fqn, layer in nets[1].named_children()}


# State dicts and checkpoints. These models are stored_weights', whose first layer is the first of a
# pair for tensor parallelism.


def meshed(net: nn.Module, tp: bool) -> nn.Module:
    return both(net) if tp else shard(net, device_mesh(dp=dist.get_world_size()))


@torch.no_grad()
def erased(net: nn.Module) -> nn.Module:
    for parameter in net.parameters():
        local = local_tensor(parameter)
        getattr(local, "plain", local).view(torch.uint8).zero_()
    return net


def wrong_entries(state: dict[str, Any], expected: dict[str, torch.Tensor]) -> list[str]:
    assert state.keys() == expected.keys()
    return [k for k, each in expected.items() if not same_bits(full(state[k]), each)]


@pytest.mark.parametrize(
    ("name", "tp"), [("tensorwise", False), ("blockwise", True), ("mxfp4", True)]
)
@on_ranks(4)
def test_whole_state_dicts(name: str, tp: bool) -> None:
    """gloo can't gather float8: entries are gathered as bytes."""
    net, expected = meshed(frozen(name), tp), frozen(name).state_dict()
    for form in (dict, copy.deepcopy, reloaded):  # plain code and other machines read all of them
        state = form(net.state_dict())  # type: ignore[operator]
        assert form is reloaded or wrong_entries(state, expected) == []
        assert net.load_state_dict(state) == ([], [])
    assert {type(each) for each in state.values()} == {DTensor}
    for cpu_offload in (False, True):
        options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
        state = get_model_state_dict(net, options=options)
        if state or not cpu_offload:  # only rank 0 has one on the CPU
            assert {type(each) for each in state.values()} == {torch.Tensor}
            assert wrong_entries(state, expected) == []
    assert same_bits(full(dequantized(net[0])), dequantized(frozen(name)[0]))  # type: ignore[index]


@pytest.mark.parametrize(("name", "in_background"), [("blockwise", False), ("mxfp4", True)])
def test_checkpoints_of_other_meshes(
    ranks: RankPools, name: str, in_background: bool, tmp_path: Path
) -> None:
    ranks(4).run(saved_by_dcp, name, in_background, str(tmp_path))
    ranks(2).run(loaded_by_dcp, name, str(tmp_path))
    net = erased(frozen(name))
    state = net.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    net.load_state_dict(state)
    assert same(run(net), run(converted(name)))


def saved_by_dcp(name: str, in_background: bool, folder: str) -> None:
    state = meshed(frozen(name), True).state_dict()
    if in_background:
        dcp.async_save(state, checkpoint_id=folder).result()
    else:
        dcp.save(state, checkpoint_id=folder)


def loaded_by_dcp(name: str, folder: str) -> None:
    for assign in (False, True, None):
        with torch.device("meta"):
            net = frozen(name)
        net = erased(shard(net, device_mesh(dp=2)).to_empty(device="cpu"))
        state = net.state_dict()
        dcp.load(state, checkpoint_id=folder)
        if assign is not None:  # None: the load in place is all
            net.load_state_dict(state, assign=assign)
        assert wrong_entries(net.state_dict(), frozen(name).state_dict()) == []
        assert same(run(net.requires_grad_(False)), run(frozen(name)))


@pytest.mark.parametrize(
    ("name", "tp"), [("tensorwise", True), ("rowwise_folded", False), ("mxfp4", True)]
)
@on_ranks(4)
def test_a_sharded_state_in_high_precision_is_cast_with_global_scales(name: str, tp: bool) -> None:
    whole, source = converted(name), meshed(converted(name), tp)
    for each in (whole, source):
        for parameter in each.parameters():
            parameter.data.mul_(3.0)
    freeze(whole)
    net = meshed(frozen(name), tp)
    assert net.load_state_dict(source.state_dict()) == ([], [])
    assert wrong_entries(net.state_dict(), whole.state_dict()) == []
    assert same(run(net), run(source))


def other(name: str) -> nn.Module:
    """Frozen layers with other values and scales."""
    net = converted(name)
    for parameter in net.parameters():
        parameter.data.copy_(parameter.flip(0) * 8)
    freeze(net)
    return net


@on_ranks(2)
def test_nothing_is_read_beside_values_that_no_stored_weight_has() -> None:
    """Also if the values are another rank's."""
    files = {key: tensor.clone() for key, tensor in other("mxfp4").state_dict().items()}
    data, net = files["2.weight"].view(torch.uint8), meshed(frozen("mxfp4"), False)
    right = data[-1, 0].item()
    with TemporaryDirectory() as folder:
        for code, expected in ((0x39, frozen("mxfp4")), (right, other("mxfp4"))):
            data[-1, 0] = code
            save_file(files, f"{folder}/model.safetensors")
            if code != right:
                text = raised(ValueError, lambda: load_float8_checkpoint(net, folder))
                assert "load_float8_checkpoint: 2.weight has float8 values that MXFP4" in text
            else:
                load_float8_checkpoint(net, folder)
            assert wrong_entries(net.state_dict(), expected.state_dict()) == []


@pytest.mark.parametrize(("name", "tp"), [("blockwise", False), ("mxfp4", True)])
@on_ranks(4)
def test_writes_to_entries_reach_the_shards(name: str, tp: bool) -> None:
    expected, twin = dict(other(name).state_dict()), meshed(other(name), tp)
    for is_sharded in (False, True):
        net = meshed(frozen(name), tp)
        for each, values in zip(*(n.state_dict().values() for n in (net, twin)), strict=True):
            (each.to_local()[:] if is_sharded else each).copy_(
                values.to_local() if is_sharded else values
            )
        assert wrong_entries(net.state_dict(), expected) == []
    assert same(run(net), run(twin))


@on_ranks(2)
def test_broadcasts_to_entries() -> None:
    for name, in_background in (("blockwise", False), ("mxfp4", True)):
        net = other(name) if dist.get_rank() == 0 else frozen(name)
        for each in net.state_dict().values():
            work = dist.broadcast(each.view(-1).view(torch.uint8), 0, async_op=in_background)
            if in_background:
                work.wait()
        assert same(run(net), run(other(name)))


# Changes of a distributed model


@on_ranks(4)
def test_sums_on_meshes() -> None:
    """A sum is cast with the scales of the whole; ``data`` is a DTensor's own."""
    whole, update = frozen("tensorwise"), torch.randn(320, 512).bfloat16()
    whole[0].weight.data += update  # type: ignore[operator]
    for tp in (False, True):
        net = meshed(frozen("tensorwise"), tp)
        weight = net[0].weight  # type: ignore[index]
        layout = weight.device_mesh, weight.placements
        with torch.no_grad():
            part = distribute_tensor(update.float(), *layout).bfloat16()
            weight.data += part
        assert wrong_entries(net.state_dict(), whole.state_dict()) == []


@on_ranks(2)
def test_a_load_between_forward_and_backward() -> None:
    """FSDP2 gathers anew in the backward, data and scales together."""
    net, gradients = meshed(frozen(), False), []
    for factor in (1, 2):
        x = torch.ones(16, 512).bfloat16().requires_grad_()
        loss = net(x).float().square().sum()
        state = {k: v * factor if "scale" in k else v for k, v in net.state_dict().items()}
        net.load_state_dict(state)
        loss.backward()
        gradients.append(x.grad)
    once, twice = gradients
    assert same_bits(4 * once, twice)  # of two layers


@on_ranks(2)
def test_accumulation_checkpointing_and_kept_gathers() -> None:
    def step(net: Any) -> list[torch.Tensor]:
        generator, found = torch.Generator().manual_seed(dist.get_rank()), []
        net.set_reshard_after_backward(False)
        net.set_unshard_in_backward(True)
        for last in (False, True):
            net.set_requires_gradient_sync(last)
            x = torch.randn(16, 512, generator=generator).bfloat16().requires_grad_()
            checkpoint(net, x, use_reentrant=False).float().square().mean().backward()
            found.append(x.grad)
        for part in net.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        found += [p.grad.to_local() for p in net.parameters() if p.requires_grad]
        net.unshard()
        with torch.no_grad():
            found.append(net(torch.ones(16, 512).bfloat16()))
        return found

    nets = [WAYS[2]["FSDP2"](layers("blockwise", WHOLE, store, "FSDP2")) for store in (False, True)]
    assert all(map(same_bits, *map(step, nets)))


# Errors


@on_ranks(2)
def test_ranks_that_store_other_weights() -> None:
    net = layers("blockwise", WHOLE, False, "FSDP2")
    if dist.get_rank() == 1:
        freeze_to_float8(net)
    shard(net, device_mesh(dp=2))
    text = raised(ValueError, lambda: net(torch.zeros(16, 512).bfloat16()))
    assert "FSDP2's first gather: the ranks of" in text
    assert "0.weight stored in float8" in text


@on_ranks(2)
def test_models_that_are_distributed_already() -> None:
    net = meshed(converted(), False)
    text = "freeze_to_float8: 0.weight is distributed already, or is not a plain parameter; freeze"
    assert text in raised(ValueError, lambda: freeze_to_float8(net))
    net = meshed(frozen(), False)
    text = "unfreeze_from_float8: 0.weight is sharded by FSDP2, which goes on gathering its bytes"
    assert text in raised(ValueError, lambda: unfreeze_from_float8(net))
    assert same(run(net), run(converted()))
    with pytest.raises(ValueError, match="no optimizer can update it; call unfreeze_from_float8"):
        run(net.requires_grad_(True))
    net = replicated_before(frozen)
    assert same(run(net), run(converted()))


def replicated_before(make: Callable[[], nn.Module]) -> nn.Module:
    """Freeze the wrapper of a frozen model too: without that, DDP refuses it."""
    net = nn.Sequential(make(), nn.Linear(192, 16).bfloat16())
    with pytest.raises(NotImplementedError, match="as DistributedDataParallel does to broadcast"):
        replicated(net)
    freeze_to_float8(net)
    return replicated(net).module[0]


@on_ranks(4)
def test_resharding_to_fewer_ranks_is_refused() -> None:
    net = shard(frozen(), device_mesh(dp=4), reshard_after_forward=2)
    with pytest.raises(ValueError, match="enable_fsdp_float8_all_gather off, and freeze_to_float8"):
        run(net)
